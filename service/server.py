"""The life of `patchgrid serve`, top to bottom: read the checkpoint, start the group, listen, drain, leave in order.

The process ends with code 0 when it was told to and owes nobody an answer, and with 1 and a reason otherwise.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn
import uvloop
from fastapi import FastAPI

from distributed.processes import adopt_orphans
from encoder.checkpoint import open_checkpoint
from service.access import load_keys
from service.admission import Admission
from service.app import create_app, create_probe_app
from service.fetch import Fetcher
from service.http_protocol import bounded_http
from service.parts import Foundation, Parts, assemble, launch_options
from service.run_dir import private_run_dir
from service.settings import Settings
from service.supervisor import GroupError

log = logging.getLogger("patchgrid")

_BACKLOG = 2048
_LOOK_AGAIN_S = 0.05
_STOP_GRACE_S = 10.0
# A connection may rest this long between requests: longer than clients and balancers let theirs (aiohttp 15 s, nginx
# 60 s), for whoever hangs up first must not be the one that a request is on its way to.
_KEEP_ALIVE_S = 75
_HANG_UP_S = 5  # for answers that were made and are not read


class HttpServer(uvicorn.Server):
    """uvicorn, with signals left to `_run`: it stops the group too, and decides on the exit code."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_http(settings.receive_timeout_s),
                timeout_keep_alive=_KEEP_ALIVE_S,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=_HANG_UP_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    with contextlib.ExitStack() as sockets:
        try:
            keys = load_keys(settings)
            fetcher = Fetcher(settings) if settings.fetch_hosts else None
            foundation = Foundation(settings, open_checkpoint(settings.model), keys, fetcher)
            listener = sockets.enter_context(_listen(settings.host, settings.port))
            prober = None
            if settings.probe_port is not None:
                prober = sockets.enter_context(_listen(settings.host, settings.probe_port))
        except (ValueError, OSError) as error:
            print(f"patchgrid serve: error: {error}", file=sys.stderr)
            return 1
        _tell(foundation)
        adopt_orphans()
        with private_run_dir() as run_dir:

            async def run() -> int:
                parts = assemble(foundation, run_dir)
                with parts.pool:
                    return await _run(parts, listener, prober)

            return uvloop.run(run())


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _tell(foundation: Foundation) -> None:
    """Log what whoever started this should know."""
    settings, checkpoint = foundation.settings, foundation.checkpoint
    if checkpoint.naming == "random":
        log.warning("serving RANDOM WEIGHTS (%s): for trying and measuring only; see --model", checkpoint.name)
    for name in type(settings).model_fields:
        if name.startswith("limit_") or name.endswith("_timeout_s"):
            log.info("%s %s", name, getattr(settings, name))
    if not foundation.keys:
        log.info("no API keys: whoever reaches the port may use it")
    if settings.nnodes > 1:
        command = launch_options(foundation).other_host_command()
        log.info("on each other host, again whenever it ends: %s", command)


async def _run(parts: Parts, listener: socket.socket, prober: socket.socket | None) -> int:
    http = HttpServer(create_app(parts), parts.settings)
    probes = HttpServer(create_probe_app(parts), parts.settings) if prober is not None else None
    signals = _catch_signals()
    gc.collect()
    gc.freeze()  # what is here stays: to walk through it again held everything up for 50 ms now and then
    supervising = asyncio.create_task(parts.supervisor.run())
    batching = asyncio.create_task(parts.batcher.run())
    listening = asyncio.create_task(http.serve(sockets=[listener]))
    probing = asyncio.create_task(probes.serve(sockets=[prober])) if probes is not None and prober is not None else None
    told_to_stop = asyncio.create_task(signals.get())
    for what, each in (("listening", listener), ("probes", prober)):
        if each is not None:
            host, port = each.getsockname()[:2]
            log.info("%s on http://%s:%d", what, f"[{host}]" if ":" in host else host, port)

    await asyncio.wait({told_to_stop, supervising, batching, listening}, return_when=asyncio.FIRST_COMPLETED)
    in_order = told_to_stop.done()
    if in_order:
        in_order = await _drain(parts.admission, signals, parts.settings)
    parts.admission.closed = True
    http.should_exit = True
    http.force_exit = not in_order
    await listening
    if batching.done():
        log.critical("the queue's owner failed", exc_info=batching.exception())
    parts.supervisor.stop(grace_s=_STOP_GRACE_S if in_order else 0.0)
    try:
        await supervising
    except GroupError as error:
        log.critical("cannot go on: %s", error)
        return 1
    finally:
        told_to_stop.cancel()
        batching.cancel()
        if probes is not None and probing is not None:
            probes.should_exit = True
            await probing
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
