import asyncio
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from encoder.config import DEEPSEEK_V4
from service.decode import DecodePool
from service.errors import ServiceError
from service.metrics import Metrics
from service.settings import Settings


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def pool(metrics: Metrics) -> Iterator[DecodePool]:
    with DecodePool(Settings(decode_processes=2, limit_image_pixels=1_000_000), DEEPSEEK_V4, metrics) as pool:
        yield pool


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


def test_an_image_becomes_a_canvas_with_its_plan(pool: DecodePool, goldens: Path, metrics: Metrics) -> None:
    data = (goldens / "images/640x700_RGB.jpeg").read_bytes()
    canvas = asyncio.run(pool.canvas(data, 0))
    assert canvas.plan.image_size == (640, 700)
    assert canvas.pixels.shape == (*canvas.plan.resized[::-1], 3)
    assert b'stage_seconds_count{stage="decode"} 1.0' in metrics.render()[0]


def test_a_view_of_a_body_will_do(pool: DecodePool) -> None:
    body = b"--" + png(30, 40) + b"--"
    assert asyncio.run(pool.canvas(memoryview(body)[2:-2], 0)).plan.image_size == (30, 40)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "unsupported_format"),
        (b"%PDF-1.7", "unsupported_format"),
        (png(300, 300)[:60], "invalid_image"),
        (png(1001, 1000), "image_too_large"),
        (png(1, 20_000), "degenerate_image"),
    ],
)
def test_an_image_that_cannot_be_used_is_told_with_its_index(pool: DecodePool, data: bytes, code: str) -> None:
    with pytest.raises(ServiceError) as error_info:
        asyncio.run(pool.canvas(data, 3))
    assert error_info.value.code == code
    assert error_info.value.index == 3


def test_no_more_images_are_decoded_at_once_than_there_are_threads(pool: DecodePool) -> None:
    async def decode_many() -> None:
        await asyncio.gather(*(pool.canvas(png(64, 64), index) for index in range(20)))

    asyncio.run(decode_many())
    assert sum(thread.name.startswith("decode") for thread in threading.enumerate()) <= 2


def test_what_a_function_raises_is_raised_by_run(pool: DecodePool) -> None:
    def fail() -> None:
        raise ServiceError("invalid_request", "no")

    with pytest.raises(ServiceError):
        asyncio.run(pool.run(fail))


def test_answers_do_not_wait_behind_images(pool: DecodePool) -> None:
    data = (png(1000, 1000),) * 40

    async def race() -> bool:
        decoding = asyncio.gather(*(pool.canvas(each, index) for index, each in enumerate(data)))
        assert await pool.run(lambda: "rendered") == "rendered"
        was_first = not decoding.done()
        await decoding
        return was_first

    assert asyncio.run(race())


def test_work_whose_caller_has_gone_never_starts(pool: DecodePool) -> None:
    started: list[int] = []
    gate = threading.Event()

    async def leave() -> None:
        blockers = [asyncio.create_task(pool.run(gate.wait, 10)) for _ in range(2)]
        left = asyncio.create_task(pool.run(started.append, 1))
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.wait([left])
        gate.set()
        await asyncio.gather(*blockers)
        await pool.run(time.sleep, 0.05)

    asyncio.run(leave())
    assert started == []
