"""A small client of /embed for the command line, on the standard library's HTTP.

Invariant: the output file appears only once it is whole; what went wrong is told in the server's words.
"""

import http.client
import shutil
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from service.schemas import MULTIPART, SAFETENSORS


class ClientError(Exception):
    """The server could not be reached, or would not."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One image's rows in the output file."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"tensor {self.name!r}, {' x '.join(map(str, self.shape))}, {self.dtype}"


class _Error(msgspec.Struct):
    code: str
    message: str
    index: int | None = None


class _Refusal(msgspec.Struct):
    error: _Error


def embed_files(
    files: Sequence[Path], output: Path, *, url: str, layout: str, dtype: str, timeout_s: float, api_key: str | None
) -> list[SavedTensor]:
    """Embed images at a server and save the answer, a safetensors file with tensors "0", "1", ... in the files' order.

    Raises:
        OSError: a file cannot be read or written.
        ClientError: there is no server, or it refused; the message says why, and which file it is about.
    """
    if not _is_http(url):
        raise ClientError(f"{url} is not an http:// or https:// URL")
    boundary = uuid.uuid4().hex
    authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(  # noqa: S310
        f"{url.rstrip('/')}/embed",
        data=_form(files, {"layout": layout, "dtype": dtype}, boundary),
        headers={"Content-Type": f"{MULTIPART}; boundary={boundary}", "Accept": SAFETENSORS, **authorization},
    )
    partial = output.with_name(f".{output.name}.{boundary}")
    try:
        _download(request, files, partial, timeout_s)
        saved = _read_tensors(partial)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return saved


def _is_http(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _form(files: Sequence[Path], fields: Mapping[str, str], boundary: str) -> bytes:
    pieces = []
    for name, value in fields.items():
        pieces.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode())
    for index, file in enumerate(files):
        head = f'Content-Disposition: form-data; name="files"; filename="{index}"'
        pieces += [f"--{boundary}\r\n{head}\r\n\r\n".encode(), file.read_bytes(), b"\r\n"]
    return b"".join([*pieces, f"--{boundary}--\r\n".encode()])


def _download(request: urllib.request.Request, files: Sequence[Path], target: Path, timeout_s: float) -> None:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response, target.open("wb") as file:  # noqa: S310
            if response.headers.get_content_type() != SAFETENSORS:
                raise ClientError(f"{request.full_url} answered with {response.headers.get_content_type()}")
            shutil.copyfileobj(response, file)
    except urllib.error.HTTPError as error:
        with error:
            raise ClientError(_refusal(error, files)) from None
    except urllib.error.URLError as error:
        raise ClientError(f"{request.full_url}: {error.reason}") from None
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise ClientError(f"{request.full_url}: {error or type(error).__name__}") from None


def _refusal(error: urllib.error.HTTPError, files: Sequence[Path]) -> str:
    """The server's error body as a line of text."""
    try:
        body = msgspec.json.decode(error.read(), type=_Refusal).error
    except (msgspec.DecodeError, http.client.HTTPException, OSError):
        return f"{error.url} answered {error.code} {error.reason}"
    text = f"{body.code}: {body.message}"
    if body.index is not None and body.index < len(files):
        text += f" ({files[body.index]})"
    if retry_after_s := error.headers.get("Retry-After"):
        text += f"; try again in {retry_after_s} s"
    return text


def _read_tensors(file: Path) -> list[SavedTensor]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            names = sorted(tensors.keys(), key=int)
            slices = [tensors.get_slice(name) for name in names]
            return [
                SavedTensor(name, tuple(each.get_shape()), each.get_dtype())
                for name, each in zip(names, slices, strict=True)
            ]
    except (SafetensorError, ValueError) as error:
        raise ClientError(f"the answer is not whole: {error}") from None
