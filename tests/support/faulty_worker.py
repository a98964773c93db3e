"""A rank whose tower fails on images of one plain colour each: what a kernel bug or a broken device would do.

Run by torchrun in place of distributed.worker, as `--worker-module=faulty_worker`. FAULTY_MAX_PATCHES, if set, is what
a forward may hold before memory runs out; FAULTY_RANK, if set, is the rank that is also given FAULTY_ARGUMENT.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from distributed.worker import main
from encoder.layout import Layout
from encoder.packing import Pack
from encoder.tower import Tower

CRASHES = (255, 0, 254)
RAISES = (254, 0, 255)
HANGS = (0, 255, 254)
IS_SLOW = (0, 254, 254)
NOT_FINITE = (0, 254, 255)

_encode, _forward = Tower.encode, Tower.forward


def is_plain(canvas: Tensor, colour: tuple[int, int, int]) -> bool:
    return bool((canvas == torch.tensor(colour, dtype=torch.uint8)).all())


def encode(self: Tower, canvases: Sequence[Tensor], layouts: Sequence[Layout]) -> Tensor:
    if any(is_plain(canvas, CRASHES) for canvas in canvases):
        os.kill(os.getpid(), signal.SIGKILL)
    if any(is_plain(canvas, RAISES) for canvas in canvases):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if any(is_plain(canvas, HANGS) for canvas in canvases):
        time.sleep(3600)
    if any(is_plain(canvas, IS_SLOW) for canvas in canvases):
        time.sleep(8)
    rows = _encode(self, canvases, layouts)
    if any(is_plain(canvas, NOT_FINITE) for canvas in canvases):
        assert len(canvases) == 1, "send it alone: which rows would be its own?"
        with torch.inference_mode():
            rows[-1, -1] = float("nan")
    return rows


def forward(self: Tower, patches: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
    if len(patches) > int(os.environ.get("FAULTY_MAX_PATCHES", "1000000000")):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return _forward(self, patches, pack)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ.get("FAULTY_RANK"):
        sys.argv.append(os.environ["FAULTY_ARGUMENT"])
    Tower.encode = encode  # type: ignore[method-assign]
    Tower.forward = forward  # type: ignore[method-assign]
    sys.exit(main())
