"""Requests that no HTTP library would send, over a bare socket: framing that lies, requests within requests, and
headers without end. One answer at most for what was one request, and never a second meaning for the same bytes.
"""

import pytest
from attack import Target
from tricky_images import CANARY, upright

pytestmark = pytest.mark.usefixtures("unharmed")

PLAN = b'{"sizes":[[64,48]]}'
OK = (200, None, None)
INVALID = (400, "invalid_request", None)
CODED = (415, "unsupported_encoding", None)
UNPARSABLE = (400, None, None)
NOTHING = None
"""The connection is closed without an answer: the client left before it had sent all."""

HEAD = b"POST /plan HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(PLAN)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
IN_CHUNKS = b"5\r\n" + PLAN[:5] + b"\r\n%x\r\n" % (len(PLAN) - 5) + PLAN[5:] + b"\r\n0\r\n\r\n"
SMUGGLED = b"GET /info HTTP/1.1\r\nHost: " + CANARY + b"\r\n\r\n"

FRAMED = {
    "as it should be": (LENGTH + b"\r\n" + PLAN, OK),
    "a length too small": (b"Content-Length: 5\r\n\r\n" + PLAN, INVALID),
    "a length too large": (b"Content-Length: 99\r\n\r\n" + PLAN, NOTHING),
    "a length below 0": (b"Content-Length: -1\r\n\r\n" + PLAN, UNPARSABLE),
    "a length with a sign": (b"Content-Length: +19\r\n\r\n" + PLAN, UNPARSABLE),
    "a length in hexadecimal": (b"Content-Length: 0x13\r\n\r\n" + PLAN, UNPARSABLE),
    "a length with a fraction": (b"Content-Length: 19.0\r\n\r\n" + PLAN, UNPARSABLE),
    "a length of other digits": (b"Content-Length: \xd9\xa1\r\n\r\n" + PLAN, UNPARSABLE),
    "a length of nothing": (b"Content-Length: \r\n\r\n" + PLAN, UNPARSABLE),
    "a length of 30 digits": (b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + PLAN, UNPARSABLE),
    "a length of 16 EB": (b"Content-Length: 18446744073709551615\r\n\r\n" + PLAN, (413, "body_too_large", None)),
    "a length of 1 GB": (b"Content-Length: 1073741824\r\n\r\n" + PLAN, (413, "body_too_large", None)),
    "two lengths": (LENGTH + b"Content-Length: 5\r\n\r\n" + PLAN, UNPARSABLE),
    "the same length twice": (LENGTH + LENGTH + b"\r\n" + PLAN, UNPARSABLE),
    "two lengths in one": (b"Content-Length: 19, 19\r\n\r\n" + PLAN, UNPARSABLE),
    "no length": (b"\r\n" + PLAN, INVALID),
    "chunks": (CHUNKED + b"\r\n" + IN_CHUNKS, OK),
    "chunks with extensions and a trailer": (
        CHUNKED + b"\r\n13;a=b;c\r\n" + PLAN + b"\r\n0;d\r\nX: y\r\n\r\n",
        OK,
    ),
    "chunks and a length behind them": (CHUNKED + b"\r\n" + IN_CHUNKS[:-2] + LENGTH + b"\r\n", UNPARSABLE),
    "chunks without an end": (CHUNKED + b"\r\n13\r\n" + PLAN + b"\r\n", NOTHING),
    "a chunk cut short": (CHUNKED + b"\r\n13\r\n" + PLAN[:5], NOTHING),
    "a chunk that is longer": (CHUNKED + b"\r\n5\r\n" + PLAN + b"\r\n0\r\n\r\n", UNPARSABLE),
    "a chunk of no size": (CHUNKED + b"\r\n\r\n" + PLAN + b"\r\n0\r\n\r\n", UNPARSABLE),
    "a chunk of junk": (CHUNKED + b"\r\n" + CANARY + b"\r\n" + PLAN + b"\r\n0\r\n\r\n", UNPARSABLE),
    "a chunk below 0": (CHUNKED + b"\r\n-13\r\n" + PLAN + b"\r\n0\r\n\r\n", UNPARSABLE),
    "a chunk of more than 64 bits": (CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n" + PLAN + b"\r\n0\r\n\r\n", UNPARSABLE),
    "chunks that end in LF": (CHUNKED + b"\r\n" + IN_CHUNKS.replace(b"\r\n", b"\n"), UNPARSABLE),
    "a length and chunks": (LENGTH + CHUNKED + b"\r\n" + IN_CHUNKS, UNPARSABLE),
    "chunks and a length": (CHUNKED + LENGTH + b"\r\n" + IN_CHUNKS, UNPARSABLE),
    "a length, chunks and a request in them": (
        b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + SMUGGLED,
        UNPARSABLE,
    ),
    "chunks, in another coding too": (b"Transfer-Encoding: chunked, identity\r\n\r\n" + IN_CHUNKS, UNPARSABLE),
    "almost chunks": (b"Transfer-Encoding: xchunked\r\n\r\n" + IN_CHUNKS, UNPARSABLE),
    "chunks behind a space": (b"Transfer-Encoding : chunked\r\n\r\n" + IN_CHUNKS, UNPARSABLE),
    "chunks in a folded header": (b"X: y\r\n " + CHUNKED + b"\r\n" + IN_CHUNKS, UNPARSABLE),
    "chunks twice": (CHUNKED * 2 + b"\r\n" + IN_CHUNKS, UNPARSABLE),
    "chunks behind a vertical tab": (b"Transfer-Encoding: \x0bchunked\r\n\r\n" + IN_CHUNKS, UNPARSABLE),
    "identity": (b"Transfer-Encoding: identity\r\n\r\n" + PLAN, UNPARSABLE),
    "a header of a zero": (b"X: a\0b\r\n" + LENGTH + b"\r\n" + PLAN, UNPARSABLE),
    "a header of a CR": (b"X: a\rb\r\n" + LENGTH + b"\r\n" + PLAN, UNPARSABLE),
    "a header of no name": (b": a\r\n" + LENGTH + b"\r\n" + PLAN, UNPARSABLE),
    "a header of no colon": (CANARY + b"\r\n" + LENGTH + b"\r\n" + PLAN, UNPARSABLE),
    "a header of no letters": (b"X: \xff\xfe" + CANARY + b"\r\n" + LENGTH + b"\r\n" + PLAN, OK),
    "an expectation": (b"Expect: 100-continue\r\n" + LENGTH + b"\r\n" + PLAN, OK),
    "another expectation": (b"Expect: " + CANARY + b"\r\n" + LENGTH + b"\r\n" + PLAN, OK),
    "a coding of the content": (b"Content-Encoding: gzip\r\n" + LENGTH + b"\r\n" + PLAN, CODED),
}

LINES = {
    "no version": (b"GET /health\r\n\r\n", OK),
    "version 1.0": (b"GET /health HTTP/1.0\r\n\r\n", OK),
    "version 2.0": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", UNPARSABLE),
    "version 9.9": (b"GET /health HTTP/9.9\r\n\r\n", UNPARSABLE),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99), UNPARSABLE),
    "SSH": (b"SSH-2.0-OpenSSH_9.0\r\n", UNPARSABLE),
    "a proxy's line": (b"PROXY TCP4 127.0.0.1 127.0.0.1 1 1\r\nGET /health HTTP/1.1\r\n\r\n", UNPARSABLE),
    "junk": (CANARY + b"\0\r\n\r\n", UNPARSABLE),
    "a method of no such kind": (b"BREW /plan HTTP/1.1\r\n\r\n", UNPARSABLE),
    "a method in small letters": (b"get /health HTTP/1.1\r\n\r\n", UNPARSABLE),
    "a tunnel": (b"CONNECT " + CANARY + b":443 HTTP/1.1\r\n\r\n", UNPARSABLE),
    "a star": (b"OPTIONS * HTTP/1.1\r\nConnection: close\r\n\r\n", (404, "not_found", None)),
    "another host's path": (b"GET http://" + CANARY + b"/health HTTP/1.1\r\nConnection: close\r\n\r\n", OK),
    "a path of no letters": (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", UNPARSABLE),
    "a path of 1 MB": (b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\n\r\n", UNPARSABLE),
    "a space in a path": (b"GET /health /info HTTP/1.1\r\n\r\n", UNPARSABLE),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n", OK),
    "no host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", OK),
    "line ends before it": (b"\r\n\r\nGET /health HTTP/1.1\r\nConnection: close\r\n\r\n", OK),
    "line ends of LF alone": (b"GET /health HTTP/1.1\nConnection: close\n\n", UNPARSABLE),
    "half a line": (b"GET /hea", NOTHING),
    "half of its headers": (b"GET /health HTTP/1.1\r\nHost: a", NOTHING),
    "nothing": (b"", NOTHING),
}


