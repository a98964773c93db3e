"""What the event loop must not do itself: decode images, parse bodies, render answers.

Images are decoded in processes (`service.decoder`), each with a thread that waits for it. Parsing and rendering have
threads of their own, so that an answer that is ready does not wait behind a queue of images. Invariant: there are never
more processes and threads than the settings say, work whose caller has gone never starts, and what has started ends:
no image holds its process for longer than the decode limit.
"""

import asyncio
import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from encoder.config import VisionConfig
from service.decode_process import Setup
from service.decoder import Decoder, Drawing
from service.errors import ServiceError
from service.metrics import Metrics
from service.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

# What runs on these holds the interpreter's lock nearly all the time: more of them would add nothing.
_NUM_SIDE_THREADS = 2


class DecodePool:
    """Processes and threads for one front end. A context manager; leaving it ends them.

    The kernel ends the processes when the thread that made the pool ends.
    """

    def __init__(self, settings: Settings, config: VisionConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        setup = Setup(config, settings.image_profile, settings.limit_image_pixels)
        with contextlib.ExitStack() as undo:
            self._decoders: list[Decoder] = []
            for _ in range(settings.num_decode_processes):
                self._decoders.append(Decoder(setup, timeout_s=settings.decode_timeout_s))
                undo.callback(self._decoders[-1].close)
            undo.pop_all()
        self._idle: queue.SimpleQueue[Decoder] = queue.SimpleQueue()
        for decoder in self._decoders:
            self._idle.put(decoder)
        self._waiting = ThreadPoolExecutor(len(self._decoders), thread_name_prefix="decode")
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

    async def draw(self, data: bytes | memoryview, index: int) -> Drawing:
        """Decode one image. Its time, waiting for a process included, is the stage `decode`.

        Raises:
            ServiceError: the image cannot be used, takes longer than the limit or crashes its decoder, or the pool is
                closed meanwhile; it carries the index.
        """
        with self._metrics.time_stage("decode"):
            try:
                return await self._submit(self._waiting, lambda: self._draw(data))
            except ServiceError as error:
                raise error.at(index) from error

    def close(self) -> None:
        """End the processes, whatever they are at, and wait for what runs on the threads."""
        for decoder in self._decoders:
            decoder.stop()
        self._waiting.shutdown()
        for decoder in self._decoders:
            decoder.close()
        self._side.shutdown(cancel_futures=True)

    def _draw(self, data: bytes | memoryview) -> Drawing:
        decoder = self._idle.get_nowait()  # there is one for every thread
        try:
            return decoder.draw(data)
        finally:
            self._idle.put(decoder)

    @staticmethod
    async def _submit(executor: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
