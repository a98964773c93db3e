import asyncio
import base64
import ipaddress
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from encoder.config import DEEPSEEK_V4
from service.decode import DecodePool
from service.errors import install_error_handling
from service.fetch import Fetcher
from service.intake import decode_base64, read_embed, read_plan
from service.metrics import Metrics
from service.settings import Settings

LIMIT_BODY = 10_000
SETTINGS = Settings(
    decode_processes=1,
    limit_body_bytes=LIMIT_BODY,
    limit_images_per_request=4,
    limit_image_bytes=2_000,
    receive_timeout_s=0.5,
)

IMAGE = bytes(range(256)) + b"\xfb\xff"  # base64 of it has both + and /
PLAIN = base64.b64encode(IMAGE).decode()


def app_that_reads(pool: DecodePool, settings: Settings = SETTINGS, fetcher: Fetcher | None = None) -> FastAPI:
    """Tells what it was sent."""
    app = FastAPI()
    install_error_handling(app)

    @app.post("/embed")
    async def embed(request: Request) -> dict[str, Any]:
        job = await read_embed(request, settings, pool, fetcher)
        return {
            "images": [bytes(image).hex() for image in job.images],
            "client_ids": job.client_ids,
            "options": [job.layout, job.dtype, job.encoding_format],
        }

    @app.post("/plan")
    async def plan(request: Request) -> list[tuple[int, int]]:
        return list((await read_plan(request, settings, pool)).sizes)

    return app


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    with DecodePool(SETTINGS, DEEPSEEK_V4, Metrics()) as pool:
        yield pool


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(pool: DecodePool) -> Post:
    def send(path: str = "/embed", **request: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app_that_reads(pool))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(path, **request)

        return asyncio.run(run())

    return send


@pytest.fixture
def post_json(post: Post) -> Post:
    def send(body: str | bytes, path: str = "/embed") -> httpx.Response:
        return post(path, content=body, headers={"content-type": "application/json"})

    return send


def images_of(response: httpx.Response) -> list[bytes]:
    assert response.status_code == 200, response.text
    return [bytes.fromhex(image) for image in response.json()["images"]]


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "json": ("/embed", {"json": {"images": [PLAIN]}}),
    "form": ("/embed", {"files": [("a", ("1.png", IMAGE))]}),
    "raw": ("/embed", {"content": IMAGE, "headers": {"content-type": "image/png"}}),
    "plan": ("/plan", {"json": {"sizes": [[30, 40]]}}),
}


def error_of(response: httpx.Response) -> tuple[str, int | None]:
    error = response.json()["error"]
    return error["code"], error.get("index")


# Forms


def test_json_holds_strings_and_objects_in_order(post: Post) -> None:
    other = base64.b64encode(b"other").decode()
    response = post(json={"images": [PLAIN, {"image": other, "id": "cat"}, {"image": PLAIN}], "layout": "v4"})
    assert images_of(response) == [IMAGE, b"other", IMAGE]
    assert response.json()["client_ids"] == [None, "cat", None]
    assert response.json()["options"] == ["v4", "bfloat16", "base64"]


def test_a_charset_on_the_content_type_is_no_matter(post: Post) -> None:
    response = post(
        content=json.dumps({"images": [PLAIN]}), headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert images_of(response) == [IMAGE]


def test_a_form_holds_files_in_order_under_any_names(post: Post) -> None:
    files = [("b", ("2.png", b"second")), ("a", ("1.png", IMAGE)), ("a", ("x", b"third"))]
    response = post(files=files, data={"layout": "v41", "dtype": "float32", "encoding_format": "float"})
    assert images_of(response) == [b"second", IMAGE, b"third"]
    assert response.json()["options"] == ["v41", "float32", "float"]


@pytest.mark.parametrize("media_type", ["image/png", "image/jpeg", "IMAGE/x-anything", "application/octet-stream"])
def test_a_raw_image_takes_its_options_from_the_query(post: Post, media_type: str) -> None:
    response = post("/embed?dtype=float16", content=IMAGE, headers={"content-type": media_type})
    assert images_of(response) == [IMAGE]
    assert response.json()["options"] == ["rows", "float16", "base64"]


@pytest.mark.parametrize(
    "media_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/xml", ";"]
)
def test_other_content_types_are_refused(post: Post, media_type: str | None) -> None:
    response = post(content=b"x", headers={"content-type": media_type} if media_type else {})
    assert response.status_code == 415
    assert error_of(response) == ("unsupported_media_type", None)


