"""More than the service can hold: refusals with a time to come back after, bounded memory, and all well afterwards."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from load import HEADERS, OPTIONS, Reference, embed
from server import Server

MIB = 2**20


def burst(server: Server, reference: Reference, count: int) -> Counter[int]:
    """So many requests at once, each over a connection of its own."""
    limits = httpx.Limits(max_connections=count)
    with httpx.Client(base_url=server.url, timeout=300, trust_env=False, limits=limits) as client:

        def send(number: int) -> int:
            index = number % len(reference.images)
            response = client.post("/embed", params=OPTIONS, content=reference.images[index], headers=HEADERS)
            if response.status_code == 200:
                reference.check(index, response)
            else:
                assert response.status_code == 429, response.text
                assert 1 <= int(response.headers["retry-after"]) <= 60
            return response.status_code

        with ThreadPoolExecutor(count) as clients:
            return Counter(clients.map(send, range(count)))


def test_a_burst_is_answered_or_refused_and_then_all_is_as_before(
    start_faulty: Callable[..., Server], reference: Reference, settles: Callable[[Server], None]
) -> None:
    limits = ["--limit-decoding-requests=32", "--limit-queue-patches=40000", "--limit-held-bytes=67108864"]
    server = start_faulty(*limits).wait_ready()
    process = psutil.Process(server.process.pid)
    burst(server, reference, 50)
    before = process.memory_info().rss
    statuses = burst(server, reference, 500)
    assert statuses[200] > 0
    assert statuses[429] > 0
    assert sum(statuses.values()) == 500
    # What is held, once over for copies that a request makes of its own, and what the allocator keeps.
    assert process.memory_info().rss < before + 2 * 64 * MIB + 64 * MIB
    settles(server)
    assert burst(server, reference, 8) == {200: 8}
    assert server.end() == 0


def test_a_full_queue_refuses_and_recovers(
    start_faulty: Callable[..., Server], reference: Reference, settles: Callable[[Server], None]
) -> None:
    server = start_faulty("--limit-queue-patches=1", "--batches-in-flight=1").wait_ready()
    statuses = burst(server, reference, 30)
    assert statuses[200] > 0
    assert server.metric("patchgrid_requests_total", outcome="queue_full") == statuses[429]
    settles(server)
    reference.check(0, embed(server.client, reference.images[0]))
    assert server.end() == 0


def test_bodies_that_are_too_much_together_are_refused_while_they_arrive(
    start_faulty: Callable[..., Server], reference: Reference, settles: Callable[[Server], None]
) -> None:
    server = start_faulty("--limit-held-bytes=1000000").wait_ready()
    response = server.client.post(
        "/embed", content=b"\x89PNG\r\n\x1a\n" + bytes(2_000_000), headers={"content-type": "image/png"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    settles(server)
    assert server.end() == 0
