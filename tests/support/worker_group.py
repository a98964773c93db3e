"""A real worker group under a real torchrun, driven over the link as the front end drives it."""

import asyncio
import itertools
from collections import deque
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
        self._unanswered: deque[int] = deque()
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
        (answer,) = self.encode_all([canvases], layout)
        return answer

    def encode_raw(
        self, canvases: Sequence[Pixels], layout: Layout, dtype: RowDtype
    ) -> tuple[Encoded, list[memoryview]]:
        self.send(canvases, layout, dtype)
        return self.receive()

    def encode_all(
        self, batches: Sequence[Sequence[Pixels]], layout: Layout = "rows", *, num_answers: int | None = None
    ) -> list[tuple[Encoded, list[NDArray[np.float32]]]]:
        """Send several batches before any is answered, and give the first answers, or all."""
        for canvases in batches:
            self.send(canvases, layout, "float32")
        return [self.receive_rows() for _ in batches[:num_answers]]

    def send(self, canvases: Sequence[Pixels], layout: Layout, dtype: RowDtype) -> None:
        images = tuple(ImageSpec(canvas.shape[0], canvas.shape[1], layout, dtype) for canvas in canvases)
        batch = Encode(next(self._batch_ids), images)
        self._unanswered.append(batch.batch_id)
        self._run(self.link.send(batch, [canvas.data for canvas in canvases]))

    def receive(self) -> tuple[Encoded, list[memoryview]]:
        """The answer to the oldest batch that has none."""
        answer, buffers = self._run(self.link.receive())
        assert isinstance(answer, Encoded)
        assert answer.batch_id == self._unanswered.popleft()
        return answer, buffers

    def receive_rows(self) -> tuple[Encoded, list[NDArray[np.float32]]]:
        """The same, of rows that were asked for in float32."""
        answer, buffers = self.receive()
        return answer, [
            np.frombuffer(buffer, np.float32).reshape(spec.num_rows, spec.width)
            for spec, buffer in zip(answer.images, buffers, strict=True)
        ]

    def has_more(self) -> bool:
        """Whether another message comes within half a second."""

        async def receive() -> bool:
            try:
                await asyncio.wait_for(self.link.receive(), timeout=0.5)
            except TimeoutError:
                return False
            return True

        return self._run(receive())

    def ping(self) -> Pong:
        self._run(self.link.send(Ping(nonce=7)))
        message, _ = self._run(self.link.receive())
        assert isinstance(message, Pong)
        return message

    def stop(self) -> int:
        self.send_stop()
        return self.wait()

    def send_stop(self) -> None:
        self._run(self.link.send(Stop()))

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
