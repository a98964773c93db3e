import asyncio
import contextlib
import ipaddress
import logging
import re
import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from service.errors import ServiceError
from service.fetch import Fetcher
from service.fetch_rules import IPAddress
from service.resolver import look_up
from service.settings import Settings

IMAGE = bytes(range(256)) * 10
LIMIT_IMAGE = 100_000

Serve = Callable[[socket.socket], None]


class Host(socketserver.ThreadingTCPServer):
    """A web server on a loopback address of its own, that answers as it is told to."""

    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, bytes | Serve] = {}
        self.heads: list[bytes] = []
        self.num_connections = 0
        self.tls = tls
        super().__init__((address, port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up."""


class _Handler(socketserver.BaseRequestHandler):
    server: Host

    def handle(self) -> None:
        self.server.num_connections += 1
        connection = self.request
        if self.server.tls is not None:
            connection = self.server.tls.wrap_socket(connection, server_side=True)
        with connection:
            head = b""
            while not head.endswith(b"\r\n\r\n") and (piece := connection.recv(65536)):
                head += piece
            self.server.heads.append(head)
            answer = self.server.answers[head.split(b" ")[1].decode()]
            connection.sendall(answer) if isinstance(answer, bytes) else answer(connection)


@contextlib.contextmanager
def serving(host: Host) -> Iterator[Host]:
    thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield host
    finally:
        host.shutdown()
        thread.join()
        host.server_close()


@pytest.fixture
def host() -> Iterator[Host]:
    with serving(Host()) as host:
        host.answers["/image"] = ok(IMAGE)
        yield host


@pytest.fixture
def trap() -> Iterator[Host]:
    """What must not be reached; its address is not allowed."""
    with serving(Host("127.0.0.66")) as trap:
        yield trap
        assert trap.num_connections == 0


def ok(body: bytes, *headers: str, length: int | None = -1) -> bytes:
    claimed = [] if length is None else [f"Content-Length: {len(body) if length < 0 else length}"]
    return "\r\n".join(("HTTP/1.1 200 OK", *claimed, *headers, "", "")).encode() + body


def redirect(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} There\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def drip(text: bytes) -> Serve:
    def answer(connection: socket.socket) -> None:
        for byte in text:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    return answer


def stall(head: bytes) -> Serve:
    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        connection.settimeout(20)
        connection.recv(1)  # until the other end hangs up

    return answer


def is_ours(address: IPAddress) -> bool:
    """The strict check's place is taken here only, so that a server under test can be on this machine."""
    return address in ipaddress.ip_network("127.0.0.0/26")


def at(*addresses: str) -> Callable[[str], Sequence[IPAddress]]:
    return lambda name: tuple(map(ipaddress.ip_address, addresses))


def ignore(num_bytes: int) -> None:
    """Claim for nobody."""


Run = Callable[[Coroutine[Any, Any, Any]], Any]
Fetch = Callable[..., Any]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    run: Run = request.param
    return run


def fetcher_for(host: Host, *, hosts: str = "", tls: ssl.SSLContext | None = None, **options: Any) -> Fetcher:
    resolve = options.pop("resolve", at("127.0.0.1"))
    settings = Settings(
        fetch_hosts=hosts or f"a.test:{host.port},*.b.test:{host.port}",
        **{"fetch_timeout_s": 5.0, "limit_image_bytes": LIMIT_IMAGE, **options},
    )
    trusting_nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return Fetcher(settings, is_allowed_address=is_ours, resolve=resolve, tls=tls or trusting_nobody)


@pytest.fixture
def fetch(host: Host, run: Run) -> Fetch:
    """Fetch `http://a.test:PORT/image`, or else."""

    def call(url: str = "/image", **options: Any) -> bytes:
        url = f"http://a.test:{host.port}{url}" if url.startswith("/") else url

        async def ask() -> bytes:
            (body,) = await fetcher_for(host, **options).fetch_all([url], ignore)
            return body

        body: bytes = run(ask())
        return body

    return call


@contextlib.contextmanager
def refused(code: str, told: str = "", index: int | None = 0) -> Iterator[None]:
    with pytest.raises(ServiceError) as caught:
        yield
    error = caught.value
    assert (error.code, error.index) == (code, index)
    assert told in error.message
    assert not re.search(r"127\.|10\.0|::|\.test|Errno", error.message)
    assert error.__cause__ is None


# What is asked


def test_an_image_is_fetched_and_nothing_of_us_is_told(host: Host, fetch: Fetch) -> None:
    host.answers["/image?size=%C3%BC"] = ok(IMAGE)
    assert fetch("/image?size=ü#fragment") == IMAGE
    (head,) = host.heads
    line, *headers = head.decode().split("\r\n")[:-2]
    assert line == "GET /image?size=%C3%BC HTTP/1.1"
    names = {header.split(":")[0].lower() for header in headers}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert f"Host: a.test:{host.port}" in headers
    assert "Accept-Encoding: identity" in headers


def test_proxies_in_the_environment_are_ignored(fetch: Fetch, trap: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.66:{trap.port}")
    monkeypatch.setenv("no_proxy", "")
    assert fetch() == IMAGE


def test_cookies_are_neither_kept_nor_sent(host: Host, run: Run) -> None:
    host.answers["/login"] = redirect("/image").replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b\r\n\r\n")
    fetcher = fetcher_for(host)

    async def ask_twice() -> None:
        for _ in range(2):
            await fetcher.fetch_all([f"http://a.test:{host.port}/login"], ignore)

    run(ask_twice())
    assert len(host.heads) == 4
    assert not [head for head in host.heads if b"ookie" in head or b"eferer" in head]


def test_many_are_fetched_side_by_side_in_order_and_one_that_stands_twice_once(host: Host, run: Run) -> None:
    together = threading.Barrier(5)

    def answer_with(body: bytes) -> Serve:
        def answer(connection: socket.socket) -> None:
            together.wait(5)  # nobody is answered until all have asked
            connection.sendall(ok(body))

        return answer

    host.answers = {f"/{number}": answer_with(b"%d" % number) for number in range(5)}
    images: list[bytes | str] = [b"inline", *(f"http://a.test:{host.port}/{n}" for n in (4, 2, 0, 2, 1, 3)), b"last"]
    found = run(fetcher_for(host).fetch_all(images, ignore))
    assert found == [b"inline", b"4", b"2", b"0", b"2", b"1", b"3", b"last"]
    assert len(host.heads) == 5


def test_a_failure_carries_the_index_of_its_image_and_ends_the_others(host: Host, run: Run) -> None:
    host.answers["/slow"] = stall(b"")
    urls = [b"inline", f"http://a.test:{host.port}/slow", "http://c.test/", f"http://a.test:{host.port}/image"]
    start = time.perf_counter()
    with refused("fetch_forbidden", index=2):
        run(fetcher_for(host, fetch_timeout_s=20).fetch_all(urls, ignore))
    assert time.perf_counter() - start < 5


def test_a_request_without_urls_costs_nothing(host: Host, run: Run) -> None:
    assert run(fetcher_for(host).fetch_all([b"a", b"b"], ignore)) == [b"a", b"b"]


# Where from


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "ftp://a.test/", "gopher://a.test/", "http://user:pw@a.test:{port}/image"),
        *("http://a.test:{port}\\@b.test/", "http://a.test:{port}/\r\nX: y", "http://2130706433:{port}/image"),
    ],
)
def test_what_is_no_plain_web_url_is_forbidden(host: Host, fetch: Fetch, url: str) -> None:
    with refused("fetch_forbidden", "only plain http and https URLs"):
        fetch(url.format(port=host.port))
    assert host.num_connections == 0