@pytest.mark.parametrize("query", ["layuot=v4", "layout=V4", "layout=v4&layout=v4", "dtype=", "images=x"])
def test_a_wrong_query_is_refused(post: Post, query: str) -> None:
    response = post(f"/embed?{query}", content=IMAGE, headers={"content-type": "image/png"})
    assert error_of(response) == ("invalid_request", None)


def test_options_in_the_query_of_another_body_are_refused_rather_than_ignored(post: Post) -> None:
    response = post("/embed?layout=v41", json={"images": [PLAIN]})
    assert error_of(response) == ("invalid_request", None)


# Base64


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.rstrip("="),
        PLAIN.replace("+", "-").replace("/", "_"),
        PLAIN.replace("+", "-").replace("/", "_").rstrip("="),
        "\r\n".join(PLAIN[start : start + 76] for start in range(0, len(PLAIN), 76)) + "\n",
        "\t " + " ".join(PLAIN),
        PLAIN.replace("=", "\n="),
        f"data:image/png;base64,{PLAIN}",
        f"data:;base64,{PLAIN}",
        f"DATA:Image/PNG;Charset=UTF-8;BASE64,{PLAIN}",
        f"  data:image/png;name=a.png;base64 , {PLAIN}\n",
        f"data:text/html;base64,{PLAIN.replace('+', '-').rstrip('=')}",
    ],
)
def test_base64_is_read_in_every_dialect(post: Post, text: str) -> None:
    assert images_of(post(json={"images": [text]})) == [IMAGE]


@pytest.mark.parametrize(
    "text",
    [
        "not base64!",
        PLAIN + "!",
        "!" + PLAIN,
        PLAIN[:10] + "\0" + PLAIN[10:],
        PLAIN[:10] + "é" + PLAIN[10:],
        PLAIN[:10] + "%" + PLAIN[10:],
        "QQ==QQ==",
        "QUI==",
        "QQ=",
        "QUJD=",
        "QUJDRA===",
        "A",
        "====",
        "=QQ",
        "file:///etc/passwd",
        "/etc/passwd.",
        f"data:image/png;base64{PLAIN}",
        f"data:image/png,{PLAIN}",
        "data:image/png;base64,",
        "data:",
    ],
)
def test_junk_is_refused_with_its_index_and_not_echoed(post: Post, text: str) -> None:
    response = post(json={"images": [PLAIN, {"image": text}]})
    assert response.status_code == 400
    assert error_of(response) == ("invalid_request", 1)
    assert "passwd" not in response.text
    assert PLAIN[:8] not in response.text


@given(st.binary(max_size=200), st.booleans(), st.booleans(), st.integers(1, 80))
def test_base64_gives_any_bytes_back(data: bytes, url_safe: bool, padded: bool, fold_at: int) -> None:
    text = (base64.urlsafe_b64encode if url_safe else base64.b64encode)(data).decode()
    text = text if padded else text.rstrip("=")
    assert decode_base64("\n".join(text[start : start + fold_at] for start in range(0, len(text), fold_at))) == data


def test_base64_longer_than_a_slice_is_read_whole() -> None:
    data = bytes(range(256)) * 9000
    folded = base64.encodebytes(data).decode()
    assert decode_base64(folded) == data
    assert decode_base64(base64.b64encode(data).decode().rstrip("=")) == data


