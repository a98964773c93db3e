import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from pydantic import SecretStr
from starlette.types import Message

import service.access
from service.access import OPEN_PATHS, RequireKey, load_keys
from service.errors import install_error_handling
from service.metrics import Metrics
from service.request_log import RequestLog
from service.settings import Settings

KEYS = ("first-key-aaaa", "second-key-bbbb", "third+/key==")


def settings_with(keys: str | None = None, file: Path | None = None) -> Settings:
    return Settings(api_keys=None if keys is None else SecretStr(keys), api_keys_file=file)


def app_with(*keys: str) -> FastAPI:
    app = FastAPI()
    install_error_handling(app)
    app.add_middleware(RequireKey, keys=load_keys(settings_with(",".join(keys))))
    app.add_middleware(RequestLog, metrics=Metrics())

    @app.post("/embed")
    @app.post("/plan")
    async def work(request: Request) -> int:
        return len(await request.body())

    @app.get("/health")
    @app.get("/health/live")
    @app.get("/health/ready")
    @app.get("/metrics")
    @app.get("/info")
    async def tell() -> str:
        return "open"

    return app


def ask(app: FastAPI, method: str = "POST", path: str = "/embed", **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "header",
    [
        ("Authorization", "Bearer {}"),
        ("authorization", "bearer {}"),
        ("AUTHORIZATION", "BEARER   {}"),
        ("x-api-key", "{}"),
        ("X-API-Key", "{}"),
    ],
)
def test_every_key_opens_in_either_header(key: str, header: tuple[str, str]) -> None:
    name, value = header
    assert ask(app_with(*KEYS), headers={name: value.format(key)}, content=b"abc").json() == 3


WRONG: list[dict[str, str]] = [
    {},
    {"x-api-key": ""},
    {"x-api-key": "first-key-aaaA"},
    {"x-api-key": "first-key-aaa"},
    {"x-api-key": "first-key-aaaaa"},
    {"x-api-key": "first-key-aaaa,second-key-bbbb"},
    {"x-api-key": "Bearer first-key-aaaa"},
    {"x-api-key": "\xfcmlaut"},
    {"x-api-key": "x" * 10_000},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "first-key-aaaa"},
    {"authorization": "Basic first-key-aaaa"},
    {"authorization": "Bearer\tfirst-key-aaaa"},
    {"authorization": "Bearer first-key-aaaa second-key-bbbb"},
    {"api-key": "first-key-aaaa"},
    {"cookie": "x-api-key=first-key-aaaa"},
]


@pytest.mark.parametrize("path", ["/embed", "/plan", "/embed/", "//embed", "/nothing", "/", "/health/", "/HEALTH"])
@pytest.mark.parametrize("headers", WRONG[:3])
def test_whoever_shows_no_key_learns_nothing(path: str, headers: dict[str, str]) -> None:
    response = ask(app_with(*KEYS), path=path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert response.json()["error"]["code"] == "unauthorized"
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("headers", WRONG)
def test_what_is_no_key_opens_nothing_and_is_not_echoed(headers: dict[str, str]) -> None:
    response = ask(app_with(*KEYS), headers={name: value.encode("latin-1") for name, value in headers.items()})
    assert response.status_code == 401
    assert "key-aaa" not in response.text + str(response.headers)


def test_a_key_in_one_header_is_enough_whatever_the_other_says() -> None:
    headers = {"authorization": "Basic dXNlcjpwYXNz", "x-api-key": KEYS[0]}
    assert ask(app_with(*KEYS), headers=headers).status_code == 200
    headers = {"authorization": f"Bearer {KEYS[0]}", "x-api-key": "wrong"}
    assert ask(app_with(*KEYS), headers=headers).status_code == 200


def test_a_key_in_the_query_opens_nothing() -> None:
    assert ask(app_with(*KEYS), path=f"/embed?x-api-key={KEYS[0]}").status_code == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_and_documentation_are_open(path: str) -> None:
    assert ask(app_with(*KEYS), "GET", path).status_code == 200


def test_a_middleware_without_keys_lets_nobody_in() -> None:
    app = FastAPI()
    app.add_middleware(RequireKey, keys=())
    assert ask(app, headers={"x-api-key": ""}).status_code == 401


def test_the_body_is_not_read_before_the_key() -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    assert ask(app_with(*KEYS), content=never()).status_code == 401


def test_a_client_that_waits_to_be_asked_for_its_body_is_refused_over_a_real_socket() -> None:
    async def talk() -> bytes:
        server = uvicorn.Server(uvicorn.Config(app_with(*KEYS), log_config=None, lifespan="off"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n")
            answer = await reader.readline()
            writer.close()
            server.should_exit = True
            await serving
        return answer

    assert b" 401 " in asyncio.run(talk())


def test_the_outcome_is_counted() -> None:
    state: dict[str, Any] = {}
    scope = {"type": "http", "method": "POST", "path": "/embed", "headers": [], "state": state}

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        pass

    asyncio.run(app_with(*KEYS)(scope, receive, send))
    assert state["outcome"] == "unauthorized"


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    app = app_with(*KEYS)
    monkeypatch.setattr(service.access, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    for key in (KEYS[0], KEYS[-1], "wrong"):
        compared.clear()
        ask(app, headers={"x-api-key": key})
        assert len(compared) == len(KEYS)
        assert {len(digest) for pair in compared for digest in pair} == {32}


def test_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (*KEYS, "wrong-key"):
            ask(app_with(*KEYS), headers={"x-api-key": key})
            ask(app_with(*KEYS), headers={"authorization": f"Bearer {key}"})
    assert caplog.records
    assert not [key for key in (*KEYS, "wrong-key") if key in caplog.text]


# Where keys come from


def test_no_place_for_keys_means_no_keys() -> None:
    assert load_keys(settings_with()) == ()


def test_keys_come_from_both_places_each_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfcc\r\n# a comment\r\n\r\n   # another\n\tbb \ndd")
    keys = load_keys(settings_with("aa, bb ,", file))
    assert len(keys) == len(set(keys)) == 4
    assert set(keys) == set(load_keys(settings_with("aa,bb,cc,dd")))


def test_keys_are_kept_as_digests() -> None:
    assert not [key for key in load_keys(settings_with("hunter22")) if b"hunter" in key]


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATCHGRID_API_KEYS", "aa,bb")
    assert load_keys(Settings()) == load_keys(settings_with("aa,bb"))


@pytest.mark.parametrize("keys", ["", ",", " , "])
def test_a_list_without_a_key_ends_the_start(keys: str) -> None:
    with pytest.raises(ValueError, match=r"^--api-keys holds no key$"):
        load_keys(settings_with(keys))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# only a comment\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_key_ends_the_start(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"^--api-keys-file holds no key$"):
        load_keys(settings_with("aa", file))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "cannot be read: No such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "is not text"),
    ],
)
def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path, make: Callable[[Path], object], told: str) -> None:
    file = tmp_path / "keys"
    make(file)
    with pytest.raises(ValueError, match=told) as caught:
        load_keys(settings_with(None, file))
    assert str(caught.value).startswith("--api-keys-file: ")


@pytest.mark.parametrize("line", ["hunter2 # inline", "hunter2 hunter3", "hünter2", "hunter2\x0bhunter3", "hunter2,x"])
def test_what_cannot_be_a_key_ends_the_start_and_is_not_told(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good\n{line}\n")
    with pytest.raises(ValueError, match=r"^--api-keys-file: line 2 is no key: ") as caught:
        load_keys(settings_with(None, file))
    assert "nter" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^--api-keys: entry 2 is no key: "):
        load_keys(settings_with("good,a b"))
