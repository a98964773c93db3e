"""What the tower has to compute at least, and how fast the device multiplies: the floor under every figure of a tower.

Invariant: arithmetic counts linear layers, attention and aligner, and nothing that a better kernel could leave out.
"""

import time
from collections.abc import Sequence

import torch

from encoder.config import VisionConfig
from encoder.geometry import Plan

_SIDES = {"cpu": 4096, "cuda": 8192}


def arithmetic(config: VisionConfig, plans: Sequence[Plan]) -> float:
    """Floating-point operations of the tower over these images."""
    width, layers = config.width, config.num_layers
    per_patch = 2 * width * config.patch_dim + layers * 2 * width * (4 * width + 3 * config.mlp_width)
    per_row = 2 * config.out_width * (width * config.merge_ratio**2 + config.out_width)
    return sum(
        each.num_patches * per_patch + each.num_rows * per_row + 4 * each.num_patches**2 * width * layers
        for each in plans
    )


def matrix_rate(device: torch.device, dtype: torch.dtype, *, at_least_s: float = 1.0) -> float:
    """Floating-point operations per second of a large matrix product: of the best of a few, after one to warm up."""
    side = _SIDES[device.type]
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    _product_s(a, b)
    times = [_product_s(a, b)]
    while sum(times) < at_least_s:
        times.append(_product_s(a, b))
    return 2 * side**3 / min(times)


def _product_s(a: torch.Tensor, b: torch.Tensor) -> float:
    start = time.perf_counter()
    a @ b.T
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - start