@pytest.mark.parametrize("url", ["http://169.254.169.254/", "HTTPS://example.org/a.png", " http://[::1]/"])
def test_urls_are_not_fetched(post: Post, url: str) -> None:
    assert error_of(post(json={"images": [PLAIN, url]})) == ("fetch_disabled", 1)


# URLs that are fetched


@pytest.fixture
def post_to_fetcher(pool: DecodePool) -> Post:
    """Posts JSON to a service that fetches from a.test, which is on this machine: `{}` in a URL is its port."""
    requests = itertools.count()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"fetched %d" % next(requests)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    def send(images: list[Any]) -> httpx.Response:
        async def run() -> httpx.Response:
            async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                settings = SETTINGS.model_copy(update={"fetch_hosts": f"a.test:{port}"})
                address = ipaddress.ip_address("127.0.0.1")
                fetcher = Fetcher(settings, is_allowed_address=lambda found: True, resolve=lambda name: (address,))
                app = app_that_reads(pool, settings, fetcher)
                body = json.dumps({"images": images}).replace("{}", str(port))
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                    return await client.post("/embed", content=body, headers={"content-type": "application/json"})

        return asyncio.run(run())

    return send


def test_urls_are_fetched_in_their_places(post_to_fetcher: Post) -> None:
    url = " HTTP://a.test:{}/x.png\n"
    response = post_to_fetcher([PLAIN, url, {"image": f"data:;base64,{PLAIN}", "id": "b"}, {"image": url, "id": "c"}])
    assert images_of(response) == [IMAGE, b"fetched 0", IMAGE, b"fetched 0"]
    assert response.json()["client_ids"] == [None, None, "b", "c"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a.test/", "http://b.test:{}/", "http://127.0.0.1:{}/"])
def test_a_url_that_may_not_be_fetched_is_refused_with_its_index(post_to_fetcher: Post, url: str) -> None:
    response = post_to_fetcher([PLAIN, "http://a.test:{}/", url])
    assert response.status_code == 400
    assert error_of(response) == ("fetch_forbidden", 2)
    assert "test" not in response.text
    assert "passwd" not in response.text


@pytest.mark.parametrize("text", ["file:/etc/passwd", "/etc/passwd.", "a.test", "not base64!"])
def test_what_is_no_url_stays_junk_where_urls_are_fetched(post_to_fetcher: Post, text: str) -> None:
    assert error_of(post_to_fetcher([PLAIN, text])) == ("invalid_request", 1)


def test_nothing_is_fetched_for_a_client_that_has_left(pool: DecodePool) -> None:
    state: dict[str, Any] = {}

    async def ask() -> None:
        asked, left = asyncio.Event(), asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()  # until the other end hangs up
            writer.close()
            left.set()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            hosts = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            settings = SETTINGS.model_copy(update={"fetch_hosts": hosts, "fetch_timeout_s": 60.0})
            body = json.dumps({"images": [f"http://{hosts}/"]}).encode()
            messages: list[Message] = [{"type": "http.request", "body": body}]

            async def receive() -> Message:
                if messages:
                    return messages.pop()
                await asked.wait()
                return {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                raise AssertionError("nobody is there to be answered")

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/embed",
                "query_string": b"",
                "headers": [(b"content-type", b"application/json")],
                "state": state,
            }
            fetcher = Fetcher(settings, is_allowed_address=lambda found: True)
            async with asyncio.timeout(10):
                await app_that_reads(pool, settings, fetcher)(scope, receive, send)
                await left.wait()

    asyncio.run(ask())
    assert state["outcome"] == "disconnected"


# Malformed JSON


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b'{"images": ["AA"]} x',
        b"[" * 50_000,
        b"[" * 50_000 + b"]" * 50_000,
        b'{"images": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"images": ["AA"], "layout": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"images": ["AA"], "x": ' + b'{"x":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"images": [' + b"1" * 5_000 + b"]}",
        b'{"images": ["AA"], "layout": ' + b"1" * 5_000 + b"}",
        b'{"images": ["AA"], "layout": 1e' + b"9" * 5_000 + b"}",
        b'{"images": [NaN]}',
        b'{"images": ["\\ud800"]}',
        b'{"images": [{"image": "AA", "id": "\\ud800"}]}',
        b'{"images": [{"image": "AA", "id": "a\\udfffb"}]}',
        b'{"images": [{"image": "AA", "id": "\xed\xa0\x80"}]}',
        b'{"images": ["\\ud800\\u0041"]}',
        b'{"images": ["A\x00A"]}',
    ],
)
def test_malformed_json_is_a_400(pool: DecodePool, body: bytes) -> None:
    async def ask() -> httpx.Response:
        app = app_that_reads(pool, SETTINGS.model_copy(update={"limit_body_bytes": 10**6}))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/embed", content=body, headers={"content-type": "application/json"})

    response = asyncio.run(ask())
    assert response.status_code == 400
    assert error_of(response)[0] == "invalid_request"