@pytest.mark.parametrize(("rest", "outcome"), FRAMED.values(), ids=FRAMED)
def test_a_body_is_framed_in_one_way_or_none(
    target: Target, rest: bytes, outcome: tuple[int, str | None, int | None] | None
) -> None:
    answers = target.talk(HEAD + rest, hang_up=outcome is NOTHING)
    assert [answer.outcome for answer in answers] == ([] if outcome is NOTHING else [outcome])


@pytest.mark.parametrize(("data", "outcome"), LINES.values(), ids=LINES)
def test_a_first_line_is_read_in_one_way_or_none(
    target: Target, data: bytes, outcome: tuple[int, str | None, int | None] | None
) -> None:
    answers = target.talk(data, hang_up=outcome is NOTHING)
    assert [answer.outcome for answer in answers] == ([] if outcome is NOTHING else [outcome])


def test_requests_sent_at_once_are_answered_in_order(target: Target) -> None:
    keep = HEAD.replace(b"Connection: close\r\n", b"")
    bad = b"{}" + b" " * (len(PLAN) - 2)
    data = b"".join(keep + LENGTH + b"\r\n" + body for body in (PLAN, bad, PLAN)) + HEAD + LENGTH + b"\r\n" + PLAN
    assert [answer.status for answer in target.talk(data)] == [200, 400, 200, 200]


