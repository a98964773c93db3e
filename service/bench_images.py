"""What a load sends: JPEGs of many sizes, drawn from a seed, as many as are asked for and all different.

Invariant: the image of a number is the same bytes whenever it is asked for.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from PIL import Image

Size: TypeAlias = tuple[int, int]

# What a model is asked about: photographs and screens, wide and tall, large and small. Width x height.
MIXED_SIZES: tuple[Size, ...] = (
    (1920, 1080),
    (640, 480),
    (500, 333),
    (1024, 1024),
    (300, 300),
    (1080, 1920),
    (1280, 720),
    (1700, 2200),
)

MIXES: Mapping[str, tuple[Size, ...]] = {
    "mixed": MIXED_SIZES,
    "small": ((300, 300), (500, 333), (224, 224), (300, 300)),
    "screens": ((1920, 1080), (1280, 720), (1080, 1920)),
    "thumbnails": (*((300, 300),) * 9, (1920, 1080)),
}
"""What the benchmarks send, in this order and over again: of thumbnails, one in ten is a screen."""

_QUANTIZERS = 32
_VARIED = 4


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded image, and its size in pixels."""

    data: bytes
    media_type: str
    size: Size


Pictures: TypeAlias = Callable[[int], Picture]


class Photos:
    """Endless JPEGs of these sizes, all different: as pixels, not only as files.

    One photograph is drawn for each size. The number of an image is written into the quantisers of its low frequencies,
    which costs nothing and changes every block. `same` gives the first image of each size over and over.
    """

    def __init__(self, sizes: Sequence[Size], *, seed: int, same: bool = False) -> None:
        self._sizes = tuple(sizes)
        self._same = same
        self._drawn = [_draw(size, np.random.default_rng([seed, index])) for index, size in enumerate(self._sizes)]

    def __call__(self, index: int) -> Picture:
        """The image of this number."""
        which = index % len(self._sizes)
        number = 0 if self._same else index // len(self._sizes)
        return Picture(_vary(self._drawn[which], number), "image/jpeg", self._sizes[which])


def _draw(size: Size, generator: np.random.Generator) -> bytes:
    """A JPEG that costs about what a photograph of its size does: smooth shapes and some grain."""
    width, height = size
    shapes = Image.fromarray(generator.integers(0, 256, (max(2, height // 40), max(2, width // 40), 3), dtype=np.uint8))
    smooth = np.asarray(shapes.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    grain = generator.integers(-8, 9, (height, width, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _vary(jpeg: bytes, number: int) -> bytes:
    """The JPEG with a number in the quantisers of its lowest frequencies, the mean aside: other pixels everywhere."""
    table = jpeg.index(b"\xff\xdb") + 5  # marker, length, precision and destination
    digits = bytes(1 + number // _QUANTIZERS**place % _QUANTIZERS for place in range(_VARIED))
    return jpeg[: table + 1] + digits + jpeg[table + 1 + _VARIED :]
