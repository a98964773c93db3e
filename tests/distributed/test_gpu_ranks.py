"""Ranks on real GPUs, NCCL between them: the rows that one tower gives on the CPU, however many batches are open."""

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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_overlapped_batches_give_the_rows_of_one_at_a_time(start_group: Callable[..., Group], num_ranks: int) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"{num_ranks} CUDA devices are needed")
    group = start_group(num_ranks, device="cuda", dtype="bfloat16")
    group.hello()
    # Large and small in turn: memory that is handed out again too early would show in the next batch's rows.
    sizes = [(60, 50), (2, 3), (40, 45), (1, 1), (30, 80), (9, 5)] * 5
    batches = [random_canvases([size, (7, 4)], seed=seed) for seed, size in enumerate(sizes)]
    for batch, (_, rows) in zip(batches, group.encode_all(batches, "v41"), strict=True):
        _, one_at_a_time = group.encode(batch, "v41")
        for image, expected in zip(rows, one_at_a_time, strict=True):
            assert np.linalg.norm(image - expected) <= 1e-5 * np.linalg.norm(expected)
    assert group.stop() == 0