@pytest.mark.parametrize(
    ("body", "index", "told"),
    [
        ('{"images": []}', None, "images must be a list of at least one image"),
        ('{"images": ["AA", 7]}', 1, "images[1] must be a string, or an object with"),
        ('{"images": [{"id": "x"}]}', 0, "images[0] must be a string, or an object with"),
        ('{"images": [{"image": 7}]}', 0, "images[0].image must be a string"),
        ('{"images": [{"image": "AA", "id": 7}]}', 0, "images[0].id must be a string of at most 256 characters"),
        ('{"images": ["AA"], "layout": "hunter2"}', None, "layout must be rows or v4 or v41"),
        ('{"images": ["AA"], "dtype": "hunter2"}', None, "dtype must be bfloat16 or float16 or float32"),
        ('{"images": ["AA"], "encoding_format": 1}', None, "encoding_format must be base64 or float"),
        ('{"images": ["AA"], "hunter2": 1}', None, "the body must be an object of these: "),
        ("[]", None, "the body must be an object of these: "),
        ("{}", None, "the body must be an object of these: "),
    ],
)
def test_what_is_wrong_with_a_field_is_told_in_our_words(
    post_json: Post, body: str, index: int | None, told: str
) -> None:
    response = post_json(body)
    assert error_of(response) == ("invalid_request", index)
    assert response.json()["error"]["message"].startswith(told)
    assert "hunter2" not in response.text


