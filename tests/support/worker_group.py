"""A real worker group under a real torchrun, driven over the link as the front end drives it."""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq.asyncio
from numpy.typing import NDArray

from distributed.launcher import LaunchOptions, WorkerGroup
from distributed.link import FrontLink
from distributed.messages import Encode, Encoded, Failure, Hello, ImageSpec, Ping, Pong, RowDtype, Stop
from encoder.layout import Layout

Pixels = NDArray[np.uint8]
T = TypeVar("T")


class Group:
    """Blocking calls on one life of a worker group."""

    def __init__(self, runner: asyncio.Runner, options: LaunchOptions, run_dir: Path) -> None:
        self._runner = runner
        self._batch_ids = itertools.count(1)
        self._context = zmq.asyncio.Context()

        async def start() -> None:
            self.link = FrontLink(self._context, run_dir, epoch=1)
            self.process = await WorkerGroup.start(options, run_dir, epoch=1)

        runner.run(start())

    def hello(self) -> Hello:
        message, _ = self._run(self.link.receive())
        assert isinstance(message, Hello)
        return message

    def encode(self, canvases: Sequence[Pixels], layout: Layout = "rows") -> tuple[Encoded, list[NDArray[np.float32]]]:
        answer, buffers = self.encode_raw(canvases, layout, "float32")
        return answer, [
            np.frombuffer(buffer, np.float32).reshape(spec.num_rows, spec.width)
            for spec, buffer in zip(answer.images, buffers, strict=True)
        ]

    def encode_raw(
        self, canvases: Sequence[Pixels], layout: Layout, dtype: RowDtype
    ) -> tuple[Encoded, list[memoryview]]:
        images = tuple(ImageSpec(canvas.shape[0], canvas.shape[1], layout, dtype) for canvas in canvases)
        batch = Encode(next(self._batch_ids), images)
        self._run(self.link.send(batch, [canvas.data for canvas in canvases]))
        answer, buffers = self._run(self.link.receive())
        assert isinstance(answer, Encoded)
        assert answer.batch_id == batch.batch_id
        return answer, buffers

    def ping(self) -> Pong:
        self._run(self.link.send(Ping(nonce=7)))
        message, _ = self._run(self.link.receive())
        assert isinstance(message, Pong)
        return message

    def stop(self) -> int:
        self._run(self.link.send(Stop()))
        return self.wait()

    def wait(self) -> int:
        return self._run(self.process.wait())

    def failure(self) -> Failure | None:
        return self.process.failure()

    def close(self) -> None:
        self._run(self.process.kill())
        self.link.close()
        self._context.destroy(linger=0)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(call, timeout=120))


def random_canvases(grids: Sequence[tuple[int, int]], seed: int = 0) -> list[Pixels]:
    """Noise canvases of these patch grids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (14 * rows, 14 * cols, 3), dtype=np.uint8) for rows, cols in grids]
