"""Latency against throughput: a closed loop finds the most that a server bears, open loops offer it shares of that."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._chart import draw_lines, open_chart
from benchmarks._subject import Subject
from service.bench import Load, LoadReport

_OPEN_LOOP_CLIENTS = 64


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One offered load, or the closed loop that says what there is to offer."""

    load: str
    offered_images_per_s: float
    images: int
    images_per_s: float
    patches_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    errors: int


def measure_curve(subject: Subject, clients: int, shares: Sequence[float], seconds: float) -> list[CurvePoint]:
    """The closed loop first, then each share of it, the smallest first."""
    closed = _point(subject, "closed loop", Load("", clients=clients, seconds=seconds))
    points = [closed]
    for share in sorted(shares):
        rate = share * closed.images_per_s
        load = Load("", clients=_OPEN_LOOP_CLIENTS, rate=rate, seconds=seconds)
        points.append(_point(subject, f"{share:.0%} of it", load))
    return points


def draw_curve(file: Path, title: str, machine: str, points: Sequence[CurvePoint]) -> None:
    """Latencies over what was offered, the closed loop's throughput being the end of the axis."""
    closed, *open_loops = points
    with open_chart(file, title, machine, note="Open loop; a request's time counts from when it was due.") as (axes,):
        xs = [point.offered_images_per_s for point in open_loops]
        lines = {
            "99 %": (xs, [point.p99_ms / 1e3 for point in open_loops]),
            "90 %": (xs, [point.p90_ms / 1e3 for point in open_loops]),
            "median": (xs, [point.p50_ms / 1e3 for point in open_loops]),
        }
        draw_lines(axes, lines, "images/s offered", "s from due to answered")
        axes.axvline(closed.images_per_s, color="#555555", linestyle="--", linewidth=1)
        axes.text(
            closed.images_per_s,
            0.02,
            "closed loop ",
            ha="right",
            va="bottom",
            fontsize=8.5,
            transform=axes.get_xaxis_transform(),
        )
        axes.set_xlim(0, 1.05 * closed.images_per_s)
        axes.set_ylim(bottom=0)


def _point(subject: Subject, name: str, load: Load) -> CurvePoint:
    served = subject.run(load, subject.fresh(), name)
    subject.took(served.images + num_errors(served))
    subject.steps.done(f"{name}: {served.images_per_s:.2f} images/s, median {served.p50_ms:.0f} ms")
    return CurvePoint(
        load=name,
        offered_images_per_s=served.images_per_s if load.rate is None else load.rate,
        images=served.images,
        images_per_s=served.images_per_s,
        patches_per_s=served.patches_per_s,
        p50_ms=served.p50_ms,
        p90_ms=served.p90_ms,
        p99_ms=served.p99_ms,
        worst_ms=served.worst_ms,
        errors=num_errors(served),
    )


def num_errors(served: LoadReport) -> int:
    """Requests without their rows, whatever the reason."""
    return sum(count for _, count in served.errors)
