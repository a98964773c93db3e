"""From an image's size to its grids and what it costs the language model, without a pixel.

Invariant: a plan equals what the released processors compute, to the last patch. Sizes are integers; the scale between
them is found in double precision in the released order of operations, since one rounding can move a whole row.
"""

import math
from dataclasses import dataclass

from encoder.config import ModelType, VisionConfig

Grid = tuple[int, int]
"""(rows, columns)."""

Size = tuple[int, int]
"""(width, height) in pixels."""

MAX_SIDE = 2**31 - 1

# V4's language model may put up to this many pads before an image, depending on where it stands in the prompt.
_V4_LEADING_PADS = 3


class PlanError(ValueError):
    """A size that no image has."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one image is cut: its size, the canvas it is drawn on, the grids over that canvas."""

    image_size: Size
    resized: Size
    vit_grid: Grid
    llm_grid: Grid
    num_tokens: int

    @property
    def num_patches(self) -> int:
        """Rows that go into the ViT."""
        return self.vit_grid[0] * self.vit_grid[1]

    @property
    def num_rows(self) -> int:
        """Rows that leave the aligner."""
        return self.llm_grid[0] * self.llm_grid[1]


def plan(config: VisionConfig, width: int, height: int) -> Plan:
    """Plan an image of width x height pixels.

    The tokens are those of the whole image block: rows, newlines, start and end, and V4's pads but the leading ones,
    which depend on the prompt.

    Raises:
        PlanError: a side is less than 1 or more than MAX_SIDE pixels.
    """
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise PlanError(f"an image's sides are between 1 and {MAX_SIDE} pixels, not {width} x {height}")
    resized = _resize(config, width, height)
    cols, rows = (side // config.patch_size for side in resized)
    llm_grid = merge_grid(config, resized)
    return Plan(
        image_size=(width, height),
        resized=resized,
        vit_grid=(rows, cols),
        llm_grid=llm_grid,
        num_tokens=count_tokens(config.model_type, llm_grid),
    )


def count_tokens(model_type: ModelType, llm_grid: Grid) -> int:
    """Tokens of one image block: each row ends in a newline, and a start and an end enclose all.

    V4 lays rows out in pairs: an odd last row is paired with a row of pads, and an odd number of column pairs is
    followed by two pads.
    """
    rows, cols = llm_grid
    row_tokens = cols + 1
    tokens = rows * row_tokens + 2
    if model_type == "deepseek_v4":
        row_pairs = -(-rows // 2)
        tokens += (rows % 2) * row_tokens + 2 * (row_pairs * row_tokens % 2)
    return tokens


def _resize(config: VisionConfig, image_width: int, image_height: int) -> Size:
    width: int | float = image_width
    height = image_height
    if config.max_aspect_ratio is not None:
        width = min(width, height * config.max_aspect_ratio)
    if width * height < config.min_pixels:
        scale = (config.min_pixels / (width * height)) ** 0.5
        width, height = int(width * scale), int(height * scale)
    patch = config.patch_size
    resized = (math.ceil(width / patch) * patch, math.ceil(height / patch) * patch)

    limit = config.max_image_tokens
    if config.model_type == "deepseek_v4":
        limit -= _V4_LEADING_PADS
    # V4.1 always fits at the first try. V4's two closing pads are not foreseen by _fit: one or two less make room.
    for budget in range(limit, limit - 3, -1):
        if count_tokens(config.model_type, merge_grid(config, resized)) <= limit:
            break
        resized = _fit(config, width, height, budget)
    assert count_tokens(config.model_type, merge_grid(config, resized)) <= limit
    return resized


def merge_grid(config: VisionConfig, resized: Size) -> Grid:
    """The LLM grid, (rows, columns), of a canvas of this size, (width, height): blocks that stick out count whole."""
    cell = config.patch_size * config.merge_ratio
    width, height = resized
    return -(-height // cell), -(-width // cell)


def _fit(config: VisionConfig, width: int | float, height: int, budget: int) -> Size:
    """The largest canvas of about this aspect ratio with rows * (columns + 1) + 2 <= budget in language-model cells."""
    row_step = 2 if config.model_type == "deepseek_v4" else 1
    patch = config.patch_size
    cell = patch * config.merge_ratio

    # rows = aspect * cols makes the budget a quadratic in cols.
    aspect = height / width
    cols_fit = math.sqrt((budget - 2) / aspect + 0.25) - 0.5
    rows_fit = cols_fit * aspect
    if cols_fit < 1:
        rows = (budget - 2) // 2
        return cell, (rows - rows % row_step) * cell
    if rows_fit < row_step:
        return ((budget - 2) // row_step - 1) * cell, row_step * cell
    cols, rows = math.floor(cols_fit), math.floor(rows_fit)
    rows -= rows % row_step
    scale = min(cols * cell / width, rows * cell / height)
    return math.floor(width * scale / patch) * patch, math.floor(height * scale / patch) * patch
