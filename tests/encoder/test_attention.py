"""Attention within images, and which implementation runs where."""

import math

import pytest
import torch
from torch import Tensor

from encoder.attention import AttentionName, AttentionUnavailable, attention, choose_attention
from encoder.config import DEMO
from encoder.cpu import bfloat16_units
from encoder.geometry import Grid
from encoder.matmul_attention import largest
from encoder.packing import Pack, pack

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GRIDS: list[Grid] = [(1, 1), (4, 7), (3, 3), (5, 20)]
PACKED: list[AttentionName] = ["flash_attn", "varlen"]
BY_IMAGE: list[AttentionName] = ["sdpa", "matmul"]


def qkv(packed: Pack, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one tensor, as the tower has them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(packed.lengths), 3, 4, head_dim, generator=generator).to(dtype)
    return values[:, 0], values[:, 1], values[:, 2]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double().cpu() - expected.double()).norm() / expected.double().norm())


def test_sdpa_is_softmax_attention_within_each_image() -> None:
    packed = pack(GRIDS, DEMO, CPU)
    q, k, v = qkv(packed, 16)
    expected = []
    for image in zip(*(x.split(packed.lengths) for x in (q, k, v)), strict=True):
        q_HLD, k_HLD, v_HLD = (x.transpose(0, 1).double() for x in image)
        weights = torch.softmax(q_HLD @ k_HLD.transpose(1, 2) / math.sqrt(16), dim=-1)
        expected.append((weights @ v_HLD).transpose(0, 1))
    assert relative_error(attention(q, k, v, packed, "sdpa"), torch.cat(expected)) < 1e-6


# Of three heads: 20 x 30 patches are one block of scores, 38 x 39 several heads' worth, 10 x 160 a part of one head's.
@pytest.mark.parametrize("grid", [(20, 30), (38, 39), (10, 160)])
@pytest.mark.parametrize("scale", [0.5, 6.0])
@pytest.mark.parametrize("offset", [0.0, 4.0])
def test_matmul_is_as_exact_as_fused_attention_however_large_the_scores(
    grid: Grid, scale: float, offset: float
) -> None:
    packed = pack([grid], DEMO, CPU)
    generator = torch.Generator().manual_seed(0)
    values = scale * torch.randn(sum(packed.lengths), 3, 3, 64, generator=generator)
    values[:, :2] += offset * torch.randn(1, 2, 3, 64, generator=generator)
    q, k, v = values.bfloat16().unbind(1)
    expected = attention(q.double(), k.double(), v.double(), packed, "sdpa")
    error = (attention(q, k, v, packed, "matmul").double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Fused attention comes to 3e-3; scores rounded to bfloat16 as they are would cost up to 3e-1 here.
    assert float(error.max()) < 1e-2


def test_largest_is_the_maximum_whatever_the_signs() -> None:
    values = torch.randn(4, 3, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[1] = -values[1].abs() - 1e-3
    values[2] = 0.0
    values[3, :, 7] = math.inf
    assert torch.equal(largest(values), values.amax(dim=-1))


def test_matmul_attends_within_each_image() -> None:
    packed = pack(GRIDS, DEMO, CPU)
    values = qkv(packed, 16, torch.bfloat16)
    expected = attention(*(x.float() for x in values), packed, "sdpa")
    assert relative_error(attention(*values, packed, "matmul"), expected) < 5e-3


@pytest.mark.parametrize("name", BY_IMAGE)
def test_rows_beyond_the_images_change_nothing_and_come_out_as_zeros(name: AttentionName) -> None:
    packed = pack(GRIDS, DEMO, CPU)
    values = qkv(packed, 16, torch.bfloat16)
    padded = [torch.cat([x, torch.full((9, 4, 16), math.nan)]).bfloat16() for x in values]
    assert torch.equal(
        attention(padded[0], padded[1], padded[2], packed, name),
        torch.cat([attention(*values, packed, name), torch.zeros(9, 4, 16, dtype=torch.bfloat16)]),
    )


@pytest.mark.parametrize("name", [*BY_IMAGE, *PACKED])
def test_empty_pack_gives_an_empty_answer(name: AttentionName) -> None:
    packed = pack([], DEMO, CPU)
    assert attention(*qkv(packed, 16), packed, name).shape == (0, 4, 16)


def test_installed_torch_takes_the_varlen_call() -> None:
    packed = pack(GRIDS, DEMO, torch.device("meta"))
    q, k, v = (x.to("meta") for x in qkv(packed, 16, torch.bfloat16))
    out = attention(q, k, v, packed, "varlen")
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_auto_is_sdpa_in_float32(device: torch.device) -> None:
    assert choose_attention("auto", device, torch.float32) == "sdpa"


def test_auto_is_matmul_in_bfloat16_where_the_cpu_multiplies_vectors_of_it() -> None:
    expected = "matmul" if bfloat16_units() == "vector" else "sdpa"
    assert choose_attention("auto", CPU, torch.bfloat16) == expected


@pytest.mark.parametrize(("device", "dtype"), [(CPU, torch.float32), (CUDA, torch.bfloat16)])
def test_matmul_forced_elsewhere_says_what_to_change(device: torch.device, dtype: torch.dtype) -> None:
    with pytest.raises(AttentionUnavailable, match=r"'matmul' cannot run here: .*choose 'auto'"):
        choose_attention("matmul", device, dtype)


@pytest.mark.parametrize("name", PACKED)
def test_packed_attention_forced_on_a_cpu_says_what_to_change(name: AttentionName) -> None:
    with pytest.raises(AttentionUnavailable, match=f"'{name}' cannot run here: it needs a CUDA device.*choose"):
        choose_attention(name, CPU, torch.bfloat16)


@pytest.mark.parametrize("name", PACKED)
def test_packed_attention_forced_in_float32_says_what_to_change(name: AttentionName) -> None:
    with pytest.raises(AttentionUnavailable, match=r"torch\.float32; choose dtype 'bfloat16'"):
        choose_attention(name, CUDA, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sdpa", *PACKED])
def test_every_attention_agrees_with_sdpa_on_the_cpu(name: AttentionName, dtype: torch.dtype, head_dim: int) -> None:
    try:
        choose_attention(name, CUDA, dtype)
    except AttentionUnavailable as error:
        pytest.skip(str(error))
    packed = pack(GRIDS, DEMO, CPU)
    values = qkv(packed, head_dim, dtype)
    expected = attention(*(x.float() for x in values), packed, "sdpa")
    # One tensor goes over, so that its slices keep their strides.
    q, k, v = torch.stack(values, dim=1).cuda().unbind(1)
    actual = attention(q, k, v, pack(GRIDS, DEMO, CUDA), name)
    assert (actual.shape, actual.dtype) == (q.shape, dtype)
    assert relative_error(actual, expected) < 1e-2
