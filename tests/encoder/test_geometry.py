"""Plans against the released processors' own, and what holds for every size."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41, DEMO, MIN_IMAGE_TOKENS, ModelType, VisionConfig
from encoder.geometry import MAX_SIDE, PlanError, count_tokens, plan

CONFIGS: dict[ModelType, VisionConfig] = {"deepseek_v4": DEEPSEEK_V4, "deepseek_v41": DEEPSEEK_V41}

# The largest plan over all sizes, and the tokens that V4 keeps free for its leading pads.
MOST_PATCHES = {"deepseek_v4": 3312, "deepseek_v41": 9189}
RESERVED_TOKENS = {"deepseek_v4": 3, "deepseek_v41": 0}

sides = st.integers(1, 20_000) | st.floats(0, 4.3).map(lambda exponent: int(10**exponent))
configs = st.sampled_from(list(CONFIGS.values()))


@st.composite
def any_config(draw: st.DrawFn) -> VisionConfig:
    return VisionConfig(
        model_type=draw(st.sampled_from(["deepseek_v4", "deepseek_v41"])),
        num_layers=1,
        width=64,
        num_heads=4,
        mlp_width=64,
        patch_size=draw(st.integers(1, 32)),
        rope_theta=10000.0,
        merge_ratio=draw(st.integers(1, 5)),
        max_image_tokens=draw(st.integers(MIN_IMAGE_TOKENS, 2000)),
        min_pixels=draw(st.integers(0, 1_000_000)),
        max_aspect_ratio=draw(st.none() | st.integers(1, 20) | st.floats(1, 20)),
        out_width=64,
    )


@pytest.mark.parametrize("model", CONFIGS)
def test_all_golden_sizes_are_exact(goldens: Path, model: ModelType) -> None:
    entries = json.loads((goldens / "geometry.json").read_text())["geometry"]
    assert len(entries) == 240
    for entry in entries:
        planned = plan(CONFIGS[model], *entry["size"])
        assert planned.image_size == tuple(entry["size"])
        assert {
            "resized": list(planned.resized),
            "vit_grid": list(planned.vit_grid),
            "llm_grid": list(planned.llm_grid),
            "num_tokens": planned.num_tokens,
        } == entry[model], entry["size"]


@pytest.mark.parametrize("size", [(2982, 1479), (5607, 2820)])
def test_the_rounding_of_doubles_is_kept(size: tuple[int, int]) -> None:
    """In exact arithmetic one side of these canvases would be a patch longer."""
    assert plan(DEEPSEEK_V41, *size).resized == (1834, 910)


@pytest.mark.parametrize("side", [2000, 4000])
def test_square_images_cost_what_the_public_api_bills(side: int) -> None:
    assert plan(DEEPSEEK_V4, side, side).num_tokens == 346


def test_the_demo_plans_as_v4_does() -> None:
    assert plan(DEMO, 1920, 1080) == plan(DEEPSEEK_V4, 1920, 1080)


def test_counts_of_a_plan() -> None:
    planned = plan(DEEPSEEK_V4, 1920, 1080)
    assert planned.num_patches == planned.vit_grid[0] * planned.vit_grid[1]
    assert planned.num_rows == planned.llm_grid[0] * planned.llm_grid[1] == 350


def test_wide_images_are_planned_at_the_limit_of_the_aspect_ratio() -> None:
    assert plan(DEEPSEEK_V4, 20_000, 100).resized == plan(DEEPSEEK_V4, 800, 100).resized


def test_v4_lowers_its_budget_until_the_closing_pads_fit() -> None:
    """The first fit, 826 x 742, costs 382 tokens with its two closing pads."""
    planned = plan(DEEPSEEK_V4, 2238, 2014)
    assert (planned.resized, planned.num_tokens) == ((742, 672), 306)


@pytest.mark.parametrize(("width", "height"), [(0, 1), (1, 0), (-5, 5), (MAX_SIDE + 1, 1), (1, 10**400)])
def test_sizes_that_no_image_has_are_refused(width: int, height: int) -> None:
    with pytest.raises(PlanError, match="an image's sides are between 1 and"):
        plan(DEEPSEEK_V4, width, height)


@given(configs, sides, sides)
def test_every_plan_fits_its_budget(config: VisionConfig, width: int, height: int) -> None:
    planned = plan(config, width, height)
    assert 0 < planned.num_tokens <= config.max_image_tokens - RESERVED_TOKENS[config.model_type]
    assert planned.num_patches <= MOST_PATCHES[config.model_type]


@given(any_config(), sides | st.just(MAX_SIDE), sides | st.just(MAX_SIDE))
def test_grids_tile_the_canvas_in_any_config(config: VisionConfig, width: int, height: int) -> None:
    planned = plan(config, width, height)
    rows, cols = planned.vit_grid
    assert rows >= 1
    assert cols >= 1
    assert planned.resized == (cols * config.patch_size, rows * config.patch_size)
    assert planned.llm_grid == (-(-rows // config.merge_ratio), -(-cols // config.merge_ratio))
    assert planned.num_tokens == count_tokens(config.model_type, planned.llm_grid)
    assert planned.num_tokens <= config.max_image_tokens - RESERVED_TOKENS[config.model_type]


@given(configs, sides, sides)
def test_an_image_within_the_budget_is_never_shrunk(config: VisionConfig, width: int, height: int) -> None:
    planned = plan(config, width, height)
    fits_as_it_is = plan(config, *planned.resized)
    assert fits_as_it_is.num_tokens <= config.max_image_tokens
    if width * height >= config.min_pixels and planned.resized[0] >= width and planned.resized[1] >= height:
        assert planned.resized[0] - width < config.patch_size
        assert planned.resized[1] - height < config.patch_size
