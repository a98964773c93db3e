"""The life of `patchgrid serve`, top to bottom: read the checkpoint, start the group, listen, leave in order.

The process ends with code 0 when it was told to, and with 1 and a reason when it cannot serve.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from distributed.launcher import LaunchOptions
from distributed.processes import adopt_orphans
from encoder.checkpoint import Checkpoint, open_checkpoint
from service.access import load_keys
from service.admission import Admission
from service.app import Parts, create_app
from service.batcher import Batcher
from service.decode import DecodePool
from service.fetch import Fetcher
from service.ledger import Ledger
from service.metrics import Metrics
from service.pipeline import Pipeline
from service.quarantine import Quarantine
from service.run_dir import private_run_dir
from service.settings import Settings
from service.supervisor import GroupError, Supervisor, SupervisorOptions

log = logging.getLogger("patchgrid")

_BACKLOG = 2048
_LOOK_AGAIN_S = 0.05
_STOP_GRACE_S = 10.0
_HANG_UP_S = 5  # for answers that were made and are not read


class HttpServer(uvicorn.Server):
    """uvicorn, with signals left to `_serve`: it stops the group too, and decides on the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        keys = load_keys(settings)
        fetcher = Fetcher(settings) if settings.fetch_hosts else None
        checkpoint = open_checkpoint(settings.model)
        listener = socket.create_server((settings.host, settings.port), backlog=_BACKLOG)
    except (ValueError, OSError) as error:
        print(f"patchgrid serve: error: {error}", file=sys.stderr)
        return 1
    if checkpoint.naming == "random":
        log.warning("serving RANDOM WEIGHTS (%s): for trying and measuring only; see --model", checkpoint.name)
    adopt_orphans()
    with listener, private_run_dir() as run_dir:
        return uvloop.run(_serve(settings, checkpoint, keys, fetcher, listener, run_dir))


async def _serve(
    settings: Settings,
    checkpoint: Checkpoint,
    keys: tuple[bytes, ...],
    fetcher: Fetcher | None,
    listener: socket.socket,
    run_dir: Path,
) -> int:
    metrics = Metrics()
    launch = _launch_options(settings, checkpoint)
    if launch.nnodes > 1:
        log.info("on each other host, again whenever it ends: %s", launch.other_host_command())
    quarantine = Quarantine(settings.quarantine_s)
    supervisor = Supervisor(
        launch,
        _supervisor_options(settings),
        checkpoint.config,
        Ledger(checkpoint.config.out_width, quarantine, metrics),
        run_dir,
        metrics,
    )
    batcher = Batcher(
        supervisor.encode,
        metrics,
        budget_patches=lambda: settings.max_patches_per_batch or supervisor.patches_per_round,
        slots=settings.batches_in_flight,
        limit_queue_patches=settings.limit_queue_patches,
    )
    admission = Admission(
        limit_decoding_requests=settings.limit_decoding_requests,
        limit_held_bytes=settings.limit_held_bytes,
        waiting_s=batcher.waiting_s,
        metrics=metrics,
    )
    with DecodePool(settings, checkpoint.config, metrics) as pool:
        pipeline = Pipeline(settings, pool, batcher, supervisor, quarantine, metrics)
        app = create_app(Parts(settings, checkpoint, keys, fetcher, pool, admission, pipeline, supervisor, metrics))
        http = HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=_HANG_UP_S,
            )
        )
        signals = _catch_signals()
        supervising = asyncio.create_task(supervisor.run())
        batching = asyncio.create_task(batcher.run())
        listening = asyncio.create_task(http.serve(sockets=[listener]))
        told_to_stop = asyncio.create_task(signals.get())
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])

        await asyncio.wait({told_to_stop, supervising, batching, listening}, return_when=asyncio.FIRST_COMPLETED)
        in_order = told_to_stop.done()
        if in_order:
            in_order = await _drain(admission, signals, settings)
        admission.closed = True
        http.should_exit = True
        http.force_exit = not in_order
        await listening
        if batching.done():
            log.critical("the queue's owner failed", exc_info=batching.exception())
        supervisor.stop(grace_s=_STOP_GRACE_S if in_order else 0.0)
        try:
            await supervising
        except GroupError as error:
            log.critical("cannot go on: %s", error)
            return 1
        finally:
            told_to_stop.cancel()
            batching.cancel()
    return 0 if in_order else 1


def _catch_signals() -> "asyncio.Queue[signal.Signals]":
    """SIGTERM and SIGINT, from now on, in the order in which they come."""
    caught: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, caught.put_nowait, number)
    return caught


async def _drain(admission: Admission, signals: "asyncio.Queue[signal.Signals]", settings: Settings) -> bool:
    """Let balancers see that this service leaves, then let nobody in, and wait until all who are in have their answer.

    Returns whether they all have; a second signal or --drain-timeout-s end the wait.
    """
    log.info("draining: %d request(s) in progress; a second signal ends at once", admission.requests)
    admission.draining = True
    forced = asyncio.create_task(signals.get())
    try:
        await asyncio.wait({forced}, timeout=settings.drain_pause_s)
        admission.closed = True
        deadline = time.monotonic() + settings.drain_timeout_s
        while admission.requests and not forced.done() and time.monotonic() < deadline:
            await asyncio.wait({forced}, timeout=_LOOK_AGAIN_S)
        if admission.requests:
            log.error("leaving %d request(s) without an answer", admission.requests)
        return not admission.requests
    finally:
        forced.cancel()


def _launch_options(settings: Settings, checkpoint: Checkpoint) -> LaunchOptions:
    return LaunchOptions(
        model=checkpoint.location if settings.nnodes == 1 else settings.model,
        nproc_per_node=settings.num_local_ranks,
        nnodes=settings.nnodes,
        rdzv_endpoint=settings.rdzv_endpoint,
        device=settings.device,
        dtype=settings.dtype,
        attention=settings.attention,
        max_patches_per_forward=settings.max_patches_per_forward,
        collective_timeout_s=settings.collective_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        worker_module=settings.worker_module,
    )


def _supervisor_options(settings: Settings) -> SupervisorOptions:
    return SupervisorOptions(
        startup_timeout_s=settings.startup_timeout_s,
        rank_timeout_s=settings.rank_timeout_s,
        restart_limit=settings.restart_limit,
        restart_window_s=settings.restart_window_s,
    )
