"""Ranks on real GPUs, NCCL between them: the same rows as one tower gives on the CPU."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from worker_group import Group, random_canvases

from encoder.checkpoint import open_checkpoint
from encoder.tower import Tower
from encoder.weights import load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_gpu_ranks_agree_with_the_cpu(
    start_group: Callable[..., Group], goldens: object, num_ranks: int, dtype: str, tolerance: float
) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"{num_ranks} CUDA devices are needed")
    checkpoint = open_checkpoint(f"{goldens}/tiny-deepseek_v4")
    tower = Tower(checkpoint.config, load_weights(checkpoint), device=torch.device("cpu"), dtype=torch.float32)
    group = start_group(num_ranks, device="cuda", dtype=dtype)
    group.hello()
    canvases = random_canvases([(3, 3), (13, 8), (1, 1), (9, 6), (28, 28)])
    _, answer = group.encode(canvases, "v41")
    for canvas, rows in zip(canvases, answer, strict=True):
        expected = tower.encode([torch.from_numpy(canvas)], ["v41"]).numpy()
        assert np.linalg.norm(rows - expected) <= tolerance * np.linalg.norm(expected)
    assert group.stop() == 0
