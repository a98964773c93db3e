# ruff: noqa: N815 (shape suffixes of fields)
"""One batch on one rank: started by one thread, encoded by a second, finished by a third.

Every rank derives the same plan from the batch's header, so that each collective finds all ranks ready for it: nothing
about an image may make one rank raise alone. To start a batch is to bring its pixels to those that encode them; to
finish it is a vote that nobody's memory ran out, the all-gather, and on rank 0 the rows' way out. Between the two each
rank is by itself: one that is done with its share goes on to the next batch while others are still at theirs.

Shapes: N rows of one image or of this rank, M rows of the fullest rank, R ranks, D the model's output width.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.balance import Shares, balance, cut_apart, rank_loads
from distributed.exchange import Exchange
from distributed.lane import Lane
from distributed.link import Buffer
from distributed.messages import Assignment, Encode, Encoded, ImageSpec
from distributed.moment import Moment, SideStream
from distributed.rows import OutgoingRows
from encoder.geometry import merge_grid
from encoder.layout import Layout, num_layout_rows
from encoder.tower import Tower

log = logging.getLogger("patchgrid.rank")


@dataclass(frozen=True, slots=True)
class OwnRows:
    """What this rank has of a batch. On CUDA the device may have yet to compute it.

    gathered_RMD: its rows in room for all ranks'. begun, encoded: when the device came to it, and had it.
    """

    gathered_RMD: Tensor
    begun: Moment
    encoded: Moment


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that was started.

    encode: compute this rank's rows; None where memory does not suffice. attempts: the latest one's future, taken out
    by whoever asks for it, so that nothing else holds the rows.
    """

    header: Encode
    arrived_at: float
    shares: Shares
    num_patches: Sequence[int]
    num_rows: Sequence[int]
    encode: Callable[[], OwnRows | None]
    attempts: "list[Future[OwnRows | None]]"

    @property
    def rank_patches(self) -> tuple[int, ...]:
        """What each rank has of it."""
        return rank_loads(self.shares, self.num_patches)


class BatchRunner:
    """This rank's part of all batches: `start` and `finish` are each called by one thread, in order."""

    def __init__(self, exchange: Exchange, tower: Tower, computing: Lane) -> None:
        self._exchange = exchange
        self._tower = tower
        self._computing = computing
        self._side_stream = SideStream(tower.device)

    def start(self, assignment: Assignment, canvases: Sequence[Tensor] | None, arrived_at: float) -> OpenBatch:
        """Bring the pixels to those that encode them, and have this rank's images encoded.

        Args:
            canvases: all of the batch's on rank 0 and None elsewhere.
            arrived_at: when rank 0 was given it, by `time.perf_counter`.
        """
        images = assignment.batch.images
        patch_area = self._tower.config.patch_size**2
        num_patches = [image.height * image.width // patch_area for image in images]
        num_rows = [self._num_rows(image) for image in images]
        shares = balance(num_patches, assignment.backlog)
        my_share = shares[self._exchange.rank]
        sending: list[dist.Work] = []
        if canvases is None:
            mine = self._exchange.receive_pixels(images, my_share)
        else:
            sending = self._exchange.send_pixels(shares, canvases)
            mine = [canvases[index] for index in my_share]
        layouts = [images[index].layout for index in my_share]
        encode = partial(self._try_tower, mine, layouts, rank_loads(shares, num_rows))
        attempt = self._computing.do(encode)
        for sent in sending:
            sent.wait()
        return OpenBatch(assignment.batch, arrived_at, shares, num_patches, num_rows, encode, [attempt])

    def finish(self, opened: OpenBatch) -> tuple[Encoded, list[Buffer]] | None:
        """Gather a batch's rows, as soon as all ranks have theirs. Rank 0: the answer and its buffers."""
        own = self._when_all_could(opened)
        # The next batch is computed while this one is gathered and copied to the host. With async_op=True NCCL would
        # gather on a stream of its own, but the copies need one too; called plainly, it gathers on the current stream.
        with self._side_stream.after(own.encoded):
            self._exchange.gather_rows(own.gathered_RMD)
            gathered = ended = Moment(self._tower.device)
            outgoing = None
            if self._exchange.rank == 0:
                spans = cut_apart(opened.shares, opened.num_rows)
                rows = [own.gathered_RMD[span.rank, span.start : span.stop] for span in spans]
                outgoing = OutgoingRows.bring_down(opened.header.images, rows)
                ended = Moment(self._tower.device)
        ended.wait()
        if outgoing is None:
            return None
        encode_s = own.encoded.seconds_since(own.begun)
        gather_s = gathered.seconds_since(own.encoded)
        images, buffers = outgoing.collect()
        answer = Encoded(
            batch_id=opened.header.batch_id,
            images=images,
            rank_patches=opened.rank_patches,
            wait_s=time.perf_counter() - opened.arrived_at - encode_s - gather_s,
            encode_s=encode_s,
            gather_s=gather_s,
        )
        return answer, buffers

    def _when_all_could(self, opened: OpenBatch) -> OwnRows:
        """This rank's rows, as soon as no rank's memory ran out.

        A rank never goes into the all-gather alone: whose memory sufficed encodes again with those whose did not. The
        first time all try as before: the batch before this one is done by now, and may have held what was missing. The
        batch behind it may be encoded first, and hold its rows, which are little beside what a forward takes.
        """
        was_repeated = False
        while True:
            own = opened.attempts.pop().result()
            # On CUDA nothing may be computed yet, but memory is allocated: it runs out while the work is queued.
            if self._exchange.all_agree(own is not None):
                assert own is not None
                return own
            if was_repeated:
                self._take_less_memory(opened.num_patches)
            was_repeated = True
            own = None  # it would be in the way
            opened.attempts.append(self._computing.do(opened.encode))

    def _try_tower(
        self, canvases: Sequence[Tensor], layouts: Sequence[Layout], rank_rows: Sequence[int]
    ) -> OwnRows | None:
        """This rank's rows in room for all ranks', or None if memory does not suffice."""
        begun = Moment(self._tower.device)
        try:
            gathered_RMD = self._exchange.gather_buffer(self._tower.encode(canvases, layouts), rank_rows)
        except torch.OutOfMemoryError:
            return None  # and with it the traceback that holds on to the tensors
        return OwnRows(gathered_RMD, begun, Moment(self._tower.device))

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
