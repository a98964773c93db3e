# ruff: noqa: N815 (shape suffixes of fields)
"""Images of different grids as one sequence of rows: where each begins, its positions, and which rows merge.

Invariant: everything here follows from the grids alone, so an image has the same numbers in a pack of one and in a pack
of many, and every rank can compute the same pack.

Shapes: N rows of the pack (one per patch), M aligner rows, K = merge_ratio^2 patches of one block, R half of a head's
features, P values of a patch, HWC a canvas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from encoder.config import VisionConfig
from encoder.geometry import Grid
from encoder.upload import upload

# Tables kept per cache: at most 2.4 MB each, for the largest image that V4.1 takes.
_NUM_CACHED_GRIDS = 64


@dataclass(frozen=True, slots=True)
class Pack:
    """What the networks need to know about the images of one forward. Tensors are on the device.

    cu_seqlens: (images + 1,) int32, where each image's rows begin, and the end. lengths: rows of each, on the host.
    cos_NR, sin_NR: float32 rotation of each row. merge_index_MK: int64, the rows that one aligner row is made of, in
    (dy, dx) order; merge_mask_MK: False where a block sticks out of its image, and the index is that of a row within.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    max_seqlen: int
    cos_NR: Tensor
    sin_NR: Tensor
    merge_index_MK: Tensor
    merge_mask_MK: Tensor


def pack(grids: Sequence[Grid], config: VisionConfig, device: torch.device) -> Pack:
    """Lay images with these patch grids (rows, columns) one behind the other. No grids make an empty pack."""
    lengths = tuple(rows * cols for rows, cols in grids)
    starts = np.cumsum((0, *lengths))
    # No image is packed like one without patches: all shapes follow.
    tables = [_rope_tables(grid, config.head_dim, config.rope_theta, device) for grid in grids or [(0, 0)]]
    merges = [_merge_tables(grid, config.merge_ratio, device) for grid in grids or [(0, 0)]]
    first_rows_M = np.repeat(starts[: len(merges)], [len(index_MK) for index_MK, _ in merges])
    first_rows_M1 = upload(torch.from_numpy(first_rows_M), device).unsqueeze(1)
    return Pack(
        cu_seqlens=upload(torch.from_numpy(starts.astype(np.int32)), device),
        lengths=lengths,
        max_seqlen=max(lengths, default=0),
        cos_NR=torch.cat([cos_NR for cos_NR, _ in tables]),
        sin_NR=torch.cat([sin_NR for _, sin_NR in tables]),
        merge_index_MK=torch.cat([index_MK for index_MK, _ in merges]).add_(first_rows_M1),
        merge_mask_MK=torch.cat([mask_MK for _, mask_MK in merges]),
    )


def split_packs(counts: Sequence[int], max_patches: int) -> list[range]:
    """Cut images with these patch counts, in order, into forwards of at most max_patches.

    An image with more patches than that is a forward of its own.
    """
    packs: list[range] = []
    start = load = 0
    for stop, count in enumerate(counts):
        if stop > start and load + count > max_patches:
            packs.append(range(start, stop))
            start, load = stop, 0
        load += count
    if start < len(counts):
        packs.append(range(start, len(counts)))
    return packs


def patchify(canvas_HWC: Tensor, patch_size: int) -> Tensor:
    """Cut a canvas into patches in reading order: (N, P), each in (channel, y, x) order, of the canvas's type."""
    height, width, channels = canvas_HWC.shape
    rows, cols = height // patch_size, width // patch_size
    tiles = canvas_HWC.reshape(rows, patch_size, cols, patch_size, channels)
    return tiles.permute(0, 2, 4, 1, 3).reshape(rows * cols, channels * patch_size**2)


def normalise(patches_NP: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring uint8 pixels to [-1, 1] as the models were trained: float32 arithmetic, rounded to bfloat16, then dtype.

    A pixel has 256 values, so this is a look-up in a table made on the CPU: the same bits on every device, where CUDA's
    division by a constant, a multiplication, would differ.
    """
    values = _pixel_values(dtype, patches_NP.device)
    return values.index_select(0, patches_NP.flatten().int()).view(patches_NP.shape)


@lru_cache(maxsize=8)
def _pixel_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    unit = torch.arange(256, dtype=torch.float32) / 255
    return upload(((unit - 0.5) / 0.5).to(torch.bfloat16).to(dtype), device)


@lru_cache(maxsize=_NUM_CACHED_GRIDS)
def _rope_tables(grid: Grid, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos_NR and sin_NR: the first half of the R angles turns with the row, the second with the column."""
    rows, cols = grid
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
    frequencies = 1.0 / theta**exponents
    row_angles = torch.outer(torch.arange(rows, dtype=torch.float32), frequencies)
    col_angles = torch.outer(torch.arange(cols, dtype=torch.float32), frequencies)
    shape = (rows, cols, head_dim // 4)
    angles_NR = torch.cat([row_angles[:, None].expand(shape), col_angles[None].expand(shape)], dim=-1).flatten(0, 1)
    return upload(angles_NR.cos(), device), upload(angles_NR.sin(), device)


@lru_cache(maxsize=_NUM_CACHED_GRIDS)
def _merge_tables(grid: Grid, ratio: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """merge_index_MK and merge_mask_MK of one image, its first row being row 0."""
    rows, cols = grid
    y = np.arange(-(-rows // ratio) * ratio).reshape(-1, 1, ratio, 1)
    x = np.arange(-(-cols // ratio) * ratio).reshape(1, -1, 1, ratio)
    index = np.minimum(y, rows - 1) * cols + np.minimum(x, cols - 1)
    mask = (y < rows) & (x < cols)
    index_MK, mask_MK = (upload(torch.from_numpy(table.reshape(-1, ratio**2)), device) for table in (index, mask))
    return index_MK, mask_MK
