"""The tower against other people's code on both tiny checkpoints, and what must not change its answer."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from encoder.attention import ATTENTIONS, AttentionName, AttentionUnavailable
from encoder.checkpoint import open_checkpoint
from encoder.cpu import bfloat16_units
from encoder.geometry import Grid
from encoder.image import read_canvas
from encoder.layout import Layout, layout_index
from encoder.packing import pack, patchify
from encoder.tower import Tower, choose_dtype
from encoder.weights import load_weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODELS = ["deepseek_v4", "deepseek_v41"]
GRIDS: list[Grid] = [(1, 1), (3, 3), (4, 7), (5, 20), (9, 6), (13, 8)]
IMAGES = ["97x61_RGB.png", "420x40_RGB.jpeg", "500x333_RGB.jpeg"]
LAYOUTS: list[Layout] = ["rows", "v4", "v41"]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make_tower(
    goldens: Path,
    model: str,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    attention: AttentionName | None = None,
    max_patches: int | None = None,
) -> Tower:
    checkpoint = open_checkpoint(str(goldens / f"tiny-{model}"))
    return Tower(
        checkpoint.config,
        load_weights(checkpoint),
        device=device,
        dtype=dtype,
        attention=attention or "auto",
        max_patches_per_forward=max_patches,
        graph_patches=0,
    )


def golden_tensor(goldens: Path, model: str, grid: Grid, kind: str) -> Tensor:
    return load_file(goldens / f"tower-{model}.safetensors")[f"{grid[0]}x{grid[1]}.{kind}"]


def golden_canvas(goldens: Path, model: str, grid: Grid) -> Tensor:
    return golden_tensor(goldens, model, grid, "pixels_u8").permute(1, 2, 0).contiguous()


def golden_patches(goldens: Path, model: str, grids: Sequence[Grid]) -> Tensor:
    """In float32 throughout, as the golden tower got them: not rounded to bfloat16 on the way."""
    patches_NP = torch.cat([patchify(golden_canvas(goldens, model, grid), 14) for grid in grids])
    return (patches_NP.float() / 255 - 0.5) / 0.5


def read_image(goldens: Path, tower: Tower, file: str) -> Tensor:
    data = (goldens / "images" / file).read_bytes()
    return torch.from_numpy(read_canvas(data, tower.config, "plain", limit_pixels=10**8).pixels)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double().cpu() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("grid", GRIDS)
def test_float32_tower_is_the_golden_one(goldens: Path, model: str, grid: Grid) -> None:
    tower = make_tower(goldens, model)
    vit_NC, rows_MD = tower.forward(golden_patches(goldens, model, [grid]), pack([grid], tower.config, CPU))
    assert relative_error(vit_NC, golden_tensor(goldens, model, grid, "vit_f32")) < 1e-5
    assert relative_error(rows_MD, golden_tensor(goldens, model, grid, "rows_f32")) < 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_packing_all_images_is_encoding_each_alone(goldens: Path, model: str) -> None:
    tower = make_tower(goldens, model)
    packed = tower.forward(golden_patches(goldens, model, GRIDS), pack(GRIDS, tower.config, CPU))
    alone = [tower.forward(golden_patches(goldens, model, [grid]), pack([grid], tower.config, CPU)) for grid in GRIDS]
    assert relative_error(packed[0], torch.cat([vit_NC for vit_NC, _ in alone])) < 1e-5
    assert relative_error(packed[1], torch.cat([rows_MD for _, rows_MD in alone])) < 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_tower_is_near_the_float32_one(goldens: Path, model: str) -> None:
    canvases = [golden_canvas(goldens, model, grid) for grid in GRIDS]
    layouts: list[Layout] = ["rows"] * len(GRIDS)
    half = make_tower(goldens, model, dtype=torch.bfloat16).encode(canvases, layouts)
    assert half.dtype == torch.bfloat16
    assert relative_error(half, make_tower(goldens, model).encode(canvases, layouts)) < 2e-2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_image_files_become_the_golden_rows_in_every_layout(goldens: Path, model: str, layout: Layout) -> None:
    golden = load_file(goldens / f"rows-{model}.safetensors")
    learned = torch.stack([golden["image_start"], golden["image_newline"], golden["image_end"]])
    tower = make_tower(goldens, model)
    for file in IMAGES:
        canvas = read_image(goldens, tower, file)
        rows, cols = (-(-side // 42) for side in canvas.shape[:2])
        index = torch.from_numpy(layout_index(layout, (rows, cols)))
        expected = torch.cat([golden[file], learned])[index]
        assert relative_error(tower.encode([canvas], [layout]), expected) < 1e-5, file


def test_v41_places_the_learned_vectors_bit_for_bit(goldens: Path) -> None:
    golden = load_file(goldens / "rows-deepseek_v41.safetensors")
    tower = make_tower(goldens, "deepseek_v41")
    rows_RD = tower.encode([golden_canvas(goldens, "deepseek_v41", (4, 7))], ["v41"])
    assert len(rows_RD) == 2 * (3 + 1) + 2
    assert torch.equal(rows_RD[0], golden["image_start"])
    assert torch.equal(rows_RD[4], golden["image_newline"])
    assert torch.equal(rows_RD[8], golden["image_newline"])
    assert torch.equal(rows_RD[9], golden["image_end"])


@pytest.mark.parametrize("max_patches", [1, 130, 10_000])
def test_batch_of_mixed_layouts_is_each_image_alone_in_order(goldens: Path, max_patches: int) -> None:
    tower = make_tower(goldens, "deepseek_v41", max_patches=max_patches)
    canvases = [golden_canvas(goldens, "deepseek_v41", grid) for grid in [*GRIDS, GRIDS[2]]]
    layouts = [LAYOUTS[i % 3] for i in range(len(canvases))]
    alone = [tower.encode([canvas], [layout]) for canvas, layout in zip(canvases, layouts, strict=True)]
    assert relative_error(tower.encode(canvases, layouts), torch.cat(alone)) < 1e-5


def test_no_images_give_no_rows(goldens: Path) -> None:
    tower = make_tower(goldens, "deepseek_v4", dtype=torch.bfloat16)
    rows_RD = tower.encode([], [])
    assert (rows_RD.shape, rows_RD.dtype) == ((0, 96), torch.bfloat16)


def test_empty_pack_goes_through_both_networks(goldens: Path) -> None:
    tower = make_tower(goldens, "deepseek_v4")
    vit_NC, rows_MD = tower.forward(torch.empty(0, 588), pack([], tower.config, CPU))
    assert (vit_NC.shape, rows_MD.shape) == ((0, 64), (0, 96))


def test_tower_without_learned_vectors_has_no_v41_layout(goldens: Path) -> None:
    checkpoint = open_checkpoint(str(goldens / "tiny-deepseek_v41"))
    weights = {name: tensor for name, tensor in load_weights(checkpoint).items() if not name.startswith("image_")}
    tower = Tower(checkpoint.config, weights, device=CPU, dtype=torch.float32)
    assert tower.layouts == ("rows", "v4")
    assert make_tower(goldens, "deepseek_v41").layouts == ("rows", "v4", "v41")


def test_forced_attention_that_cannot_run_stops_the_tower(goldens: Path) -> None:
    with pytest.raises(AttentionUnavailable, match="varlen"):
        make_tower(goldens, "deepseek_v4", attention="varlen")


def test_forward_without_room_for_a_patch_is_an_error(goldens: Path) -> None:
    with pytest.raises(ValueError, match="max_patches_per_forward is 0"):
        make_tower(goldens, "deepseek_v4", max_patches=0)


def test_named_dtype_is_taken_and_cuda_is_bfloat16() -> None:
    assert choose_dtype("float32", CUDA) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert choose_dtype("auto", CUDA) == torch.bfloat16


def test_cpu_computes_in_bfloat16_if_it_multiplies_it_natively() -> None:
    expected = torch.float32 if bfloat16_units() == "none" else torch.bfloat16
    assert choose_dtype("auto", CPU) == expected


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("model", MODELS)
def test_float32_tower_on_cuda_is_the_golden_one(goldens: Path, model: str) -> None:
    tower = make_tower(goldens, model, device=CUDA)
    patches_NP = golden_patches(goldens, model, GRIDS).cuda()
    vit_NC, rows_MD = tower.forward(patches_NP, pack(GRIDS, tower.config, CUDA))
    for actual, kind in [(vit_NC, "vit_f32"), (rows_MD, "rows_f32")]:
        expected = torch.cat([golden_tensor(goldens, model, grid, kind) for grid in GRIDS])
        assert relative_error(actual, expected) < 1e-5


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("max_patches", [130, 10_000])
def test_bfloat16_tower_on_cuda_is_near_the_float32_one(
    goldens: Path, attention: AttentionName, max_patches: int
) -> None:
    canvases = [golden_canvas(goldens, "deepseek_v41", grid) for grid in GRIDS]
    layouts = [LAYOUTS[i % 3] for i in range(len(canvases))]
    expected = make_tower(goldens, "deepseek_v41").encode(canvases, layouts)
    try:
        tower = make_tower(
            goldens,
            "deepseek_v41",
            device=CUDA,
            dtype=torch.bfloat16,
            attention=attention,
            max_patches=max_patches,
        )
    except AttentionUnavailable as error:
        pytest.skip(str(error))
    assert relative_error(tower.encode(canvases, layouts), expected) < 2e-2
    assert relative_error(tower.encode([canvas.cuda() for canvas in canvases], layouts), expected) < 2e-2
    assert tower.encode([], []).shape == (0, 80)
