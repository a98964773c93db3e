"""The front end by itself: ranks answer at once, and what is left is HTTP, decoding, queue, link and rendering.

Invariant: throughput is also given per second of each process's CPU time, because load, front end, decoders and rank
share the cores here, and a GPU host's front end has a core of its own.

    .venv/bin/python -m benchmarks.front_end --seconds 2 --rounds 1      # half a minute, to try it
"""

import io
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from benchmarks._chart import draw_shares, open_chart
from benchmarks._progress import Steps, show_steps
from benchmarks._report import describe_machine, make_parser, report
from benchmarks._server import Server
from benchmarks._stages import Stages
from encoder.config import DEEPSEEK_V4
from encoder.image import read_canvas
from service.bench import Load, run_load
from service.bench_images import MIXED_SIZES, Photos, Picture, Pictures, Size

# Of V4's canvases the one with the most rows, 350: it is neither scaled nor padded.
_CANVAS: Size = (1036, 588)
_SMALL: Size = (392, 392)
_PADDING = (127, 127, 127)
_STAGES = ("decode", "queue", "link", "encode", "gather", "reply")


@dataclass(frozen=True, slots=True)
class Throughput:
    """One kind of load, answered as safetensors in bfloat16. CPU is per image, in milliseconds.

    front_end_images_per_core_s: images per second of the front end's CPU time: what a core of its own would bear.
    """

    images_are: str
    per_request: int
    images_per_s: float
    p50_ms: float
    p99_ms: float
    received_mb_per_s: float
    front_end_images_per_core_s: float
    front_end_cpu_ms: float
    decoders_cpu_ms: float
    rank_cpu_ms: float
    load_cpu_ms: float
    errors: int


@dataclass(frozen=True, slots=True)
class StageShares:
    """Where an image's time goes: each stage's part of all stages' time. Waiting counts in `decode` and `queue`."""

    images_are: str
    ms_per_image: float
    decode: float
    queue: float
    link: float
    encode: float
    gather: float
    reply: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """One size, one thread: our way from bytes to canvas, against Pillow's calls alone."""

    size: str
    ours_ms: float
    pillow_ms: float
    ratio: float


class FlatImages:
    """Endless images of one colour each that cost next to nothing to decode: PNGs with a palette of one."""

    def __init__(self, size: Size) -> None:
        self._size = size

    def __call__(self, index: int) -> Picture:
        """The image of this number, below 2^24."""
        image = Image.new("P", self._size)
        image.putpalette(index.to_bytes(3, "big"))
        file = io.BytesIO()
        image.save(file, "PNG", bits=1, compress_level=1)
        return Picture(file.getvalue(), "image/png", self._size)


def main() -> None:
    """Measure every kind of load with one server, and decoding in this process."""
    parser = make_parser("benchmarks.front_end", __doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="of decoding")
    options = parser.parse_args()

    machine = describe_machine()
    # The ranks look for their module in PYTHONPATH only.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    os.environ["OMP_NUM_THREADS"] = "1"  # one that waits for another would take a core from the front end
    flat, small = FlatImages(_CANVAS), FlatImages(_SMALL)
    seen = [flat(2**24 - 1 - number) for number in range(16)]
    loads: dict[str, tuple[Pictures, int]] = {
        "known files, 350 rows": (lambda index: seen[index % len(seen)], 1),
        "cheap to decode, 350 rows": (flat, 1),
        "cheap to decode, 100 rows": (small, 1),
        "cheap to decode, 100 rows, 8 a request": (lambda index: small(2**20 + index), 8),
        "cheap to decode, 100 rows, 64 a request": (lambda index: small(2**21 + index), 64),
        "photographs of mixed sizes": (Photos(MIXED_SIZES, seed=0), 1),
    }
    throughputs: list[Throughput] = []
    shares: list[StageShares] = []
    flags = ("--model=random:deepseek_v4", "--device=cpu", "--nproc-per-node=1")
    with Server(*flags, "--worker-module=benchmarks.instant_worker") as server, show_steps(len(loads)) as steps:
        server.wait_for("/health/ready")
        run_load(Load(server.url, clients=options.clients, images=len(seen)), loads["known files, 350 rows"][0])
        for name, (pictures, per_request) in loads.items():
            load = Load(server.url, clients=options.clients, seconds=options.seconds, per_request=per_request)
            throughput, share = _measure(server, name, load, pictures, steps)
            throughputs.append(throughput)
            shares.append(share)
    decoding = [_compare_decoding(size, options.rounds) for size in sorted(set(MIXED_SIZES))]
    tables: dict[str, Sequence[Throughput | StageShares | Decoding]] = {
        "the front end by itself": throughputs,
        "shares of the stages": shares,
        "decoding": decoding,
    }
    machine = report(tables, machine, options.json)
    if options.png:
        labels = [f"{each.images_are}\n{each.images_per_s:,.0f} images/s" for each in throughputs]
        parts = {stage: [getattr(share, stage) for share in shares] for stage in _STAGES}
        with open_chart(options.png, "Where an image's time goes, less the tower's", machine) as (axes,):
            draw_shares(axes, labels, parts)


def _measure(server: Server, name: str, load: Load, pictures: Pictures, steps: Steps) -> tuple[Throughput, StageShares]:
    stages, cpu_s, own_s = Stages.of(server.url), server.cpu_s(), _own_cpu_s()
    served = run_load(load, pictures, on_progress=steps.watch(name))
    steps.done(f"{name}: {served.images_per_s:.1f} images/s")
    used_s = {part: seconds - cpu_s[part] for part, seconds in server.cpu_s().items()}
    load_s, spent = _own_cpu_s() - own_s, Stages.of(server.url).since(stages)
    images = max(served.images, 1)

    def cpu_ms(part: str) -> float:
        return 1e3 / images * sum(seconds for name, seconds in used_s.items() if name.startswith(part))

    throughput = Throughput(
        images_are=name,
        per_request=load.per_request,
        images_per_s=served.images_per_s,
        p50_ms=served.p50_ms,
        p99_ms=served.p99_ms,
        received_mb_per_s=served.received_mb_per_s,
        front_end_images_per_core_s=1e3 / max(cpu_ms("front end"), 1e-9),
        front_end_cpu_ms=cpu_ms("front end"),
        decoders_cpu_ms=cpu_ms("decoder"),
        rank_cpu_ms=cpu_ms("rank"),
        load_cpu_ms=1e3 * load_s / images,
        errors=sum(count for _, count in served.errors),
    )
    total_ms = max(spent.ms(*_STAGES), 1e-9)
    parts = {stage: spent.ms(stage) / total_ms for stage in _STAGES}
    return throughput, StageShares(images_are=name, ms_per_image=total_ms / images, **parts)


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _compare_decoding(size: Size, rounds: int) -> Decoding:
    """In turns, on the same JPEG."""
    data = Photos([size], seed=1)(0).data
    planned = read_canvas(data, DEEPSEEK_V4, "vllm", limit_pixels=10**8).plan.resized
    ours: list[float] = []
    pillow: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        read_canvas(data, DEEPSEEK_V4, "vllm", limit_pixels=10**8)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        ImageOps.pad(image, planned, color=_PADDING)
        pillow.append(time.perf_counter() - start)
    return Decoding(
        size=f"{size[0]} x {size[1]}",
        ours_ms=_median_ms(ours),
        pillow_ms=_median_ms(pillow),
        ratio=statistics.median(our / their for our, their in zip(ours, pillow, strict=True)),
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    main()
