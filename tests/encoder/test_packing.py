"""Packs against their definition, image by image, and patches against the released processors', to the bit."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder.aligner import fold
from encoder.config import DEEPSEEK_V4, DEMO, load_config
from encoder.geometry import Grid
from encoder.image import read_canvas
from encoder.packing import normalise, pack, patchify, split_packs

CPU = torch.device("cpu")
GRIDS: list[Grid] = [(1, 1), (4, 7), (3, 3), (5, 20), (4, 7)]


@pytest.mark.parametrize("model", ["deepseek_v4", "deepseek_v41"])
def test_patches_are_the_released_processors_to_the_bit(goldens: Path, model: str) -> None:
    config = load_config(goldens / f"tiny-{model}")
    images = json.loads((goldens / "preprocess.json").read_text())["images"]
    assert len(images) == 9
    for image in images:
        data = (goldens / "images" / image["file"]).read_bytes()
        canvas = read_canvas(data, config, "plain", limit_pixels=10**8)
        patches = normalise(patchify(torch.from_numpy(canvas.pixels), config.patch_size), torch.bfloat16)
        digest = hashlib.sha256(patches.view(torch.uint8).numpy().data).hexdigest()
        assert digest == image[model]["patches_bf16_sha256"], image["file"]


def test_patchify_reads_patches_row_by_row_and_values_by_channel() -> None:
    canvas = torch.arange(4 * 6 * 3, dtype=torch.uint8).view(4, 6, 3)
    patches = patchify(canvas, 2)
    assert patches.shape == (6, 12)
    assert patches[4].tolist() == canvas[2:4, 2:4].permute(2, 0, 1).flatten().tolist()


def test_float32_pixels_are_the_bfloat16_ones() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 256)
    assert torch.equal(normalise(values, torch.float32), normalise(values, torch.bfloat16).float())


def test_pack_bounds_each_image() -> None:
    packed = pack(GRIDS, DEMO, CPU)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens.tolist() == [0, 1, 29, 38, 138, 166]
    assert packed.lengths == (1, 28, 9, 100, 28)
    assert packed.max_seqlen == 100


def test_pack_of_many_is_the_packs_of_each() -> None:
    packed = pack(GRIDS, DEMO, CPU)
    alone = [pack([grid], DEMO, CPU) for grid in GRIDS]
    starts = packed.cu_seqlens.tolist()
    assert torch.equal(packed.cos_NR, torch.cat([one.cos_NR for one in alone]))
    assert torch.equal(packed.sin_NR, torch.cat([one.sin_NR for one in alone]))
    assert torch.equal(packed.merge_mask_MK, torch.cat([one.merge_mask_MK for one in alone]))
    shifted = [one.merge_index_MK + start for one, start in zip(alone, starts[:-1], strict=True)]
    assert torch.equal(packed.merge_index_MK, torch.cat(shifted))


def test_half_of_the_angles_turn_with_the_row_and_half_with_the_column() -> None:
    rows, cols = 5, 20
    packed = pack([(rows, cols)], DEEPSEEK_V4, CPU)
    frequencies = 10000.0 ** -(np.arange(0, 32, 2) / 32)
    for row, col in [(0, 0), (0, 19), (4, 0), (3, 11)]:
        angles = np.concatenate([row * frequencies, col * frequencies])
        torch.testing.assert_close(packed.cos_NR[row * cols + col].double().numpy(), np.cos(angles), atol=2e-6, rtol=0)
        torch.testing.assert_close(packed.sin_NR[row * cols + col].double().numpy(), np.sin(angles), atol=2e-6, rtol=0)


def test_fold_is_zero_padding_and_channel_major() -> None:
    packed = pack(GRIDS, DEMO, CPU)
    vit_NC = torch.randn(sum(packed.lengths), 5)
    expected = []
    for (rows, cols), image in zip(GRIDS, vit_NC.split(packed.lengths), strict=True):
        grid_CHW = image.view(rows, cols, 5).permute(2, 0, 1)
        padded = torch.nn.functional.pad(grid_CHW, (0, -cols % 3, 0, -rows % 3))
        expected.append(torch.nn.functional.unfold(padded[None], 3, stride=3)[0].T)
    assert torch.equal(fold(vit_NC, packed), torch.cat(expected))


def test_empty_pack_has_the_shapes_of_any_other() -> None:
    packed = pack([], DEMO, CPU)
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.lengths == ()
    assert packed.cos_NR.shape == packed.sin_NR.shape == (0, DEMO.head_dim // 2)
    assert packed.merge_index_MK.shape == packed.merge_mask_MK.shape == (0, 9)
    assert fold(torch.empty(0, 5), packed).shape == (0, 45)


@given(counts=st.lists(st.integers(1, 12), max_size=20), max_patches=st.integers(1, 20))
def test_forwards_keep_order_and_are_full(counts: list[int], max_patches: int) -> None:
    packs = split_packs(counts, max_patches)
    assert [image for images in packs for image in images] == list(range(len(counts)))
    loads = [sum(counts[image] for image in images) for images in packs]
    for images, load in zip(packs, loads, strict=True):
        assert load <= max_patches or len(images) == 1
    for load, following in zip(loads, packs[1:], strict=False):
        assert load + counts[following.start] > max_patches


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pixels_have_the_same_bits_on_cuda() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(normalise(values.cuda(), dtype).cpu(), normalise(values, dtype))
