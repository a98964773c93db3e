"""Over a real socket to a real uvicorn: heads without end, clients without haste, and offers of other protocols."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from service.http_protocol import LIMIT_HEAD_BYTES, bounded_http

TIMEOUT_S = 0.4
LARGE = bytes(32 * 2**20)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]


class App:
    """Answers with the body it got, or, at /large, with more than any buffer holds."""

    def __init__(self) -> None:
        self.heads: list[Scope] = []
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.heads.append(scope)
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body, more = body + message["body"], message["more_body"]
        answer = LARGE if scope["path"] == "/large" else body
        length = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        for start in range(0, len(answer) or 1, 2**20):
            chunk = answer[start : start + 2**20]
            await send({"type": "http.response.body", "body": chunk, "more_body": start + 2**20 < len(answer)})
        self.left.set()


@pytest.fixture
def app() -> App:
    return App()


def serving(app: App, talk: Talk, timeout_s: float = TIMEOUT_S) -> bytes:
    async def run() -> bytes:
        config = uvicorn.Config(
            app, http=bounded_http(timeout_s), log_config=None, lifespan="off", timeout_keep_alive=60
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                received = await asyncio.wait_for(talk(reader, writer), 60)
                writer.close()
                return received
            finally:
                server.should_exit = True
                await running

    return asyncio.run(run())


def sending(*pieces: bytes, pause_s: float = 0.0) -> Talk:
    """Write the pieces, and give all that comes back until the server hangs up."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        async def write() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)

        writing = asyncio.create_task(write())
        received = b""
        try:
            while chunk := await reader.read(2**20):
                received += chunk
        except ConnectionResetError:
            pass
        writing.cancel()
        await asyncio.wait([writing])
        return received

    return talk


def drip(data: bytes) -> Iterable[bytes]:
    return (data[index : index + 1] for index in range(len(data)))


def bodies(received: bytes) -> list[bytes]:
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append(received[:length])
        received = received[length:]
    return found


def test_a_request_in_pieces_is_read(app: App) -> None:
    pieces = drip(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
    assert bodies(serving(app, sending(*pieces), timeout_s=60)) == [b"abc"]


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"x" * 2**20,
        b"GET / HTTP/1.1\r\nX: " + b"y" * 2**20,
        b"GET / HTTP/1.1\r\n" + b"y" * 2**20,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 2**18,
        b"\r\n" * 2**19,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 2**20,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"y" * 2**20,
    ],
    ids=["path", "header", "header's name", "headers", "empty lines", "chunk's extension", "trailer"],
)
def test_what_comes_before_or_between_a_body_is_bounded(app: App, endless: bytes) -> None:
    received = serving(app, sending(*[endless[start : start + 2**16] for start in range(0, len(endless), 2**16)]), 60)
    assert received == b"" or received.startswith(b"HTTP/1.1 400 "), received[:100]


@pytest.mark.parametrize("excess", [0, 1])
def test_the_bound_is_the_same_however_a_head_is_cut(app: App, excess: int) -> None:
    name = LIMIT_HEAD_BYTES - len(b"/x") - len(b"connectionclose") + excess
    data = b"GET / HTTP/1.1\r\nConnection: close\r\nX: " + b"y" * name + b"\r\n\r\n"
    for pieces in ([data], [data[:1000], data[1000:]], [data[:-1], data[-1:]]):
        assert serving(app, sending(*pieces), 60).startswith(b"HTTP/1.1 400 " if excess else b"HTTP/1.1 200 ")


def test_a_body_of_any_size_and_cut_is_no_head(app: App) -> None:
    chunks = b"1\r\nx\r\n" * (2 * LIMIT_HEAD_BYTES) + b"0\r\n\r\n"
    data = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks
    assert bodies(serving(app, sending(data), 60)) == [b"x" * (2 * LIMIT_HEAD_BYTES)]


@pytest.mark.parametrize(
    "head", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nX: y"], ids=["nothing", "half a line", "half of the headers"]
)
def test_a_head_has_to_arrive_in_time(app: App, head: bytes) -> None:
    assert serving(app, sending(head)) == b""
    assert app.heads == []


def test_dribbling_a_head_gains_no_time(app: App) -> None:
    assert serving(app, sending(*drip(b"GET / HTTP/1.1\r\nX: " + b"y" * 10_000), pause_s=0.02)) == b""
    assert app.heads == []


def test_the_next_request_on_a_connection_has_its_own_time(app: App) -> None:
    whole = b"GET / HTTP/1.1\r\n\r\n"
    received = serving(app, sending(whole, whole, whole, b"GET / HT", pause_s=TIMEOUT_S * 0.7))
    assert len(bodies(received)) == 3


def test_a_body_is_not_the_connection_s_to_time(app: App) -> None:
    head = b"POST / HTTP/1.1\r\nContent-Length: 4\r\nConnection: close\r\n\r\n"
    assert bodies(serving(app, sending(head, *drip(b"abcd"), pause_s=TIMEOUT_S * 0.5))) == [b"abcd"]


def test_who_was_answered_cannot_send_on_for_ever(app: App) -> None:
    head = b"POST /early HTTP/1.1\r\nContent-Length: 99999\r\n\r\n"
    assert bodies(serving(app, sending(head, *drip(bytes(10_000)), pause_s=0.02))) == [b""]


def test_an_answer_that_nobody_reads_is_given_up(app: App) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.transport.pause_reading()
        writer.write(b"GET /large HTTP/1.1\r\n\r\n")
        await app.left.wait()
        return b""

    serving(app, talk)


def test_an_answer_that_is_read_slowly_arrives(app: App) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /large HTTP/1.1\r\nConnection: close\r\n\r\n")
        received = bytearray()
        while chunk := await reader.read(2**20):
            received += chunk
            await asyncio.sleep(0.012)
        return bytes(received)

    assert bodies(serving(app, talk, timeout_s=2.0)) == [LARGE]


OFFER = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: %s\r\nUpgrade: %s\r\nX: y\r\nContent-Length: 3\r\n\r\nabc"


@pytest.mark.parametrize("options", [b"Upgrade", b"upgrade, HTTP2-Settings", b"close, UPGRADE"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_offer_of_another_protocol_is_passed_over(app: App, options: bytes, protocol: bytes) -> None:
    last = b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"
    data = OFFER % (options, protocol) * (1 if b"close" in options else 3)
    for pieces in ([data + last], drip(data + last)):
        app.heads.clear()
        received = bodies(serving(app, sending(*pieces), 60))
        assert received[0] == b"abc"
        assert len(received) == (1 if b"close" in options else 4)
        names = [name for name, _ in app.heads[0]["headers"]]
        assert b"x" in names
        assert b"upgrade" not in names


def test_a_tunnel_is_refused(app: App) -> None:
    assert serving(app, sending(b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
