"""A rank with a device that does what it is given later, as a GPU does.

Run by torchrun in place of distributed.worker, as `--worker-module=queueing_worker`. Images of one plain colour each
keep the device busy, or the rank itself; fill the memory once, break the device while it runs, or cannot be queued.
TRACE_DIR is where each rank writes down what it does, and when; SLEEP_S, if set, how long the rank itself is kept busy.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from distributed import worker
from distributed.batch import BatchRunner, OpenBatch
from distributed.link import Buffer
from distributed.messages import Assignment, Encoded
from distributed.moment import Moment, SideStream
from encoder.layout import Layout
from encoder.tower import Tower

BUSY_S = {(0, 100, 0): 0.3, (0, 200, 0): 4.0}
SLEEPS = (100, 100, 0)
SLEEP_S = float(os.environ.get("SLEEP_S", "1"))
FILLS = (0, 0, 100)
BREAKS = (200, 0, 0)
RAISES = (0, 0, 200)

_encode, _mark, _start, _finish = Tower.encode, Moment.__init__, BatchRunner.start, BatchRunner.finish


class Device:
    """Busy until some time, for all that it was given; once broken, every question to it raises."""

    busy_until = 0.0
    side = threading.local()
    was_full = False
    is_broken = False


def has_colour(canvases: Sequence[Tensor], colour: tuple[int, int, int]) -> bool:
    return any(bool((canvas == torch.tensor(colour, dtype=torch.uint8)).all()) for canvas in canvases)


def encode(self: Tower, canvases: Sequence[Tensor], layouts: Sequence[Layout]) -> Tensor:
    if has_colour(canvases, RAISES):
        raise RuntimeError("the host could not queue it")
    if has_colour(canvases, FILLS) and not Device.was_full:
        Device.was_full = True
        raise torch.OutOfMemoryError("CUDA out of memory")
    busy_s = sum(seconds for colour, seconds in BUSY_S.items() if has_colour(canvases, colour))
    Device.busy_until = max(Device.busy_until, time.monotonic()) + busy_s
    Device.is_broken |= has_colour(canvases, BREAKS)
    if has_colour(canvases, SLEEPS):
        time.sleep(SLEEP_S)
    rows = _encode(self, canvases, layouts)
    trace("encode")
    return rows


def mark(self: Moment, device: torch.device) -> None:
    _mark(self, device)
    self.comes_at = getattr(Device.side, "busy_until", Device.busy_until)  # type: ignore[attr-defined]


@contextmanager
def after(self: SideStream, moment: Moment) -> Iterator[None]:
    Device.side.busy_until = moment.comes_at  # type: ignore[attr-defined]
    yield
    del Device.side.busy_until


def wait(self: Moment) -> None:
    while time.monotonic() < self.comes_at:  # type: ignore[attr-defined]
        time.sleep(0.01)
    if Device.is_broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def start(self: BatchRunner, assignment: Assignment, canvases: Sequence[Tensor] | None, arrived_at: float) -> OpenBatch:
    trace("start")
    return _start(self, assignment, canvases, arrived_at)


def finish(self: BatchRunner, opened: OpenBatch) -> tuple[Encoded, list[Buffer]] | None:
    answer = _finish(self, opened)
    trace("finish")
    return answer


def trace(what: str) -> None:
    with Path(os.environ["TRACE_DIR"], f"rank-{os.environ['RANK']}").open("a") as file:
        file.write(f"{what} {time.monotonic()}\n")


if __name__ == "__main__":
    Tower.encode = encode  # type: ignore[method-assign]
    Moment.__init__ = mark  # type: ignore[method-assign]
    Moment.wait = wait  # type: ignore[method-assign]
    SideStream.after = after  # type: ignore[method-assign]
    BatchRunner.start = start  # type: ignore[method-assign]
    BatchRunner.finish = finish  # type: ignore[method-assign]
    sys.exit(worker.main())