@pytest.mark.parametrize(
    "url",
    [
        *("http://c.test:{port}/image", "http://b.test:{port}/image", "http://xa.test:{port}/image", "http://a.test/"),
        *("http://127.0.0.1:{port}/image", "http://localhost:{port}/image", "http://a.test.c.test:{port}/image"),
        *("http://[::1]:{port}/image", "http://[::ffff:127.0.0.1]:{port}/image", "http://a.test:22/image"),
    ],
)
def test_a_host_or_port_that_is_not_on_the_list_is_forbidden(host: Host, fetch: Fetch, url: str) -> None:
    with refused("fetch_forbidden", "does not fetch from that host"):
        fetch(url.format(port=host.port))
    assert host.num_connections == 0


def test_names_are_compared_as_they_are_dialled(host: Host, fetch: Fetch) -> None:
    assert fetch(f"HTTP://A.TEST.:{host.port}/image") == IMAGE
    assert fetch(f"http://x.y.B.test:{host.port}/image") == IMAGE
    hosts = f"bücher.test:{host.port}"
    assert fetch(f"http://xn--bcher-kva.test:{host.port}/image", hosts=hosts) == IMAGE
    assert fetch(f"http://BÜCHER.test:{host.port}/image", hosts=hosts) == IMAGE


def test_an_address_that_is_listed_is_fetched_from(host: Host, fetch: Fetch) -> None:
    def never(name: str) -> Sequence[IPAddress]:
        raise AssertionError("an address was looked up")

    url = f"http://127.0.0.1:{host.port}/image"
    assert fetch(url, hosts=f"127.0.0.1:{host.port}", resolve=never) == IMAGE


