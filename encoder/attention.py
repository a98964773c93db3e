"""Variable-length attention, full within each image of a pack and blind beyond it.

Invariant: four implementations of one function, which differ in rounding only. Which one runs is chosen at the start.

Shapes: N rows of the pack, L rows of one image, H heads, D features of a head.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from encoder.cpu import bfloat16_units
from encoder.matmul_attention import attend_by_matmul
from encoder.packing import Pack

AttentionName = Literal["flash_attn", "varlen", "matmul", "sdpa"]
ATTENTIONS: tuple[AttentionName, ...] = get_args(AttentionName)
"""Fastest first."""

# FlashAttention 2, which is behind both packed implementations, needs an Ampere device.
_LEAST_CAPABILITY = (8, 0)


class AttentionUnavailable(ValueError):  # noqa: N818 (what it says is all there is to it)
    """The attention that was asked for cannot run here; the message says what to install or to change."""


def choose_attention(name: Literal["auto"] | AttentionName, device: torch.device, dtype: torch.dtype) -> AttentionName:
    """The implementation to use: the one that was named, or for "auto" the fastest that runs in dtype on the device.

    Raises:
        AttentionUnavailable: the named one cannot run.
    """
    if name == "auto":
        # On AMX torch's fused attention is the faster one.
        slower = ("matmul",) if bfloat16_units() != "vector" else ()
        candidates = [candidate for candidate in ATTENTIONS if candidate not in slower]
        return next(candidate for candidate in candidates if _obstacle(candidate, device, dtype) is None)
    obstacle = _obstacle(name, device, dtype)
    if obstacle is not None:
        raise AttentionUnavailable(f"attention {name!r} cannot run here: {obstacle}")
    return name


def attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, pack: Pack, name: AttentionName) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each image: (N, H, D), of the arguments' type.

    The arguments need unit stride in D only, so slices of one qkv tensor do. They may have more rows than the pack's
    images: what comes out for those is zero image by image, and undefined where all images go at once.
    """
    if not pack.lengths:
        return torch.zeros_like(q_NHD)
    if name in ("sdpa", "matmul"):
        return _attend_by_image(q_NHD, k_NHD, v_NHD, pack, attend_by_matmul if name == "matmul" else _attend_by_sdpa)
    attend: Callable[..., Any] = varlen_attn if name == "varlen" else _flash_attn()
    # Bounds and longest of queries, then of keys: all that the signatures of all versions have in common.
    bounds, longest = pack.cu_seqlens, pack.max_seqlen
    out_NHD = attend(q_NHD, k_NHD, v_NHD, bounds, bounds, longest, longest)
    assert isinstance(out_NHD, Tensor)
    return out_NHD


def _attend_by_image(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, pack: Pack, attend: Callable[[Tensor, Tensor, Tensor, Tensor], None]
) -> Tensor:
    out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
    start = 0
    for length in pack.lengths:
        stop = start + length
        attend(q_NHD[start:stop], k_NHD[start:stop], v_NHD[start:stop], out_NHD[start:stop])
        start = stop
    out_NHD[start:] = 0
    return out_NHD


def _attend_by_sdpa(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, out_LHD: Tensor) -> None:
    # A batch of one, (1, H, L, D): no padding, and no mask to keep the fused kernels away.
    q, k, v = (x_LHD.transpose(0, 1).unsqueeze(0) for x_LHD in (q_LHD, k_LHD, v_LHD))
    out_LHD.copy_(scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))


def _obstacle(name: AttentionName, device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps an implementation from running in dtype on the device, and what to do about it; None if nothing."""
    if name == "sdpa":
        return None
    if name == "matmul":
        if device.type != "cpu" or dtype != torch.bfloat16:
            return f"it computes in bfloat16 on a CPU only, and the tower in {dtype} on {device.type}; choose 'auto'"
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, and the tower is on {device.type}; choose attention 'sdpa' or 'auto'"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits only, and the tower in {dtype}; choose dtype 'bfloat16', or attention 'sdpa'"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return (
            f"it needs compute capability {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} (Ampere) or newer, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; choose attention 'sdpa'"
        )
    if name == "varlen":
        if torch.backends.cuda.is_flash_attention_available():
            return None
        return f"torch {torch.__version__} was built without FlashAttention; install a CUDA build from PyPI"
    try:
        _flash_attn()
    except (ImportError, AttributeError, OSError) as error:
        return f"{error}; install it with: pip install 'patchgrid[cuda]', built for torch {torch.__version__}"
    return None


@cache
def _flash_attn() -> Callable[..., Any]:
    """flash-attn's packed function. A wheel made for another torch fails in this import, not at its installation."""
    function: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_varlen_func
    return function
