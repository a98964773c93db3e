"""Whether GET /health/live is answered in time while 32 clients post large photographs.

Invariant: server, load and poller are processes of their own, and the poller asks over one connection of its own, so
that what is measured is the server. A poll that fell due while the one before it was unanswered counts from then. Every
client has a photograph of its own and no cache knows any: each is decoded and encoded every time.

    .venv/bin/python -m benchmarks.health --body raw --seconds 5      # ten seconds, to try it
"""

import asyncio
import base64
import http.client
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import httpx

from benchmarks._chart import draw_bars, open_chart
from benchmarks._progress import show_steps
from benchmarks._report import describe_machine, make_parser, percentile, report
from benchmarks._server import Server
from service.bench_images import Photos

_SIZE = (4000, 3000)
_BODIES = ("raw", "multipart", "json")
_INTERVAL_S = 0.02
_LIMIT_MEDIAN_MS = 100.0
_LIMIT_WORST_MS = 500.0


@dataclass(frozen=True, slots=True)
class Liveness:
    """One kind of body: answers of /health/live, how late the poller itself woke, and who used the cores."""

    body: str
    polls: int
    median_ms: float
    p99_ms: float
    worst_ms: float
    poller_late_worst_ms: float
    images_per_s: float
    front_end_cores: float
    decoders_cores: float
    ranks_cores: float
    load_cores: float


@dataclass(frozen=True, slots=True)
class Poll:
    """One question: how long its answer took, and how late it was asked because the poller woke late."""

    answer_ms: float
    late_ms: float


@dataclass(frozen=True, slots=True)
class Body:
    """What one client posts."""

    content: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the load has to say: images answered in time, and the cores that it used."""

    num_images: int
    cores: float


def main() -> int:
    """Measure each kind of body; 1 if a bound is missed."""
    parser = make_parser("benchmarks.health", __doc__)
    parser.add_argument("--body", nargs="+", choices=_BODIES, default=_BODIES)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, for each kind of body")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()

    machine = describe_machine()
    photos = Photos([_SIZE], seed=0)
    files = [photos(number).data for number in range(options.clients)]
    print(
        f"{options.clients} clients post JPEGs of {_SIZE[0]} x {_SIZE[1]} pixels, {len(files[0]) / 2**20:.1f} MiB each"
    )
    rows = []
    with Server(f"--model={options.model}", "--cache-bytes=0") as server, show_steps(len(options.body)) as steps:
        server.wait_for("/health/ready")
        for kind in options.body:
            steps.begin(f"{kind}, {options.seconds:g} s")
            rows.append(_measure(server, kind, files, options.seconds))
            steps.done(f"{kind}: worst {rows[-1].worst_ms:.1f} ms")
    machine = report({"GET /health/live under load": rows}, machine, options.json)
    if options.png:
        title = f"GET /health/live while {options.clients} clients post {_SIZE[0]} x {_SIZE[1]} JPEGs"
        series = {
            "median": [row.median_ms for row in rows],
            "99 %": [row.p99_ms for row in rows],
            "worst": [row.worst_ms for row in rows],
        }
        with open_chart(options.png, title, machine) as (axes,):
            draw_bars(axes, [row.body for row in rows], series, "ms")

    met = all(row.median_ms <= _LIMIT_MEDIAN_MS and row.worst_ms <= _LIMIT_WORST_MS for row in rows)
    bounds = f"at most {_LIMIT_MEDIAN_MS:g} ms at the median and {_LIMIT_WORST_MS:g} ms at worst"
    print(f"\n{'met' if met else 'MISSED'}: {bounds}")
    return 0 if met else 1


def _measure(server: Server, kind: str, files: Sequence[bytes], seconds: float) -> Liveness:
    bodies = [_build_body(kind, file) for file in files]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    load = context.Process(target=_run_load, args=(server.url, bodies, seconds, theirs))
    load.start()
    theirs.close()
    ours.recv()  # it has begun; if it could not, this raises EOFError and its traceback is above
    before = server.cpu_s()
    polls = _poll(server.url, seconds)
    after = server.cpu_s()
    result: LoadResult = ours.recv()
    load.join()
    answer_ms = [poll.answer_ms for poll in polls]
    return Liveness(
        body=kind,
        polls=len(polls),
        median_ms=statistics.median(answer_ms),
        p99_ms=percentile(answer_ms, 99),
        worst_ms=max(answer_ms),
        poller_late_worst_ms=max(poll.late_ms for poll in polls),
        images_per_s=result.num_images / seconds,
        front_end_cores=(after["front end"] - before["front end"]) / seconds,
        decoders_cores=sum(after[name] - before[name] for name in after if name.startswith("decoder")) / seconds,
        ranks_cores=sum(after[name] - before[name] for name in after if name.startswith("rank")) / seconds,
        load_cores=result.cores,
    )


def _build_body(kind: str, photo: bytes) -> Body:
    """One image in a body of a kind, rendered once: the load only sends it."""
    match kind:
        case "raw":
            return Body(photo, "image/jpeg")
        case "json":
            text = json.dumps({"images": [f"data:image/jpeg;base64,{base64.b64encode(photo).decode()}"]})
            return Body(text.encode(), "application/json")
        case _:
            form = httpx.Request("POST", "http://form", files={"file": ("photo.jpg", photo, "image/jpeg")})
            return Body(form.read(), form.headers["content-type"])


def _run_load(url: str, bodies: Sequence[Body], seconds: float, report_to: Connection) -> None:
    """The load's process: say when it begins, keep every client busy, say what came of it."""
    report_to.send(None)
    start = time.perf_counter()
    num_images = asyncio.run(_keep_posting(url, bodies, start + seconds))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    report_to.send(LoadResult(num_images, (usage.ru_utime + usage.ru_stime) / (time.perf_counter() - start)))


async def _keep_posting(url: str, bodies: Sequence[Body], deadline: float) -> int:
    """Post from every client until the deadline. Returns the images that were answered before it."""
    limits = httpx.Limits(max_connections=len(bodies), max_keepalive_connections=len(bodies))

    async def keep_posting(client: httpx.AsyncClient, body: Body) -> int:
        num_images = 0
        while time.perf_counter() < deadline:
            response = await client.post("/embed", content=body.content, headers={"content-type": body.content_type})
            response.raise_for_status()
            num_images += time.perf_counter() <= deadline
        return num_images

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120.0, trust_env=False) as client:
        return sum(await asyncio.gather(*(keep_posting(client, body) for body in bodies)))


def _poll(url: str, seconds: float) -> Sequence[Poll]:
    """Ask every 20 ms over one connection."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    polls: list[Poll] = []
    due = time.perf_counter()
    deadline = due + seconds
    while due < deadline:
        late_s = 0.0
        if (early_s := due - time.perf_counter()) > 0:
            time.sleep(early_s)
            late_s = time.perf_counter() - due  # the kernel's doing, not the server's
        connection.request("GET", "/health/live")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise RuntimeError(f"/health/live answered {response.status}")
        polls.append(Poll((time.perf_counter() - due - late_s) * 1e3, late_s * 1e3))
        due += _INTERVAL_S
    connection.close()
    return polls


if __name__ == "__main__":
    sys.exit(main())
