"""A load for /embed: closed loop or open loop, seeded images of many sizes that are all different, checked answers.

Invariant: a request's time counts from when it was due, so a server that falls behind cannot slow its own load down
unnoticed; and an answer counts only if its rows are as many as the grid that POST /plan tells has in the layout.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from encoder.layout import Layout, num_layout_rows
from service.bench_client import BenchClient, PlannedImage, RequestError
from service.bench_images import Pictures, Size
from service.client import ClientError

_PAUSE_S = 0.1
_PROGRESS_S = 0.5
_PLANNED_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and for how long: `images` or `seconds`, whichever ends first, and one of them at least.

    clients: requests in flight at most. rate: images per second that fall due, at random intervals; None is a closed
    loop, where a client's next request is due when its last is answered.
    """

    url: str
    clients: int
    rate: float | None = None
    images: int | None = None
    seconds: float | None = None
    per_request: int = 1
    layout: Layout = "rows"
    dtype: str = "bfloat16"
    seed: int = 0
    timeout_s: float = 300.0
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came of a load. Times are of requests that were answered rightly, from when they were due; 0 if none was.

    images: those that were answered rightly; cached, as many of them as the server says it knew. What is per second is
    of those too, over the time from the first request to the last answer. late_ms: how long the worst request waited
    for a free client, which is part of its time. errors: requests by code, the most frequent first.
    """

    requests: int
    images: int
    cached: int
    seconds: float
    images_per_s: float
    patches_per_s: float
    rows_per_s: float
    received_mb_per_s: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    worst_ms: float
    late_ms: float
    errors: tuple[tuple[str, int], ...]


def run_load(load: Load, pictures: Pictures, *, on_progress: Callable[[int, int], None] | None = None) -> LoadReport:
    """Send a load and wait for the last answer.

    Args:
        load: what to send.
        pictures: the image of each number, from 0.
        on_progress: told twice a second how many requests were answered, and how many failed.

    Raises:
        ClientError: there is no server, or it will not plan images; once the load has begun, errors are counted.
    """
    assert load.images is not None or load.seconds is not None
    return _Run(load, pictures).to_the_end(on_progress)


def render_report(load: Load, report: LoadReport) -> str:
    """The report as lines for a terminal."""
    failed = sum(count for _, count in report.errors)
    images = "1 image" if load.per_request == 1 else f"{load.per_request} images"
    loop = "closed loop" if load.rate is None else f"{load.rate:g} images/s due"
    lines = [
        ("load", f"{loop}, {load.clients} clients, {images} a request, seed {load.seed}"),
        ("images", f"{report.images} in {report.seconds:.1f} s, {report.requests} requests, {failed} of them failed"),
        (
            "throughput",
            f"{report.images_per_s:.2f} images/s, {report.patches_per_s:,.0f} patches/s, "
            f"{report.rows_per_s:,.0f} rows/s, {report.received_mb_per_s:.1f} MB/s received",
        ),
    ]
    if report.images:
        lines.append(("cached", f"{report.cached} images, {report.cached / report.images:.0%}"))
        times = {
            "p50": report.p50_ms,
            "p90": report.p90_ms,
            "p95": report.p95_ms,
            "p99": report.p99_ms,
            "worst": report.worst_ms,
        }
        lines += [(name, f"{milliseconds:.1f} ms") for name, milliseconds in times.items()]
        lines.append(("late", f"{report.late_ms:.1f} ms at most, for want of a free client"))
    lines += [(f"error {code}", f"{count} requests") for code, count in report.errors]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)


def show_progress(answered: int | None, failed: int = 0) -> None:
    """Keep one line of a terminal up to date, or with None end it; nothing where there is no terminal."""
    if sys.stderr.isatty():
        text = "\n" if answered is None else f"\r{answered} answered, {failed} failed"
        print(text, end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class _Request:
    """Images that go together, and when."""

    first: int
    count: int
    due: float


class _Run:
    """One load on its way. Clients are threads: most of their time goes by in the kernel, without the interpreter."""

    def __init__(self, load: Load, pictures: Pictures) -> None:
        self._load = load
        self._pictures = pictures
        self._random = random.Random(load.seed)  # noqa: S311
        self._lock = threading.Lock()
        self._next_image = 0
        self._plans: dict[Size, PlannedImage] = {}
        self._times_ms: list[float] = []
        self._late_ms = 0.0
        self._images = self._cached = self._patches = self._rows = self._received = 0
        self._errors: Counter[str] = Counter()
        self._start = self._next_due = self._end = 0.0

    def to_the_end(self, on_progress: Callable[[int, int], None] | None) -> LoadReport:
        with self._connect() as connection:  # so that a wrong address is told before the load begins
            for index in range(_PLANNED_AHEAD):
                self._plan(connection, self._pictures(index).size)
        with ThreadPoolExecutor(self._load.clients) as clients:
            self._start = self._next_due = self._end = time.perf_counter()
            works = [clients.submit(self._work) for _ in range(self._load.clients)]
            while wait(works, timeout=_PROGRESS_S).not_done:
                if on_progress:
                    on_progress(len(self._times_ms), self._errors.total())
        for work in works:
            work.result()
        return self._report()

    def _work(self) -> None:
        with self._connect() as connection:
            while (request := self._take()) is not None:
                self._do(request, connection)

    def _take(self) -> _Request | None:
        """The next request; its client waits until it is due."""
        load = self._load
        with self._lock:
            now = time.perf_counter()
            due = now if load.rate is None else self._next_due
            count = load.per_request
            if load.images is not None:
                count = min(count, load.images - self._next_image)
            if count <= 0 or (load.seconds is not None and due - self._start >= load.seconds):
                return None
            first = self._next_image
            self._next_image += count
            if load.rate is not None:
                self._next_due += self._random.expovariate(load.rate / count)
        if due > now:
            time.sleep(due - now)
        return _Request(first, count, due)

    def _do(self, request: _Request, connection: BenchClient) -> None:
        pictures = [self._pictures(request.first + index) for index in range(request.count)]
        late_ms = max(0.0, time.perf_counter() - request.due) * 1e3
        try:
            plans = [self._plan(connection, picture.size) for picture in pictures]
            rows = [num_layout_rows(self._load.layout, plan.llm_grid) for plan in plans]
            answer = connection.embed(pictures, rows)
        except (RequestError, ClientError) as failure:
            with self._lock:
                self._errors[str(failure) if isinstance(failure, RequestError) else "not_planned"] += 1
                self._end = time.perf_counter()
            if self._load.rate is None:
                time.sleep(_PAUSE_S)  # or a server that refuses at once would be asked without end
            return
        with self._lock:
            self._end = time.perf_counter()
            self._times_ms.append((self._end - request.due) * 1e3)
            self._late_ms = max(self._late_ms, late_ms)
            self._images += request.count
            self._cached += answer.cached
            self._patches += sum(plan.patches for plan in plans)
            self._rows += sum(rows)
            self._received += answer.num_bytes

    def _connect(self) -> BenchClient:
        load = self._load
        return BenchClient(
            load.url, layout=load.layout, dtype=load.dtype, timeout_s=load.timeout_s, api_key=load.api_key
        )

    def _plan(self, connection: BenchClient, size: Size) -> PlannedImage:
        if size not in self._plans:
            self._plans[size] = connection.plan(size)
        return self._plans[size]

    def _report(self) -> LoadReport:
        seconds = max(self._end - self._start, 1e-9)
        times = sorted(self._times_ms) or [0.0]
        return LoadReport(
            requests=len(self._times_ms) + self._errors.total(),
            images=self._images,
            cached=self._cached,
            seconds=seconds,
            images_per_s=self._images / seconds,
            patches_per_s=self._patches / seconds,
            rows_per_s=self._rows / seconds,
            received_mb_per_s=self._received / seconds / 1e6,
            p50_ms=_percentile(times, 50),
            p90_ms=_percentile(times, 90),
            p95_ms=_percentile(times, 95),
            p99_ms=_percentile(times, 99),
            worst_ms=times[-1],
            late_ms=self._late_ms,
            errors=tuple(self._errors.most_common()),
        )


def _percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