@pytest.mark.parametrize(
    "hosts", ["127.0.0.1", "a.test, 10.0.0.1:80", "[::1]:81", "[::ffff:8.8.8.8]", "169.254.169.254"]
)
def test_an_address_that_is_not_public_cannot_be_listed(hosts: str) -> None:
    with pytest.raises(ValueError, match=r"^--fetch-hosts: .* is not a public address$"):
        Fetcher(Settings(fetch_hosts=hosts))


@pytest.mark.parametrize(
    "addresses", [["127.0.0.66"], ["127.0.0.1", "127.0.0.66"], ["127.0.0.66", "127.0.0.1"], ["127.0.0.1", "::1"]]
)
def test_one_bad_address_among_good_ones_forbids_the_host(
    host: Host, fetch: Fetch, addresses: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with refused("fetch_forbidden", "does not fetch from that host"), caplog.at_level(logging.DEBUG):
        fetch(f"http://secret.b.test:{host.port}/image", resolve=at(*addresses))
    assert host.num_connections == 0
    assert "b.test has an address that is not public" in caplog.text
    assert "secret" not in caplog.text


def test_by_default_no_address_of_this_machine_is_fetched_from(host: Host, run: Run) -> None:
    fetcher = Fetcher(Settings(fetch_hosts=f"localhost:{host.port}"))
    with refused("fetch_forbidden"):
        run(fetcher.fetch_all([f"http://localhost:{host.port}/image"], ignore))
    assert host.num_connections == 0


def test_the_address_that_was_checked_is_the_one_dialled(host: Host, fetch: Fetch, trap: Host) -> None:
    """A name that leads to a good address when it is first asked for, and elsewhere ever after."""
    answers = [at("127.0.0.1")]

    def rebind(name: str) -> Sequence[IPAddress]:
        return answers.pop()(name) if answers else at("127.0.0.66")(name)

    assert fetch(resolve=rebind) == IMAGE
    assert not answers


def test_a_name_is_not_looked_up_again_to_dial(
    host: Host, fetch: Fetch, trap: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the system was asked for an address")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    assert fetch() == IMAGE


def test_a_redirect_to_a_name_that_leads_elsewhere_by_then_is_forbidden(host: Host, fetch: Fetch, trap: Host) -> None:
    host.answers["/first"] = redirect(f"http://a.test:{host.port}/image")
    answers = [at("127.0.0.66"), at("127.0.0.1")]
    with refused("fetch_forbidden"):
        fetch("/first", resolve=lambda name: answers.pop()(name))
    assert host.num_connections == 1


def test_a_host_without_an_address_fails(fetch: Fetch) -> None:
    with refused("fetch_failed", "the host has no address"):
        fetch(resolve=at())


def test_the_next_address_is_tried_if_one_is_dead(host: Host, fetch: Fetch) -> None:
    assert fetch(resolve=at("127.0.0.2", "127.0.0.1")) == IMAGE


def test_an_address_that_does_not_answer_leaves_time_for_the_next(host: Host, fetch: Fetch) -> None:
    with socket.socket() as full, contextlib.ExitStack() as others:
        full.bind(("127.0.0.3", host.port))
        full.listen(0)
        for _ in range(4):  # until its queue is full and a further one gets no answer
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        assert fetch(resolve=at("127.0.0.3", "127.0.0.1"), fetch_timeout_s=1.0) == IMAGE


def test_a_host_that_nobody_answers_for_fails(host: Host, fetch: Fetch) -> None:
    with refused("fetch_failed", "the host could not be reached"):
        fetch(resolve=at("127.0.0.2"))


# Redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("to", ["/image", "image#x", "//a.test:{port}/image", "http://x.b.test:{port}/image"])
def test_redirects_are_followed(host: Host, fetch: Fetch, status: int, to: str) -> None:
    host.answers["/first"] = redirect(to.format(port=host.port), status)
    assert fetch("/first") == IMAGE


@pytest.mark.parametrize(
    "to",
    [
        *("http://127.0.0.66:{trap}/", "http://c.test:{port}/", "http://a.test:{trap}/", "//c.test:{port}/"),
        *("http://169.254.169.254/latest/meta-data/", "http://[::ffff:127.0.0.66]:{trap}/", "http://localhost:{trap}/"),
        *(
            "file:///etc/passwd",
            "ftp://a.test:{port}/image",
            "data:image/png;base64,AAAA",
            "http://u@a.test:{port}/image",
        ),
        *("http://a.test:{port}\\@127.0.0.66:{trap}/", "http://a.test:{port}/ x", "//[", "http://\xff/"),
    ],
)
def test_a_redirect_is_checked_like_the_first_url(host: Host, fetch: Fetch, trap: Host, to: str) -> None:
    host.answers["/first"] = redirect("/second")
    host.answers["/second"] = redirect(to.format(port=host.port, trap=trap.port))
    with refused("fetch_forbidden"):
        fetch("/first")
    assert host.num_connections == 2


def test_redirects_are_bounded(host: Host, fetch: Fetch) -> None:
    host.answers |= {f"/{number}": redirect(f"/{number + 1}") for number in range(9)}
    host.answers["/9"] = ok(IMAGE)
    assert fetch("/6") == IMAGE
    host.heads.clear()
    with refused("fetch_failed", "redirects more than 3 times"):
        fetch("/5")
    assert len(host.heads) == 4


def test_a_redirect_to_nowhere_fails(host: Host, fetch: Fetch) -> None:
    host.answers["/first"] = b"HTTP/1.1 302 There\r\n\r\n"
    with refused("fetch_failed", "redirects to nowhere"):
        fetch("/first")


# Answers


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end


CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    "answer",
    [
        ok(IMAGE),
        ok(IMAGE, length=None),
        ok(IMAGE, "Content-Encoding: identity", "Upgrade: h2c", "Connection: upgrade"),
        ok(IMAGE + b"and more", length=len(IMAGE)),
        ok(IMAGE + b"and more", "Connection: close", length=len(IMAGE)),
        ok(chunked(IMAGE[:7], IMAGE[7:]), CHUNKED, length=None),
        ok(chunked(IMAGE, end=b"0\r\nContent-Encoding: gzip\r\nLocation: /x\r\n\r\n"), CHUNKED, length=None),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLocation: /x\r\nContent-Encoding: gzip\r\n\r\n"
        + ok(IMAGE),
        b"HTTP/1.0 200 OK\r\n\r\n" + IMAGE,
    ],
)
def test_a_body_is_read_however_it_is_framed(host: Host, fetch: Fetch, answer: bytes) -> None:
    host.answers["/image"] = answer
    assert fetch() == IMAGE


@pytest.mark.parametrize("status", [201, 204, 206, 300, 304, 305, 400, 401, 404, 418, 500, 503])
def test_another_status_fails(host: Host, fetch: Fetch, status: int) -> None:
    host.answers["/image"] = ok(IMAGE).replace(b"200", b"%d" % status)
    with refused("fetch_failed", f"the host answered {status}"):
        fetch()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\r\n",
        b"junk",
        b"<html>",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 99999 OK\r\n\r\n",
        ok(IMAGE, length=len(IMAGE) + 1),
        ok(IMAGE, "Content-Length: 1"),
        ok(IMAGE, length=None).replace(b"OK\r\n", b"OK\r\nContent-Length: -1\r\n"),
        ok(IMAGE, length=10**30),
        ok(IMAGE, CHUNKED),
        ok(chunked(IMAGE, end=b""), CHUNKED, length=None),
        ok(chunked(IMAGE, end=b"0\r\n"), CHUNKED, length=None),
        ok(chunked(IMAGE, end=b"zz\r\n"), CHUNKED, length=None),
        ok(b"-1\r\nx", CHUNKED, length=None),
        ok(b"fffffffffffffffff\r\nx", CHUNKED, length=None),
        ok(IMAGE, "Content-Encoding: gzip"),
        ok(IMAGE, "content-encoding: BR"),
        ok(IMAGE, "Content-Encoding: identity", "Content-Encoding: zstd"),
        ok(IMAGE, "Transfer-Encoding: gzip", length=None),
        ok(chunked(IMAGE), "Transfer-Encoding: gzip, chunked", length=None),
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 40_000 + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        ok(chunked(IMAGE, end=b"0\r\nX: " + b"y" * 200_000), CHUNKED, length=None),
        ok(b"1;" + b"y" * 200_000, CHUNKED, length=None),
    ],
)
def test_an_answer_that_is_none_fails(host: Host, fetch: Fetch, answer: bytes) -> None:
    host.answers["/image"] = answer
    with refused("fetch_failed"):
        fetch()
    assert len(host.heads) == 1, "it failed of the answer"


