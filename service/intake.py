"""A request's body to the images in it: JSON, multipart or one raw image; in JSON, perhaps by URL.

Invariant: bytes are counted as they arrive, whatever Content-Length says; nothing is parsed on the event loop; and what
cannot be read is refused with the image's index, in words that hold nothing of the input. Junk is never skipped.
"""

import asyncio
import binascii
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from distributed.messages import RowDtype
from encoder.geometry import MAX_SIDE
from encoder.layout import LAYOUTS, Layout
from service.decode import DecodePool
from service.errors import ServiceError
from service.fetch import Fetcher
from service.multipart import split_form
from service.patience import while_awaited
from service.schemas import (
    JSON,
    MAX_CLIENT_ID_CHARS,
    MAX_PLAN_SIZES,
    MULTIPART,
    OCTETS,
    EmbedOptions,
    EmbedRequest,
    EncodingFormat,
    PlanRequest,
)
from service.settings import Settings

S = TypeVar("S", bound=msgspec.Struct)

_LIMIT_PLAN_BYTES = 2**20
_SLICE_CHARS = 2**18

_OPTIONS = EmbedOptions.__struct_fields__
_SPACES = " \t\r\n\f"
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_WEB_URL = re.compile("https?://", re.IGNORECASE)
_ANY_URL = re.compile("[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_ERROR_PATH = re.compile(r" - at `\$\.(\w+)(?:\[(\d+)\])?(?:\[\d+\])?(?:\.(\w+))?`$")

# What a field must be, for those who sent something else.
_EXPECTED: Mapping[str, str] = {
    "images": "a list of at least one image",
    "images[]": "a string, or an object with a string `image` and perhaps an `id`",
    "image": "a string",
    "id": f"a string of at most {MAX_CLIENT_ID_CHARS} characters",
    "layout": " or ".join(LAYOUTS),
    "dtype": " or ".join(get_args(RowDtype)),
    "encoding_format": " or ".join(get_args(EncodingFormat)),
    "sizes": f"a list of 1 to {MAX_PLAN_SIZES} pairs [width, height]",
    "sizes[]": f"a pair [width, height] of integers from 1 to {MAX_SIDE}",
}


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """What a client wants: encoded images in order, a client id or None for each, and what for."""

    images: tuple[bytes | memoryview, ...]
    client_ids: tuple[str | None, ...]
    layout: Layout
    dtype: RowDtype
    encoding_format: EncodingFormat


async def read_embed(
    request: Request,
    settings: Settings,
    pool: DecodePool,
    fetcher: Fetcher | None = None,
    claim: Callable[[int], None] = lambda num_bytes: None,
) -> EmbedJob:
    """Read the body of POST /embed, of whichever kind its Content-Type names.

    Args:
        fetcher: fetches images that JSON names by URL; without it they are refused.
        claim: told of bytes that were fetched, as they arrive; it may raise to refuse them.

    Raises:
        ServiceError: the body or an image is too large, too many or malformed, or the upload takes too long; or an
            image is not to be had by its URL.
        ClientDisconnect: the client left before the end.
    """
    _check_encoding(request)
    kind, parameters = parse_options_header(request.headers.get("content-type"))
    media_type = kind.decode("latin-1")
    is_raw = media_type.startswith("image/") or media_type == OCTETS
    if not (is_raw or media_type in (JSON, MULTIPART)):
        raise ServiceError(
            "unsupported_media_type", f"the Content-Type must be {JSON}, {MULTIPART}, image/* or {OCTETS}"
        )
    query = request.query_params.multi_items()
    if not is_raw and any(name in _OPTIONS for name, _ in query):
        raise ServiceError("invalid_request", "options go into the body; the query is for a raw image as the body")

    body = await _read_body(request, settings.limit_body_bytes, settings.receive_timeout_s)
    if is_raw:
        return _job([body], _options(query), settings)
    if media_type == MULTIPART:
        return await pool.run(_parse_form, body, parameters.get(b"boundary", b""), settings)
    images, client_ids, options = await pool.run(_parse_json, body, settings, fetcher is not None)
    del body  # it may be large, and to fetch takes its time
    return _job(await _fetch(images, request, fetcher, claim), options, settings, client_ids)


async def read_plan(request: Request, settings: Settings, pool: DecodePool) -> PlanRequest:
    """Read the body of POST /plan. Raises as read_embed does."""
    _check_encoding(request)
    if parse_options_header(request.headers.get("content-type"))[0] != JSON.encode():
        raise ServiceError("unsupported_media_type", f"the Content-Type must be {JSON}")
    body = await _read_body(request, min(_LIMIT_PLAN_BYTES, settings.limit_body_bytes), settings.receive_timeout_s)
    return await pool.run(_decode_json, body, PlanRequest)


def decode_base64(text: str) -> bytes:
    """Base64 in any of its dialects: standard or URL-safe, folded or not, padded right or not at all.

    Raises:
        ValueError: anything else. Nothing is skipped but white space.
    """
    letters = text.rstrip("=" + _SPACES)
    if "=" in letters:
        raise ValueError("padding before the end")
    is_plain = not any(mark in letters for mark in f"-_{_SPACES}")
    pieces, rest = [], b""
    # By slices, because binascii does not let go of the interpreter's lock.
    for start in range(0, len(letters), _SLICE_CHARS):
        piece = letters[start : start + _SLICE_CHARS].encode("ascii")
        rest += piece if is_plain else piece.translate(_TO_STANDARD, _SPACES.encode())
        whole = len(rest) // 4 * 4
        pieces.append(binascii.a2b_base64(rest[:whole], strict_mode=True))
        rest = rest[whole:]
    padding = b"=" * (-len(rest) % 4)
    if text.count("=", len(letters)) not in (0, len(padding)):
        raise ValueError("wrong padding")
    pieces.append(binascii.a2b_base64(rest + padding, strict_mode=True))
    return b"".join(pieces)


def _check_encoding(request: Request) -> None:
    codings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    if any(coding.strip() not in ("", "identity") for coding in codings):
        raise ServiceError("unsupported_encoding", "the body must come as it is: no Content-Encoding is undone here")


async def _read_body(request: Request, limit_bytes: int, timeout_s: float) -> bytes:
    too_large = ServiceError("body_too_large", f"the body is larger than {limit_bytes} bytes")
    claimed = request.headers.get("content-length", "")
    if claimed.isdecimal() and (len(claimed) > 20 or int(claimed) > limit_bytes):
        raise too_large  # before it is uploaded
    body = io.BytesIO()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                if body.tell() + len(chunk) > limit_bytes:
                    raise too_large
                body.write(chunk)
    except TimeoutError:
        raise ServiceError("deadline_exceeded", f"the body took longer than {timeout_s:g} s") from None
    return body.getvalue()


def _parse_json(
    body: bytes, settings: Settings, fetches: bool
) -> tuple[list[bytes | str], list[str | None], EmbedOptions]:
    """The images, or the URLs where they are; their client ids; and the options."""
    request = _decode_json(body, EmbedRequest)
    _check_count(len(request.images), settings)
    texts = [image if isinstance(image, str) else image.image for image in request.images]
    client_ids = [None if isinstance(image, str) else image.id for image in request.images]
    options = EmbedOptions(layout=request.layout, dtype=request.dtype, encoding_format=request.encoding_format)
    return [_image(text, index, fetches) for index, text in enumerate(texts)], client_ids, options


def _image(text: str, index: int, fetches: bool) -> bytes | str:
    """The bytes of an image that came as a string, or the string if it is a URL."""
    text = text.lstrip(_SPACES)
    if (_ANY_URL if fetches else _WEB_URL).match(text):
        return text.rstrip(_SPACES)
    if text[:5].lower() == "data:":
        head, _, text = text.partition(",")
        if not (text and head.rstrip(_SPACES).lower().endswith(";base64")):
            raise ServiceError("invalid_request", "a data URL must be data:[type];base64,[data]", index=index)
    try:
        return decode_base64(text)
    except ValueError:
        raise ServiceError("invalid_request", "the image is neither a data URL nor base64", index=index) from None


async def _fetch(
    images: Sequence[bytes | str], request: Request, fetcher: Fetcher | None, claim: Callable[[int], None]
) -> Sequence[bytes]:
    if fetcher is not None:
        return await while_awaited(request, fetcher.fetch_all(images, claim))
    found = []
    for index, image in enumerate(images):
        if isinstance(image, str):
            raise ServiceError("fetch_disabled", "this service fetches no URLs: send the image itself", index=index)
        found.append(image)
    return found


def _parse_form(body: bytes, boundary: bytes, settings: Settings) -> EmbedJob:
    parts = split_form(body, boundary, limit_parts=settings.limit_images_per_request + len(_OPTIONS))
    files = [part.data for part in parts if part.is_file]
    if not files:
        raise ServiceError("invalid_request", "the form has no file in it; a part is a file if it has a filename")
    _check_count(len(files), settings)
    fields = [(part.name, str(part.data, "utf-8", "replace")) for part in parts if not part.is_file]
    return _job(files, _options(fields), settings)


def _job(
    images: Iterable[bytes | memoryview],
    options: EmbedOptions,
    settings: Settings,
    client_ids: Iterable[str | None] | None = None,
) -> EmbedJob:
    images = tuple(images)
    for index, image in enumerate(images):
        if len(image) > settings.limit_image_bytes:
            limit = settings.limit_image_bytes
            raise ServiceError("image_too_large", f"the image is larger than {limit} bytes", index=index)
    return EmbedJob(
        images=images,
        client_ids=(None,) * len(images) if client_ids is None else tuple(client_ids),
        layout=options.layout,
        dtype=options.dtype,
        encoding_format=options.encoding_format,
    )


def _check_count(num_images: int, settings: Settings) -> None:
    limit = settings.limit_images_per_request
    if num_images > limit:
        raise ServiceError("too_many_images", f"a request holds at most {limit} images")


def _options(pairs: list[tuple[str, str]]) -> EmbedOptions:
    """The options of a query or of a form's text fields."""
    fields = dict(pairs)
    try:
        if len(fields) == len(pairs):
            return msgspec.convert(fields, EmbedOptions)
    except msgspec.ValidationError as error:
        if problem := _explain(error):
            raise problem from None
    raise ServiceError("invalid_request", f"the options are {', '.join(_OPTIONS)}, once each at most")


def _decode_json(body: bytes, shape: type[S]) -> S:
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        fields = ", ".join(shape.__struct_fields__)
        problem = _explain(error) or ServiceError("invalid_request", f"the body must be an object of these: {fields}")
        raise problem from None
    except msgspec.DecodeError:
        raise ServiceError("invalid_request", "the body is not valid JSON") from None


def _explain(error: msgspec.ValidationError) -> ServiceError | None:
    """Which field is wrong and what it should be. Of msgspec's text only the path is used, all names in it ours."""
    found = _ERROR_PATH.search(str(error))
    if found is None:
        return None
    field, index, inner = found.groups()
    where = field + (f"[{index}]" if index else "") + (f".{inner}" if inner else "")
    expected = _EXPECTED[inner or (f"{field}[]" if index else field)]
    return ServiceError(
        "invalid_request", f"{where} must be {expected}", index=int(index) if index and field == "images" else None
    )
