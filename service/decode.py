"""The threads that do what the event loop must not: decode images, parse bodies, render answers.

Invariant: there are never more threads than the settings say, and work whose caller has gone never starts. Parsing and
rendering have threads of their own, so that an answer that is ready does not wait behind a queue of images.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from encoder.config import VisionConfig
from encoder.image import Canvas, ImageError, read_canvas
from service.errors import ServiceError
from service.metrics import Metrics
from service.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

# What runs on these holds the interpreter's lock nearly all the time: more of them would add nothing.
_NUM_SIDE_THREADS = 2


class DecodePool:
    """Threads for one front end. A context manager; leaving it waits for what is running."""

    def __init__(self, settings: Settings, config: VisionConfig, metrics: Metrics) -> None:
        self._config = config
        self._profile = settings.image_profile
        self._limit_pixels = settings.limit_image_pixels
        self._metrics = metrics
        self._decoders = ThreadPoolExecutor(settings.num_decode_processes, thread_name_prefix="decode")
        self._side = ThreadPoolExecutor(_NUM_SIDE_THREADS, thread_name_prefix="side")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function off the event loop: parsing, hashing, rendering. What it raises is raised here."""
        return await self._submit(self._side, lambda: function(*args, **kwargs))

    async def canvas(self, data: bytes | memoryview, index: int) -> Canvas:
        """Decode one image. Its time, waiting for a thread included, is the stage `decode`.

        Raises:
            ServiceError: the image cannot be used; it carries the index.
        """
        with self._metrics.time_stage("decode"):
            try:
                return await self._submit(
                    self._decoders,
                    lambda: read_canvas(data, self._config, self._profile, limit_pixels=self._limit_pixels),
                )
            except ImageError as error:
                raise ServiceError(error.code, str(error), index=index) from error

    def close(self) -> None:
        """Drop what has not started, and wait for what has."""
        for executor in (self._decoders, self._side):
            executor.shutdown(wait=True, cancel_futures=True)

    @staticmethod
    async def _submit(executor: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
