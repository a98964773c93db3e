"""The sizes of forward that are worth a graph each.

Invariant: which rung a pack meets follows from its grids alone, so an image alone always meets the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from encoder.config import VisionConfig
from encoder.packing import Pack

# Rows of the kernels' tiles: padding of less than a tile costs nothing.
_TILE = 128
# Nine, but for images of which many blocks stick out. Spare rows are cheap: each costs about an eighth of a patch.
_PATCHES_PER_ROW = 6


@dataclass(frozen=True, slots=True)
class Rung:
    """A size of forward: patches, slots for images and for aligner rows, and the most patches of one image.

    What the images leave is padding, an image of its own that has a slot besides these.
    """

    patches: int
    images: int
    rows: int
    longest: int


def ladder(config: VisionConfig, top_patches: int) -> tuple[Rung, ...]:
    """Rungs from the smallest image of the model up to exactly top_patches; 0 makes none.

    They are an eighth apart, or a tile if that is more: over images of all sizes and shapes padding is 4 % of the
    patches for V4.1, and 10 % for V4. Image slots are no more than the smallest images that fill the rung, because an
    empty one still costs attention a launch of idle blocks.
    """
    smallest = max(1, config.min_pixels // config.patch_size**2)
    largest = config.max_image_tokens * config.merge_ratio**2
    sizes: list[int] = []
    size = -(-smallest // _TILE) * _TILE
    while size < top_patches:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(_TILE, octave // 8)
    if top_patches > 0:
        sizes.append(top_patches)
    return tuple(
        Rung(
            patches=size,
            images=max(1, size // smallest),
            rows=-(-size // _PATCHES_PER_ROW),
            longest=min(size, largest),
        )
        for size in sizes
    )


def find_rung(rungs: Sequence[Rung], pack: Pack) -> Rung | None:
    """The smallest rung with enough patches, if the pack fits it otherwise, too; none for a pack of nothing.

    A pack with many images or rows for its patches is not moved to a larger rung: padding stays a fraction of the work.
    """
    patches = sum(pack.lengths)
    rung = next((rung for rung in rungs if rung.patches >= patches > 0), None)
    if rung is None:
        return None
    fits = (
        len(pack.lengths) <= rung.images
        and len(pack.merge_index_MK) <= rung.rows
        and max(pack.max_seqlen, rung.patches - patches) <= rung.longest
    )
    return rung if fits else None
