"""Keeps a worker group alive and its debts paid.

One task, `run`, goes through the group's lives: start torchrun, wait for the hello, watch process and heartbeat, end
what is left, start again. What was sent and not answered is sent again to the next life: encoding is idempotent. A
reason that would only repeat itself (a bad checkpoint, no such device) or too many deaths end `run` with `GroupError`.
"""

import asyncio
import contextlib
import enum
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import zmq.asyncio

from distributed.launcher import LaunchOptions, WorkerGroup
from distributed.link import FrontLink
from distributed.messages import Encoded, Hello, Pong, ProtocolError, Stop
from encoder.config import VisionConfig
from encoder.geometry import plan
from encoder.image import Canvas
from service.batcher import QueuedImage
from service.errors import ServiceError
from service.ledger import Debt, Ledger
from service.metrics import Metrics
from service.pulse import Pulse

log = logging.getLogger("patchgrid.supervisor")

_LONGEST_BACKOFF_S = 10.0
_LAST_WORDS_S = 1.0
_MOST_VAIN_STARTS = 3


class GroupState(enum.StrEnum):
    """Where the group is in its life. Only `READY` takes requests."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class GroupError(RuntimeError):
    """The group cannot be started, or died too often; the message is the reason."""


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How patient the supervisor is; the fields are those of `Settings`."""

    startup_timeout_s: float
    rank_timeout_s: float
    restart_limit: int
    restart_window_s: float


