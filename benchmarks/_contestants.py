"""Ways to encode the same canvases: our tower packed at several caps and one image at a time, and timm's.

Invariant: all begin with uint8 canvases in memory and end with rows on the device, and all rows are the same but for
rounding: that is checked before anything is measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers import timm_tower
from encoder.config import VisionConfig
from encoder.geometry import Plan
from encoder.packing import split_packs
from encoder.tower import Tower

ONE_AT_A_TIME = "one at a time"
_TOLERANCE = 3e-2


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to run images. run encodes them all, and returns when it is done the rows of each."""

    name: str
    forwards: int
    run: Callable[[], list[Tensor]]


def draw_canvases(plans: Sequence[Plan]) -> list[Tensor]:
    """Noise on the canvas of each plan."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(each.resized[1], each.resized[0], 3) for each in plans]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]


def enter_contestants(towers: dict[int, Tower], timm: object | None, plans: Sequence[Plan]) -> list[Contestant]:
    """Everyone who runs these images: one at a time first, then our caps, then timm where it is given.

    towers: by cap. They share their weights, and differ in the cap only.
    """
    canvases = draw_canvases(plans)
    counts = [each.num_patches for each in plans]
    first = next(iter(towers.values()))
    found = [Contestant(ONE_AT_A_TIME, len(plans), _one_at_a_time(first, canvases))]
    found += [
        Contestant(f"packed, cap {cap}", len(split_packs(counts, cap)), _packed(tower, canvases, plans))
        for cap, tower in towers.items()
    ]
    if timm is not None:
        found.append(Contestant("timm, one at a time", len(plans), _timm(timm, first, canvases)))
    return found


def check_agreement(contestants: Sequence[Contestant]) -> None:
    """Let everyone run once, which also loads the kernels, and compare their rows with the first one's.

    Raises:
        RuntimeError: somebody's rows are others.
    """
    expected = torch.cat(contestants[0].run()).float()
    for each in contestants[1:]:
        found = torch.cat(each.run()).float()
        difference = float((found - expected).norm() / expected.norm())
        if not difference < _TOLERANCE:
            raise RuntimeError(f"{each.name} computes other rows than {contestants[0].name}: {difference:.1e} apart")


def build_timm(
    config: VisionConfig, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> object | None:
    """timm's tower with the same weights; None where this interpreter has no timm."""
    return timm_tower.build_tower(config, weights, device, dtype) if timm_tower.is_installed() else None


def _one_at_a_time(tower: Tower, canvases: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        rows = [tower.encode([canvas], ["rows"]) for canvas in canvases]
        _wait(tower.device)
        return rows

    return run


def _packed(tower: Tower, canvases: Sequence[Tensor], plans: Sequence[Plan]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        rows = tower.encode(canvases, ["rows"] * len(canvases))
        _wait(tower.device)
        return list(rows.split([each.num_rows for each in plans]))

    return run


def _timm(tower: object, ours: Tower, canvases: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    assert callable(tower)

    @torch.inference_mode()  # as ours
    def run() -> list[Tensor]:
        rows = [tower(timm_tower.normalise(canvas, ours.device, ours.dtype))[0] for canvas in canvases]
        _wait(ours.device)
        return rows

    return run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
