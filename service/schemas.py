"""What crosses HTTP: the requests, the answers and their OpenAPI.

Invariant: no request is built before it is known to fit. Requests are msgspec structs, decoded straight into the
declared shape, so that a hostile body fails at its first wrong byte; a parser that builds a tree first needs gigabytes
for `[],[],[],...`. Answers are pydantic models, which FastAPI documents.
"""

from collections import defaultdict
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from distributed.messages import RowDtype
from encoder.geometry import MAX_SIDE
from encoder.layout import Layout
from service.errors import ERRORS, ErrorCode, ErrorType

EncodingFormat: TypeAlias = Literal["base64", "float"]

JSON = "application/json"
SAFETENSORS = "application/x-safetensors"
MULTIPART = "multipart/form-data"
OCTETS = "application/octet-stream"

MAX_CLIENT_ID_CHARS = 256
MAX_PLAN_SIZES = 10_000

_PIXEL_GIF = "R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="


class ImageInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image with a name that its entry in the answer will carry."""

    image: Annotated[str, Meta(description="A data URL or base64, standard or URL-safe, padded or not.")]
    id: Annotated[
        Annotated[str, Meta(max_length=MAX_CLIENT_ID_CHARS)] | None,
        Meta(description="Comes back as client_id, and is used for nothing else."),
    ] = None


class EmbedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is wanted of every image of a request."""

    layout: Annotated[Layout, Meta(description="Which rows, in which order.")] = "rows"
    dtype: Annotated[RowDtype, Meta(description="What the answer is in.")] = "bfloat16"
    encoding_format: Annotated[
        EncodingFormat, Meta(description="How a JSON answer holds rows: base64 of little-endian values, or lists.")
    ] = "base64"


