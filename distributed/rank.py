"""What a rank does once it is loaded: rank 0 takes batches from the front end and leads, the others follow.

Every rank derives the same plan of a batch from its header, so that each collective finds all ranks ready for it:
nothing about an image may make one rank raise alone. What only one can know (its memory ran out) is agreed on first.

Shapes: N rows of one image or of this rank, M rows of the fullest rank, R ranks, D the model's output width.
"""

import logging
import os
import queue
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.balance import balance, cut_apart, rank_loads
from distributed.exchange import Exchange
from distributed.heartbeat import Heartbeat
from distributed.link import Buffer, RankLink
from distributed.messages import Encode, Encoded, Hello, Idle, ImageSpec, RankInfo, RowsSpec, Stop
from encoder.geometry import merge_grid
from encoder.layout import Layout, num_layout_rows
from encoder.tower import Tower

log = logging.getLogger("patchgrid.rank")

_HEARTBEAT_S = 0.5
_TICKS_PER_TIMEOUT = 4


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a rank takes part: where the front end listens (rank 0 needs it), which life this is, how patient to be."""

    run_dir: Path | None
    epoch: int
    collective_timeout_s: float
    stall_timeout_s: float


class Rank:
    """A loaded tower and this process's place in the group."""

    def __init__(self, options: GroupOptions, tower: Tower, weights_fingerprint: str) -> None:
        self._options = options
        self._tower = tower
        self._exchange = Exchange.join(tower.device, options.collective_timeout_s)
        exchange = self._exchange
        self._heartbeat = Heartbeat(
            exchange.rank,
            exchange.num_ranks,
            interval_s=_HEARTBEAT_S,
            stall_timeout_s=options.stall_timeout_s,
        )
        device = torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu"
        self._infos = exchange.introduce(
            RankInfo(exchange.rank, os.getpid(), socket.gethostname(), device, weights_fingerprint)
        )
        strangers = [info.rank for info in self._infos if info.fingerprint != weights_fingerprint]
        if strangers:
            raise RuntimeError(f"ranks {strangers} differ from rank {exchange.rank}: compare --model and --dtype")

    def run(self) -> None:
        """Serve until told to stop."""
        if self._exchange.rank == 0:
            self._lead()
        else:
            self._follow()
        self._heartbeat.stop()
        self._exchange.leave()

    def _lead(self) -> None:
        assert self._options.run_dir is not None, "rank 0 runs beside the front end"
        link = RankLink(self._options.run_dir, self._options.epoch, self._heartbeat.silent_s)
        self._warm_up()
        link.send(
            Hello(
                epoch=self._options.epoch,
                ranks=self._infos,
                dtype=str(self._tower.dtype).removeprefix("torch."),
                attention=self._tower.attention,
                layouts=self._tower.layouts,
                max_patches_per_forward=self._tower.max_patches_per_forward,
                out_width=self._tower.config.out_width,
            )
        )
        while True:
            try:
                delivery = link.inbox.get(timeout=self._options.collective_timeout_s / _TICKS_PER_TIMEOUT)
            except queue.Empty:
                self._send_command(Idle())
                continue
            wait_s = time.perf_counter() - delivery.arrived_at
            batch = delivery.message
            self._send_command(batch)
            if isinstance(batch, Stop):
                break
            with self._heartbeat.working():
                answer, rows = self._encode_and_cut(batch, _canvases(batch.images, delivery.buffers), wait_s)
            link.send(answer, rows)
        link.close()

    def _follow(self) -> None:
        while True:
            command = self._exchange.receive_command()
            if isinstance(command, Stop):
                return
            if isinstance(command, Encode):
                with self._heartbeat.working():
                    self._encode(command, None)

    def _send_command(self, command: Encode | Idle | Stop) -> None:
        if self._exchange.num_ranks > 1:
            self._exchange.send_command(command)

    def _warm_up(self) -> None:
        """One small image per rank through the ordinary way: kernels and communicators exist before the hello."""
        side = 3 * self._tower.config.patch_size
        spec = ImageSpec(height=side, width=side, layout="rows", dtype="float32")
        batch = Encode(batch_id=0, images=(spec,) * self._exchange.num_ranks)
        self._send_command(batch)
        canvas = torch.zeros(side, side, 3, dtype=torch.uint8)
        answer, _ = self._encode_and_cut(batch, [canvas] * len(batch.images), wait_s=0.0)
        if not all(image.state == "good" for image in answer.images):
            raise RuntimeError("the tower's first forward gave values that are not finite")

    def _encode(self, batch: Encode, canvases: Sequence[Tensor] | None) -> "_Gathered":
        """Every rank's part of a batch. `canvases` are all of the batch's on rank 0 and None elsewhere."""
        started = time.perf_counter()
        patch_area = self._tower.config.patch_size**2
        num_patches = [image.height * image.width // patch_area for image in batch.images]
        num_rows = [self._num_rows(image) for image in batch.images]
        shares = balance(num_patches, self._exchange.num_ranks)
        rank_rows = rank_loads(shares, num_rows)
        my_share = shares[self._exchange.rank]
        sending: list[dist.Work] = []
        if canvases is None:
            mine = self._exchange.receive_pixels(batch.images, my_share)
        else:
            sending = self._exchange.send_pixels(shares, canvases)
            mine = [canvases[index] for index in my_share]
        layouts = [batch.images[index].layout for index in my_share]
        gathered_RMD = self._try_tower(mine, layouts, rank_rows)
        while not self._exchange.all_agree(gathered_RMD is not None):
            gathered_RMD = None
            self._take_less_memory(num_patches)
            gathered_RMD = self._try_tower(mine, layouts, rank_rows)
        assert gathered_RMD is not None
        self._exchange.wait_for(sending)
        encoded = time.perf_counter()
        self._exchange.gather_rows(gathered_RMD)
        return _Gathered(
            rows=[gathered_RMD[span.rank, span.start : span.stop] for span in cut_apart(shares, num_rows)],
            rank_patches=rank_loads(shares, num_patches),
            encode_s=encoded - started,
            gather_s=time.perf_counter() - encoded,
        )

    def _try_tower(
        self, canvases: Sequence[Tensor], layouts: Sequence[Layout], rank_rows: Sequence[int]
    ) -> Tensor | None:
        """This rank's rows, computed to the end, in room for all ranks' (R, M, D); None if memory does not suffice."""
        try:
            rows_ND = self._tower.encode(canvases, layouts)
            gathered_RMD = self._exchange.gather_buffer(rows_ND, rank_rows)
            if self._tower.device.type == "cuda":
                torch.cuda.synchronize(self._tower.device)
        except torch.OutOfMemoryError:
            return None  # and with it the traceback that holds on to the tensors
        return gathered_RMD

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

    def _encode_and_cut(self, batch: Encode, canvases: Sequence[Tensor], wait_s: float) -> tuple[Encoded, list[Buffer]]:
        """Rank 0: a batch's answer, each image's rows in the dtype that it asked for."""
        gathered = self._encode(batch, canvases)
        specs: list[RowsSpec] = []
        buffers: list[Buffer] = []
        for image, computed_ND in zip(batch.images, gathered.rows, strict=True):
            rows_ND = computed_ND.to(getattr(torch, image.dtype))
            state: Literal["good", "not_finite", "overflow"] = "good"
            if not _is_finite(rows_ND):
                state = "overflow" if _is_finite(computed_ND) else "not_finite"
            specs.append(RowsSpec(num_rows=rows_ND.shape[0], width=rows_ND.shape[1], state=state))
            buffers.append(_buffer(rows_ND) if state == "good" else b"")
        answer = Encoded(
            batch_id=batch.batch_id,
            images=tuple(specs),
            rank_patches=gathered.rank_patches,
            wait_s=wait_s,
            encode_s=gathered.encode_s,
            gather_s=gathered.gather_s,
        )
        return answer, buffers


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A batch after the all-gather: every image's rows (N, D), in the order of the batch."""

    rows: list[Tensor]
    rank_patches: tuple[int, ...]
    encode_s: float
    gather_s: float


def _is_finite(rows_ND: Tensor) -> bool:
    # NaN and either infinity show in the extremes, which cost a CPU a thirtieth of isfinite().all().
    return all(extreme.isfinite() for extreme in rows_ND.aminmax())


def _buffer(rows_ND: Tensor) -> memoryview:
    return rows_ND.contiguous().cpu().flatten().view(torch.uint8).numpy().data


def _canvases(images: Sequence[ImageSpec], buffers: Sequence[memoryview]) -> list[Tensor]:
    return [
        torch.frombuffer(buffer, dtype=torch.uint8).view(image.height, image.width, 3)
        for image, buffer in zip(images, buffers, strict=True)
    ]
