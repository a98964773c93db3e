"""The life of `patchgrid serve`, top to bottom: read the checkpoint, start the group, listen, leave in order.

The process ends with code 0 when it was told to, and with 1 and a reason when it cannot serve.
"""

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from distributed.launcher import LaunchOptions
from distributed.processes import adopt_orphans
from encoder.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from encoder.config import ConfigError
from service.app import Parts, create_app
from service.batcher import Batcher
from service.decode import DecodePool
from service.metrics import Metrics
from service.pipeline import Pipeline
from service.settings import Settings
from service.supervisor import GroupError, Supervisor, SupervisorOptions

log = logging.getLogger("patchgrid")

_BACKLOG = 2048


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
        checkpoint = open_checkpoint(settings.model)
        listener = socket.create_server((settings.host, settings.port), backlog=_BACKLOG)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"patchgrid serve: error: {error}", file=sys.stderr)
        return 1
    if checkpoint.naming == "random":
        log.warning("serving RANDOM WEIGHTS (%s): for trying and measuring only; see --model", checkpoint.name)
    adopt_orphans()
    run_dir = Path(tempfile.mkdtemp(prefix="patchgrid-"))
    try:
        with listener:
            return uvloop.run(_serve(settings, checkpoint, listener, run_dir))
    finally:
        shutil.rmtree(run_dir)


async def _serve(settings: Settings, checkpoint: Checkpoint, listener: socket.socket, run_dir: Path) -> int:
    metrics = Metrics()
    supervisor = Supervisor(_launch_options(settings), _supervisor_options(settings), run_dir, metrics)
    batcher = Batcher(
        supervisor.encode,
        metrics,
        budget_patches=lambda: settings.max_patches_per_batch or supervisor.patches_per_round,
        slots=settings.batches_in_flight,
        limit_queue_patches=settings.limit_queue_patches,
    )
    with DecodePool(settings, checkpoint.config, metrics) as pool:
        pipeline = Pipeline(pool, batcher, supervisor, metrics, settings)
        app = create_app(Parts(settings, checkpoint, pool, pipeline, supervisor, metrics))
        http = HttpServer(uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="off"))

        told_to_stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told_to_stop.set)
        stopping = asyncio.create_task(told_to_stop.wait())
        supervising = asyncio.create_task(supervisor.run())
        batching = asyncio.create_task(batcher.run())
        listening = asyncio.create_task(http.serve(sockets=[listener]))
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])

        await asyncio.wait({stopping, supervising, batching, listening}, return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        await listening
        supervisor.stop()
        try:
            await supervising
        except GroupError as error:
            log.critical("cannot go on: %s", error)
            return 1
        finally:
            stopping.cancel()
            batching.cancel()
    return 0 if told_to_stop.is_set() else 1


def _launch_options(settings: Settings) -> LaunchOptions:
    return LaunchOptions(
        model=settings.model,
        nproc_per_node=settings.num_local_ranks,
        nnodes=settings.nnodes,
        rdzv_endpoint=settings.rdzv_endpoint,
        device=settings.device,
        dtype=settings.dtype,
        attention=settings.attention,
        max_patches_per_forward=settings.max_patches_per_forward,
        collective_timeout_s=settings.collective_timeout_s,
    )


def _supervisor_options(settings: Settings) -> SupervisorOptions:
    return SupervisorOptions(
        startup_timeout_s=settings.startup_timeout_s,
        rank_timeout_s=settings.rank_timeout_s,
        restart_limit=settings.restart_limit,
        restart_window_s=settings.restart_window_s,
    )
