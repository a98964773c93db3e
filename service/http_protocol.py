"""uvicorn's HTTP/1.1 over httptools, with an end to what it leaves endless: headers, and waiting for the other side.

Invariant: what a connection makes the server hold is bounded in bytes before a body begins and in time whenever nothing
moves, so that neither a flood of headers nor ten thousand idle or dribbling connections cost anyone else the service.
How long a body or an answer may take on the whole is for the application to say.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LIMIT_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers together; and of what may stand between two pieces of a body."""


def bounded_http(timeout_s: float) -> type["BoundedHttp"]:
    """The protocol class for uvicorn.Config's `http`, its patience this long."""
    return type("HttpProtocol", (BoundedHttp,), {"timeout_s": timeout_s})


class BoundedHttp(HttpToolsProtocol):
    """One connection.

    timeout_s: the longest that a request's head may take to arrive, that a client may send on after it has been
    answered, and that it may leave a full buffer of an answer where it is.
    """

    timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bytes_without_progress = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first request, but not for ever."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_awaiting_head()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, or answer 400 and hang up."""
        self._unset_keepalive_if_required()
        self._bytes_without_progress += len(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        try:
            if self._bytes_without_progress > LIMIT_HEAD_BYTES + len(data):
                raise httptools.HttpParserError
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            self._stop_awaiting_head()
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_headers_complete(self) -> None:
        """Begin the request, unless it has to be parsed anew without its offer of another protocol."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > LIMIT_HEAD_BYTES:
            raise httptools.HttpParserError
        if not self.parser.should_upgrade():
            self._bytes_without_progress = 0
            self._stop_awaiting_head()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._bytes_without_progress = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered; it has until the timeout to read what is buffered."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser. Returns what it still has to be fed: nothing, but after an offer of another protocol."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._head_without_offer() + data[offer.args[0] :]
        return b""

    def _head_without_offer(self) -> bytes:
        """The head just parsed, as a client would write it that offers nothing, for a parser that has seen nothing.

        A server may ignore an offer (RFC 9110, 7.8), but httptools then gives the body up for lost.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(option for option in value.split(b",") if option.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%s: %s" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        return b"\r\n".join([*lines, b"", b""])

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_s, self.timeout_keep_alive_handler)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
