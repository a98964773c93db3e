"""One client of a load: it asks for rows over one connection, checks how many come back, and forgets them.

Invariant: what goes wrong with a request is a code; what is wrong with the address is a ClientError.
"""

import http.client
import struct
import urllib.parse
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from encoder.geometry import Grid
from service.bench_images import Picture, Size
from service.client import ClientError
from service.schemas import JSON, MULTIPART, SAFETENSORS

_MAX_HEADER_BYTES = 2**20


class PlannedImage(msgspec.Struct, frozen=True):
    """What /plan says of an image of one size."""

    llm_grid: Grid
    patches: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: its bytes, and the images that the server says it knew."""

    num_bytes: int
    cached: int


class _Planned(msgspec.Struct):
    data: tuple[PlannedImage, ...]


class _ErrorDetail(msgspec.Struct):
    code: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


class _Tensor(msgspec.Struct):
    shape: tuple[int, int]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct):
    patchgrid: str


class _Usage(msgspec.Struct):
    cached: int


class _Summary(msgspec.Struct):
    usage: _Usage


class RequestError(Exception):
    """A request without its rows; the text is the code that it counts under."""


class BenchClient:
    """One client's connection, made anew after an error. Answers are read into one buffer again and again."""

    def __init__(self, url: str, *, layout: str, dtype: str, timeout_s: float, api_key: str | None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError:
            raise ClientError(f"{url} is not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{url} is not an http:// or https:// URL")
        self._url = url
        self._path = parts.path.rstrip("/")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._http = kind(parts.hostname, port, timeout=timeout_s)
        self._options = {"layout": layout, "dtype": dtype}
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._buffer = memoryview(bytearray(2**16))

    def __enter__(self) -> "BenchClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def plan(self, size: Size) -> PlannedImage:
        """What an image of this size comes to, as the server says."""
        try:
            self._send("/plan", msgspec.json.encode({"sizes": [size]}), {"Content-Type": JSON})
            response = self._http.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{self._url}: {error or type(error).__name__}") from None
        if response.status != 200:
            raise ClientError(f"{self._url}/plan answered {response.status} {_code(body, response.status)}")
        try:
            return msgspec.json.decode(body, type=_Planned).data[0]
        except (msgspec.DecodeError, IndexError):
            raise ClientError(f"{self._url}/plan does not answer as patchgrid does") from None

    def embed(self, pictures: Sequence[Picture], rows: Sequence[int]) -> Answer:
        """Embed images and check how many rows come back."""
        try:
            self._post(pictures)
            response = self._http.getresponse()
            if response.status != 200:
                raise RequestError(_code(response.read(), response.status))
            if response.getheader("Content-Type") != SAFETENSORS:
                raise RequestError("wrong_answer")
            return self._read(response, rows)
        except TimeoutError:
            self._http.close()
            raise RequestError("timeout") from None
        except (OSError, http.client.HTTPException):
            self._http.close()
            raise RequestError("connection") from None
        except RequestError:
            self._http.close()  # whatever of the answer was not read goes with it
            raise

    def _post(self, pictures: Sequence[Picture]) -> None:
        accept = {"Accept": SAFETENSORS}
        if len(pictures) == 1:
            query = urllib.parse.urlencode(self._options)
            self._send(f"/embed?{query}", pictures[0].data, accept | {"Content-Type": pictures[0].media_type})
            return
        boundary = uuid.uuid4().hex
        body = _form(pictures, self._options, boundary)
        self._send("/embed", body, accept | {"Content-Type": f"{MULTIPART}; boundary={boundary}"})

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        self._http.request("POST", self._path + path, body, self._headers | headers)

    def _read(self, response: http.client.HTTPResponse, rows: Sequence[int]) -> Answer:
        head = response.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _MAX_HEADER_BYTES
        if length >= _MAX_HEADER_BYTES:
            raise RequestError("wrong_answer")
        header = response.read(length)
        num_bytes = 0
        while received := response.readinto(self._buffer):
            num_bytes += received
            if response.length and response.length > len(self._buffer):
                self._buffer = memoryview(bytearray(min(response.length, 2**22)))
        return Answer(8 + length + num_bytes, _check(header, rows, num_bytes))


def _check(header: bytes, rows: Sequence[int], num_bytes: int) -> int:
    """Check that a safetensors header has these tensors, "0", "1", ..., in so many bytes. Returns how many were cached.

    Raises:
        RequestError: it has others.
    """
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        tensors = [msgspec.json.decode(fields[str(index)], type=_Tensor) for index in range(len(rows))]
        metadata = msgspec.json.decode(fields["__metadata__"], type=_Metadata)
        summary = msgspec.json.decode(metadata.patchgrid, type=_Summary)
    except (msgspec.DecodeError, KeyError):
        raise RequestError("wrong_answer") from None
    shapes_match = [tensor.shape[0] for tensor in tensors] == list(rows)
    if not (shapes_match and len(fields) == len(rows) + 1 and tensors[-1].data_offsets[1] == num_bytes):
        raise RequestError("wrong_answer")
    return summary.usage.cached


def _code(body: bytes, status: int) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code
    except msgspec.DecodeError:
        return f"status_{status}"


def _form(pictures: Sequence[Picture], options: dict[str, str], boundary: str) -> bytes:
    pieces = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in options.items()
    ]
    for index, picture in enumerate(pictures):
        head = f'Content-Disposition: form-data; name="files"; filename="{index}"\r\nContent-Type: {picture.media_type}'
        pieces += [f"--{boundary}\r\n{head}\r\n\r\n".encode(), picture.data, b"\r\n"]
    return b"".join([*pieces, f"--{boundary}--\r\n".encode()])