class Supervisor:
    """The front end's side of the worker group. Use from one event loop."""

    def __init__(
        self,
        launch: LaunchOptions,
        options: SupervisorOptions,
        config: VisionConfig,
        ledger: Ledger,
        run_dir: Path,
        metrics: Metrics,
    ) -> None:
        self.state = GroupState.STARTING
        self.hello: Hello | None = None
        self._launch = launch
        self._options = options
        self._config = config
        self._ledger = ledger
        self._run_dir = run_dir
        self._metrics = metrics
        self._link: FrontLink | None = None
        self._epoch = 0
        self._last_ready_epoch = 0
        self._stopping = asyncio.Event()
        self._stop_grace_s = 0.0
        self._doubt = asyncio.Event()
        self._deaths: deque[float] = deque()
        self._pulse = Pulse(options.rank_timeout_s)

    def reasons_not_ready(self) -> tuple[str, ...]:
        """Why the group takes no work now; empty if it does."""
        if self.state is not GroupState.READY:
            return (self.state.value,)
        reasons = []
        if self._pulse.is_lost:
            reasons.append(f"no heartbeat for {self._pulse.age_s:.1f} s")
        if self._doubt.is_set():
            reasons.append("the last forward gave values that are not finite")
        return tuple(reasons)

    async def run(self) -> None:
        """Keep the group alive until `stop`.

        Raises:
            GroupError: it cannot be kept alive; every unanswered batch has been given an error.
        """
        context = zmq.asyncio.Context()
        try:
            while True:
                self._epoch += 1
                reason = await self._live(context)
                if self._stopping.is_set():
                    return
                if self._ledger.blame(self._epoch):
                    self._deaths.clear()  # an image explains them, and is not let in again
                self._count_death(reason)
                self.state = GroupState.RESTARTING
                backoff_s = min(2.0 ** (len(self._deaths) - 1) - 1.0, _LONGEST_BACKOFF_S)
                log.warning("worker group %d ended: %s; next start in %.0f s", self._epoch, reason, backoff_s)
                self._metrics.restarts_total.inc()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), backoff_s)
        finally:
            self.state = GroupState.STOPPED
            self._ledger.fail(_group_is_gone())
            context.destroy(linger=0)

    def stop(self, grace_s: float) -> None:
        """Have the group finish what it was sent and end, within so many seconds; `run` then returns."""
        self._stop_grace_s = grace_s
        self._stopping.set()

    async def encode(self, images: Sequence[QueuedImage], deaths: int = 0) -> None:
        """Have a batch encoded, over as many lives of the group as it takes, and settle every image's `rows`.

        deaths: lives that these images may have ended already.
        """
        debt = self._ledger.add(images, deaths)
        try:
            if self.state is GroupState.STOPPED:
                raise _group_is_gone()
            if self._link is not None:
                await self._send_unsent(self._link)
            answer = await debt.settled
        except ServiceError as error:
            for image in images:
                if not image.rows.done():
                    image.rows.set_exception(error)
            return
        finally:
            self._ledger.remove(debt)
        if answer is not None:
            self._observe(debt, answer)
            return
        for image in images:
            if not image.rows.done():
                await self.encode([image], deaths=1)

    async def _live(self, context: zmq.asyncio.Context) -> str:
        """One life of the group, from torchrun's start until nothing is left of it. Returns why it ended."""
        link = FrontLink(context, self._run_dir, self._epoch)
        try:
            group = await WorkerGroup.start(self._launch, self._run_dir, self._epoch)
            try:
                return await self._outlive(group, link)
            finally:
                self._link = None
                await group.kill()
        except (OSError, TimeoutError) as error:
            raise GroupError(f"torchrun cannot be started or ended: {error}") from error
        finally:
            link.close()

    async def _outlive(self, group: WorkerGroup, link: FrontLink) -> str:
        """Talk to the group until it ends, has to be ended, or is told to stop. Returns the reason."""
        exited = asyncio.create_task(group.wait())
        talking = asyncio.create_task(self._talk(link))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({exited, talking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and await link.send(Stop()):
                await asyncio.wait({exited}, timeout=self._stop_grace_s)
            if not exited.done() and talking.done():
                await asyncio.wait({exited}, timeout=_LAST_WORDS_S)  # what ails a rank is better told by itself
            if not exited.done():
                return talking.result() if talking.done() else "told to stop"
            failure = group.failure()
            if failure is None:
                return f"torchrun ended with code {exited.result()}"
            reason = f"rank {failure.rank} failed in {failure.phase}: {failure.reason}"
            if failure.phase == "setup" and self.hello is None:
                raise GroupError(reason)
            return reason
        finally:
            for task in (exited, talking, stopping):
                task.cancel()

    def _count_death(self, reason: str) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > self._options.restart_window_s:
            self._deaths.popleft()
        if len(self._deaths) > self._options.restart_limit:
            raise GroupError(f"the worker group died {len(self._deaths)} times; the last time: {reason}")
        if self._epoch - self._last_ready_epoch >= _MOST_VAIN_STARTS:
            raise GroupError(
                f"the worker group did not become ready {_MOST_VAIN_STARTS} times; the last time: {reason}"
            )

    async def _talk(self, link: FrontLink) -> str:
        """Hear the hello, then receive and watch until one of them finds a reason to end this life."""
        try:
            async with asyncio.timeout(self._options.startup_timeout_s):
                hello, _ = await link.receive()
        except TimeoutError:
            reason = f"not ready within {self._options.startup_timeout_s:g} s"
            if self.hello is None:
                raise GroupError(reason) from None
            return reason
        if not isinstance(hello, Hello):
            return "rank 0 spoke before its hello"
        if hello.out_width != self._config.out_width:
            raise GroupError(f"the ranks' rows are {hello.out_width} wide, the checkpoint's {self._config.out_width}")
        await self._welcome(link, hello)
        tasks = {asyncio.create_task(part(link)) for part in (self._receive, self._pulse.watch, self._reassure)}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()

    async def _welcome(self, link: FrontLink, hello: Hello) -> None:
        link.hide()
        self.hello = hello
        self._last_ready_epoch = self._epoch
        self._pulse.begin()
        self._doubt.clear()
        await self._send_unsent(link)
        self._link = link
        self.state = GroupState.READY
        ranks = ", ".join(f"{info.rank} on {info.device}" for info in hello.ranks)
        log.info("worker group %d ready: rank %s; %s, %s", hello.epoch, ranks, hello.dtype, hello.ranks[0].attention)

    async def _send_unsent(self, link: FrontLink) -> None:
        """Send what this life may be sent now, in order. If rank 0 is gone, the next life will be sent it."""
        while debt := self._ledger.next_to_send(self._epoch):
            if not await link.send(debt.message, debt.buffers):
                return
            debt.epoch, debt.sent_at = self._epoch, time.perf_counter()

    async def _receive(self, link: FrontLink) -> str:
        try:
            while True:
                message, buffers = await link.receive()
                match message:
                    case Pong():
                        self._pulse.hear(message)
                    case Encoded():
                        if not self._ledger.deliver(message, buffers):
                            self._doubt.set()
                        await self._send_unsent(link)
                    case Hello():
                        raise ProtocolError("rank 0 said hello twice")
        except (ProtocolError, msgspec.DecodeError) as error:
            return f"rank 0 is not understood: {error}"

    async def _reassure(self, link: FrontLink) -> str:
        """After rows that are not finite, try an image that cannot be the reason: if it fails too, the group is ill."""
        side = self._config.patch_size * self._config.merge_ratio
        planned = plan(self._config, side, side)
        width, height = planned.resized
        while True:
            await self._doubt.wait()
            canvas = Canvas(np.zeros((height, width, 3), np.uint8), planned)
            plain = QueuedImage(canvas, "", "rows", "float32", asyncio.get_running_loop().create_future())
            await self.encode([plain])
            if plain.rows.exception() is not None:
                return "a plain image's rows are not finite either"
            self._doubt.clear()

    def _observe(self, debt: Debt, answer: Encoded) -> None:
        round_trip_s = time.perf_counter() - debt.sent_at
        self._metrics.observe_stage("encode", answer.encode_s)
        self._metrics.observe_stage("gather", answer.gather_s)
        link_s = max(0.0, round_trip_s - answer.wait_s - answer.encode_s - answer.gather_s)
        self._metrics.observe_stage("link", link_s)
        self._metrics.observe_loads(answer.rank_patches)


def _group_is_gone() -> ServiceError:
    return ServiceError("draining", "the service is ending", retry_after_s=1)