@pytest.mark.parametrize("item", ["[],", "{},", "1,", '"",', "[[[[[[[["])
def test_a_body_of_tiny_things_is_refused_at_once(pool: DecodePool, item: str) -> None:
    settings = SETTINGS.model_copy(update={"limit_body_bytes": 2**25, "receive_timeout_s": 60.0})
    body = b'{"images":[' + item.encode() * (2**24 // len(item)) + b'""]}'

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app_that_reads(pool, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/embed", content=body, headers={"content-type": "application/json"})

    start = time.perf_counter()
    assert asyncio.run(ask()).status_code in (400, 413)
    assert time.perf_counter() - start < 5


# Malformed forms


def form(*parts: str, end: str = "--xx--\r\n") -> dict[str, Any]:
    body = "".join(f"--xx\r\n{part}\r\n" for part in parts) + end
    return {"content": body.encode(), "headers": {"content-type": "multipart/form-data; boundary=xx"}}


FILE = 'Content-Disposition: form-data; name="f"; filename="a"\r\n\r\nimage'


def test_a_form_by_hand_is_read(post: Post) -> None:
    assert images_of(post(**form(FILE, FILE))) == [b"image", b"image"]


def test_a_file_name_in_the_extended_syntax_makes_a_file(post: Post) -> None:
    part = "Content-Disposition: form-data; name=\"f\"; filename*=UTF-8''%C3%BC.png\r\n\r\nimage"
    assert images_of(post(**form(part))) == [b"image"]


def test_an_image_may_hold_anything_that_looks_like_a_boundary(post: Post) -> None:
    data = b"\r\n--x\r\n--xxx\r\n-- xx\r\n--xy--\r\r\n"
    response = post(
        content=b'--xx\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n' + data + b"\r\n--xx--\r\n",
        headers={"content-type": "multipart/form-data; boundary=xx"},
    )
    assert images_of(response) == [data]


@pytest.mark.parametrize(
    "request_",
    [
        form(),
        form(FILE, end=""),
        form(FILE, end="--xx"),
        form(FILE, end="--xx-"),
        form('Content-Disposition: form-data; name="f"\r\n\r\nno file'),
        form(FILE, 'Content-Disposition: form-data; name="layuot"\r\n\r\nv4'),
        form(FILE, 'Content-Disposition: form-data; name="layout"\r\n\r\nv5'),
        form(FILE, *['Content-Disposition: form-data; name="layout"\r\n\r\nv4'] * 2),
        form(FILE, 'Content-Disposition: form-data; name="layout"\r\n\r\n\ud800'.encode("utf-8", "replace").decode()),
        form("no header at all"),
        form("Bad Header\r\n\r\nx"),
        form("X: " + "y" * 9000 + "\r\n\r\nx"),
        {"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=xx"}},
        {"content": b"", "headers": {"content-type": "multipart/form-data; boundary=xx"}},
        {"content": b"--xx--\r\n", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"--xx--\r\n", "headers": {"content-type": "multipart/form-data; boundary="}},
        {"content": b"--xx--\r\n", "headers": {"content-type": "multipart/form-data; boundary=" + "x" * 999}},
    ],
)
def test_a_malformed_form_is_a_400(post: Post, request_: dict[str, Any]) -> None:
    response = post(**request_)
    assert response.status_code == 400, response.text
    assert error_of(response) == ("invalid_request", None)


# Limits


def test_too_many_images_are_refused_in_json_and_in_a_form(post: Post) -> None:
    assert error_of(post(json={"images": ["AA"] * 5})) == ("too_many_images", None)
    assert error_of(post(**form(*[FILE] * 5))) == ("too_many_images", None)
    assert error_of(post(**form(*[FILE] * 50))) == ("too_many_images", None)
    assert len(images_of(post(json={"images": ["AA"] * 4}))) == 4


def test_an_image_that_is_too_large_is_refused_with_its_index(post: Post) -> None:
    large = b"x" * 2_001
    assert error_of(post(json={"images": [PLAIN, base64.b64encode(large).decode()]})) == ("image_too_large", 1)
    assert error_of(post(files=[("f", ("a", IMAGE)), ("f", ("b", large))])) == ("image_too_large", 1)
    response = post(content=large, headers={"content-type": "image/png"})
    assert response.status_code == 413
    assert error_of(response) == ("image_too_large", 0)
    assert images_of(post(content=large[1:], headers={"content-type": "image/png"})) == [large[1:]]


async def in_pieces(num_bytes: int) -> AsyncIterator[bytes]:
    for start in range(0, num_bytes, 999):
        yield b"x" * min(999, num_bytes - start)


@pytest.mark.parametrize("claimed", [None, "5", "0", str(LIMIT_BODY), "junk", "-1", "٣"])
def test_the_body_is_counted_whatever_content_length_says(post: Post, claimed: str | None) -> None:
    headers = {"content-type": "image/png"} | ({"content-length": claimed.encode()} if claimed else {})
    response = post(content=in_pieces(LIMIT_BODY + 1), headers=headers)
    assert response.status_code == 413
    assert error_of(response) == ("body_too_large", None)
    assert error_of(post(content=in_pieces(LIMIT_BODY), headers=headers)) == ("image_too_large", 0)


@pytest.mark.parametrize("claimed", [LIMIT_BODY + 1, 10**18])
def test_a_content_length_over_the_limit_is_refused_before_the_upload(post: Post, claimed: int) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    response = post(content=never(), headers={"content-type": "image/png", "content-length": str(claimed)})
    assert error_of(response) == ("body_too_large", None)


def test_an_upload_has_a_deadline(post: Post) -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.05)

    response = post(content=drip(), headers={"content-type": "image/png"})
    assert response.status_code == 504
    assert error_of(response) == ("deadline_exceeded", None)