# Limits


def endless(head: bytes, piece: bytes) -> Serve:
    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:  # until the other end hangs up
            connection.sendall(piece)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"x" * (LIMIT_IMAGE + 1)),
        ok(b"", length=LIMIT_IMAGE + 1),
        endless(ok(b"", length=10**15), b"x" * 65536),
        endless(ok(b"", length=None), b"x" * 65536),
        endless(ok(b"", CHUNKED, length=None), b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        endless(ok(b"", CHUNKED, length=None), b"1\r\nx\r\n" * 1000),
    ],
)
def test_an_image_that_is_too_large_is_cut_off(host: Host, fetch: Fetch, answer: bytes | Serve) -> None:
    host.answers["/image"] = answer
    with refused("image_too_large", f"larger than {LIMIT_IMAGE} bytes"):
        fetch()


def test_an_image_of_just_the_limit_is_fetched(host: Host, fetch: Fetch) -> None:
    host.answers["/image"] = ok(b"x" * LIMIT_IMAGE)
    assert fetch() == b"x" * LIMIT_IMAGE


def test_the_images_of_a_request_have_a_limit_together(host: Host, run: Run) -> None:
    host.answers = {f"/{number}": ok(b"x" * 90_000) for number in range(4)}
    urls = [f"http://a.test:{host.port}/{number}" for number in range(4)]
    fetcher = fetcher_for(host, limit_body_bytes=270_000)
    assert [len(body) for body in run(fetcher.fetch_all(urls[:3], ignore))] == [90_000] * 3
    fetcher = fetcher_for(host, limit_body_bytes=270_000)
    with refused("body_too_large", "larger than 270000 bytes together", index=None):
        run(fetcher.fetch_all(urls, ignore))