class EmbedRequest(EmbedOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Images to embed; the answer keeps their order."""

    images: Annotated[
        tuple[str | ImageInput, ...],
        Meta(min_length=1, description="Data URLs or base64 strings, bare or in objects.", examples=[[_PIXEL_GIF]]),
    ]


_Side = Annotated[int, Meta(ge=1, le=MAX_SIDE)]


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Image sizes to plan, without pixels."""

    sizes: Annotated[
        tuple[tuple[_Side, _Side], ...],
        Meta(
            min_length=1, max_length=MAX_PLAN_SIZES, description="[width, height] in pixels.", examples=[[[1920, 1080]]]
        ),
    ]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EmbeddingInfo(_Answer):
    """One image of an answer, without its rows."""

    index: int = Field(description="the image's place in the request")
    id: str = Field(description="digest of the pixels and of everything else that the rows depend on")
    client_id: str | None = Field(default=None, description="the id that the request gave, if it gave one")
    image_size: tuple[int, int] = Field(description="[width, height], after orientation", examples=[[1920, 1080]])
    vit_grid: tuple[int, int] = Field(description="[rows, columns] of patches")
    llm_grid: tuple[int, int] = Field(description="[rows, columns] of language-model rows")
    num_tokens: int = Field(description="what the image costs the language model")
    shape: tuple[int, int] = Field(description="[rows, dim]", examples=[[350, 4096]])


class Embedding(EmbeddingInfo):
    """One image of a JSON answer."""

    embedding: str | list[list[float]] = Field(description="base64 of the little-endian rows, or lists of numbers")


class Usage(_Answer):
    """What a request came to."""

    images: int
    patches: int
    rows: int
    cached: int = Field(description="images that were known already")


class EmbedSummary(_Answer):
    """An answer without its rows: the metadata `patchgrid` of a safetensors answer."""

    model: str
    layout: Layout
    dtype: RowDtype
    dim: int
    data: tuple[EmbeddingInfo, ...]
    usage: Usage


class EmbedResponse(EmbedSummary):
    """A JSON answer."""

    data: tuple[Embedding, ...]


class PlannedSize(_Answer):
    """How an image of one size is cut."""

    size: tuple[int, int] = Field(description="[width, height], as asked")
    resized: tuple[int, int] = Field(description="[width, height] of the canvas")
    vit_grid: tuple[int, int] = Field(description="[rows, columns] of patches")
    llm_grid: tuple[int, int] = Field(description="[rows, columns] of language-model rows")
    num_tokens: int
    rows: int
    patches: int


class PlanResponse(_Answer):
    """One entry for each size, in order."""

    data: tuple[PlannedSize, ...]


class ErrorDetail(_Answer):
    """What went wrong."""

    code: ErrorCode
    message: str
    type: ErrorType
    index: int | None = Field(default=None, description="the image that it is about, counted from 0")


class ErrorBody(_Answer):
    """Every answer other than 200, probes apart."""

    error: ErrorDetail


class Health(_Answer):
    """Whether the process answers, whether it takes work, and if not, why."""

    live: bool
    ready: bool
    reasons: tuple[str, ...] = Field(default=(), examples=[["starting"]])


class Limits(_Answer):
    """The most that one request may hold or take, and the most that all may."""

    body_bytes: int
    images_per_request: int
    image_bytes: int
    image_pixels: int
    decoding_requests: int
    queue_patches: int
    held_bytes: int
    request_timeout_s: float
    receive_timeout_s: float
    decode_timeout_s: float
    fetch_timeout_s: float


class Info(_Answer):
    """What is served. What only the group knows is null until it has said hello."""

    version: str
    model: str
    model_type: str
    image_profile: str
    patch_size: int
    merge_ratio: int
    max_image_tokens: int
    dim: int
    ranks: int
    limits: Limits
    layouts: tuple[Layout, ...] | None = None
    fingerprint: str | None = None
    devices: tuple[str, ...] | None = None
    dtype: str | None = None
    attention: str | None = None


OpenApi: TypeAlias = dict[str, Any]


def embed_openapi() -> OpenApi:
    """FastAPI's `openapi_extra` for /embed: three kinds of body, and the query of the raw one."""
    options = _schema(EmbedOptions)["properties"]
    binary = {"type": "string", "format": "binary"}
    form = {
        "type": "object",
        "required": ["files"],
        "properties": {
            "files": {"type": "array", "items": binary, "description": "One image a file; any field name will do."},
            **options,
        },
    }
    content = {JSON: _schema(EmbedRequest), MULTIPART: form, "image/*": binary, OCTETS: binary}
    return {
        "requestBody": {"required": True, "content": {kind: {"schema": schema} for kind, schema in content.items()}},
        "parameters": [
            {"name": name, "in": "query", "description": "Only with a raw image as the body.", "schema": schema}
            for name, schema in options.items()
        ],
    }


def embed_responses() -> dict[int | str, OpenApi]:
    """FastAPI's `responses` for /embed: both answers, and every error."""
    safetensors = {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": 'Tensors "0", "1", ...; metadata "patchgrid" is the JSON answer without `embedding`.',
        }
    }
    answer: OpenApi = {"model": EmbedResponse, "description": "The rows.", "content": {SAFETENSORS: safetensors}}
    return {200: answer, **error_responses(*ERRORS)}


def plan_openapi() -> OpenApi:
    """FastAPI's `openapi_extra` for /plan."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": _schema(PlanRequest)}}}}


def error_responses(*codes: ErrorCode) -> dict[int | str, OpenApi]:
    """FastAPI's `responses` for these errors, those of one status together."""
    by_status: defaultdict[int, list[str]] = defaultdict(list)
    for code in codes:
        by_status[ERRORS[code].status].append(f"`{code}`")
    return {
        status: {"model": ErrorBody, "description": ", ".join(found)} for status, found in sorted(by_status.items())
    }


def _schema(struct: type[msgspec.Struct]) -> OpenApi:
    """The JSON schema of a request, whole in itself: OpenAPI has no place for msgspec's definitions."""
    (schema,), definitions = msgspec.json.schema_components([struct])

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rpartition("/")[2]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(value) for value in node] if isinstance(node, list) else node

    resolved: OpenApi = inline(schema)
    return resolved
