"""ASGI middleware around everything: a request's id, its line in the log and its place in the counters.

Every answer carries `x-request-id`: the caller's if it is a plain token, else a new one. Of all that a client sends,
only the method and the route it matched are logged.
"""

import contextlib
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics import Metrics

log = logging.getLogger("patchgrid.requests")

REQUEST_ID_HEADER = "x-request-id"

_TOKEN = re.compile(r"[A-Za-z0-9._-]{1,128}")
_UNCOUNTED = ("/health", "/metrics")  # probes would drown the requests


class RequestLog:
    """Outermost middleware. Handlers read `request.state.request_id` and leave `request.state.outcome`.

    What they enter into `request.state.until_answered` is left when the answer's last byte is on its way.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        claimed = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = claimed if _TOKEN.fullmatch(claimed) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        started = time.perf_counter()
        status = 0

        async def add_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            with contextlib.ExitStack() as until_answered:
                state["until_answered"] = until_answered
                await self._app(scope, receive, add_id)
        finally:
            if not scope["path"].startswith(_UNCOUNTED):
                outcome = state.get("outcome", "ok" if status else "disconnected")
                self._metrics.requests_total.labels(outcome).inc()
                route = getattr(scope.get("route"), "path", "-")
                elapsed_ms = (time.perf_counter() - started) * 1e3
                log.info("%s %s %s %d %s %.0f ms", request_id, scope["method"], route, status, outcome, elapsed_ms)