def test_a_client_that_leaves_is_no_error(pool: DecodePool) -> None:
    state: dict[str, Any] = {}
    headers = [(b"content-type", b"image/png")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/embed",
        "query_string": b"",
        "headers": headers,
        "state": state,
    }
    messages: list[Message] = [
        {"type": "http.request", "body": b"x", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError("nobody is there to be answered")

    asyncio.run(app_that_reads(pool)(scope, receive, send))
    assert state["outcome"] == "disconnected"


# Plans


def test_sizes_are_read(post_json: Post) -> None:
    assert post_json('{"sizes": [[1, 2], [1920, 1080]]}', "/plan").json() == [[1, 2], [1920, 1080]]


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"sizes": [[0, 1]]}',
        '{"sizes": [[1, 2, 3]]}',
        '{"sizes": [[1, %s]]}' % ("9" * 5_000),
        '{"sizes": [[true, 1]]}',
    ],
)
def test_sizes_that_are_none_are_refused(post_json: Post, body: str) -> None:
    response = post_json(body, "/plan")
    assert response.status_code == 400
    assert error_of(response) == ("invalid_request", None)


def test_a_plan_takes_json_only(post: Post) -> None:
    assert error_of(post("/plan", content=b"x", headers={"content-type": "image/png"}))[0] == "unsupported_media_type"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", ["gzip", "br", "Zstd", "identity, gzip", "a thing"])
def test_a_body_in_an_encoding_is_refused(post: Post, form: str, encoding: str) -> None:
    path, request = FORMS[form]
    headers = request.get("headers", {}) | {"content-encoding": encoding}
    response = post(path, **request | {"headers": headers})
    assert response.status_code == 415
    assert error_of(response) == ("unsupported_encoding", None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", ["", "identity", "Identity, identity"])
def test_a_body_that_says_it_is_in_none_is_read(post: Post, form: str, encoding: str) -> None:
    path, request = FORMS[form]
    headers = request.get("headers", {}) | {"content-encoding": encoding}
    assert post(path, **request | {"headers": headers}).status_code == 200


# Over a real socket


async def with_server(app: FastAPI, talk: Callable[[int], Any]) -> Any:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            return await talk(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


def test_an_endless_chunked_upload_is_cut_off(pool: DecodePool) -> None:
    async def talk(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(20):
            writer.write(b"400\r\n" + b"x" * 0x400 + b"\r\n")
        await writer.drain()
        answer = await reader.readline()
        writer.close()
        return answer

    assert b" 413 " in asyncio.run(with_server(app_that_reads(pool), talk))


def test_the_event_loop_keeps_ticking_while_large_bodies_are_parsed(pool: DecodePool) -> None:
    settings = SETTINGS.model_copy(
        update={"limit_body_bytes": 2**26, "limit_image_bytes": 2**25, "receive_timeout_s": 60.0}
    )
    body = b'{"images": ["' + b"QUJD" * (2**25 // 4) + b'"]}'

    async def pauses() -> list[float]:
        transport = httpx.ASGITransport(app_that_reads(pool, settings.model_copy(update={"limit_image_bytes": 1})))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": "application/json"}
            asking = asyncio.create_task(client.post("/embed", content=body, headers=headers))
            ticks = [time.perf_counter()]
            while not asking.done():
                await asyncio.sleep(0.001)
                ticks.append(time.perf_counter())
            assert error_of(asking.result()) == ("image_too_large", 0)
        return [after - before for before, after in itertools.pairwise(ticks)]

    assert max(asyncio.run(pauses())) < 0.5
