"""The sizes of padded forwards: which there are for both models, and which one a pack meets."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41, DEMO, VisionConfig
from encoder.geometry import Grid, plan
from encoder.ladder import Rung, find_rung, ladder
from encoder.packing import pack

CPU = torch.device("cpu")
CONFIGS = [DEEPSEEK_V4, DEEPSEEK_V41]
RUNGS = (
    Rung(patches=24, images=2, rows=6, longest=24),
    Rung(patches=60, images=3, rows=12, longest=60),
    Rung(patches=130, images=5, rows=24, longest=104),
)


@pytest.mark.parametrize("config", CONFIGS)
@given(top=st.integers(1, 20_000))
def test_rungs_grow_to_exactly_the_top_by_an_eighth_or_a_tile(config: VisionConfig, top: int) -> None:
    rungs = ladder(config, top)
    assert rungs[-1].patches == top
    for lower, upper in pairwise(rungs):
        assert 0 < upper.patches - lower.patches <= max(128, lower.patches // 8)
        assert upper.images >= lower.images
        assert upper.rows >= lower.rows
        assert upper.longest >= lower.longest


def test_top_of_nothing_makes_no_rungs() -> None:
    assert ladder(DEEPSEEK_V4, 0) == ()


@pytest.mark.parametrize("config", CONFIGS)
@given(width=st.integers(1, 6000), aspect=st.floats(0.2, 5.0))
def test_image_of_usual_shape_has_a_rung_with_little_padding(config: VisionConfig, width: int, aspect: float) -> None:
    image = plan(config, width, max(1, round(width * aspect)))
    rung = find_rung(ladder(config, 9216), pack([image.vit_grid], config, CPU))
    assert rung is not None
    assert image.num_patches <= rung.patches <= image.num_patches + max(128, image.num_patches // 8)


@pytest.mark.parametrize(
    ("grids", "patches"),
    [
        ([(4, 6)], 24),
        ([(5, 5)], 60),
        ([(6, 10)], 60),
        ([(8, 13), (2, 13)], 130),
        ([(5, 13), (6, 11)], None),
        ([(1, 1)] * 2, 24),
        ([(1, 1)] * 3, None),
        ([(1, 18)], 24),
        ([(1, 19)], None),
        ([(7, 15)], None),
        ([], None),
    ],
    ids=[
        "just fits",
        "one patch too many",
        "just fits the second",
        "just fits the last",
        "too many patches",
        "as many images as slots",
        "too many images",
        "as many rows as slots",
        "too many rows",
        "too large an image",
        "nothing",
    ],
)
def test_pack_meets_the_next_rung_with_enough_patches_or_none(grids: list[Grid], patches: int | None) -> None:
    rung = find_rung(RUNGS, pack(grids, DEMO, CPU))
    assert (rung.patches if rung else None) == patches
