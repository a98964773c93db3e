"""Keeps a worker group alive and its debts paid.

One task, `run`, goes through the group's lives: start torchrun, wait for the hello, watch process and heartbeat, end
what is left, start again. What was sent and not answered is sent again to the next life: encoding is idempotent. A
reason that would only repeat itself (a bad checkpoint, no such device) or too many deaths end `run` with `GroupError`.
"""

import asyncio
import contextlib
import enum
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq.asyncio

from distributed.launcher import LaunchOptions, WorkerGroup
from distributed.link import FrontLink
from distributed.messages import (
    DTYPE_BYTES,
    Encode,
    Encoded,
    Hello,
    ImageSpec,
    Ping,
    Pong,
    ProtocolError,
    RowsSpec,
    Stop,
)
from encoder.layout import num_layout_rows
from service.batcher import ImageRows, QueuedImage
from service.errors import ServiceError
from service.metrics import Metrics

log = logging.getLogger("patchgrid.supervisor")

_PINGS_PER_TIMEOUT = 4
_STOP_GRACE_S = 10.0
_LONGEST_BACKOFF_S = 10.0


class GroupState(enum.StrEnum):
    """Where the group is in its life. Only `READY` takes requests."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class GroupError(RuntimeError):
    """The group cannot be started, or died too often; the message is the reason."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A batch that was accepted and not answered."""

    message: Encode
    images: Sequence[QueuedImage]
    answered: "asyncio.Future[Encoded]"
    sent_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How patient the supervisor is; the fields are those of `Settings`."""

    startup_timeout_s: float
    rank_timeout_s: float
    restart_limit: int
    restart_window_s: float


class Supervisor:
    """The front end's side of the worker group. Use from one event loop."""

    def __init__(self, launch: LaunchOptions, options: SupervisorOptions, run_dir: Path, metrics: Metrics) -> None:
        self.state = GroupState.STARTING
        self.hello: Hello | None = None
        self._launch = launch
        self._options = options
        self._run_dir = run_dir
        self._metrics = metrics
        self._batch_ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._link: FrontLink | None = None
        self._stopping = asyncio.Event()
        self._pong = Pong(nonce=0, silent_s=())
        self._pong_at = 0.0

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the most silent rank was last known to be alive."""
        return time.monotonic() - self._pong_at + max(self._pong.silent_s, default=0.0)

    def reasons_not_ready(self) -> tuple[str, ...]:
        """Why the group takes no work now; empty if it does."""
        if self.state is not GroupState.READY:
            return (self.state.value,)
        if self.heartbeat_age_s > self._options.rank_timeout_s:
            return (f"no heartbeat for {self.heartbeat_age_s:.1f} s",)
        return ()

    @property
    def patches_per_round(self) -> int:
        """Patches that the group takes in one forward pass of every rank."""
        assert self.hello is not None, "asked once there was work"
        return self.hello.max_patches_per_forward * len(self.hello.ranks)

    async def run(self) -> None:
        """Keep the group alive until `stop`.

        Raises:
            GroupError: it cannot be kept alive; every unanswered batch has been given an error.
        """
        deaths: deque[float] = deque()
        context = zmq.asyncio.Context()
        try:
            for epoch in itertools.count(1):
                reason = await self._live(context, epoch)
                if self._stopping.is_set():
                    return
                now = time.monotonic()
                deaths.append(now)
                while now - deaths[0] > self._options.restart_window_s:
                    deaths.popleft()
                if len(deaths) > self._options.restart_limit:
                    raise GroupError(f"the worker group died {len(deaths)} times; the last time: {reason}")
                self.state = GroupState.RESTARTING
                backoff_s = min(2.0 ** (len(deaths) - 1) - 1.0, _LONGEST_BACKOFF_S)
                log.warning("worker group %d ended: %s; next start in %.0f s", epoch, reason, backoff_s)
                self._metrics.restarts_total.inc()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), backoff_s)
        finally:
            self.state = GroupState.STOPPED
            for pending in self._pending.values():
                if not pending.answered.done():
                    pending.answered.set_exception(_group_is_gone())
            context.destroy(linger=0)

    def stop(self) -> None:
        """Have the group finish what it was sent and end; `run` then returns."""
        self._stopping.set()

    async def encode(self, images: Sequence[QueuedImage]) -> None:
        """Have a batch encoded, over as many lives of the group as it takes, and settle every image's `rows`."""
        message = Encode(batch_id=next(self._batch_ids), images=tuple(_spec(image) for image in images))
        pending = _Pending(message, images, asyncio.get_running_loop().create_future())
        self._pending[message.batch_id] = pending
        try:
            if self.state is GroupState.STOPPED:
                raise _group_is_gone()
            if self._link is not None:
                await self._send(self._link, pending)
            answer = await pending.answered
            self._observe(answer, time.perf_counter() - pending.sent_at)
        except ServiceError as error:
            for image in images:
                if not image.rows.done():
                    image.rows.set_exception(error)
        finally:
            del self._pending[message.batch_id]

    async def _live(self, context: zmq.asyncio.Context, epoch: int) -> str:
        """One life of the group, from torchrun's start until nothing is left of it. Returns why it ended."""
        link = FrontLink(context, self._run_dir, epoch)
        group = await WorkerGroup.start(self._launch, self._run_dir, epoch)
        exited = asyncio.create_task(group.wait())
        talking = asyncio.create_task(self._talk(link))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({exited, talking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and self._link is not None:
                await self._link.send(Stop())
                await asyncio.wait({exited}, timeout=_STOP_GRACE_S)
            if not exited.done():
                return talking.result() if talking.done() else "told to stop"
            failure = group.failure()
            if failure is None:
                return f"torchrun ended with code {exited.result()}"
            reason = f"rank {failure.rank} failed in {failure.phase}: {failure.reason}"
            if failure.phase == "setup":
                raise GroupError(reason)
            return reason
        finally:
            self._link = None
            self._metrics.ready.set(0)
            for task in (exited, talking, stopping):
                task.cancel()
            await group.kill()
            link.close()

    async def _talk(self, link: FrontLink) -> str:
        """Hear the hello, then receive and watch until one of them finds a reason to end this life."""
        try:
            async with asyncio.timeout(self._options.startup_timeout_s):
                hello, _ = await link.receive()
        except TimeoutError:
            raise GroupError(f"not ready within {self._options.startup_timeout_s:g} s") from None
        if not isinstance(hello, Hello):
            return "rank 0 spoke before its hello"
        await self._welcome(link, hello)
        receiving = asyncio.create_task(self._receive(link))
        watching = asyncio.create_task(self._watch(link))
        try:
            done, _ = await asyncio.wait({receiving, watching}, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            receiving.cancel()
            watching.cancel()

    async def _welcome(self, link: FrontLink, hello: Hello) -> None:
        self.hello = hello
        self._pong_at = time.monotonic()
        self._link = link
        self.state = GroupState.READY
        self._metrics.ready.set(1)
        log.info(
            "worker group %d ready: %d rank(s), %s, %s", hello.epoch, len(hello.ranks), hello.dtype, hello.attention
        )
        for pending in list(self._pending.values()):
            await self._send(link, pending)

    async def _send(self, link: FrontLink, pending: _Pending) -> None:
        pending.sent_at = time.perf_counter()
        await link.send(pending.message, [image.canvas.pixels.data for image in pending.images])

    async def _receive(self, link: FrontLink) -> str:
        while True:
            message, buffers = await link.receive()
            match message:
                case Pong():
                    self._pong = message
                    self._pong_at = time.monotonic()
                case Encoded():
                    try:
                        self._deliver(message, buffers)
                    except ProtocolError as error:
                        return str(error)
                case Hello():
                    return "rank 0 said hello twice"

    async def _watch(self, link: FrontLink) -> str:
        interval_s = self._options.rank_timeout_s / _PINGS_PER_TIMEOUT
        for nonce in itertools.count(1):
            await link.send(Ping(nonce))
            await asyncio.sleep(interval_s)
            if self.heartbeat_age_s > self._options.rank_timeout_s:
                return f"no heartbeat for {self.heartbeat_age_s:.1f} s (silent per rank: {self._pong.silent_s})"
        raise AssertionError("itertools.count does not end")

    def _deliver(self, answer: Encoded, buffers: Sequence[memoryview]) -> None:
        pending = self._pending.get(answer.batch_id)
        if pending is None or pending.answered.done():
            return  # its waiters are gone, or an earlier life had answered already
        for image, spec, buffer in zip(pending.images, answer.images, buffers, strict=True):
            rows = _checked_rows(image, spec, buffer)
            if image.rows.done():
                continue
            if rows is None:
                image.rows.set_exception(ServiceError("non_finite", "the image's rows are not finite numbers"))
            else:
                image.rows.set_result(rows)
        pending.answered.set_result(answer)

    def _observe(self, answer: Encoded, round_trip_s: float) -> None:
        stage = self._metrics.stage_seconds
        stage.labels("encode").observe(answer.encode_s)
        stage.labels("gather").observe(answer.gather_s)
        stage.labels("link").observe(max(0.0, round_trip_s - answer.wait_s - answer.encode_s - answer.gather_s))
        self._metrics.observe_loads(answer.rank_patches)


def _spec(image: QueuedImage) -> ImageSpec:
    height, width, _ = image.canvas.pixels.shape
    return ImageSpec(height=height, width=width, layout=image.layout, dtype=image.dtype)


def _checked_rows(image: QueuedImage, spec: RowsSpec, buffer: memoryview) -> ImageRows | None:
    """An image's rows off the wire, or None where they are not finite. One row too many takes an LLM engine down."""
    expected = num_layout_rows(image.layout, image.canvas.plan.llm_grid)
    if spec.num_rows != expected:
        raise ProtocolError(f"rank 0 sent {spec.num_rows} rows for an image of {expected}")
    if not spec.finite:
        return None
    if buffer.nbytes != spec.num_rows * spec.width * DTYPE_BYTES[image.dtype]:
        raise ProtocolError(f"rank 0 sent {buffer.nbytes} bytes for {spec.num_rows} x {spec.width} {image.dtype}")
    return ImageRows(spec.num_rows, spec.width, buffer)


def _group_is_gone() -> ServiceError:
    return ServiceError("draining", "the service is ending", retry_after_s=1)
