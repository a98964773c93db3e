# ruff: noqa: N815 (shape suffixes of fields)
"""One batch on one rank: started together with the other ranks, finished in this rank's own time.

Its start is all that the ranks do together: pixels to those that encode them, the tower, a vote that nobody's memory
ran out, the all-gather. Every rank derives the same plan from the batch's header, so that each collective finds all
ranks ready for it: nothing about an image may make one rank raise alone. Its finish is to wait for this rank's own
device and, on rank 0, to hand out the rows. No other rank takes part in that, so each may start the next batch first.

Shapes: N rows of one image or of this rank, M rows of the fullest rank, R ranks, D the model's output width.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.balance import balance, cut_apart, rank_loads
from distributed.exchange import Exchange
from distributed.link import Buffer
from distributed.messages import Encode, Encoded, ImageSpec
from distributed.moment import Moment, SideStream
from distributed.rows import OutgoingRows
from encoder.geometry import merge_grid
from encoder.layout import Layout, num_layout_rows
from encoder.tower import Tower

log = logging.getLogger("patchgrid.rank")


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that was started. On CUDA the device may have yet to begin it.

    gathered_RMD: not to be freed before the side stream is done with it. outgoing: on rank 0, the same cut apart.
    begun, encoded, gathered, ended: when this rank's device came to it, had its own rows, had all rows, and was done.
    """

    batch_id: int
    rank_patches: tuple[int, ...]
    arrived_at: float
    gathered_RMD: Tensor
    outgoing: OutgoingRows | None
    begun: Moment
    encoded: Moment
    gathered: Moment
    ended: Moment

    def has_ended(self) -> bool:
        """Whether `finish` will not have to wait."""
        return self.ended.has_come()

    def finish(self) -> tuple[Encoded, list[Buffer]] | None:
        """Wait for this rank's device. Rank 0: the answer and its buffers."""
        self.ended.wait()
        if self.outgoing is None:
            return None
        encode_s = self.encoded.seconds_since(self.begun)
        gather_s = self.gathered.seconds_since(self.encoded)
        wait_s = time.perf_counter() - self.arrived_at - encode_s - gather_s
        images, buffers = self.outgoing.collect()
        answer = Encoded(
            batch_id=self.batch_id,
            images=images,
            rank_patches=self.rank_patches,
            wait_s=wait_s,
            encode_s=encode_s,
            gather_s=gather_s,
        )
        return answer, buffers


class BatchStarter:
    """Starts batches on this rank, one after the other."""

    def __init__(self, exchange: Exchange, tower: Tower, finish_open: Callable[[], None] | None) -> None:
        """finish_open finishes the batches that are open, for their memory; None where only one is open at a time."""
        self._exchange = exchange
        self._tower = tower
        self._finish_open = finish_open
        self._side_stream = SideStream(tower.device)

    def start(self, batch: Encode, canvases: Sequence[Tensor] | None, arrived_at: float) -> OpenBatch:
        """This rank's part of a batch, as far as the other ranks need it.

        Args:
            canvases: all of the batch's on rank 0 and None elsewhere.
            arrived_at: when rank 0 was given it, by `time.perf_counter`.
        """
        begun = Moment(self._tower.device)
        patch_area = self._tower.config.patch_size**2
        num_patches = [image.height * image.width // patch_area for image in batch.images]
        num_rows = [self._num_rows(image) for image in batch.images]
        shares = balance(num_patches, self._exchange.num_ranks)
        my_share = shares[self._exchange.rank]
        sending: list[dist.Work] = []
        if canvases is None:
            mine = self._exchange.receive_pixels(batch.images, my_share)
        else:
            sending = self._exchange.send_pixels(shares, canvases)
            mine = [canvases[index] for index in my_share]
        layouts = [batch.images[index].layout for index in my_share]
        gathered_RMD = self._encode_until_all_could(mine, layouts, rank_loads(shares, num_rows), num_patches)
        self._exchange.wait_for(sending)
        encoded = Moment(self._tower.device)
        # The next batch is computed while this one is gathered and copied to the host. With async_op=True NCCL would
        # gather on a stream of its own, but the copies need one too; called plainly, it gathers on the current stream.
        with self._side_stream.after(encoded):
            self._exchange.gather_rows(gathered_RMD)
            gathered = ended = Moment(self._tower.device)
            outgoing = None
            if canvases is not None:
                rows = [gathered_RMD[span.rank, span.start : span.stop] for span in cut_apart(shares, num_rows)]
                outgoing = OutgoingRows.bring_down(batch.images, rows)
                ended = Moment(self._tower.device)
        return OpenBatch(
            batch_id=batch.batch_id,
            rank_patches=rank_loads(shares, num_patches),
            arrived_at=arrived_at,
            gathered_RMD=gathered_RMD,
            outgoing=outgoing,
            begun=begun,
            encoded=encoded,
            gathered=gathered,
            ended=ended,
        )

    def _encode_until_all_could(
        self,
        canvases: Sequence[Tensor],
        layouts: Sequence[Layout],
        rank_rows: Sequence[int],
        num_patches: Sequence[int],
    ) -> Tensor:
        """This rank's rows in room for all ranks' (R, M, D), as soon as no rank's memory ran out.

        A rank never goes into the all-gather alone: whose memory sufficed encodes again with those whose did not. The
        first time all try again without the batch before, which may have taken what was missing.
        """
        make_room = self._finish_open
        while True:
            gathered_RMD = self._try_tower(canvases, layouts, rank_rows)
            # On CUDA nothing may be computed yet, but memory is allocated: it runs out while the work is queued.
            if self._exchange.all_agree(gathered_RMD is not None):
                assert gathered_RMD is not None
                return gathered_RMD
            del gathered_RMD
            if make_room is not None:
                make_room()
                make_room = None
            else:
                self._take_less_memory(num_patches)

    def _try_tower(
        self, canvases: Sequence[Tensor], layouts: Sequence[Layout], rank_rows: Sequence[int]
    ) -> Tensor | None:
        """This rank's rows in room for all ranks', or None if memory does not suffice."""
        try:
            return self._exchange.gather_buffer(self._tower.encode(canvases, layouts), rank_rows)
        except torch.OutOfMemoryError:
            return None  # and with it the traceback that holds on to the tensors

    def _take_less_memory(self, num_patches: Sequence[int]) -> None:
        """Halve the patches of a forward from here on; every rank does, after a batch that was too much for one."""
        limit = self._tower.max_patches_per_forward
        if limit <= min(num_patches):
            raise RuntimeError(f"out of memory with one image in a forward, of {max(num_patches)} patches at most")
        self._tower.max_patches_per_forward = limit // 2
        log.warning("out of memory: from here on at most %d patches in a forward", limit // 2)
        if self._tower.device.type == "cuda":
            torch.cuda.empty_cache()

    def _num_rows(self, image: ImageSpec) -> int:
        return num_layout_rows(image.layout, merge_grid(self._tower.config, (image.width, image.height)))
