import asyncio
import logging
from typing import get_args

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from service.errors import ERRORS, ErrorCode, ServiceError, install_error_handling


def ask(app: FastAPI, method: str, path: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path)

    return asyncio.run(send())


def app_that_raises(error: Exception) -> FastAPI:
    app = FastAPI()
    install_error_handling(app)

    @app.get("/")
    async def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize("code", get_args(ErrorCode))
def test_every_code_has_its_status_and_type(code: ErrorCode) -> None:
    response = ask(app_that_raises(ServiceError(code, "what happened")), "GET", "/")
    assert response.status_code == ERRORS[code].status
    assert response.json() == {"error": {"code": code, "message": "what happened", "type": ERRORS[code].type}}


def test_the_index_and_the_time_to_retry_are_told() -> None:
    error = ServiceError("queue_full", "later", index=3, retry_after_s=7)
    response = ask(app_that_raises(error), "GET", "/")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["index"] == 3


def test_an_index_can_be_added_later() -> None:
    error = ServiceError("non_finite", "no").at(2)
    assert (error.code, error.message, error.index) == ("non_finite", "no", 2)


def test_an_error_about_the_service_names_no_image() -> None:
    error = ServiceError("queue_full", "later", retry_after_s=7).at(2)
    assert (error.code, error.message, error.index, error.retry_after_s) == ("queue_full", "later", None, 7)


def test_a_path_that_is_not_there_is_not_found_and_not_echoed() -> None:
    response = ask(app_that_raises(ValueError()), "GET", "/secret-path")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert "secret-path" not in response.text


def test_a_wrong_method_is_told_which_are_right() -> None:
    response = ask(app_that_raises(ValueError()), "POST", "/")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert response.headers["allow"] == "GET"


def test_a_parameter_of_a_wrong_type_is_invalid_and_not_echoed() -> None:
    app = FastAPI()
    install_error_handling(app)

    @app.get("/{number}")
    async def take(number: int) -> int:
        return number

    response = ask(app, "GET", "/not-a-number")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"
    assert "not-a-number" not in response.text


def test_an_unexpected_error_is_logged_with_the_request_id_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    install_error_handling(app)

    @app.get("/")
    async def fail(request: Request) -> None:
        request.state.request_id = "r-17"
        raise RuntimeError("the address is 10.0.0.1")

    with caplog.at_level(logging.ERROR):
        response = ask(app, "GET", "/")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "10.0.0.1" not in response.text
    (record,) = caplog.records
    assert "r-17" in record.getMessage()
    assert "10.0.0.1" in caplog.text


def test_an_error_after_the_status_breaks_the_connection() -> None:
    app = FastAPI()
    install_error_handling(app)

    @app.get("/")
    async def fail() -> Response:
        async def body():  # type: ignore[no-untyped-def]
            yield b"half"
            raise RuntimeError("and no more")

        return StreamingResponse(body())

    with pytest.raises(RuntimeError):
        ask(app, "GET", "/")


def test_outcomes_are_left_for_whoever_counts() -> None:
    def outcome(error: Exception) -> str:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "state": {}}

        async def receive() -> Message:
            return {"type": "http.request"}

        async def send(message: Message) -> None:
            pass

        asyncio.run(app_that_raises(error)(scope, receive, send))
        return scope["state"]["outcome"]  # type: ignore[index,no-any-return]

    assert outcome(ServiceError("draining", "bye")) == "draining"
    assert outcome(RuntimeError("bug")) == "internal"
    assert outcome(ClientDisconnect()) == "disconnected"
