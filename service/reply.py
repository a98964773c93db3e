"""Rows to a response body: JSON or safetensors, as the client's Accept header asks.

Invariant: rows are never joined or copied whole. A body is a list of chunks, views of the rows where the format allows
it, and each chunk is small enough that making it holds the interpreter's lock for about a millisecond.
"""

import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from distributed.messages import DTYPE_BYTES, RowDtype
from encoder.geometry import Plan
from encoder.layout import Layout
from service.decode import DecodePool
from service.metrics import Metrics
from service.schemas import JSON, SAFETENSORS, EmbeddingInfo, EmbedSummary, EncodingFormat, Usage

Chunk: TypeAlias = bytes | memoryview

_CHUNK_BYTES = 3 * 2**18  # a multiple of 3, so that base64 chunks can be strung together
_SAFETENSORS_DTYPES: Mapping[RowDtype, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class EmbeddedImage:
    """One image's rows. data: little-endian, shape[0] x shape[1] values of the answer's dtype, all finite."""

    id: str
    plan: Plan
    shape: tuple[int, int]
    data: memoryview
    cached: bool = False
    client_id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a response says; images in the order of the question, at least one."""

    model: str
    layout: Layout
    dtype: RowDtype
    images: Sequence[EmbeddedImage]


async def embed_response(
    answer: Answer, *, accept: str | None, encoding_format: EncodingFormat, pool: DecodePool, metrics: Metrics
) -> "ChunkedResponse":
    """Render an answer as the Accept header asks: JSON off the event loop; of safetensors only the header is made."""
    media_type = choose_media_type(accept)
    with metrics.time_stage("reply"):
        if media_type == SAFETENSORS:
            return ChunkedResponse(render_safetensors(answer), media_type)
        return ChunkedResponse(await pool.run(render_json, answer, encoding_format), media_type)


def render_json(answer: Answer, encoding_format: EncodingFormat) -> list[Chunk]:
    """The answer as schemas.EmbedResponse."""
    summary = _summarize(answer)
    # In JSON a quote within a string is escaped: this can only be the field.
    head, field, tail = _dump(summary.model_copy(update={"data": ()})).partition(b'"data":[')
    start, end = (b'"', b'"') if encoding_format == "base64" else (b"[", b"]")
    chunks: list[Chunk] = []
    between = head + field
    for info, image in zip(summary.data, answer.images, strict=True):
        chunks.append(between + _dump(info).removesuffix(b"}") + b',"embedding":' + start)
        chunks += _base64(image.data) if encoding_format == "base64" else _float_lists(image, answer.dtype)
        between = end + b"},"
    chunks.append(end + b"}" + tail)
    return chunks


def render_safetensors(answer: Answer) -> list[Chunk]:
    """The answer as a safetensors file: tensors "0", "1", ..., and the JSON answer less its rows as metadata.

    The header is written here because the library would copy every row into one buffer.
    """
    header: dict[str, object] = {"__metadata__": {"patchgrid": _dump(_summarize(answer)).decode()}}
    end = 0
    for index, image in enumerate(answer.images):
        start, end = end, end + image.data.nbytes
        header[str(index)] = {
            "dtype": _SAFETENSORS_DTYPES[answer.dtype],
            "shape": image.shape,
            "data_offsets": (start, end),
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    chunks: list[Chunk] = [len(text).to_bytes(8, "little") + text]
    for image in answer.images:
        chunks += _slices(image.data)
    return chunks


def choose_media_type(accept: str | None) -> str:
    """JSON or safetensors, whichever an Accept header (RFC 9110) prefers; JSON if it is absent or wants neither."""
    qualities = {JSON: 0.0, SAFETENSORS: 0.0}
    ranks = {JSON: 0, SAFETENSORS: 0}  # the more exact range decides, and breaks ties between the two
    for item in (accept or "").lower().split(","):
        media_range, *parameters = (part.strip() for part in item.split(";"))
        rank = {JSON: 3, SAFETENSORS: 3, "application/*": 2, "*/*": 1}.get(media_range, 0)
        for media_type in qualities:
            if rank > ranks[media_type] and (rank < 3 or media_range == media_type):
                ranks[media_type], qualities[media_type] = rank, _quality(parameters)
    preferred = max(qualities, key=lambda media_type: (qualities[media_type], ranks[media_type]))
    return preferred if qualities[preferred] > 0 else JSON


class ChunkedResponse(Response):
    """A response whose body is a list of chunks: sent one by one, under a Content-Length."""

    def __init__(self, chunks: Sequence[Chunk], media_type: str) -> None:
        super().__init__(media_type=media_type)
        self._chunks = chunks
        self.headers["content-length"] = str(sum(len(chunk) for chunk in chunks))
        self.headers["vary"] = "Accept"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. The server's flow control paces the chunks."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _summarize(answer: Answer) -> EmbedSummary:
    for image in answer.images:
        assert image.data.nbytes == image.shape[0] * image.shape[1] * DTYPE_BYTES[answer.dtype]
    infos = (
        EmbeddingInfo(
            index=index,
            id=image.id,
            client_id=image.client_id,
            image_size=image.plan.image_size,
            vit_grid=image.plan.vit_grid,
            llm_grid=image.plan.llm_grid,
            num_tokens=image.plan.num_tokens,
            shape=image.shape,
        )
        for index, image in enumerate(answer.images)
    )
    usage = Usage(
        images=len(answer.images),
        patches=sum(image.plan.num_patches for image in answer.images),
        rows=sum(image.shape[0] for image in answer.images),
        cached=sum(image.cached for image in answer.images),
    )
    return EmbedSummary(
        model=answer.model,
        layout=answer.layout,
        dtype=answer.dtype,
        dim=answer.images[0].shape[1],
        data=tuple(infos),
        usage=usage,
    )


def _dump(model: EmbedSummary | EmbeddingInfo) -> bytes:
    return model.model_dump_json(exclude_none=True).encode()


def _slices(data: memoryview) -> Iterator[memoryview]:
    octets = data.cast("B")
    for start in range(0, octets.nbytes, _CHUNK_BYTES):
        yield octets[start : start + _CHUNK_BYTES]


def _base64(data: memoryview) -> Iterator[bytes]:
    for octets in _slices(data):
        yield binascii.b2a_base64(octets, newline=False)


def _float_lists(image: EmbeddedImage, dtype: RowDtype) -> Iterator[bytes]:
    """Row by row. Every value is written so that reading it as a double, then as the dtype, gives it back exactly."""
    encode = msgspec.json.Encoder().encode
    octets = image.data.cast("B")
    row_bytes = image.shape[1] * DTYPE_BYTES[dtype]
    for start in range(0, octets.nbytes, row_bytes):
        yield (b"," if start else b"") + encode(_floats(octets[start : start + row_bytes], dtype))


def _floats(row: memoryview, dtype: RowDtype) -> list[float]:
    values: NDArray[np.float16] | NDArray[np.float32]
    if dtype == "bfloat16":  # the upper half of a float32
        values = (np.frombuffer(row, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(row, "<f2" if dtype == "float16" else "<f4")
    floats: list[float] = values.tolist()
    return floats


def _quality(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(max(float(value), 0.0), 1.0)
            except ValueError:
                return 0.0
    return 1.0
