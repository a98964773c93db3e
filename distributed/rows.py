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

    shapes: every image's. parts: its rows in the dtype that was asked for, as bytes on the host. finite_2I: whether
    those are finite, and whether those that the tower gave are, as bytes on the host.
    """

    shapes: Sequence[tuple[int, ...]]
    parts: Sequence[Tensor]
    finite_2I: Tensor

    @classmethod
    def bring_down(cls, images: Sequence[ImageSpec], computed: Sequence[Tensor]) -> "OutgoingRows":
        """Convert, check and copy every image's rows (N, D); on CUDA this is queued on the current stream."""
        dtypes: list[torch.dtype] = [getattr(torch, image.dtype) for image in images]
        try:
            converted = [rows_ND.to(dtype) for dtype, rows_ND in zip(dtypes, computed, strict=True)]
        except torch.OutOfMemoryError:
            # The ranks have agreed that memory suffices: what has no room on the device is converted on the host.
            computed = [rows_ND.cpu() for rows_ND in computed]
            converted = [rows_ND.to(dtype) for dtype, rows_ND in zip(dtypes, computed, strict=True)]
        finite_I = _are_finite(converted)
        same = all(ours is theirs for ours, theirs in zip(converted, computed, strict=True))
        finite_2I = torch.stack([finite_I, finite_I if same else _are_finite(computed)])
        *parts, finite = _on_host([*converted, finite_2I])
        return cls([tuple(rows_ND.shape) for rows_ND in computed], parts, finite.view(2, -1))

    def collect(self) -> tuple[tuple[RowsSpec, ...], list[Buffer]]:
        """What to tell of every image, and its rows; none where they cannot be used."""
        specs: list[RowsSpec] = []
        buffers: list[Buffer] = []
        states = self.finite_2I.t().tolist()
        for (num_rows, width), part, (finite, was_finite) in zip(self.shapes, self.parts, states, strict=True):
            state: Literal["good", "not_finite", "overflow"] = "good"
            if not finite:
                state = "overflow" if was_finite else "not_finite"
            specs.append(RowsSpec(num_rows=num_rows, width=width, state=state))
            # The view holds the array, and that the tensor: torch hands pinned memory out again, to be written to, only
            # when ZeroMQ has sent the batch's last image and let go of it.
            buffers.append(part.numpy().data if state == "good" else b"")
        return tuple(specs), buffers


def _are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all values are, for each tensor: (I,) bool."""
    # NaN and either infinity show in the extremes, which cost a CPU a thirtieth of isfinite().all().
    extremes = torch.stack([extreme for tensor in tensors for extreme in tensor.aminmax()])
    return extremes.isfinite().view(-1, 2).all(dim=1)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every tensor as its bytes on the host: itself where it is there already, else a part of one pinned buffer."""
    parts = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    if parts[0].device.type == "cpu":
        return parts
    sizes = [part.numel() for part in parts]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    return [host.copy_(part, non_blocking=True) for host, part in zip(torch.split(pinned, sizes), parts, strict=True)]
