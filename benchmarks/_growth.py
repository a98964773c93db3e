"""What deciding costs as there is more of everything: images in a queue or a batch, ranks in a group."""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks._simulation import draw_images
from distributed.balance import balance, cut_apart
from encoder.config import DEEPSEEK_V4
from encoder.geometry import plan
from encoder.image import Canvas
from service.batcher import Batcher, ImageRows, QueuedImage
from service.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Growth:
    """Time that the front end or every rank spends on deciding, for each of what there is ten times more of."""

    what: str
    number: int
    us_each: float


def measure_growth() -> list[Growth]:
    """Each by itself, in microseconds for one of what there is more of."""
    gc.freeze()  # torch's objects, which a front end does not have, would be looked through in every collection
    images = draw_images("mixed")
    patches = [next(images).patches for _ in range(10_000)]
    rows = [
        Growth("queue: images in it", number, _median_us(partial(_drain, patches[:number]), 5) / number)
        for number in (100, 1_000, 10_000)
    ]
    rows += [
        Growth(
            "balance, 8 ranks: images in a batch",
            number,
            _median_us(partial(balance, patches[:number], [0] * 8)) / number,
        )
        for number in (100, 1_000, 10_000)
    ]
    rows += [
        Growth(
            "balance, 64 images a rank: ranks",
            ranks,
            _median_us(partial(balance, patches[: 64 * ranks], [0] * ranks)) / ranks,
        )
        for ranks in (1, 10, 100)
    ]
    for ranks in (1, 10, 100):
        counts = patches[: 64 * ranks]
        call = partial(cut_apart, balance(counts, [0] * ranks), counts)
        rows.append(Growth("cut apart, 64 images a rank: ranks", ranks, _median_us(call) / ranks))
    return rows


def _drain(patches: Sequence[int]) -> None:
    """Queue these images all at once, and answer every batch as soon as it is formed."""
    asyncio.run(_queue_and_answer(patches))


async def _queue_and_answer(patches: Sequence[int]) -> None:
    async def answer(batch: Sequence[QueuedImage]) -> None:
        for image in batch:
            image.rows.set_result(ImageRows(0, 0, memoryview(b"")))

    limit = sum(patches)
    batcher = Batcher(answer, Metrics(), budget_patches=lambda: 8 * 2560, slots=2, limit_queue_patches=limit)
    planned, pixels = plan(DEEPSEEK_V4, 300, 300), np.zeros((1, 1, 3), np.uint8)
    canvases = [Canvas(pixels, replace(planned, vit_grid=(1, count))) for count in patches]
    waits = [asyncio.create_task(batcher.submit(canvas, "", "rows", "bfloat16")) for canvas in canvases]
    await asyncio.sleep(0)  # all are queued
    run = asyncio.create_task(batcher.run())
    await asyncio.gather(*waits)
    run.cancel()
    await asyncio.wait([run])


def _median_us(call: Callable[[], object], calls: int = 25) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6
