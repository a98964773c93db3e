"""Layouts against the released ones, and that no row is lost or doubled."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import ModelType
from encoder.geometry import Grid, count_tokens
from encoder.layout import END, LAYOUTS, NEWLINE, START, Layout, layout_index, num_layout_rows, token_types

MODEL_TYPES: dict[Literal["v4", "v41"], ModelType] = {"v4": "deepseek_v4", "v41": "deepseek_v41"}

grids = st.tuples(st.integers(1, 60), st.integers(1, 60)) | st.sampled_from([(1, 1021), (511, 1), (2, 189)])


def golden_layouts(goldens: Path) -> list[tuple[Grid, dict[str, list[int]]]]:
    entries = json.loads((goldens / "geometry.json").read_text())["layouts"]
    assert len(entries) == 24
    return [((entry["llm_grid"][0], entry["llm_grid"][1]), entry) for entry in entries]


def test_v4_order_is_the_released_one(goldens: Path) -> None:
    for grid, golden in golden_layouts(goldens):
        assert layout_index("v4", grid).tolist() == golden["v4_perm"], grid


def test_v4_types_are_the_released_ones(goldens: Path) -> None:
    for grid, golden in golden_layouts(goldens):
        assert token_types("v4", grid).tolist() == golden["v4_types"], grid


def test_v41_types_are_the_released_ones(goldens: Path) -> None:
    for grid, golden in golden_layouts(goldens):
        assert token_types("v41", grid).tolist() == golden["v41_types"], grid


def test_rows_are_in_reading_order() -> None:
    assert layout_index("rows", (2, 3)).tolist() == [0, 1, 2, 3, 4, 5]


def test_v4_interleaves_pairs_of_rows_and_leaves_the_odd_one_last() -> None:
    assert layout_index("v4", (3, 2)).tolist() == [0, 2, 1, 3, 4, 5]


def test_v41_ends_every_row_with_a_newline_between_start_and_end() -> None:
    start, newline, end = 6 + START, 6 + NEWLINE, 6 + END
    assert layout_index("v41", (2, 3)).tolist() == [start, 0, 1, 2, newline, 3, 4, 5, newline, end]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(grid=grids)
def test_every_aligner_row_appears_once(layout: Layout, grid: Grid) -> None:
    num_rows = grid[0] * grid[1]
    index = layout_index(layout, grid)
    assert index.dtype == np.int64
    assert np.array_equal(np.sort(index[index < num_rows]), np.arange(num_rows))


@pytest.mark.parametrize("layout", LAYOUTS)
@given(grid=grids)
def test_row_count_is_known_from_the_grid(layout: Layout, grid: Grid) -> None:
    assert layout_index(layout, grid).shape == (num_layout_rows(layout, grid),)


@pytest.mark.parametrize("layout", ["v4", "v41"])
@given(grid=grids)
def test_one_type_per_token_of_the_plan(layout: Literal["v4", "v41"], grid: Grid) -> None:
    types = token_types(layout, grid)
    assert types.dtype == np.int8
    assert types.shape == (count_tokens(MODEL_TYPES[layout], grid),)


@given(grid=grids)
def test_v4_image_tokens_and_newlines_match_the_grid(grid: Grid) -> None:
    rows, cols = grid
    counts = np.bincount(token_types("v4", grid), minlength=5)
    assert counts[[0, 2, 3, 4]].tolist() == [1, rows * cols, rows, 1]


@given(grid=grids)
def test_v41_layout_and_types_name_the_same_tokens(grid: Grid) -> None:
    """Start, image, newline and end stand where the types say, so the rows can be written over the block as it is."""
    num_rows = grid[0] * grid[1]
    index = layout_index("v41", grid)
    kinds = np.select([index == num_rows + START, index < num_rows, index == num_rows + NEWLINE], [0, 1, 2], default=3)
    assert np.array_equal(kinds, token_types("v41", grid))