def test_bytes_are_claimed_as_they_arrive_and_may_be_refused(host: Host, run: Run) -> None:
    claimed: list[int] = []
    url = f"http://a.test:{host.port}/image"
    run(fetcher_for(host).fetch_all([url], claimed.append))
    assert sum(claimed) == len(IMAGE)

    def refuse(num_bytes: int) -> None:
        raise ServiceError("overloaded", "no room", retry_after_s=3)

    with refused("overloaded", index=None):
        run(fetcher_for(host).fetch_all([url], refuse))


@pytest.mark.parametrize(
    "answer",
    [
        stall(b""),
        stall(b"HTTP/1.1 200"),
        stall(ok(b"x", length=2)),
        stall(ok(b"x", length=None)),
        drip(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 500),
        drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
        drip(ok(b"x" * 500)),
        drip(ok(b"1\r\nx\r\n" * 200, CHUNKED, length=None)),
    ],
)
def test_a_fetch_has_a_time_in_total(host: Host, fetch: Fetch, answer: Serve) -> None:
    host.answers["/image"] = answer
    start = time.perf_counter()
    with refused("fetch_failed", "the image took longer than 0.3 s to fetch"):
        fetch(fetch_timeout_s=0.3)
    assert time.perf_counter() - start < 2


def test_redirects_count_towards_the_time(host: Host, fetch: Fetch) -> None:
    def slow(connection: socket.socket) -> None:
        time.sleep(0.2)
        connection.sendall(redirect("/first"))

    host.answers["/first"] = slow
    with refused("fetch_failed", "the image took longer"):
        fetch("/first", fetch_timeout_s=0.5)


