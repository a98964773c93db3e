"""One HTTP response, as its bytes arrive: status, where it redirects to, and a body that is counted.

Invariant: memory is bounded by what the body may be, whatever the host says of its length and however it frames it.
"""

import io
from types import TracebackType
from typing import Self

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_LIMIT_FRAMING_BYTES = 2**16


class ResponseError(Exception):
    """The response cannot be used. The message is ours, and fit for a client."""


class BodyTooLargeError(Exception):
    """The body is, or claims to be, larger than it may be."""


class Response:
    """Fed by whoever reads the connection, for as long as it wants to know more.

    A context manager; leaving it frees the body. The `on_` methods are for the parser.

    Args:
        limit_bytes: the largest body.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.status = 0
        self.location: bytes | None = None
        self.head_is_whole = False
        self.is_whole = False
        self.num_body_bytes = 0
        self._limit_bytes = limit_bytes
        self._body = io.BytesIO()
        self._claimed_bytes: int | None = None
        self._transfer_coding = b""
        self._content_coding = b""
        self._num_framing_bytes = 0
        self._parser = HttpResponseParser(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._body.close()  # the parser and this hold each other, and may stay for a while

    @property
    def body(self) -> bytes:
        """The body; call it when is_whole."""
        return self._body.getvalue()

    def feed(self, data: bytes) -> None:
        """Take what the connection gave; nothing means that it ended.

        Raises:
            ResponseError: it is no HTTP, ends too early, is coded otherwise than in chunks, or goes on without a body.
            BodyTooLargeError: as it says.
        """
        num_before = self.num_body_bytes
        if data:
            self._parse(data)
        elif self.head_is_whole and self._claimed_bytes is None and not self._transfer_coding:
            self.is_whole = True
        if self.head_is_whole and 200 <= self.status < 300:
            self._check_codings()
            if max(self.num_body_bytes, self._claimed_bytes or 0) > self._limit_bytes:
                raise BodyTooLargeError
        if not (data or self.is_whole):
            raise ResponseError("the host ended its answer too early")
        # Heads, chunk sizes and trailers: the parser keeps them, and nothing else bounds them.
        self._num_framing_bytes = 0 if self.num_body_bytes > num_before else self._num_framing_bytes + len(data)
        if self._num_framing_bytes > _LIMIT_FRAMING_BYTES:
            raise ResponseError("the host answers at length, but not with an image")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header that matters; a trailer never does."""
        if self.head_is_whole:
            return
        match name.lower():
            case b"location":
                self.location = value
            case b"content-length":
                self._claimed_bytes = int(value)  # checked by the parser
            case b"transfer-encoding":
                self._transfer_coding += value.lower()
            case b"content-encoding":
                self._content_coding += value.lower()

    def on_headers_complete(self) -> None:
        """Begin the body, unless the head is that of an interim response."""
        self.status = self._parser.get_status_code()
        self.head_is_whole = self.status >= 200

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body."""
        self.num_body_bytes += len(piece)
        if self.num_body_bytes <= self._limit_bytes:
            self._body.write(piece)

    def on_message_complete(self) -> None:
        """End the response or, if it was an interim one, wait for the next."""
        if self.head_is_whole:
            self.is_whole = True
        else:
            self.location, self._claimed_bytes = None, None
            self._transfer_coding = self._content_coding = b""

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            if not self.is_whole:  # what follows a whole response is nothing to us
                raise ResponseError("the host's answer could not be read") from None

    def _check_codings(self) -> None:
        if self._transfer_coding not in (b"", b"chunked") or self._content_coding not in (b"", b"identity"):
            raise ResponseError("the host compresses its answer, although it was asked not to")
