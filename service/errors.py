"""Every error a client can get, in one table, and how each becomes a response.

Invariant: an error body holds our own words only. Neither input nor a library's or an exception's text is echoed; those
stay in the log, under the request's id.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ErrorCode = Literal[
    "invalid_request",
    "layout_unavailable",
    "fetch_disabled",
    "fetch_forbidden",
    "unauthorized",
    "not_found",
    "method_not_allowed",
    "body_too_large",
    "too_many_images",
    "image_too_large",
    "unsupported_media_type",
    "unsupported_encoding",
    "unsupported_format",
    "invalid_image",
    "degenerate_image",
    "decode_timeout",
    "dtype_overflow",
    "fetch_failed",
    "queue_full",
    "overloaded",
    "starting",
    "restarting",
    "draining",
    "deadline_exceeded",
    "non_finite",
    "image_crashed_encoder",
    "internal",
]
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "overloaded_error",
    "timeout_error",
    "server_error",
]
Outcome = ErrorCode | Literal["ok", "disconnected"]


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """What a client's program branches on: the HTTP status and the family."""

    status: int
    type: ErrorType


ERRORS: Mapping[ErrorCode, ErrorKind] = {
    "invalid_request": ErrorKind(400, "invalid_request_error"),
    "layout_unavailable": ErrorKind(400, "invalid_request_error"),
    "fetch_disabled": ErrorKind(400, "invalid_request_error"),
    "fetch_forbidden": ErrorKind(400, "invalid_request_error"),
    "unauthorized": ErrorKind(401, "authentication_error"),
    "not_found": ErrorKind(404, "invalid_request_error"),
    "method_not_allowed": ErrorKind(405, "invalid_request_error"),
    "body_too_large": ErrorKind(413, "invalid_request_error"),
    "too_many_images": ErrorKind(413, "invalid_request_error"),
    "image_too_large": ErrorKind(413, "invalid_request_error"),
    "unsupported_media_type": ErrorKind(415, "invalid_request_error"),
    "unsupported_encoding": ErrorKind(415, "invalid_request_error"),
    "unsupported_format": ErrorKind(415, "invalid_request_error"),
    "invalid_image": ErrorKind(422, "invalid_request_error"),
    "degenerate_image": ErrorKind(422, "invalid_request_error"),
    "decode_timeout": ErrorKind(422, "invalid_request_error"),
    "dtype_overflow": ErrorKind(422, "invalid_request_error"),
    "fetch_failed": ErrorKind(422, "invalid_request_error"),
    "queue_full": ErrorKind(429, "rate_limit_error"),
    "overloaded": ErrorKind(429, "rate_limit_error"),
    "starting": ErrorKind(503, "overloaded_error"),
    "restarting": ErrorKind(503, "overloaded_error"),
    "draining": ErrorKind(503, "overloaded_error"),
    "deadline_exceeded": ErrorKind(504, "timeout_error"),
    "non_finite": ErrorKind(500, "server_error"),
    "image_crashed_encoder": ErrorKind(500, "server_error"),
    "internal": ErrorKind(500, "server_error"),
}

_log = logging.getLogger(__name__)


class ServiceError(Exception):
    """An answer other than 200.

    Args:
        code: a row of ERRORS.
        message: what went wrong and what to do, in our own words; it is sent to the client.
        index: the image it is about, counted from 0 in the order of the request.
        retry_after_s: when to try again, whole seconds; sent as Retry-After.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, index: int | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(code, message)
        self.code: ErrorCode = code
        self.message = message
        self.index = index
        self.retry_after_s = retry_after_s

    def at(self, index: int) -> "ServiceError":
        """The same error, about the image with this index if it is about an image at all."""
        is_about_all = ERRORS[self.code].type in ("overloaded_error", "rate_limit_error")
        return ServiceError(
            self.code, self.message, index=None if is_about_all else index, retry_after_s=self.retry_after_s
        )


def error_response(error: ServiceError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The error as HTTP: `{"error": {"code", "message", "type", "index"?}}` and, where it has one, Retry-After."""
    kind = ERRORS[error.code]
    fields: dict[str, str | int] = {"code": error.code, "message": error.message, "type": kind.type}
    if error.index is not None:
        fields["index"] = error.index
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["Retry-After"] = str(error.retry_after_s)
    return JSONResponse({"error": fields}, kind.status, all_headers)


def install_error_handling(app: FastAPI) -> None:
    """Make every failure of the app one of ERRORS. Add middleware that wants to see the answer after this call.

    Leaves the outcome of a failed request in `request.state.outcome`, for whoever counts requests, and reads
    `request.state.request_id`, if it is set, for the log.
    """
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(ErrorBoundary)


class ErrorBoundary:
    """ASGI middleware, the process border: what no handler knew is logged here and answered with a bare 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        request = Request(scope)
        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            request.state.outcome = "disconnected"
        except Exception:
            _log.exception("request %s failed", getattr(request.state, "request_id", "-"))
            request.state.outcome = "internal"
            if started:
                raise  # the status is gone out already: only a broken connection can say that the rest is missing
            response = error_response(ServiceError("internal", "something went wrong here; it has been logged"))
            await response(scope, receive, send)


def _on_service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    request.state.outcome = error.code
    if error.__cause__ is not None:
        _log.debug("request %s: %s", getattr(request.state, "request_id", "-"), error.code, exc_info=error)
    return error_response(error)


def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """A route's own parameters: bodies are read, and their faults told, by service.intake."""
    return _on_service_error(request, ServiceError("invalid_request", "the request could not be read; /docs says how"))


def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """The framework's own refusals: a path or method that is not there, a body it could not parse."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        ours = ServiceError("not_found", "there is nothing at this path; /docs lists what there is")
    elif error.status_code == 405:
        ours = ServiceError("method_not_allowed", "this path does not take this method")
    elif error.status_code < 500:
        ours = ServiceError("invalid_request", "the request could not be read")
    else:
        _log.error(
            "request %s: the framework answered %d", getattr(request.state, "request_id", "-"), error.status_code
        )
        ours = ServiceError("internal", "something went wrong here; it has been logged")
    request.state.outcome = ours.code
    return error_response(ours, error.headers)
