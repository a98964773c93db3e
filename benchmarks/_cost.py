"""What a forward costs on this machine: a + b n + c (n1^2 + n2^2 + ...) for images of n1, n2, ... patches, n in all."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks._progress import Steps
from encoder.checkpoint import open_checkpoint
from encoder.tower import Tower, choose_dtype
from encoder.weights import load_weights

# Canvases, in patches a side: alone, and three or four of a kind in one forward.
_PACKS = (((14, 14),), ((28, 28),), ((37, 42),), ((42, 74),), ((14, 14),) * 4, ((28, 28),) * 3)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a forward of n patches, fitted to measurements. error: of the worst of them, as a part of it."""

    fixed_ms: float
    per_patch_us: float
    per_patch_squared_ns: float
    forwards: int
    error: float

    def forward_s(self, counts: Sequence[int]) -> float:
        """What one forward of images with these patch counts takes."""
        squares = sum(count * count for count in counts)
        return (
            self.fixed_ms * 1e-3 + sum(counts) * self.per_patch_us * 1e-6 + squares * self.per_patch_squared_ns * 1e-9
        )


def given_curve(fixed_ms: float, per_patch_us: float, per_patch_squared_ns: float) -> CostCurve:
    """A curve that was not measured here: of another machine, or a guess."""
    return CostCurve(fixed_ms, per_patch_us, per_patch_squared_ns, forwards=0, error=0.0)


def fit_curve(model: str, rounds: int, steps: Steps) -> CostCurve:
    """Measure every pack in turn, and fit the median times by least squares of the relative error."""
    checkpoint = open_checkpoint(model)
    device = torch.device("cpu")
    tower = Tower(
        checkpoint.config,
        load_weights(checkpoint),
        device=device,
        dtype=choose_dtype("auto", device),
        max_patches_per_forward=10**9,
    )
    side = checkpoint.config.patch_size
    packs = [[torch.zeros(height * side, width * side, 3, dtype=torch.uint8) for height, width in p] for p in _PACKS]
    tower.encode(packs[0], ["rows"] * len(packs[0]))
    times: list[list[float]] = [[] for _ in packs]
    for number in range(1, rounds + 1):
        steps.begin(f"round {number} of the forwards")
        for canvases, taken in zip(packs, times, strict=True):
            start = time.perf_counter()
            tower.encode(canvases, ["rows"] * len(canvases))
            taken.append(time.perf_counter() - start)
        steps.done(f"round {number} of the forwards: {sum(taken[-1] for taken in times):.1f} s")
    measured = np.array([statistics.median(taken) for taken in times])
    counts = [[height * width for height, width in pack] for pack in _PACKS]
    terms = np.array([[1.0, sum(pack), sum(count * count for count in pack)] for pack in counts])
    fixed, linear, quadratic = _solve_positive(terms / measured[:, None])
    errors = abs(terms @ [fixed, linear, quadratic] / measured - 1)
    return CostCurve(fixed * 1e3, linear * 1e6, quadratic * 1e9, len(measured), float(errors.max()))


def _solve_positive(relative: NDArray[np.float64]) -> tuple[float, float, float]:
    """Least squares for relative @ x = 1 with no x below 0: terms that would be are left out."""
    active = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(relative[:, active], np.ones(len(relative)), rcond=None)[0]
        if (found >= 0).all():
            values = dict(zip(active, found.tolist(), strict=True))
            return values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)
        active = [term for term, value in zip(active, found, strict=True) if value >= 0]
