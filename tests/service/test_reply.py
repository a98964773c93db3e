import asyncio
import base64
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from distributed.messages import RowDtype
from encoder.config import DEEPSEEK_V4
from encoder.geometry import plan
from service.decode import DecodePool
from service.metrics import Metrics
from service.reply import Answer, EmbeddedImage, choose_media_type, embed_response, render_json, render_safetensors
from service.schemas import JSON, SAFETENSORS, EmbedResponse, EmbedSummary, EncodingFormat
from service.settings import Settings

TORCH: dict[RowDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@pytest.fixture
def pool() -> Iterator[DecodePool]:
    with DecodePool(Settings(decode_processes=1), DEEPSEEK_V4, Metrics()) as pool:
        yield pool


def little_endian(rows: torch.Tensor) -> memoryview:
    return memoryview(rows.contiguous().view(torch.uint8).numpy().tobytes())


def rows_of(dtype: RowDtype, num_rows: int, dim: int) -> torch.Tensor:
    """Rows with a value of every magnitude that the dtype has, signed zeros and the ends of its range among them."""
    torch_dtype = TORCH[dtype]
    bits = {2: torch.int16, 4: torch.int32}[torch_dtype.itemsize]
    limits = torch.iinfo(bits)
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(limits.min, limits.max, (num_rows * dim,), dtype=bits, generator=generator)
    values = pattern.view(torch_dtype)
    values = torch.where(torch.isfinite(values.float()), values, torch.ones((), dtype=torch_dtype))
    info = torch.finfo(torch_dtype)
    values[:6] = torch.tensor([0.0, -0.0, info.max, info.min, info.tiny, info.smallest_normal / 2], dtype=torch_dtype)
    return values.view(num_rows, dim)


def answer_of(dtype: RowDtype, *sizes: tuple[int, int], dim: int = 8) -> tuple[Answer, list[torch.Tensor]]:
    plans = [plan(DEEPSEEK_V4, *size) for size in sizes]
    tensors = [rows_of(dtype, each.num_rows, dim) for each in plans]
    images = [
        EmbeddedImage(
            id=f"{index:064x}",
            plan=each,
            shape=(each.num_rows, dim),
            data=little_endian(rows),
            cached=index == 1,
            client_id='"data":[' if index == 1 else None,
        )
        for index, (each, rows) in enumerate(zip(plans, tensors, strict=True))
    ]
    return Answer(model='say "data":[', layout="rows", dtype=dtype, images=images), tensors


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_base64_json_gives_every_bit_back(dtype: RowDtype) -> None:
    answer, tensors = answer_of(dtype, (640, 480), (1920, 1080))
    body = EmbedResponse.model_validate_json(b"".join(render_json(answer, "base64")))
    for entry, rows in zip(body.data, tensors, strict=True):
        assert isinstance(entry.embedding, str)
        data = bytearray(base64.b64decode(entry.embedding, validate=True))
        assert same_bits(torch.frombuffer(data, dtype=TORCH[dtype]).view(entry.shape), rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_float_json_gives_every_bit_back(dtype: RowDtype) -> None:
    answer, tensors = answer_of(dtype, (640, 480), (1920, 1080))
    body = json.loads(b"".join(render_json(answer, "float")))
    for entry, rows in zip(body["data"], tensors, strict=True):
        assert same_bits(torch.tensor(entry["embedding"], dtype=torch.float64).to(TORCH[dtype]), rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_safetensors_gives_every_bit_back(dtype: RowDtype) -> None:
    answer, tensors = answer_of(dtype, (640, 480), (1920, 1080), (100, 100))
    read = load(b"".join(render_safetensors(answer)))
    assert read.keys() == {"0", "1", "2"}
    for index, rows in enumerate(tensors):
        assert read[str(index)].dtype == TORCH[dtype]
        assert same_bits(read[str(index)], rows)


def test_the_answer_describes_itself() -> None:
    answer, _ = answer_of("bfloat16", (640, 480), (1920, 1080))
    body = json.loads(b"".join(render_json(answer, "base64")))
    assert list(body) == ["model", "layout", "dtype", "dim", "data", "usage"]
    assert body["model"] == 'say "data":['
    first, second = body["data"]
    assert "client_id" not in first
    assert second["client_id"] == '"data":['
    del second["embedding"]
    assert second == {
        "index": 1,
        "id": "0" * 63 + "1",
        "client_id": '"data":[',
        "image_size": [1920, 1080],
        "vit_grid": [42, 74],
        "llm_grid": [14, 25],
        "num_tokens": 366,
        "shape": [350, 8],
    }
    patches = sum(image.plan.num_patches for image in answer.images)
    assert body["usage"] == {"images": 2, "patches": patches, "rows": first["shape"][0] + 350, "cached": 1}


def test_safetensors_carries_the_same_description(tmp_path: Path) -> None:
    answer, _ = answer_of("bfloat16", (640, 480), (1920, 1080))
    file = tmp_path / "answer.safetensors"
    file.write_bytes(b"".join(render_safetensors(answer)))
    with safe_open(file, framework="pt") as tensors:
        told = EmbedSummary.model_validate_json(tensors.metadata()["patchgrid"])
    body = json.loads(b"".join(render_json(answer, "base64")))
    for entry in body["data"]:
        del entry["embedding"]
    assert json.loads(told.model_dump_json(exclude_none=True)) == body


def test_many_tensors_keep_the_order_of_the_request() -> None:
    answer, tensors = answer_of("bfloat16", *((100 + index, 100) for index in range(12)))
    read = load(b"".join(render_safetensors(answer)))
    assert all(same_bits(read[str(index)], rows) for index, rows in enumerate(tensors))


def test_rows_are_not_copied_into_a_safetensors_answer() -> None:
    answer, _ = answer_of("float32", (1920, 1080), dim=4096)
    head, *views = render_safetensors(answer)
    assert len(head) % 8 == 0
    assert all(isinstance(view, memoryview) and view.obj is answer.images[0].data.obj for view in views)
    assert max(len(view) for view in views) < 2**20


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("text/html", JSON),
        ("application/json", JSON),
        ("application/x-safetensors", SAFETENSORS),
        ("Application/X-SafeTensors", SAFETENSORS),
        ("application/x-safetensors, */*", SAFETENSORS),
        ("application/x-safetensors, application/json", JSON),
        ("application/x-safetensors, application/json;q=0.5", SAFETENSORS),
        ("application/x-safetensors;q=0.5, application/json;q=0.9", JSON),
        ("application/x-safetensors;q=0.2, */*;q=0.8", JSON),
        ("application/json;q=0, */*", SAFETENSORS),
        ("application/x-safetensors;q=0", JSON),
        ("application/json;q=0, application/x-safetensors;q=0", JSON),
        ("application/x-safetensors;q=junk", JSON),
        ("application/x-safetensors;version=1; q=1.0", SAFETENSORS),
        (";;,,q=", JSON),
    ],
)
def test_accept_chooses_the_answer(accept: str | None, expected: str) -> None:
    assert choose_media_type(accept) == expected


def app_that_answers(answer: Answer, pool: DecodePool, encoding_format: EncodingFormat, metrics: Metrics) -> Starlette:
    async def embed(request: Request) -> object:
        return await embed_response(
            answer,
            accept=request.headers.get("accept"),
            encoding_format=encoding_format,
            pool=pool,
            metrics=metrics,
        )

    return Starlette(routes=[Route("/embed", embed, methods=["POST"])])


def test_a_response_has_a_length_a_type_and_its_time_counted(pool: DecodePool) -> None:
    answer, tensors = answer_of("bfloat16", (1920, 1080), dim=4096)
    metrics = Metrics()

    async def ask(accept: str) -> httpx.Response:
        transport = httpx.ASGITransport(app_that_answers(answer, pool, "base64", metrics))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/embed", headers={"accept": accept})

    for accept in (JSON, SAFETENSORS):
        response = asyncio.run(ask(accept))
        assert response.headers["content-type"] == accept
        assert int(response.headers["content-length"]) == len(response.content)
        assert response.headers["vary"] == "Accept"
    assert same_bits(load(response.content)["0"], tensors[0])
    assert b'stage_seconds_count{stage="reply"} 2.0' in metrics.render()[0]


def test_the_event_loop_keeps_ticking_while_a_large_float_answer_renders(pool: DecodePool) -> None:
    dim, num_images = 5120, 6
    planned = plan(DEEPSEEK_V4, 1920, 1080)
    values = np.random.default_rng(0).standard_normal((planned.num_rows, dim), np.float32)
    image = EmbeddedImage(id="ab", plan=planned, shape=values.shape, data=memoryview(values.tobytes()))
    answer = Answer(model="m", layout="rows", dtype="float32", images=[image] * num_images)

    async def pauses() -> list[float]:
        rendering = asyncio.create_task(pool.run(render_json, answer, "float"))
        ticks = [time.perf_counter()]
        while not rendering.done():
            await asyncio.sleep(0.001)
            ticks.append(time.perf_counter())
        assert sum(map(len, rendering.result())) > 100_000_000
        return [after - before for before, after in itertools.pairwise(ticks)]

    found = asyncio.run(pauses())
    assert len(found) > 20
    assert max(found) < sum(found) / 3  # one lock held from end to end would make it all of the sum
