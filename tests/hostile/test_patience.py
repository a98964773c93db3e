"""Clients without haste: slow-loris in every part of a request and of its answer, by the hundred, costs nobody else."""

import json
import select
import socket
import time
from base64 import b64encode

import pytest
from attack import Target
from image_bytes import encode, scene
from tricky_images import upright

pytestmark = pytest.mark.usefixtures("unharmed")

RECEIVE_TIMEOUT_S = 1.0
FLAGS = [f"--receive-timeout-s={RECEIVE_TIMEOUT_S}", "--request-timeout-s=60"]

TOO_SLOW = (504, "deadline_exceeded", None)
POST = b"POST /embed HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: "
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def drip(head: bytes, data: bytes = b"") -> list[bytes]:
    return [head, *(data[index : index + 1] for index in range(len(data)))]


@pytest.mark.parametrize(
    "head",
    [
        POST + b"image/png\r\nContent-Length: 9999\r\n\r\n",
        POST + b"application/json\r\nContent-Length: 9999\r\n\r\n",
        POST + b"multipart/form-data; boundary=xx\r\nContent-Length: 9999\r\n\r\n",
        POST.replace(b"embed", b"plan") + b"application/json\r\nContent-Length: 9999\r\n\r\n",
    ],
    ids=["raw", "JSON", "form", "plan"],
)
@pytest.mark.parametrize("data", [b"", b"x" * 9000], ids=["stalled", "dribbled"])
def test_a_body_has_to_arrive_in_time(target: Target, head: bytes, data: bytes) -> None:
    (answer,) = target.talk(*drip(head, data), pause_s=0.05)
    assert answer.outcome == TOO_SLOW


def test_dribbled_chunks_gain_no_time(target: Target) -> None:
    (answer,) = target.talk(POST + b"image/png\r\n" + CHUNKED, *[b"1\r\nx\r\n"] * 9000, pause_s=0.05)
    assert answer.outcome == TOO_SLOW


def test_a_chunk_s_extension_is_not_dribbled_for_ever(target: Target) -> None:
    (answer,) = target.talk(*drip(POST + b"image/png\r\n" + CHUNKED + b"1;", b"x" * 9000), pause_s=0.05)
    assert answer.outcome == TOO_SLOW


@pytest.mark.parametrize(
    "pieces",
    [[b""], [POST], drip(POST, b"x" * 9000), drip(b"", b"\r\n" * 9000)],
    ids=["nothing", "half of a head", "a dribbled head", "empty lines"],
)
def test_a_connection_that_never_asks_is_closed(target: Target, pieces: list[bytes]) -> None:
    assert target.talk(*pieces, pause_s=0.05) == []


def test_who_was_refused_cannot_send_on_for_ever(target: Target) -> None:
    head = b"POST /nothing HTTP/1.1\r\nContent-Length: 99999\r\n\r\n"
    answers = target.talk(*drip(head, b"x" * 9000), pause_s=0.05)
    assert [answer.outcome for answer in answers] == [(404, "not_found", None)]


def test_hundreds_who_dribble_cost_nobody_else(target: Target) -> None:
    heads = [b"", POST, POST + b"image/png\r\nContent-Length: 9999\r\n\r\n", POST + b"image/png\r\n" + CHUNKED]
    waiting = [socket.create_connection(target.address, timeout=60) for _ in range(400)]
    for index, connection in enumerate(waiting):
        connection.sendall(heads[index % len(heads)])
    rows = target.embed(upright()).rows
    assert rows == target.known(upright()).rows
    for connection in waiting:
        with connection:
            while connection.recv(65536):
                pass


def test_an_answer_that_nobody_reads_is_given_up(target: Target) -> None:
    images = [b64encode(encode(scene(seed=seed))).decode() for seed in range(8)]
    body = json.dumps({"images": images, "encoding_format": "float"}).encode()
    head = POST + b"application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(target.address)
        connection.sendall(head + body)
        select.select([connection], [], [], 60)
        held = target.server.metric("patchgrid_held_bytes")
        deadline = time.monotonic() + 60
        while target.server.metric("patchgrid_in_progress_requests"):
            assert time.monotonic() < deadline, "an answer waits for ever"
            time.sleep(0.05)
    assert held > 0
    assert target.server.metric("patchgrid_held_bytes") == 0
