"""The queue: first come first served, a budget in patches, no timer, and nobody left waiting."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import DEMO
from encoder.geometry import plan
from encoder.image import Canvas
from service.batcher import Batcher, ImageRows, QueuedImage, num_fitting
from service.errors import ServiceError
from service.metrics import Metrics

sizes = st.lists(st.integers(1, 9189), max_size=50)


def canvas(width: int = 400, height: int = 400) -> Canvas:
    planned = plan(DEMO, width, height)
    pixel_width, pixel_height = planned.resized
    return Canvas(np.zeros((pixel_height, pixel_width, 3), np.uint8), planned)


@given(sizes, st.integers(1, 40_000))
def test_a_batch_is_the_longest_head_of_the_queue_within_the_budget(waiting: list[int], budget: int) -> None:
    count = num_fitting(waiting, budget)
    if count > 1:
        assert sum(waiting[:count]) <= budget
    if count < len(waiting):
        assert sum(waiting[: count + 1]) > budget


@given(sizes, st.integers(1, 40_000))
def test_a_batch_is_empty_only_if_nothing_waits(waiting: list[int], budget: int) -> None:
    assert (num_fitting(waiting, budget) > 0) == bool(waiting)


class Recorder:
    """A group that answers when it is let, and remembers what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[QueuedImage]] = []
        self.open = asyncio.Event()

    async def encode(self, images: Sequence[QueuedImage]) -> None:
        self.batches.append(list(images))
        await self.open.wait()
        for image in images:
            if not image.rows.done():
                image.rows.set_result(ImageRows(1, 1, memoryview(b"\0\0")))


def make(
    recorder: Recorder, metrics: Metrics, *, budget: int = 3 * canvas().plan.num_patches, limit: int = 10**6
) -> Batcher:
    return Batcher(recorder.encode, metrics, budget_patches=lambda: budget, slots=2, limit_queue_patches=limit)


def test_a_free_slot_takes_at_once_and_a_busy_group_lets_the_next_batch_form() -> None:
    async def scenario() -> None:
        recorder, metrics = Recorder(), Metrics()
        batcher = make(recorder, metrics)
        running = asyncio.create_task(batcher.run())
        waiting = []
        for _ in range(8):
            waiting.append(asyncio.create_task(batcher.submit(canvas(), "digest", "rows", "bfloat16")))
            await asyncio.sleep(0.001)
        assert [len(batch) for batch in recorder.batches] == [1, 1]
        assert metrics.registry.get_sample_value("patchgrid_queue_images") == 6
        recorder.open.set()
        await asyncio.gather(*waiting)
        assert [len(batch) for batch in recorder.batches] == [1, 1, 3, 3]
        assert metrics.registry.get_sample_value("patchgrid_queue_patches") == 0
        running.cancel()

    asyncio.run(scenario())


def test_a_cancelled_wait_leaves_the_queue_before_it_costs_anything() -> None:
    async def scenario() -> None:
        recorder, metrics = Recorder(), Metrics()
        batcher = make(recorder, metrics)
        running = asyncio.create_task(batcher.run())
        waiting = []
        for _ in range(4):
            waiting.append(asyncio.create_task(batcher.submit(canvas(), "digest", "rows", "bfloat16")))
            await asyncio.sleep(0.001)
        waiting[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[2]
        assert metrics.registry.get_sample_value("patchgrid_queue_images") == 1
        recorder.open.set()
        await waiting[3]
        assert sum(len(batch) for batch in recorder.batches) == 3
        running.cancel()

    asyncio.run(scenario())


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def scenario() -> None:
        recorder = Recorder()
        patches = canvas().plan.num_patches
        batcher = make(recorder, Metrics(), budget=patches, limit=2 * patches)
        running = asyncio.create_task(batcher.run())
        waiting = []
        for _ in range(4):
            waiting.append(asyncio.create_task(batcher.submit(canvas(), "digest", "rows", "bfloat16")))
            await asyncio.sleep(0.001)
        with pytest.raises(ServiceError) as refused:
            await batcher.submit(canvas(), "digest", "rows", "bfloat16")
        assert refused.value.code == "queue_full"
        assert refused.value.retry_after_s is not None
        recorder.open.set()
        await asyncio.gather(*waiting)
        running.cancel()

    asyncio.run(scenario())


def test_an_unexpected_failure_of_a_batch_reaches_its_waiters_and_the_owner() -> None:
    async def scenario() -> None:
        async def broken(images: Sequence[QueuedImage]) -> None:
            raise RuntimeError("broken")

        batcher = Batcher(broken, Metrics(), budget_patches=lambda: 1, slots=1, limit_queue_patches=10**6)
        running = asyncio.create_task(batcher.run())
        waiting = [batcher.submit(canvas(), "digest", "rows", "bfloat16") for _ in range(3)]
        for failed in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(failed, ServiceError)
            assert failed.code == "internal"
        with pytest.raises(ExceptionGroup):
            await running
        with pytest.raises(ServiceError):
            await batcher.submit(canvas(), "digest", "rows", "bfloat16")

    asyncio.run(scenario())
