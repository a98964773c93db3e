"""What benchmarks.service measures: a ready server, the same tower in this process, and images for both.

Invariant: no image is sent twice but on purpose, so no cache knows one.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import httpx
import torch
from torch import Tensor

from benchmarks._progress import Steps
from benchmarks._server import Server
from benchmarks._stages import Stages
from encoder.attention import AttentionName
from encoder.checkpoint import open_checkpoint
from encoder.image import read_canvas
from encoder.tower import Tower, choose_dtype
from encoder.weights import load_weights
from service.bench import Load, LoadReport, run_load
from service.bench_images import MIXED_SIZES, Photos, Picture, Pictures, Size

_LIMIT_PIXELS = 100_000_000
_WARM_UP_SIZE: Size = (300, 300)


class Subject:
    """Both sides of the comparison. Loads are given without their address."""

    def __init__(self, url: str, tower: Tower, steps: Steps) -> None:
        self._url = url
        self._tower = tower
        self._photos: dict[tuple[Size, ...], Photos] = {}
        self._num_taken = 0
        self.steps = steps

    def fresh(self, sizes: Sequence[Size] = MIXED_SIZES, count: int = 0) -> Pictures:
        """Images of these sizes that nobody has seen, from the first size on; count, of those that will be sent.

        A load by time does not know it, and says later by `took`.
        """
        photos = self._photos.setdefault(tuple(sizes), Photos(sizes, seed=0))
        first = self._num_taken = -(-self._num_taken // len(sizes)) * len(sizes)
        self._num_taken += count
        return lambda index: photos(first + index)

    def took(self, count: int) -> None:
        """So many images were sent of those that were fresh."""
        self._num_taken += count

    def run(self, load: Load, pictures: Pictures, what: str) -> LoadReport:
        """Send the server a load."""
        return run_load(replace(load, url=self._url), pictures, on_progress=self.steps.watch(what))

    def encode_s(self, pictures: Sequence[Picture]) -> float:
        """Seconds that the tower by itself takes for these, decoding left out."""
        canvases = [self._canvas(picture) for picture in pictures]
        start = time.perf_counter()
        self._tower.encode(canvases, ["rows"] * len(canvases))
        return time.perf_counter() - start

    def stages(self) -> Stages:
        """What the server's stages have come to."""
        return Stages.of(self._url)

    def num_computed(self) -> int:
        """Images that the server has found in no cache and in nobody else's request."""
        text = httpx.get(f"{self._url}/metrics", trust_env=False).text
        return int(float(text.split('patchgrid_cache_lookups_total{result="computed"} ')[1].split()[0]))

    def warm_up(self) -> None:
        """Load the kernels of both sides."""
        pictures = self.fresh([_WARM_UP_SIZE], 1)
        self.run(Load("", clients=1, images=1), pictures, "warming up")
        self.encode_s([pictures(0)])

    def _canvas(self, picture: Picture) -> Tensor:
        canvas = read_canvas(picture.data, self._tower.config, "vllm", limit_pixels=_LIMIT_PIXELS)
        return torch.from_numpy(canvas.pixels)


@contextmanager
def start_subject(model: str, attention: Literal["auto"] | AttentionName, steps: Steps) -> Iterator[Subject]:
    """A server with this model on the CPU, and the same tower here, both warm."""
    steps.begin("starting")
    with Server(f"--model={model}", "--device=cpu", f"--attention={attention}") as server:
        checkpoint = open_checkpoint(model)
        device = torch.device("cpu")
        # Bound to the call, not to the server's life: its ranks have loaded by the time that this has.
        dtype = choose_dtype("auto", device)
        tower = Tower(checkpoint.config, load_weights(checkpoint), device=device, dtype=dtype, attention=attention)
        server.wait_for("/health/ready")
        subject = Subject(server.url, tower, steps)
        subject.warm_up()
        yield subject
