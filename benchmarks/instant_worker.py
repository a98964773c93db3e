"""A rank whose tower answers at once, with zeros of the right shapes: what is left is everything but the tower.

Run by torchrun in place of distributed.worker, as `--worker-module=benchmarks.instant_worker` with the repository in
PYTHONPATH. It loads no weights.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from distributed import worker
from encoder.attention import AttentionName
from encoder.checkpoint import open_checkpoint
from encoder.config import VisionConfig
from encoder.layout import LAYOUTS, Layout, num_layout_rows


class InstantTower:
    """As encoder.tower.Tower from outside, on the CPU."""

    def __init__(self, config: VisionConfig, max_patches_per_forward: int | None) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = torch.bfloat16
        self.attention: AttentionName = "sdpa"
        self.layouts: tuple[Layout, ...] = LAYOUTS
        self.max_patches_per_forward = max_patches_per_forward or 2560
        self._zeros_RD = torch.zeros(0, config.out_width, dtype=self.dtype)

    def encode(self, canvases: Sequence[Tensor], layouts: Sequence[Layout]) -> Tensor:
        """Zeros, as many rows as these images have."""
        block = self.config.patch_size * self.config.merge_ratio
        num_rows = sum(
            num_layout_rows(layout, (-(-canvas.shape[0] // block), -(-canvas.shape[1] // block)))
            for canvas, layout in zip(canvases, layouts, strict=True)
        )
        if num_rows > len(self._zeros_RD):
            self._zeros_RD = torch.zeros(num_rows, self.config.out_width, dtype=self.dtype)
        return self._zeros_RD[:num_rows]


def load_tower(options: worker.WorkerOptions, device: torch.device) -> tuple[InstantTower, str]:
    """What stands in for distributed.worker.load_tower."""
    assert device.type == "cpu"
    tower = InstantTower(open_checkpoint(options.model).config, options.max_patches_per_forward)
    return tower, "instant"


if __name__ == "__main__":
    worker.load_tower = load_tower  # type: ignore[assignment]
    sys.exit(worker.main())
