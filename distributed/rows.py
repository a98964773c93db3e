# ruff: noqa: N815 (shape suffixes of fields)
"""Rank 0's rows of one batch on their way out: converted and checked where they are, brought to the host in one go.

Shapes: N rows of one image, D the model's output width, I images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distributed.link import Buffer
from distributed.messages import ImageSpec, RowsSpec


@dataclass(frozen=True, slots=True)
class OutgoingRows:
    """Rows that the device may still be at. Made by `bring_down`; `collect` once it is done.

    computed: every image's rows (N, D), as the tower gave them. parts: the same in the dtype that was asked for, as
    bytes on the host. finite_I: whether those are, as bytes on the host.
    """

    computed: Sequence[Tensor]
    parts: Sequence[Tensor]
    finite_I: Tensor

    @classmethod
    def bring_down(cls, images: Sequence[ImageSpec], computed: Sequence[Tensor]) -> "OutgoingRows":
        """Convert, check and copy every image's rows; on CUDA this is queued on the current stream."""
        converted = [rows_ND.to(getattr(torch, image.dtype)) for image, rows_ND in zip(images, computed, strict=True)]
        # NaN and either infinity show in the extremes, which cost a CPU a thirtieth of isfinite().all().
        extremes = torch.stack([extreme for rows_ND in converted for extreme in rows_ND.aminmax()])
        finite_I = extremes.isfinite().view(-1, 2).all(dim=1)
        *parts, finite_I = _on_host([*converted, finite_I])
        return cls(computed, parts, finite_I)

    def collect(self) -> tuple[tuple[RowsSpec, ...], list[Buffer]]:
        """What to tell of every image, and its rows; none where they cannot be used."""
        specs: list[RowsSpec] = []
        buffers: list[Buffer] = []
        for computed_ND, part, finite in zip(self.computed, self.parts, self.finite_I.tolist(), strict=True):
            state: Literal["good", "not_finite", "overflow"] = "good"
            if not finite:
                state = "overflow" if all(extreme.isfinite() for extreme in computed_ND.aminmax()) else "not_finite"
            num_rows, width = computed_ND.shape
            specs.append(RowsSpec(num_rows=num_rows, width=width, state=state))
            # The view holds the array, and that the tensor: torch hands pinned memory out again, to be written to, only
            # when ZeroMQ has sent the batch's last image and let go of it.
            buffers.append(part.numpy().data if state == "good" else b"")
        return tuple(specs), buffers


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every tensor as its bytes on the host: itself where it is there already, else a part of one pinned buffer."""
    parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    if parts[0].device.type == "cpu":
        return parts
    sizes = [part.numel() for part in parts]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    return [host.copy_(part, non_blocking=True) for host, part in zip(torch.split(pinned, sizes), parts, strict=True)]
