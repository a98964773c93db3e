"""The service against its tower: what HTTP, queue, link and decoding take away, at saturation and for one request.

Invariant: both sides run the same images in one sitting, in turns, on the same number of threads; every turn has images
that the server has not seen. The front end without a tower is benchmarks.front_end's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from torch import Tensor

from benchmarks._common import Server, describe_machine, report
from benchmarks._stages import Stages
from encoder.checkpoint import open_checkpoint
from encoder.config import VisionConfig
from encoder.image import read_canvas
from encoder.tower import Tower, choose_dtype
from encoder.weights import load_weights
from service.bench import Load, LoadReport, run_load
from service.bench_images import MIXED_SIZES, Photos, Picture, Pictures, Size

_LIMIT_PIXELS = 100_000_000
_ALONE: Size = (300, 300)
_HITS = 20


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


@dataclass(frozen=True, slots=True)
class CacheHits:
    """An image for the first time and again, and for the first time by several clients at once."""

    size: str
    computed_ms: float
    hit_ms: float
    ratio: float
    simultaneous: int
    computations: int


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One offered load, or the closed loop that says what there is to offer."""

    load: str
    images: int
    images_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    errors: int


def main() -> None:
    """Measure the parts that were asked for, with one server."""
    parser = argparse.ArgumentParser(prog="benchmarks.service", description=__doc__)
    parser.add_argument("--model", default="random:deepseek_v4")
    parser.add_argument("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--images", type=int, default=len(MIXED_SIZES), help="in each turn at saturation")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8, help="one at a time")
    parser.add_argument(
        "--loads", nargs="+", type=float, default=[0.3, 0.6, 0.8, 0.9], help="of the curve, as shares of saturation"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each point of the curve")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    machine = describe_machine()
    tables: dict[str, Sequence[Saturation | Alone | CacheHits | CurvePoint]] = {}
    with Server(f"--model={options.model}", "--device=cpu") as server:
        checkpoint = open_checkpoint(options.model)
        device = torch.device("cpu")
        # Bound to the call, not to the server's life: its ranks have loaded by the time that this has.
        tower = Tower(checkpoint.config, load_weights(checkpoint), device=device, dtype=choose_dtype("auto", device))
        server.wait_for("/health/ready")
        bench = _Bench(server.url, tower, options)
        bench.warm_up()
        for part in options.parts:
            tables[part] = _PARTS[part](bench)
            print(f"{part}: {tables[part]}", flush=True)
    report(tables, machine, options.json)


class _Bench:
    """A ready server, the same tower in this process, and images that are never sent twice by accident."""

    def __init__(self, url: str, tower: Tower, options: argparse.Namespace) -> None:
        self._url = url
        self._tower = tower
        self._options = options
        self._num_sent = 0
        self._mixed = Photos(MIXED_SIZES, seed=0)
        self._small = Photos([_ALONE], seed=1)

    def warm_up(self) -> None:
        """Load the kernels of both sides."""
        self._run(Load(self._url, clients=1, images=1), self._fresh(self._small, 1))
        self._encode([_canvas(self._tower.config, self._small(self._num_sent))])

    def saturation(self) -> list[Saturation]:
        rows = []
        for number in range(self._options.rounds):
            pictures = self._fresh(self._mixed, self._options.images)
            load = Load(self._url, clients=self._options.clients, images=self._options.images)
            served = self._run(load, pictures)
            canvases = [_canvas(self._tower.config, pictures(index)) for index in range(self._options.images)]
            tower_images_per_s = len(canvases) / self._encode(canvases)
            row = Saturation(
                round=number,
                images=served.images,
                service_images_per_s=served.images_per_s,
                tower_images_per_s=tower_images_per_s,
                ratio=served.images_per_s / tower_images_per_s,
                p50_ms=served.p50_ms,
                worst_ms=served.worst_ms,
                errors=_num_errors(served),
            )
            print(f"round {number}: {row.ratio:.3f} of the tower by itself", flush=True)
            rows.append(row)
        return rows

    def alone(self) -> list[Alone]:
        requests, towers, stages = [], [], []
        for _ in range(self._options.requests):
            pictures = self._fresh(self._small, 1)
            before = Stages.of(self._url)
            requests.append(self._run(Load(self._url, clients=1, images=1), pictures).worst_ms)
            stages.append(Stages.of(self._url).since(before))
            towers.append(self._encode([_canvas(self._tower.config, pictures(0))]) * 1e3)
        batchers = [each.ms("queue", "link", "gather") for each in stages]
        others = [
            request_ms - each.ms("decode", "encode") - batcher_ms
            for request_ms, each, batcher_ms in zip(requests, stages, batchers, strict=True)
        ]
        return [
            Alone(
                requests=len(requests),
                request_ms=statistics.median(requests),
                tower_by_itself_ms=statistics.median(towers),
                decode_ms=statistics.median(each.ms("decode") for each in stages),
                encode_ms=statistics.median(each.ms("encode") for each in stages),
                queue_ms=statistics.median(each.ms("queue") for each in stages),
                batcher_ms=statistics.median(batchers),
                other_ms=statistics.median(others),
            )
        ]

    def cache(self) -> list[CacheHits]:
        rows = []
        for size in ((300, 300), (1920, 1080)):
            photos = Photos([size], seed=2, same=True)
            first = self._run(Load(self._url, clients=1, images=1), photos)
            again = self._run(Load(self._url, clients=1, images=_HITS), photos)
            before = _num_computed(self._url)
            clients = self._options.clients
            self._run(Load(self._url, clients=clients, images=clients), Photos([size], seed=3, same=True))
            rows.append(
                CacheHits(
                    size=f"{size[0]} x {size[1]}",
                    computed_ms=first.p50_ms,
                    hit_ms=again.p50_ms,
                    ratio=first.p50_ms / again.p50_ms,
                    simultaneous=clients,
                    computations=_num_computed(self._url) - before,
                )
            )
        return rows

    def curve(self) -> list[CurvePoint]:
        seconds = self._options.seconds
        closed = self._point("closed loop", Load(self._url, clients=self._options.clients, seconds=seconds))
        rows = [closed]
        for share in self._options.loads:
            rate = share * closed.images_per_s
            load = Load(self._url, clients=64, rate=rate, seconds=seconds)
            rows.append(self._point(f"{share:.0%} of it: {rate:.2f} images/s", load))
        return rows

    def _point(self, name: str, load: Load) -> CurvePoint:
        served = self._run(load, self._fresh(self._mixed, 0))
        self._num_sent += served.images + _num_errors(served)
        return CurvePoint(
            load=name,
            images=served.images,
            images_per_s=served.images_per_s,
            p50_ms=served.p50_ms,
            p90_ms=served.p90_ms,
            p99_ms=served.p99_ms,
            worst_ms=served.worst_ms,
            errors=_num_errors(served),
        )

    def _fresh(self, photos: Photos, count: int) -> Pictures:
        """The next images that were not sent yet, from a whole mix on."""
        first = self._num_sent = -(-self._num_sent // len(MIXED_SIZES)) * len(MIXED_SIZES)
        self._num_sent += count
        return lambda index: photos(first + index)

    def _run(self, load: Load, pictures: Pictures) -> LoadReport:
        return run_load(load, pictures)

    def _encode(self, canvases: Sequence[Tensor]) -> float:
        start = time.perf_counter()
        self._tower.encode(canvases, ["rows"] * len(canvases))
        return time.perf_counter() - start


_PARTS: dict[str, Callable[[_Bench], Sequence[Saturation | Alone | CacheHits | CurvePoint]]] = {
    "saturation": _Bench.saturation,
    "alone": _Bench.alone,
    "cache": _Bench.cache,
    "curve": _Bench.curve,
}


def _canvas(config: VisionConfig, picture: Picture) -> Tensor:
    return torch.from_numpy(read_canvas(picture.data, config, "vllm", limit_pixels=_LIMIT_PIXELS).pixels)


def _num_errors(served: LoadReport) -> int:
    return sum(count for _, count in served.errors)


def _num_computed(url: str) -> int:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(float(text.split('patchgrid_cache_lookups_total{result="computed"} ')[1].split()[0]))


if __name__ == "__main__":
    main()