def test_a_connection_that_breaks_fails(host: Host, fetch: Fetch) -> None:
    def reset(connection: socket.socket) -> None:
        connection.sendall(ok(b"x", length=2))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    host.answers["/image"] = reset
    with refused("fetch_failed"):
        fetch()
    assert len(host.heads) == 1, "it failed of the answer"


def test_connections_are_closed_also_when_a_request_is_given_up(host: Host, run: Run) -> None:
    gone = threading.Event()

    def wait(connection: socket.socket) -> None:
        connection.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            connection.recv(1)
        gone.set()

    host.answers["/image"] = wait

    async def give_up() -> None:
        urls = [f"http://a.test:{host.port}/image"]
        asking = asyncio.create_task(fetcher_for(host).fetch_all(urls, ignore))
        await asyncio.to_thread(lambda: [time.sleep(0.01) for _ in range(500) if not host.heads])
        asking.cancel()
        assert await asyncio.to_thread(gone.wait, 5)

    run(give_up())


# Names that hang


def test_look_ups_that_hang_cost_time_and_a_bounded_number_of_threads(host: Host, run: Run) -> None:
    released = threading.Event()
    asked: list[str] = []

    def hang(name: str) -> Sequence[IPAddress]:
        if name.startswith("n"):
            asked.append(name)
            released.wait(20)
        return at("127.0.0.1")(name)

    async def ask() -> None:
        fetcher = fetcher_for(host, resolve=hang, fetch_timeout_s=0.2)
        before = threading.active_count()
        for _ in range(2):
            names = [f"http://n{number}.b.test:{host.port}/image" for number in range(10)]
            tasks = [asyncio.create_task(fetcher.fetch_all([name], ignore)) for name in [*names, *names]]
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert {getattr(error, "code", None) for error in errors} == {"fetch_failed"}
        assert sorted(asked) == sorted(f"n{number}.b.test" for number in range(10))  # each name once

        others = [f"http://n{number}.b.test:{host.port}/image" for number in range(100, 140)]
        tasks = [asyncio.create_task(fetcher.fetch_all([name], ignore)) for name in others]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(asked) == 16
        assert threading.active_count() - before <= 16 + host.num_connections

        released.set()
        url = f"http://a.test:{host.port}/image"
        assert await fetcher.fetch_all([url], ignore) == [IMAGE]
        assert len(asked) == 16  # nobody waits for the rest any more, and they are not looked up

    run(ask())


