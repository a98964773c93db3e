"""Images that crash, raise, hang, exhaust or poison the tower: the culprit alone is refused, and its mates get rows."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from faulty_worker import CRASHES, HANGS, IS_SLOW, NOT_FINITE, RAISES
from load import HEADERS, OPTIONS, Load, Reference, embed, plain
from server import Server


@pytest.fixture(scope="module")
def server(start_faulty: Callable[..., Server]) -> Server:
    return start_faulty("--stall-timeout-s=1.5").wait_ready()


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("colour", [CRASHES, RAISES, HANGS], ids=["crashes", "raises", "hangs"])
def test_the_culprit_is_refused_and_everyone_else_is_answered(
    server: Server,
    reference: Reference,
    settles: Callable[[Server], None],
    colour: tuple[int, int, int],
) -> None:
    quarantined = server.metric("patchgrid_images_quarantined_total")
    with Load(server.url, reference) as load:
        load.wait_for(10)
        assert error_of(embed(server.client, plain(colour))) == (500, "image_crashed_encoder")
        load.wait_for(20)
    assert load.errors == []
    assert server.metric("patchgrid_images_quarantined_total") == quarantined + 1
    restarts = server.metric("patchgrid_restarts_total")
    again = server.client.post(
        "/embed", params={"layout": "v4"}, content=plain(colour), headers={"content-type": "image/png"}
    )
    assert error_of(again) == (500, "image_crashed_encoder")
    assert server.metric("patchgrid_restarts_total") == restarts, "known by its pixels, it cost nothing this time"
    settles(server)


def test_a_culprit_among_mates_of_one_batch(
    start_faulty: Callable[..., Server], reference: Reference, settles: Callable[[Server], None]
) -> None:
    server = start_faulty("--batches-in-flight=1").wait_ready()
    images = [*reference.images[:6], plain(CRASHES), *reference.images[6:12]]
    with ThreadPoolExecutor(len(images)) as clients:  # one is encoded alone, the others wait and become a batch
        responses = list(clients.map(lambda image: embed(server.client, image), images))
    assert error_of(responses.pop(6)) == (500, "image_crashed_encoder")
    for index, response in enumerate(responses):
        reference.check(index, response)
    settles(server)
    assert server.end() == 0


def test_rows_that_are_not_finite_cost_one_image_its_answer_and_no_restart(
    server: Server, reference: Reference, settles: Callable[[Server], None]
) -> None:
    restarts = server.metric("patchgrid_restarts_total")
    not_finite = server.metric("patchgrid_images_not_finite_total")
    assert error_of(embed(server.client, plain(NOT_FINITE))) == (500, "non_finite")
    reference.check(3, embed(server.client, reference.images[3]))
    assert server.metric("patchgrid_images_not_finite_total") == not_finite + 1
    assert server.metric("patchgrid_restarts_total") == restarts
    settles(server)


def test_out_of_memory_is_no_crash(
    start_faulty: Callable[..., Server], reference: Reference, settles: Callable[[Server], None]
) -> None:
    # Any one image of the reference fits into 3500 patches, and a forward of 9000 takes several.
    server = start_faulty("--max-patches-per-forward=9000", FAULTY_MAX_PATCHES="3500").wait_ready()
    pids = server.rank_pids()
    with Load(server.url, reference, clients=16) as load:
        load.wait_for(60)
    assert load.errors == []
    assert "out of memory: from here on" in server.log
    assert server.rank_pids() == pids
    settles(server)
    assert server.end() == 0


def test_a_deadline_ends_a_request_in_time_and_takes_it_out_of_the_queue(
    start_faulty: Callable[..., Server], reference: Reference, settles: Callable[[Server], None]
) -> None:
    server = start_faulty("--batches-in-flight=1").wait_ready()
    with ThreadPoolExecutor(4) as clients:
        slow = clients.submit(embed, server.client, plain(IS_SLOW))
        while server.metric("patchgrid_batch_size_patches_count") == 0:
            time.sleep(0.05)
        dropped = server.metric("patchgrid_images_dropped_total", where="queue")
        soon = {"x-timeout-ms": "3000"}
        late = [clients.submit(embed, server.client, reference.images[index], **soon) for index in (2, 3)]
        patient = clients.submit(embed, server.client, reference.images[1])
        for response in late:
            assert error_of(response.result()) == (504, "deadline_exceeded")
        assert server.metric("patchgrid_images_dropped_total", where="queue") == dropped + 2
        reference.check(1, patient.result())
        assert slow.result().status_code == 200
    settles(server)
    assert server.end() == 0


def test_a_deadline_that_is_no_number_is_refused(server: Server, reference: Reference) -> None:
    for value in ("soon", "-1", "0", "1.5", "9" * 40):
        assert error_of(embed(server.client, reference.images[0], **{"x-timeout-ms": value})) == (
            400,
            "invalid_request",
        )


def test_clients_that_leave_take_their_images_along(
    server: Server, reference: Reference, settles: Callable[[Server], None]
) -> None:
    before = server.metric("patchgrid_requests_total", outcome="disconnected")

    def leave(index: int) -> None:
        with httpx.Client(base_url=server.url, timeout=0.05, trust_env=False) as client:
            try:
                client.post("/embed", params=OPTIONS, content=reference.images[index % 24], headers=HEADERS)
            except httpx.TimeoutException:
                return

    with Load(server.url, reference) as load:
        load.wait_for(5)
        with ThreadPoolExecutor(32) as leavers:
            list(leavers.map(leave, range(200)))
        load.wait_for(20)
    assert load.errors == []
    settles(server)
    assert server.metric("patchgrid_requests_total", outcome="disconnected") > before
