"""What a rank does once it is loaded: rank 0 takes batches from the front end and leads, the others follow.

Three threads of every rank share the work, each in the order of the batches: one starts them, one encodes, and the main
thread finishes them. So a rank that has done its share is not held up by another, and a GPU has the next batch's
kernels before it is done with the one before. Whatever goes wrong ends the rank when it is that batch's turn to finish:
nothing is gathered after it, and what was encoded before it is still answered.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from distributed.backlog import Backlog
from distributed.batch import BatchRunner, OpenBatch
from distributed.exchange import Exchange
from distributed.heartbeat import Heartbeat
from distributed.lane import Lane
from distributed.link import Delivery, RankLink
from distributed.messages import Assignment, Encode, Hello, Idle, ImageSpec, RankInfo, Stop
from encoder.tower import Tower

_HEARTBEAT_S = 0.5
_TICKS_PER_TIMEOUT = 4
# Batches that are started and not finished, at most: one to compute and one to go on with.
_MAX_OPEN = 2


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a rank takes part: where the front end listens (rank 0 needs it), which life this is, how patient to be."""

    run_dir: Path | None
    epoch: int
    collective_timeout_s: float
    stall_timeout_s: float


class Rank:
    """A loaded tower and this process's place in the group."""

    def __init__(self, options: GroupOptions, tower: Tower, weights_fingerprint: str, computing: Lane) -> None:
        """Join the group. computing: the lane that made the tower, and calls it."""
        self._options = options
        self._tick_s = options.collective_timeout_s / _TICKS_PER_TIMEOUT
        self._tower = tower
        self._exchange = Exchange.join(tower.device, options.collective_timeout_s)
        exchange = self._exchange
        self._heartbeat = Heartbeat(
            exchange.rank,
            exchange.num_ranks,
            interval_s=_HEARTBEAT_S,
            stall_timeout_s=options.stall_timeout_s,
        )
        self._runner = BatchRunner(exchange, tower, computing)
        self._starting = Lane("start", tower.device)
        self._room = threading.Semaphore(_MAX_OPEN)
        self._backlog = Backlog(exchange.num_ranks)
        # What the main thread has to finish, in order; last of all how the starting thread ended.
        self._started: queue.SimpleQueue[OpenBatch | Future[None]] = queue.SimpleQueue()
        device = torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu"
        info = RankInfo(
            rank=exchange.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=device,
            fingerprint=weights_fingerprint,
            attention=tower.attention,
        )
        self._infos = exchange.introduce(info)
        expected = (info.fingerprint, info.attention)
        strangers = [peer.rank for peer in self._infos if (peer.fingerprint, peer.attention) != expected]
        if strangers:
            raise RuntimeError(
                f"ranks {strangers} differ from rank {info.rank}: compare --model, --dtype and --attention"
            )

    def run(self) -> None:
        """Serve until told to stop. After a failure its threads may be left waiting for other ranks."""
        if self._exchange.rank == 0:
            assert self._options.run_dir is not None, "rank 0 runs beside the front end"
            link = RankLink(self._options.run_dir, self._options.epoch, self._heartbeat.silent_s)
            with closing(link):  # answers that were sent still go out when a later batch ends this rank
                self._warm_up()
                link.send(self._hello())
                self._serve(partial(self._lead, link), partial(self._answer, link))
        else:
            self._warm_up()
            self._serve(self._follow, self._runner.finish)
        self._heartbeat.stop()
        self._exchange.leave()

    def _serve(self, start_all: Callable[[], None], finish: Callable[[OpenBatch], object]) -> None:
        """Finish what the starting thread starts, until that has ended and all is finished."""
        self._starting.do(start_all).add_done_callback(self._started.put)
        while self._finish_next(finish):
            pass

    def _finish_next(self, finish: Callable[[OpenBatch], object]) -> bool:
        """Finish a batch, of which nothing is kept. Returns whether there can be another."""
        started = self._started.get()
        if isinstance(started, Future):
            started.result()
            return False
        finish(started)
        self._heartbeat.end_batch()
        self._room.release()
        return True

    def _lead(self, link: RankLink) -> None:
        while self._lead_next(link.inbox):
            pass

    def _lead_next(self, inbox: "queue.SimpleQueue[Delivery]") -> bool:
        """Start what the front end sends next, of which nothing is kept here. Returns whether there can be more."""
        delivery = self._next_delivery(inbox)
        batch = delivery.message
        if isinstance(batch, Stop):
            self._tell(batch)
            return False
        while not self._room.acquire(timeout=self._tick_s):
            self._tell(Idle())
        assignment = Assignment(batch, self._backlog.patches())
        self._tell(assignment)
        self._start(assignment, _canvases(batch.images, delivery.buffers), delivery.arrived_at)
        return True

    def _answer(self, link: RankLink, opened: OpenBatch) -> None:
        answer = self._runner.finish(opened)
        assert answer is not None, "this is rank 0"
        self._backlog.end(answer[0].encode_s)
        link.send(*answer)

    def _follow(self) -> None:
        while True:
            match self._exchange.receive_command():
                case Assignment() as assignment:
                    self._room.acquire()
                    self._start(assignment, None, time.perf_counter())
                case Idle():
                    pass
                case Stop():
                    return

    def _next_delivery(self, inbox: "queue.SimpleQueue[Delivery]") -> Delivery:
        """Wait for the front end; the other ranks are told now and then that nothing came."""
        while True:
            try:
                return inbox.get(timeout=self._tick_s)
            except queue.Empty:
                self._tell(Idle())

    def _tell(self, command: Assignment | Idle | Stop) -> None:
        if self._exchange.num_ranks > 1:
            self._exchange.send_command(command)

    def _start(self, assignment: Assignment, canvases: Sequence[Tensor] | None, arrived_at: float) -> None:
        self._heartbeat.begin_batch()
        opened = self._runner.start(assignment, canvases, arrived_at)
        if self._exchange.rank == 0:
            self._backlog.give(opened.rank_patches)
        self._started.put(opened)

    def _warm_up(self) -> None:
        """One small image per rank through the ordinary way: kernels and communicators exist before the hello."""
        side = 3 * self._tower.config.patch_size
        num_ranks = self._exchange.num_ranks
        spec = ImageSpec(height=side, width=side, layout="rows", dtype="float32")
        assignment = Assignment(Encode(batch_id=0, images=(spec,) * num_ranks), (0,) * num_ranks)
        canvas = torch.zeros(side, side, 3, dtype=torch.uint8)
        canvases = [canvas] * num_ranks if self._exchange.rank == 0 else None
        answer = self._runner.finish(self._runner.start(assignment, canvases, time.perf_counter()))
        if answer is not None and not all(image.state == "good" for image in answer[0].images):
            raise RuntimeError("the tower's first forward gave values that are not finite")

    def _hello(self) -> Hello:
        return Hello(
            epoch=self._options.epoch,
            ranks=self._infos,
            dtype=str(self._tower.dtype).removeprefix("torch."),
            layouts=self._tower.layouts,
            max_patches_per_forward=self._tower.max_patches_per_forward,
            out_width=self._tower.config.out_width,
        )


def _canvases(images: Sequence[ImageSpec], buffers: Sequence[memoryview]) -> list[Tensor]:
    return [
        torch.frombuffer(buffer, dtype=torch.uint8).view(image.height, image.width, 3)
        for image, buffer in zip(images, buffers, strict=True)
    ]
