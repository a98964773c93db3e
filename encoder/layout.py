"""In which order an image's aligner rows leave, and what stands between them.

Invariant: every aligner row appears exactly once in every layout, and the number of rows is known from the grid alone.
"""

from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from encoder.geometry import Grid

Layout = Literal["rows", "v4", "v41"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_Number = TypeVar("_Number", np.int8, np.int64)

# Learned vectors, as offsets behind an image's own aligner rows.
START, NEWLINE, END = 0, 1, 2

_V4_START, _V4_PAD, _V4_IMAGE, _V4_NEWLINE, _V4_END = range(5)
_V41_START, _V41_IMAGE, _V41_NEWLINE, _V41_END = range(4)


def num_layout_rows(layout: Layout, llm_grid: Grid) -> int:
    """Rows that an image of this grid (rows, columns) has in the layout."""
    rows, cols = llm_grid
    if layout == "v41":
        return rows * (cols + 1) + 2
    return rows * cols


def layout_index(layout: Layout, llm_grid: Grid) -> NDArray[np.int64]:
    """Where each row of the layout comes from: int64, (num_layout_rows,).

    Indexes the image's rows * cols aligner rows in reading order, followed by the learned start, newline and end
    vectors at rows * cols + START, + NEWLINE and + END; only `v41` refers to those.
    """
    rows, cols = llm_grid
    reading_order = np.arange(rows * cols, dtype=np.int64).reshape(rows, cols)
    if layout == "rows":
        return reading_order.reshape(-1)
    if layout == "v4":
        pairs = np.pad(reading_order, ((0, rows % 2), (0, 0)), constant_values=-1)
        order: NDArray[np.int64] = _interleave_row_pairs(pairs)
        return order[order >= 0]
    lines = np.pad(reading_order, ((0, 0), (0, 1)), constant_values=rows * cols + NEWLINE)
    return np.concatenate(([rows * cols + START], lines.reshape(-1), [rows * cols + END]))


def token_types(layout: Literal["v4", "v41"], llm_grid: Grid) -> NDArray[np.int8]:
    """The kind of every token of an image block, V4's leading pads left out: int8, (count_tokens,).

    v4: START 0, PAD 1, IMAGE 2, NEW_LINE 3, END 4. v41: START 0, IMAGE 1, NEW_LINE 2, END 3.
    """
    rows, cols = llm_grid
    if layout == "v41":
        lines = np.full((rows, cols + 1), _V41_IMAGE, np.int8)
        lines[:, cols] = _V41_NEWLINE
        return np.pad(lines.reshape(-1), 1, constant_values=(_V41_START, _V41_END))
    lines = np.full((rows + rows % 2, cols + 1), _V4_PAD, np.int8)
    lines[:rows, :cols] = _V4_IMAGE
    lines[:rows, cols] = _V4_NEWLINE
    body = _interleave_row_pairs(lines)
    body = np.pad(body, (0, 2 * (body.size // 2 % 2)), constant_values=_V4_PAD)
    return np.pad(body, 1, constant_values=(_V4_START, _V4_END))


def _interleave_row_pairs(table: NDArray[_Number]) -> NDArray[_Number]:
    """Flatten an even number of rows two at a time, column by column: upper, lower, upper, lower."""
    rows, cols = table.shape
    return table.reshape(rows // 2, 2, cols).swapaxes(1, 2).reshape(-1)
