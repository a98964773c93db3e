import base64
import io
import json
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.responses import Response

from service.errors import ERRORS
from service.schemas import (
    EmbedRequest,
    EmbedResponse,
    ErrorBody,
    Health,
    ImageInput,
    PlanRequest,
    embed_openapi,
    embed_responses,
    plan_openapi,
)


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    app = FastAPI()

    @app.post("/embed", openapi_extra=embed_openapi(), responses=embed_responses())
    async def embed() -> Response:
        return Response()

    @app.post("/plan", openapi_extra=plan_openapi())
    async def plan() -> Response:
        return Response()

    return json.loads(json.dumps(app.openapi()))  # type: ignore[no-any-return]


def test_embed_documents_every_kind_of_body(openapi: dict[str, Any]) -> None:
    content = openapi["paths"]["/embed"]["post"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "multipart/form-data", "image/*", "application/octet-stream"}
    assert content["application/json"]["schema"]["properties"].keys() == set(EmbedRequest.__struct_fields__)
    assert content["multipart/form-data"]["schema"]["properties"]["layout"]["enum"] == ["rows", "v4", "v41"]


def test_embed_documents_the_query_of_a_raw_body(openapi: dict[str, Any]) -> None:
    parameters = openapi["paths"]["/embed"]["post"]["parameters"]
    assert {each["name"] for each in parameters} == {"layout", "dtype", "encoding_format"}


def test_embed_documents_both_answers_and_every_error(openapi: dict[str, Any]) -> None:
    responses = openapi["paths"]["/embed"]["post"]["responses"]
    assert {"application/json", "application/x-safetensors"} <= responses["200"]["content"].keys()
    assert responses.keys() - {"200"} == {str(kind.status) for kind in ERRORS.values()}
    told = " ".join(response["description"] for response in responses.values())
    assert all(f"`{code}`" in told for code in ERRORS)


def test_every_reference_of_the_openapi_resolves(openapi: dict[str, Any]) -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if "$ref" in node else []
            return own + [each for value in node.values() for each in references(value)]
        return [each for value in node for each in references(value)] if isinstance(node, list) else []

    found = references(openapi)
    assert found
    for reference in found:
        node = openapi
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]


def test_the_example_is_an_image(openapi: dict[str, Any]) -> None:
    schema = openapi["paths"]["/embed"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    ((example,),) = schema["properties"]["images"]["examples"]
    with Image.open(io.BytesIO(base64.b64decode(example))) as image:
        image.load()
        assert image.size == (1, 1)


def test_requests_have_the_documented_defaults() -> None:
    request = msgspec.json.decode(b'{"images": ["AA", {"image": "AA", "id": "cat"}]}', type=EmbedRequest)
    assert request == EmbedRequest(images=("AA", ImageInput("AA", "cat")))
    assert (request.layout, request.dtype, request.encoding_format) == ("rows", "bfloat16", "base64")


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        '{"images": []}',
        '{"images": "AA"}',
        '{"images": [1]}',
        '{"images": ["AA"], "layuot": "v4"}',
        '{"images": ["AA"], "layout": "V4"}',
        '{"images": ["AA"], "dtype": null}',
        '{"images": [{"image": "AA", "name": "x"}]}',
        '{"images": [{"image": "AA", "id": "%s"}]}' % ("x" * 257),
    ],
)
def test_a_request_of_another_shape_is_refused(body: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=EmbedRequest)


@pytest.mark.parametrize(
    "body",
    ['{"sizes": []}', '{"sizes": [[1]]}', '{"sizes": [[0, 1]]}', '{"sizes": [[1.5, 1]]}', '{"sizes": [["1", 1]]}'],
)
def test_sizes_are_pairs_of_positive_integers(body: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=PlanRequest)


def test_answers_are_read_back_by_their_own_models() -> None:
    body = {
        "model": "demo",
        "layout": "rows",
        "dtype": "bfloat16",
        "dim": 1,
        "data": [
            {
                "index": 0,
                "id": "ab",
                "image_size": [1, 1],
                "vit_grid": [1, 1],
                "llm_grid": [1, 1],
                "num_tokens": 4,
                "shape": [1, 1],
                "embedding": "AAA=",
            }
        ],
        "usage": {"images": 1, "patches": 1, "rows": 1, "cached": 0},
    }
    assert EmbedResponse.model_validate_json(json.dumps(body)).data[0].embedding == "AAA="
    assert ErrorBody.model_validate({"error": {"code": "internal", "message": "m", "type": "server_error"}})
    assert Health(live=True, ready=False, reasons=("starting",)).reasons == ("starting",)
