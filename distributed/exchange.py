"""What the ranks tell one another: commands and pixels over gloo, rows over NCCL (gloo on a CPU).

Every rank derives sizes and destinations from the batch header alone, so no collective carries a surprise. A rank
receives the pixels of its own images and no others. What is to be done and what came of it have a process group each:
while one thread of a rank takes the next batch's pixels, another gathers the rows of the one before. A rank that waits
for work waits in gloo and never in an NCCL call.

Shapes: H, W pixels of a canvas; N rows of this rank; M rows of the fullest rank; D the model's output width; R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.balance import Shares
from distributed.messages import Command, ImageSpec, RankInfo, pack_header, unpack_command

_CARD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Exchange:
    """This rank's place in the group. Made by `join`, ended by `leave`."""

    rank: int
    num_ranks: int
    device: torch.device
    _work_group: dist.ProcessGroup
    _rows_group: dist.ProcessGroup

    @classmethod
    def join(cls, device: torch.device, timeout_s: float) -> "Exchange":
        """Meet the other ranks that torchrun started.

        Args:
            device: where this rank's rows are; CUDA brings NCCL in beside gloo.
            timeout_s: the longest that any one call waits for another rank.
        """
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        work_group = dist.new_group(backend="gloo", timeout=timeout)
        rows_group = dist.group.WORLD
        assert rows_group is not None, "it was just made"
        return cls(dist.get_rank(), dist.get_world_size(), device, work_group, rows_group)

    def leave(self) -> None:
        """Part from the others; every rank does so after the same last command."""
        dist.destroy_process_group()

    def introduce(self, info: RankInfo) -> tuple[RankInfo, ...]:
        """Tell every rank who this one is and learn who the others are, in rank order."""
        card = msgspec.json.encode(info).ljust(_CARD_BYTES)  # JSON may end in blanks
        assert len(card) == _CARD_BYTES
        cards = torch.empty(self.num_ranks, _CARD_BYTES, dtype=torch.uint8)
        _all_gather(cards.view(-1), torch.frombuffer(bytearray(card), dtype=torch.uint8), self._work_group)
        return tuple(msgspec.json.decode(peer.numpy().tobytes(), type=RankInfo) for peer in cards)

    def send_command(self, command: Command) -> None:
        """Rank 0: tell the other ranks what comes next."""
        header = bytearray(pack_header(command))
        dist.broadcast(torch.tensor([len(header)]), src=0, group=self._work_group)
        dist.broadcast(torch.frombuffer(header, dtype=torch.uint8), src=0, group=self._work_group)

    def receive_command(self) -> Command:
        """Every other rank: wait for what comes next.

        Raises:
            RuntimeError: rank 0 is gone, or was silent for longer than the group's time-out.
        """
        length = torch.empty(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._work_group)
        header = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(header, src=0, group=self._work_group)
        return unpack_command(header.numpy().tobytes())

    def send_pixels(self, shares: Shares, canvases: Sequence[Tensor]) -> list[dist.Work]:
        """Rank 0: start to send the other ranks the canvases of their images.

        Args:
            shares: which images go to which rank.
            canvases: all of the batch's, uint8 (H, W, 3) on the CPU; they must stay until all are sent.
        """
        return [
            _started(dist.isend(canvases[index], dst=rank, group=self._work_group, tag=index))
            for rank, share in enumerate(shares)
            if rank != self.rank
            for index in share
        ]

    def receive_pixels(self, images: Sequence[ImageSpec], share: Sequence[int]) -> list[Tensor]:
        """Every other rank: its canvases, uint8 (H, W, 3) on the CPU, in the order of its share of the batch."""
        mine = [torch.empty(images[index].height, images[index].width, 3, dtype=torch.uint8) for index in share]
        receiving = [
            _started(dist.irecv(canvas, src=0, group=self._work_group, tag=index))
            for canvas, index in zip(mine, share, strict=True)
        ]
        for received in receiving:
            received.wait()
        return mine

    def all_agree(self, agree: bool) -> bool:
        """Whether every rank says so. Tells a rank that it must do again what a peer could not finish."""
        if self.num_ranks == 1:
            return agree
        votes = torch.tensor([agree], dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._rows_group)
        return bool(votes)

    def gather_buffer(self, rows_ND: Tensor, rank_rows: Sequence[int]) -> Tensor:
        """Room for all ranks' rows, (R, M, D), with this rank's in their place and zeros behind them.

        Args:
            rows_ND: this rank's rows, all its images one after the other; N may be 0.
            rank_rows: rows of every rank, as the batch header gives them.
        """
        num_rows, width = rows_ND.shape
        assert num_rows == rank_rows[self.rank], "the tower's rows are those that the plan counted"
        if self.num_ranks == 1:
            return rows_ND.unsqueeze(0)
        gathered_RMD = rows_ND.new_empty(self.num_ranks, max(rank_rows), width)
        mine_MD = gathered_RMD[self.rank]
        mine_MD[:num_rows] = rows_ND
        mine_MD[num_rows:] = 0
        return gathered_RMD

    def gather_rows(self, gathered_RMD: Tensor) -> None:
        """Fill the other ranks' places by one padded all-gather; on CUDA it is queued on the current stream."""
        if self.num_ranks > 1:
            _all_gather(gathered_RMD.flatten(0, 1), gathered_RMD[self.rank], self._rows_group)


def _all_gather(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """torch's all-gather into one tensor, by its name of 2.13 or by the one before."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, mine, group=group)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is part of the group"
    return work
