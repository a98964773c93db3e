"""What a rank does once it is loaded: rank 0 takes batches from the front end and leads, the others follow.

Batches are started and finished in order, at most so many open at once. Two keep a GPU at work: it has the next batch's
kernels before it is done with the one before, and none of them waits for an answer to be handed out.
"""

import logging
import os
import queue
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distributed.batch import BatchStarter, OpenBatch
from distributed.exchange import Exchange
from distributed.heartbeat import Heartbeat
from distributed.link import Delivery, RankLink
from distributed.messages import Encode, Hello, Idle, ImageSpec, RankInfo, Stop
from encoder.tower import Tower

log = logging.getLogger("patchgrid.rank")

_HEARTBEAT_S = 0.5
_TICKS_PER_TIMEOUT = 4

# On a CPU to start a batch is to compute it, and an answer would only wait for the next one's.
_MAX_OPEN = {"cpu": 1, "cuda": 2}
# How long rank 0 waits for the next batch before it looks at its device again, with a batch open.
_LOOK_S = 5e-4


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a rank takes part: where the front end listens (rank 0 needs it), which life this is, how patient to be."""

    run_dir: Path | None
    epoch: int
    collective_timeout_s: float
    stall_timeout_s: float


class Rank:
    """A loaded tower and this process's place in the group."""

    def __init__(
        self, options: GroupOptions, tower: Tower, weights_fingerprint: str, max_open: int | None = None
    ) -> None:
        """Join the group.

        Args:
            max_open: batches that may be open at once, the same on every rank; None takes what suits the device.
        """
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
        self._open: deque[OpenBatch] = deque()
        self._max_open = _MAX_OPEN[tower.device.type] if max_open is None else max_open
        self._starter = BatchStarter(exchange, tower, self._finish_all if self._max_open > 1 else None)
        self._link: RankLink | None = None
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
        with closing(link):  # when a batch ends this rank, the answers before it still go out
            self._link = link
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
                delivery = self._next_delivery(link.inbox)
                batch = delivery.message
                self._send_command(batch)
                if isinstance(batch, Stop):
                    break
                self._start(batch, _canvases(batch.images, delivery.buffers), delivery.arrived_at)
            self._finish_all()

    def _next_delivery(self, inbox: "queue.SimpleQueue[Delivery]") -> Delivery:
        """Wait for the front end. If nothing comes until the device is done, finish, and tell the peers to do so."""
        while True:
            patience_s = _LOOK_S if self._open else self._options.collective_timeout_s / _TICKS_PER_TIMEOUT
            try:
                return inbox.get(timeout=patience_s)
            except queue.Empty:
                if self._open and not self._open[0].has_ended():
                    continue
                self._finish_all()
                self._send_command(Idle())

    def _follow(self) -> None:
        while True:
            match self._exchange.receive_command():
                case Encode() as batch:
                    self._start(batch, None, time.perf_counter())
                case Idle():
                    self._finish_all()
                case Stop():
                    self._finish_all()
                    return

    def _send_command(self, command: Encode | Idle | Stop) -> None:
        if self._exchange.num_ranks > 1:
            self._exchange.send_command(command)

    def _start(self, batch: Encode, canvases: Sequence[Tensor] | None, arrived_at: float) -> None:
        """Start a batch, and finish those that there is no room for besides the next one."""
        if self._open and self._open[0].has_ended():
            self._finish()  # or its answer would wait for what the host has to do now
        self._heartbeat.begin_batch()
        try:
            opened = self._starter.start(batch, canvases, arrived_at)
        except Exception:
            self._finish_all()  # the front end suspects its first unanswered batch, which is to be this one
            raise
        self._open.append(opened)
        self._finish_down_to(self._max_open - 1)

    def _finish_all(self) -> None:
        self._finish_down_to(0)

    def _finish_down_to(self, num_open: int) -> None:
        while len(self._open) > num_open:
            self._finish()

    def _finish(self) -> None:
        """Finish the oldest batch; rank 0 hands out its rows."""
        answer = self._open.popleft().finish()
        self._heartbeat.end_batch()
        if answer is not None:
            assert self._link is not None
            self._link.send(*answer)

    def _warm_up(self) -> None:
        """One small image per rank through the ordinary way: kernels and communicators exist before the hello."""
        side = 3 * self._tower.config.patch_size
        spec = ImageSpec(height=side, width=side, layout="rows", dtype="float32")
        batch = Encode(batch_id=0, images=(spec,) * self._exchange.num_ranks)
        self._send_command(batch)
        canvas = torch.zeros(side, side, 3, dtype=torch.uint8)
        answer = self._starter.start(batch, [canvas] * len(batch.images), time.perf_counter()).finish()
        assert answer is not None, "this is rank 0"
        if not all(image.state == "good" for image in answer[0].images):
            raise RuntimeError("the tower's first forward gave values that are not finite")
        self._send_command(Idle())


def _canvases(images: Sequence[ImageSpec], buffers: Sequence[memoryview]) -> list[Tensor]:
    return [
        torch.frombuffer(buffer, dtype=torch.uint8).view(image.height, image.width, 3)
        for image, buffer in zip(images, buffers, strict=True)
    ]