def test_a_request_cut_into_single_bytes_is_read(target: Target) -> None:
    data = HEAD + CHUNKED + b"\r\n" + IN_CHUNKS
    assert [answer.outcome for answer in target.talk(*(bytes([byte]) for byte in data), pause_s=0.0005)] == [OK]


def test_a_body_of_single_byte_chunks_is_read(target: Target) -> None:
    image = upright()
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in image) + b"0\r\n\r\n"
    head = b"POST /embed HTTP/1.1\r\nContent-Type: image/png\r\nConnection: close\r\n" + CHUNKED + b"\r\n"
    (answer,) = target.talk(head + chunks)
    assert answer.rows == target.known(image).rows


def test_an_upload_larger_than_its_limit_is_cut_off_whatever_it_claims(target: Target) -> None:
    head = b"POST /embed HTTP/1.1\r\nContent-Type: image/png\r\nConnection: close\r\n" + CHUNKED + b"\r\n"
    chunk = b"100000\r\n" + bytes(2**20) + b"\r\n"
    (answer,) = target.talk(head, *[chunk] * 66)
    assert answer.outcome == (413, "body_too_large", None)


def test_a_client_that_offers_another_protocol_is_answered_in_this_one(target: Target) -> None:
    """Java's client and curl --http2 do, and their bodies are not to be lost."""
    offers = HEAD.replace(b"close", b"close, Upgrade, HTTP2-Settings") + b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    assert target.talk(offers + LENGTH + b"\r\n" + PLAN)[0].outcome == OK
    for offered in (b"websocket", CANARY):
        head = b"GET /health HTTP/1.1\r\nConnection: close, Upgrade\r\nUpgrade: " + offered + b"\r\n"
        assert [answer.outcome for answer in target.talk(head + b"\r\n")] == [OK]


@pytest.mark.parametrize(
    "endless",
    [
        HEAD + b"X: " + b"y" * 2**23,
        HEAD + b"y" * 2**23,
        HEAD + b"X: y\r\n" * 2**20,
        b"GET /" + b"x" * 2**23,
        b"\r\n" * 2**22,
        HEAD + CHUNKED + b"\r\n13;x=" + b"y" * 2**23,
        HEAD + CHUNKED + b"\r\n13\r\n" + PLAN + b"\r\n0\r\nX: " + b"y" * 2**23,
    ],
    ids=["header", "header's name", "headers", "path", "empty lines", "chunk's extension", "trailer"],
)
def test_what_comes_before_or_between_a_body_has_an_end(target: Target, endless: bytes) -> None:
    answers = target.talk(*[endless[start : start + 2**16] for start in range(0, len(endless), 2**16)])
    assert [answer.outcome for answer in answers] in ([UNPARSABLE], [])
