"""patchgrid against LitServe with timm: the same load, threads and torch, in turns and in one sitting.

    python -m venv PEERS && PEERS/bin/pip install -r benchmarks/peers/requirements.txt
    .venv/bin/python -m benchmarks.peers --python PEERS/bin/python
    .venv/bin/python -m benchmarks.peers --python PEERS/bin/python --rounds 1 --images 2      # a minute, to try it

Invariant: both get the same JPEGs as base64 in JSON and answer with base64, and every answer's size is checked; a round
has images that neither server has seen.
"""

import asyncio
import base64
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from benchmarks._chart import draw_bars, open_chart
from benchmarks._progress import show_steps
from benchmarks._report import describe_machine, make_parser, report
from benchmarks._server import Server
from encoder.config import DEEPSEEK_V4
from encoder.geometry import plan
from service.bench_images import MIXED_SIZES, Photos

_ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 300.0
_ROW_BYTES = DEEPSEEK_V4.out_width * 2


@dataclass(frozen=True, slots=True)
class Round:
    """Both servers with the same images, one after the other, in another order every round."""

    round: int
    images: int
    patchgrid_images_per_s: float
    litserve_images_per_s: float
    ratio: float
    patchgrid_p50_s: float
    litserve_p50_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """A server's end of the bargain: its route, what it is asked with, and where in the answer the rows are."""

    url: str
    ask: Callable[[str], object]
    find_rows: Callable[[dict[str, object]], object]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one load came to."""

    images_per_s: float
    p50_s: float


def main() -> None:
    """Let both take turns, each with the machine to itself: even an idle server takes some of its cores."""
    parser = make_parser("benchmarks.peers", __doc__)
    parser.add_argument("--python", type=Path, required=True, help="of the venv that has LitServe and timm")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--images", type=int, default=len(MIXED_SIZES), help="in each turn")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()

    machine = describe_machine()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # the ranks inherit it
    photos = Photos(MIXED_SIZES, seed=0)
    start: dict[str, Callable[[], AbstractContextManager[Side]]] = {
        "patchgrid": _patchgrid,
        "litserve": partial(_litserve, options.python, options.threads),
    }
    rows = []
    with show_steps(2 * options.rounds) as steps:
        for number in range(options.rounds):
            turns = {}
            for name in sorted(start, reverse=number % 2 == 0):
                steps.begin(f"round {number + 1}: {name}")
                first = number * len(MIXED_SIZES)  # the same sizes every round
                with start[name]() as side:
                    asyncio.run(_run(side, Photos([(300, 300)], seed=1), 0, 1, 1))
                    turns[name] = asyncio.run(_run(side, photos, first, options.images, options.clients))
                steps.done(f"round {number + 1}: {name} {turns[name].images_per_s:.3f} images/s")
            ours, theirs = turns["patchgrid"], turns["litserve"]
            ratio = ours.images_per_s / theirs.images_per_s
            rows.append(
                Round(
                    number + 1, options.images, ours.images_per_s, theirs.images_per_s, ratio, ours.p50_s, theirs.p50_s
                )
            )
    machine = report({f"patchgrid against LitServe and timm, {options.threads} threads": rows}, machine, options.json)
    if options.png:
        series = {
            "patchgrid": [row.patchgrid_images_per_s for row in rows],
            "LitServe with timm": [row.litserve_images_per_s for row in rows],
        }
        title = f"The same images through both, {options.clients} clients, {options.threads} threads"
        with open_chart(options.png, title, machine, height_in=1.8 + 0.5 * len(rows)) as (axes,):
            draw_bars(axes, [f"round {row.round}" for row in rows], series, "images/s")


def _rows_of_embed(body: dict[str, object]) -> object:
    data = body["data"]
    assert isinstance(data, list)
    return data[0]["embedding"]


@contextmanager
def _patchgrid() -> Iterator[Side]:
    flags = ("--model=random:deepseek_v4", "--device=cpu", "--dtype=bfloat16", "--nproc-per-node=1")
    with Server(*flags, "--request-timeout-s=1800") as server:
        server.wait_for("/health/ready")
        yield Side(f"{server.url}/embed", lambda image: {"images": [image]}, _rows_of_embed)


@contextmanager
def _litserve(python: Path, threads: int) -> Iterator[Side]:
    """The other server, on a free loopback port, with the repository in its path."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(python), "-m", "benchmarks.peers.litserve_timm", f"--port={port}", f"--threads={threads}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    text = os.pread(log.fileno(), 2**20, 0).decode(errors="replace")
                    raise RuntimeError(f"LitServe did not start:\n{text}")
                time.sleep(0.2)
            yield Side(f"{url}/predict", lambda image: {"image": image}, lambda body: body["embedding"])
        finally:
            # Its workers outlive it otherwise, and take a sixth of a core each.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


async def _run(side: Side, photos: Photos, first: int, count: int, clients: int) -> Turn:
    """A closed loop over images first, first + 1, ..."""
    pictures = [photos(first + index) for index in range(count)]
    waiting = iter(pictures)
    times: list[float] = []

    async def ask(client: httpx.AsyncClient) -> None:
        for picture in waiting:
            question = side.ask(base64.b64encode(picture.data).decode())
            asked = time.perf_counter()
            response = await client.post(side.url, json=question)
            times.append(time.perf_counter() - asked)
            rows = side.find_rows(response.raise_for_status().json())
            num_bytes = plan(DEEPSEEK_V4, *picture.size).num_rows * _ROW_BYTES
            if not isinstance(rows, str) or len(base64.b64decode(rows)) != num_bytes:
                raise RuntimeError(f"{side.url} answered with other rows than {picture.size} has")

    async with httpx.AsyncClient(timeout=1800.0, trust_env=False) as client:
        start = time.perf_counter()
        await asyncio.gather(*(ask(client) for _ in range(clients)))
        elapsed_s = time.perf_counter() - start
    return Turn(count / elapsed_s, statistics.median(times))


if __name__ == "__main__":
    main()
