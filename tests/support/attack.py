"""Asks a server hostile questions, and holds every answer to what all answers must be.

Never a 5xx, never a hang; an error is JSON of our own shape, under its own status; and neither what the client sent nor
a library's words come back, or get into the log.
"""

import contextlib
import json
import re
import socket
import time
from dataclasses import dataclass
from typing import Any

from server import Server
from tricky_images import CANARY

from service.errors import ERRORS
from service.schemas import ErrorBody

ANSWER_TIMEOUT_S = 60.0
UNPARSABLE = b"Invalid HTTP request received."
"""uvicorn's own 400, for what never was a request."""

FOREIGN = re.compile(
    r"PIL\b|pillow|msgspec|pydantic|traceback|site-packages|multipart\.py|\.py\b|BytesIO|tempfile|libtiff|jpeglib"
    r"|starlette|httptools|exception|0x[0-9a-f]{6}",
    re.IGNORECASE,
)
OUR_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ (patchgrid(\.\w+)?|service\.\w+|uvicorn\.error|rank \d+): ")
GAUGES = ("queue_images", "queue_patches", "in_progress_requests", "held_bytes")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. document: the JSON of it, None for uvicorn's own 400. code: None for an answer without fault."""

    status: int
    code: str | None = None
    index: int | None = None
    document: Any = None

    @property
    def outcome(self) -> tuple[int, str | None, int | None]:
        return self.status, self.code, self.index

    @property
    def rows(self) -> tuple[str, str]:
        """Of the first image: its id, and what it was embedded to."""
        assert self.status == 200, self.outcome
        return self.document["data"][0]["id"], self.document["data"][0]["embedding"]


class Target:
    """A running server that is asked."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._known: dict[bytes, Answer] = {}

    def ask(self, method: str = "POST", path: str = "/embed", **request: Any) -> Answer:
        """One request, as httpx sends it."""
        response = self.server.client.request(method, path, timeout=ANSWER_TIMEOUT_S, **request)
        return judge(response.status_code, dict(response.headers), response.content)

    def embed(self, image: bytes, content_type: str = "application/octet-stream") -> Answer:
        """One image as the body."""
        return self.ask(content=image, headers={"content-type": content_type})

    def known(self, image: bytes) -> Answer:
        """As `embed`, but an image that was asked for before is not sent again."""
        if image not in self._known:
            self._known[image] = self.embed(image)
        return self._known[image]

    def talk(self, *pieces: bytes, pause_s: float = 0.0, hang_up: bool = False) -> list[Answer]:
        """Bytes as they are over a connection of their own, and all answers until the server closes it.

        hang_up: say after the last piece that no more will come.
        """
        received = b""
        with socket.create_connection(self.address, timeout=ANSWER_TIMEOUT_S) as connection:
            try:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has answered and hung up already
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(pause_s)
                    if hang_up:
                        connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):  # it had not read all
                    while chunk := connection.recv(65536):
                        received += chunk
            except TimeoutError:
                raise AssertionError(f"no end within {ANSWER_TIMEOUT_S} s, after {received!r}") from None
        return list(_split(received))

    def check_unharmed(self, golden: bytes, answer: Answer) -> None:
        """Ready, with nothing left over, the same answer as ever, and a clean log."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while any(left := {name: self.server.metric(f"patchgrid_{name}") for name in GAUGES}.values()):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        assert self.server.client.get("/health/ready").status_code == 200
        assert self.server.metric("patchgrid_restarts_total") == 0
        assert self.embed(golden).rows == answer.rows
        self.check_log()

    def check_log(self) -> None:
        """Every line is the service's own, and none holds what does not belong into it."""
        for line in self.server.log.splitlines():
            assert OUR_LINE.match(line), line
            assert not FOREIGN.search(line), line
            assert CANARY.decode() not in line.lower(), line

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.server.url.removeprefix("http://").split(":")
        return host, int(port)


def judge(status: int, headers: dict[str, str], body: bytes) -> Answer:
    """What every answer has to be, however it came about."""
    assert not any(CANARY.decode() in f"{name}: {value}".lower() for name, value in headers.items()), headers
    assert CANARY.lower() not in body.lower(), body[:1000]
    if body == UNPARSABLE:
        assert status == 400
        return Answer(400)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", headers["x-request-id"])
    assert status < 500 or status == 504, body
    if not body and status == 200:  # to HEAD
        return Answer(200)
    assert headers["content-type"] == "application/json", headers
    document = json.loads(body)
    if status == 200:
        assert not FOREIGN.search(json.dumps(_without_rows(document)))
        return Answer(200, document=document)
    assert not FOREIGN.search(body.decode())
    error = ErrorBody.model_validate(document).error
    assert (status, error.type) == (ERRORS[error.code].status, ERRORS[error.code].type)
    return Answer(status, error.code, error.index, document)


def _without_rows(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _without_rows(value) for name, value in document.items() if name not in ("embedding", "id")}
    return [_without_rows(value) for value in document] if isinstance(document, list) else document


def _split(received: bytes) -> list[Answer]:
    """The answers that came over one connection."""
    answers = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("ascii").split("\r\n")
        status = int(status_line.split(" ")[1])
        if status == 100:
            continue
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"])
        assert len(received) >= length, "an answer that was cut short"
        answers.append(judge(status, headers, received[:length]))
        received = received[length:]
    return answers
