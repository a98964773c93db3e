"""One to four real gloo ranks under torchrun: the same rows as one tower gives alone, in the right order."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from worker_group import Group, Pixels, random_canvases

from encoder.checkpoint import open_checkpoint
from encoder.layout import Layout, num_layout_rows
from encoder.tower import Tower
from encoder.weights import load_weights

MIXED = [(3, 3), (13, 8), (1, 1), (9, 6), (5, 20), (40, 2), (28, 28)]


@pytest.fixture(scope="module")
def tower(goldens: Path) -> Tower:
    checkpoint = open_checkpoint(str(goldens / "tiny-deepseek_v4"))
    return Tower(checkpoint.config, load_weights(checkpoint), device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def group(request: pytest.FixtureRequest, start_group: Callable[..., Group]) -> Group:
    group = start_group(request.param)
    assert [info.rank for info in group.hello().ranks] == list(range(request.param))
    return group


def alone(tower: Tower, canvas: Pixels, layout: Layout) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = tower.encode([torch.from_numpy(canvas)], [layout]).numpy()
    return rows


def assert_same_rows(
    tower: Tower, canvases: Sequence[Pixels], answer: Sequence[NDArray[np.float32]], layout: Layout
) -> None:
    assert len(answer) == len(canvases)
    for canvas, rows in zip(canvases, answer, strict=True):
        expected = alone(tower, canvas, layout)
        assert rows.shape == expected.shape
        assert np.linalg.norm(rows - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("layout", ["rows", "v4", "v41"])
def test_mixed_grids_give_the_single_rank_rows_in_order(group: Group, tower: Tower, layout: Layout) -> None:
    canvases = random_canvases(MIXED)
    answer, rows = group.encode(canvases, layout)
    assert_same_rows(tower, canvases, rows, layout)
    assert sum(answer.rank_patches) == sum(h * w for h, w in MIXED)


def test_one_image_leaves_the_other_ranks_without_work(group: Group, tower: Tower) -> None:
    canvases = random_canvases([(6, 7)])
    answer, rows = group.encode(canvases)
    assert_same_rows(tower, canvases, rows, "rows")
    assert sorted(answer.rank_patches)[:-1] == [0] * (len(answer.rank_patches) - 1)


def test_duplicates_are_answered_one_by_one(group: Group, tower: Tower) -> None:
    canvas, other = random_canvases([(5, 5), (5, 5)])
    canvases = [canvas, other, canvas, canvas]
    _, rows = group.encode(canvases)
    assert_same_rows(tower, canvases, rows, "rows")


def test_forty_images_come_back_in_order(group: Group, tower: Tower) -> None:
    rng = np.random.default_rng(3)
    canvases = random_canvases([(int(rng.integers(1, 20)), int(rng.integers(1, 20))) for _ in range(40)])
    _, rows = group.encode(canvases)
    assert_same_rows(tower, canvases, rows, "rows")


def test_nothing_is_left_over_from_the_batch_before(group: Group, tower: Tower) -> None:
    large = random_canvases([(30, 30)] * 5, seed=1)
    small = random_canvases([(2, 2), (1, 3)], seed=2)
    for canvases in (large, small, large[:1], small):
        _, rows = group.encode(canvases)
        assert_same_rows(tower, canvases, rows, "rows")


def test_bfloat16_rows_are_the_float32_rows_rounded(group: Group, tower: Tower) -> None:
    (canvas,) = random_canvases([(9, 9)])
    answer, buffers = group.encode_raw([canvas], "rows", "bfloat16")
    assert buffers[0].nbytes == num_layout_rows("rows", (3, 3)) * answer.images[0].width * 2
    rows = torch.frombuffer(buffers[0], dtype=torch.bfloat16).float().view(9, -1).numpy()
    expected = alone(tower, canvas, "rows")
    assert np.linalg.norm(rows - expected) <= 2**-8 * np.linalg.norm(expected)


@pytest.mark.parametrize("group", [4], indirect=True)
def test_every_rank_has_a_heartbeat(group: Group) -> None:
    time.sleep(2)
    assert max(group.ping().silent_s) < 1.9, "as many seconds as have passed, if no heartbeat was seen"
