"""How long `patchgrid serve` takes to become ready, and what each of its processes needs at most.

Invariant: a real server is started for every figure. Memory is the kernel's peak of resident memory (VmHWM); what
processes share, as libraries, counts in each of them.

    .venv/bin/python -m benchmarks.startup --model demo --rounds 1      # ten seconds, to try it
"""

import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks._chart import draw_bars, open_chart
from benchmarks._progress import show_steps
from benchmarks._report import describe_machine, make_parser, report
from benchmarks._server import Server
from service.bench_images import Photos

# What is embedded before the second look at memory: one request with all, so that they share a batch if they can.
_SIZES = ((1920, 1080), (640, 480), (500, 333), (300, 300))
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ReadyTime:
    """Seconds since the process was started until each probe first answered 200."""

    model: str
    ranks: int
    starts: int
    live_s: float
    ready_s: float
    ready_fastest_s: float
    ready_slowest_s: float


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most of any start, when it had become ready and when it had embedded images."""

    model: str
    ranks: int
    process: str
    when_ready_mib: float
    after_images_mib: float


@dataclass(frozen=True, slots=True)
class _Start:
    live_s: float
    ready_s: float
    when_ready_mib: dict[str, float]
    after_images_mib: dict[str, float]


def main() -> None:
    """Measure every model with every number of ranks."""
    parser = make_parser("benchmarks.startup", __doc__)
    parser.add_argument("--model", nargs="+", default=["demo", "random:deepseek_v4"])
    parser.add_argument("--nproc-per-node", nargs="+", type=int, default=[1])
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--rounds", type=int, default=3, help="starts of each; the median time and the highest peak count"
    )
    options = parser.parse_args()

    machine = describe_machine()
    photos = [Photos([size], seed=seed)(0).data for seed, size in enumerate(_SIZES)]
    times: list[ReadyTime] = []
    peaks: list[PeakMemory] = []
    kinds = [(model, ranks) for model in options.model for ranks in options.nproc_per_node]
    with show_steps(len(kinds) * options.rounds) as steps:
        for model, ranks in kinds:
            starts = []
            for _ in range(options.rounds):
                steps.begin(f"{model}, {ranks} rank(s)")
                starts.append(_start(model, ranks, options.device, photos))
                steps.done(f"{model}, {ranks} rank(s): ready after {starts[-1].ready_s:.1f} s")
            times.append(_summarize_times(model, ranks, starts))
            peaks += _summarize_peaks(model, ranks, starts)
    machine = report({"time to ready": times, "peak resident memory": peaks}, machine, options.json)
    if options.png:
        labels = [f"{each.model}, {each.ranks} rank{'s' * (each.ranks > 1)}" for each in times]
        series = {"live": [each.live_s for each in times], "ready": [each.ready_s for each in times]}
        with open_chart(options.png, "From start to live and ready", machine, height_in=1.8 + 0.5 * len(times)) as axes:
            draw_bars(axes[0], labels, series, "s")


def _start(model: str, ranks: int, device: str, photos: list[bytes]) -> _Start:
    flags = (f"--model={model}", f"--nproc-per-node={ranks}", f"--device={device}", f"--request-timeout-s={_TIMEOUT_S}")
    with Server(*flags) as server:
        live_s = server.wait_for("/health/live")
        ready_s = server.wait_for("/health/ready")
        when_ready_mib = _peaks_mib(server)
        files = [("files", (f"{index}.jpg", photo, "image/jpeg")) for index, photo in enumerate(photos)]
        httpx.post(f"{server.url}/embed", files=files, timeout=_TIMEOUT_S, trust_env=False).raise_for_status()
        return _Start(live_s, ready_s, when_ready_mib, _peaks_mib(server))


def _peaks_mib(server: Server) -> dict[str, float]:
    peaks = {}
    for name, process in server.processes().items():
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        assert match is not None
        peaks[name] = int(match.group(1)) / 1024
    return peaks


def _summarize_times(model: str, ranks: int, starts: list[_Start]) -> ReadyTime:
    return ReadyTime(
        model=model,
        ranks=ranks,
        starts=len(starts),
        live_s=statistics.median(each.live_s for each in starts),
        ready_s=statistics.median(each.ready_s for each in starts),
        ready_fastest_s=min(each.ready_s for each in starts),
        ready_slowest_s=max(each.ready_s for each in starts),
    )


def _summarize_peaks(model: str, ranks: int, starts: list[_Start]) -> list[PeakMemory]:
    return [
        PeakMemory(
            model=model,
            ranks=ranks,
            process=process,
            when_ready_mib=max(each.when_ready_mib[process] for each in starts),
            after_images_mib=max(each.after_images_mib[process] for each in starts),
        )
        for process in starts[0].when_ready_mib
    ]


if __name__ == "__main__":
    main()
