"""Attention within images, and which implementation runs where."""

import math

import pytest
import torch
from torch import Tensor

from encoder.attention import AttentionName, AttentionUnavailable, attention, choose_attention
from encoder.config import DEMO
from encoder.geometry import Grid
from encoder.packing import Pack, pack

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GRIDS: list[Grid] = [(1, 1), (4, 7), (3, 3), (5, 20)]
PACKED: list[AttentionName] = ["flash_attn", "varlen"]


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


@pytest.mark.parametrize("name", ["sdpa", *PACKED])
def test_empty_pack_gives_an_empty_answer(name: AttentionName) -> None:
    packed = pack([], DEMO, CPU)
    assert attention(*qkv(packed, 16), packed, name).shape == (0, 4, 16)


def test_installed_torch_takes_the_varlen_call() -> None:
    packed = pack(GRIDS, DEMO, torch.device("meta"))
    q, k, v = (x.to("meta") for x in qkv(packed, 16, torch.bfloat16))
    out = attention(q, k, v, packed, "varlen")
    assert (out.shape, out.dtype) == (q.shape, q.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_is_sdpa_on_a_cpu(dtype: torch.dtype) -> None:
    assert choose_attention("auto", CPU, dtype) == "sdpa"


def test_auto_is_sdpa_in_float32() -> None:
    assert choose_attention("auto", CUDA, torch.float32) == "sdpa"


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
