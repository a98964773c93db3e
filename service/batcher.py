"""Which images go to the ranks next: first come, first served, up to a budget of patches, and no timer.

A free slot takes at once what is waiting. Two slots keep the ranks busy: those that are done with one batch have the
next already, and the one after it forms. Every image that was queued ends with rows or with an error; none is left
waiting.
"""

import asyncio
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from distributed.messages import RowDtype
from distributed.rate import PatchRate
from encoder.image import Canvas
from encoder.layout import Layout
from service.errors import ServiceError
from service.metrics import Metrics

_LONGEST_RETRY_S = 60


@dataclass(frozen=True, slots=True)
class ImageRows:
    """An image's rows: `num_rows` x `width` little-endian values, as a view of what came off the wire."""

    num_rows: int
    width: int
    data: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class QueuedImage:
    """An image that waits for its rows. digest: its canvas's."""

    canvas: Canvas
    digest: str
    layout: Layout
    dtype: RowDtype
    rows: "asyncio.Future[ImageRows]"
    queued_at: float = field(default_factory=time.perf_counter)

    @property
    def num_patches(self) -> int:
        """What it weighs."""
        return self.canvas.plan.num_patches


EncodeBatch: TypeAlias = Callable[[Sequence[QueuedImage]], Awaitable[None]]


def num_fitting(num_patches: Iterable[int], budget_patches: int) -> int:
    """How many of the first images make up the next batch: those that fit the budget together, and at least one."""
    count = total = 0
    for patches in num_patches:
        total += patches
        if count > 0 and total > budget_patches:
            break
        count += 1
    return count


class Batcher:
    """The queue, owned by one task: `run`.

    Args:
        encode: settles the `rows` of every image that it is given; called for several batches at once.
        budget_patches: patches per batch, asked anew for each.
        slots: batches in flight at most.
        limit_queue_patches: `submit` refuses an image that would lift the queue above this.
    """

    def __init__(
        self,
        encode: EncodeBatch,
        metrics: Metrics,
        *,
        budget_patches: Callable[[], int],
        slots: int,
        limit_queue_patches: int,
    ) -> None:
        self._encode = encode
        self._metrics = metrics
        self._budget_patches = budget_patches
        self._slots = asyncio.Semaphore(slots)
        self._limit_queue_patches = limit_queue_patches
        self._queue: OrderedDict[int, QueuedImage] = OrderedDict()
        self._queued_patches = 0
        self._tickets = itertools.count()
        self._arrived = asyncio.Event()
        self._rate = PatchRate()
        self._last_end = 0.0
        self._closed = False

    def waiting_s(self) -> float:
        """How long what is queued will take, at the rate of the last batches; 0 before the first."""
        return self._rate.seconds_for(self._queued_patches)

    async def submit(self, canvas: Canvas, digest: str, layout: Layout, dtype: RowDtype) -> ImageRows:
        """Queue an image and wait for its rows. An image whose wait is cancelled leaves the queue at once.

        Raises:
            ServiceError: the queue is full, or whatever went wrong with this image.
        """
        if self._closed:
            raise _no_answer()
        image = QueuedImage(canvas, digest, layout, dtype, asyncio.get_running_loop().create_future())
        if self._queue and self._queued_patches + image.num_patches > self._limit_queue_patches:
            retry_after_s = min(max(1, math.ceil(self.waiting_s())), _LONGEST_RETRY_S)
            raise ServiceError("queue_full", "too many patches are waiting", retry_after_s=retry_after_s)
        ticket = next(self._tickets)
        self._queue[ticket] = image
        self._count_queue(1, image.num_patches)
        self._arrived.set()
        try:
            return await image.rows
        except asyncio.CancelledError:
            self._metrics.images_dropped_total.labels("queue" if ticket in self._queue else "flight").inc()
            raise
        finally:
            if ticket in self._queue:
                self._remove(ticket)

    async def run(self) -> None:
        """Form and send batches until cancelled. Whoever still waits then is told so."""
        batch: list[QueuedImage] = []
        try:
            async with asyncio.TaskGroup() as batches:
                while True:
                    await self._slots.acquire()
                    while not self._queue:
                        self._arrived.clear()
                        await self._arrived.wait()
                    batch = self._take_batch()
                    batches.create_task(self._settle(batch))
                    batch = []
        finally:
            self._closed = True
            for image in (*batch, *self._queue.values()):
                if not image.rows.done():
                    image.rows.set_exception(_no_answer())

    def _take_batch(self) -> list[QueuedImage]:
        sizes = (image.num_patches for image in self._queue.values())
        tickets = list(itertools.islice(self._queue, num_fitting(sizes, self._budget_patches())))
        return [self._remove(ticket) for ticket in tickets]

    async def _settle(self, batch: list[QueuedImage]) -> None:
        started = time.perf_counter()
        for image in batch:
            self._metrics.observe_stage("queue", started - image.queued_at)
        num_patches = sum(image.num_patches for image in batch)
        self._metrics.batch_size_patches.observe(num_patches)
        try:
            await self._encode(batch)
            ended = time.perf_counter()
            self._rate.observe(num_patches, ended - max(started, self._last_end))  # the time when no batch ended
            self._last_end = ended
            self._slots.release()
        finally:
            for image in batch:
                if not image.rows.done():
                    image.rows.set_exception(_no_answer())

    def _remove(self, ticket: int) -> QueuedImage:
        image = self._queue.pop(ticket)
        self._count_queue(-1, -image.num_patches)
        return image

    def _count_queue(self, images: int, patches: int) -> None:
        self._queued_patches += patches
        self._metrics.queue_images.inc(images)
        self._metrics.queue_patches.inc(patches)


def _no_answer() -> ServiceError:
    return ServiceError("internal", "the image was queued and will not be encoded")
