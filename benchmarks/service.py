"""The service against its tower: what HTTP, queue, link and decoding take away, and how latency grows with load.

    .venv/bin/python -m benchmarks.service
    .venv/bin/python -m benchmarks.service --model demo --rounds 1 --seconds 4      # a minute, to try it

Parts: `saturation`, the same images through the service and through the tower by itself; `alone`, one request at a
time; `cache`, an image that comes again; `curve`, latency at shares of the closed loop's throughput, which --png draws.

Invariant: both sides run the same images in one sitting, in turns, on the same number of threads under a rank's
environment, and every turn has images that the server has not seen. The front end without a tower is
benchmarks.front_end's.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._environment import enter_rank_environment
from benchmarks._progress import show_steps
from benchmarks._report import Row, describe_machine, make_parser, report
from benchmarks._service_cache import measure_cache
from benchmarks._service_curve import CurvePoint, draw_curve, measure_curve, num_errors
from benchmarks._subject import Subject, start_subject
from encoder.attention import ATTENTIONS
from service.bench import Load
from service.bench_images import MIXED_SIZES, Size

_PARTS = ("saturation", "alone", "cache", "curve")
_ALONE: Size = (300, 300)


@dataclass(frozen=True, slots=True)
class Saturation:
    """One round: the same images through the service and through the tower by itself."""

    round: int
    images: int
    service_images_per_s: float
    tower_images_per_s: float
    ratio: float
    p50_ms: float
    worst_ms: float
    errors: int


@dataclass(frozen=True, slots=True)
class Alone:
    """One request at a time, medians. batcher_ms: in the queue, on the link both ways, gathered and cut apart.

    other_ms: HTTP, hashing and rendering at both ends, which is what no stage counts, and the stage `reply`.
    """

    requests: int
    request_ms: float
    tower_by_itself_ms: float
    decode_ms: float
    encode_ms: float
    queue_ms: float
    batcher_ms: float
    other_ms: float


def main() -> None:
    """Measure the parts that were asked for, with one server."""
    options = _parse()
    enter_rank_environment()
    machine = describe_machine()
    tables: dict[str, Sequence[Row]] = {}
    points: list[CurvePoint] = []
    num_steps = {"saturation": options.rounds, "alone": 1, "cache": 2, "curve": 1 + len(options.loads)}
    with (
        show_steps(sum(num_steps[part] for part in options.parts)) as steps,
        start_subject(options.model, options.attention, steps) as subject,
    ):
        if "saturation" in options.parts:
            tables["saturation"] = _saturate(subject, options.rounds, options.images, options.clients)
        if "alone" in options.parts:
            tables["alone"] = [_measure_alone(subject, options.requests)]
        if "cache" in options.parts:
            tables["cache"] = measure_cache(subject, options.clients)
        if "curve" in options.parts:
            tables["curve"] = points = measure_curve(subject, options.clients, options.loads, options.seconds)
    machine = report(tables, machine, options.json)
    if options.png:
        draw_curve(options.png, f"Latency against throughput, {options.model}, mixed sizes", machine, points)


def _parse() -> argparse.Namespace:
    parser = make_parser("benchmarks.service", __doc__)
    parser.add_argument("--model", default="random:deepseek_v4")
    parser.add_argument("--attention", choices=["auto", *ATTENTIONS], default="auto")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--images", type=int, default=len(MIXED_SIZES), help="in each turn at saturation")
    parser.add_argument("--rounds", type=int, default=2, help="at saturation")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8, help="one at a time")
    parser.add_argument(
        "--loads",
        nargs="+",
        type=float,
        default=[0.2, 0.4, 0.6, 0.8, 0.95],
        metavar="SHARE",
        help="of the curve, as shares of the closed loop's throughput (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each point of the curve")
    options = parser.parse_args()
    if options.png and "curve" not in options.parts:
        parser.error("--png draws the curve, and --parts leaves it out")
    return options


def _saturate(subject: Subject, rounds: int, images: int, clients: int) -> list[Saturation]:
    rows = []
    for number in range(1, rounds + 1):
        pictures = subject.fresh(count=images)
        served = subject.run(Load("", clients=clients, images=images), pictures, f"round {number}, service")
        subject.steps.begin(f"round {number}, tower by itself")
        tower_images_per_s = images / subject.encode_s([pictures(index) for index in range(images)])
        row = Saturation(
            round=number,
            images=served.images,
            service_images_per_s=served.images_per_s,
            tower_images_per_s=tower_images_per_s,
            ratio=served.images_per_s / tower_images_per_s,
            p50_ms=served.p50_ms,
            worst_ms=served.worst_ms,
            errors=num_errors(served),
        )
        subject.steps.done(f"round {number}: {row.ratio:.3f} of the tower by itself")
        rows.append(row)
    return rows


def _measure_alone(subject: Subject, count: int) -> Alone:
    requests, towers, stages = [], [], []
    for number in range(1, count + 1):
        pictures = subject.fresh([_ALONE], 1)
        before = subject.stages()
        load = Load("", clients=1, images=1)
        requests.append(subject.run(load, pictures, f"request {number} of {count}, alone").worst_ms)
        stages.append(subject.stages().since(before))
        towers.append(subject.encode_s([pictures(0)]) * 1e3)
    batchers = [each.ms("queue", "link", "gather") for each in stages]
    others = [
        request_ms - each.ms("decode", "encode") - batcher_ms
        for request_ms, each, batcher_ms in zip(requests, stages, batchers, strict=True)
    ]
    alone = Alone(
        requests=len(requests),
        request_ms=statistics.median(requests),
        tower_by_itself_ms=statistics.median(towers),
        decode_ms=statistics.median(each.ms("decode") for each in stages),
        encode_ms=statistics.median(each.ms("encode") for each in stages),
        queue_ms=statistics.median(each.ms("queue") for each in stages),
        batcher_ms=statistics.median(batchers),
        other_ms=statistics.median(others),
    )
    subject.steps.done(f"alone: {alone.batcher_ms:.1f} ms beside tower and decoding")
    return alone


if __name__ == "__main__":
    main()