def test_a_look_up_that_hangs_keeps_no_process_from_ending() -> None:
    program = (
        "import asyncio, time\n"
        "from service.resolver import Resolver\n"
        "async def main():\n"
        "    async with asyncio.timeout(0.1):\n"
        "        await Resolver(lambda name: time.sleep(60)).resolve('a.test')\n"
        "try:\n    asyncio.run(main())\nexcept TimeoutError:\n    print('left')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "left\n"


def test_the_system_is_asked_for_all_addresses() -> None:
    assert ipaddress.ip_address("127.0.0.1") in look_up("localhost")
    assert look_up("name.invalid") == ()


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for a.test and 127.0.0.1, signed by itself, and its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=a.test "
        "-addext subjectAltName=DNS:a.test,IP:127.0.0.1 -keyout key -out cert"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    both = folder / "both"
    both.write_text((folder / "cert").read_text() + (folder / "key").read_text())
    return both


@pytest.fixture
def secure(certificate: Path) -> Iterator[Host]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(Host(tls=context)) as host:
        host.answers["/image"] = ok(IMAGE)
        yield host


def fetch_securely(secure: Host, run: Run, name: str, trusted: Path | None, **options: Any) -> bytes:
    hosts = f"a.test:{secure.port},c.test:{secure.port},127.0.0.1:{secure.port}"
    tls = None if trusted is None else ssl.create_default_context(cafile=str(trusted))
    fetcher = fetcher_for(secure, hosts=hosts, tls=tls, **options)

    async def ask() -> bytes:
        (body,) = await fetcher.fetch_all([f"https://{name}:{secure.port}/image"], ignore)
        return body

    body: bytes = run(ask())
    return body


def test_the_certificate_is_checked_against_the_name_not_the_address(secure: Host, run: Run, certificate: Path) -> None:
    names: list[str | None] = []
    assert secure.tls is not None
    secure.tls.sni_callback = lambda connection, name, context: names.append(name)
    assert fetch_securely(secure, run, "a.test", certificate) == IMAGE
    assert fetch_securely(secure, run, "A.Test.", certificate) == IMAGE
    assert fetch_securely(secure, run, "127.0.0.1", certificate) == IMAGE
    with refused("fetch_failed", "or its certificate not be verified"):
        fetch_securely(secure, run, "c.test", certificate)
    assert names == ["a.test", "a.test", None, "c.test"]
    assert len(secure.heads) == 3


def test_a_certificate_that_nobody_vouches_for_is_refused(secure: Host, run: Run) -> None:
    with refused("fetch_failed", "or its certificate not be verified"):
        fetch_securely(secure, run, "a.test", None)
    assert not any(secure.heads)


def test_a_handshake_that_hangs_is_bounded_by_the_time(run: Run, certificate: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        fetcher = Fetcher(
            Settings(fetch_hosts=f"a.test:{port}", fetch_timeout_s=0.3),
            is_allowed_address=is_ours,
            resolve=at("127.0.0.1"),
        )
        start = time.perf_counter()
        with refused("fetch_failed", "the image took longer than 0.3 s"):
            run(fetcher.fetch_all([f"https://a.test:{port}/"], ignore))
        assert time.perf_counter() - start < 2


def test_a_redirect_may_lead_to_tls(host: Host, secure: Host, run: Run, certificate: Path) -> None:
    host.answers["/first"] = redirect(f"https://a.test:{secure.port}/image")
    fetcher = fetcher_for(
        host,
        hosts=f"a.test:{host.port},a.test:{secure.port}",
        tls=ssl.create_default_context(cafile=str(certificate)),
    )
    assert run(fetcher.fetch_all([f"http://a.test:{host.port}/first"], ignore)) == [IMAGE]
