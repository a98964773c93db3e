"""More ranks: two against two independent processes, and 1 to 64 in a simulation that runs on this machine's costs.

Invariant: the simulation plans with the service's own functions: batches by `num_fitting`, shares by `balance`,
forwards by `split_packs`. Only time is simulated, by the cost of a forward of images of n1, n2, ... patches, n in
all, a + b n + c (n1^2 + n2^2 + ...), fitted to forwards that were measured.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks._common import Server, describe_machine, percentile, report
from distributed.balance import Shares, balance, cut_apart, rank_loads
from encoder.checkpoint import open_checkpoint
from encoder.config import DEEPSEEK_V4
from encoder.geometry import plan
from encoder.image import Canvas
from encoder.packing import split_packs
from encoder.tower import Tower, choose_dtype
from encoder.weights import load_weights
from service.batcher import Batcher, ImageRows, QueuedImage, num_fitting
from service.bench import Load, LoadReport, run_load
from service.bench_images import MIXED_SIZES, Photos, Pictures
from service.metrics import Metrics

_RANKS = (1, 2, 4, 8, 16, 32, 64)
_SMALL_SIZES = ((300, 300), (500, 333), (640, 480), (300, 300))
_MIXES: Mapping[str, Sequence[tuple[int, int]]] = {
    "mixed": MIXED_SIZES,
    "thumbnails and a few screens": (*(((300, 300),) * 9), (1920, 1080)),
    "screens": ((1920, 1080), (1280, 720), (1080, 1920)),
}
# Canvases, in patches a side: alone, and three or four of a kind in one forward.
_PACKS = (((14, 14),), ((28, 28),), ((37, 42),), ((42, 74),), ((14, 14),) * 4, ((28, 28),) * 3)
_ROW_BYTES = 4096 * 2


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """One round: the same images through one server with two ranks, and halved through two servers with one each."""

    round: int
    images: int
    two_ranks_images_per_s: float
    two_processes_images_per_s: float
    ratio: float
    errors: int


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a forward of n patches, fitted to measurements. error: of the worst of them, as a part of it."""

    fixed_ms: float
    per_patch_us: float
    per_patch_squared_ns: float
    forwards: int
    error: float

    def forward_s(self, counts: Sequence[int]) -> float:
        """What one forward of images with these patch counts takes."""
        squares = sum(count * count for count in counts)
        return (
            self.fixed_ms * 1e-3 + sum(counts) * self.per_patch_us * 1e-6 + squares * self.per_patch_squared_ns * 1e-9
        )


@dataclass(frozen=True, slots=True)
class Simulated:
    """A full queue: where the ranks' time goes. Shares are of all ranks' time together.

    forwards: of the cap that a batch may hold for each rank; the service's budget is 1 unless it is told another.
    padding: of the bytes that the all-gather moves, those that are zeros; gather: what moving them all takes.
    cost_balance_gain: throughput with shares balanced by estimated cost, against by patches, which is what runs.
    wait_p50, wait_p99: open loop at 80 % of this throughput, from arrival to the start of the batch, in batches' time.
    """

    mix: str
    forwards: int
    ranks: int
    images_per_s: float
    efficiency: float
    lost_to_imbalance: float
    lost_to_gather: float
    padding: float
    cost_balance_gain: float
    wait_p50: float
    wait_p99: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Time that the front end or every rank spends on deciding, for each of what there is ten times more of."""

    what: str
    number: int
    us_each: float


def main() -> None:
    """Measure, fit, simulate."""
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=__doc__)
    parser.add_argument("--model", default="random:deepseek_v4")
    parser.add_argument("--parts", nargs="+", choices=["ranks", "simulation", "growth"])
    parser.add_argument("--images", type=int, default=16, help="through two ranks, in each turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cap", type=int, default=2560, help="simulated: patches in a forward of a rank")
    parser.add_argument(
        "--curve", nargs=3, type=float, metavar=("MS", "US", "NS"), help="simulated: a, b and c, rather than measured"
    )
    parser.add_argument("--forwards", nargs="+", type=int, default=[1, 4], help="simulated: a rank's part of a batch")
    parser.add_argument("--batches", type=int, default=400, help="simulated, for each number of ranks")
    parser.add_argument("--gather-gb-per-s", type=float, default=2.0, help="simulated: what a rank receives")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    machine = describe_machine()
    parts = options.parts or ["ranks", "simulation", "growth"]
    tables: dict[str, Sequence[TwoRanks | CostCurve | Simulated | Growth]] = {}
    if "ranks" in parts:
        tables["two ranks against two processes, one thread each"] = _compare_ranks(
            options.model, options.images, options.rounds
        )
    if "simulation" in parts:
        curve = _given(*options.curve) if options.curve else _fit(options.model, options.rounds)
        tables["cost of a forward"] = [curve]
        tables["simulated ranks"] = [
            _simulate(_Group(curve, ranks, options.cap, forwards, options.gather_gb_per_s * 1e9), mix, options.batches)
            for mix in _MIXES
            for forwards in options.forwards
            for ranks in _RANKS
        ]
    if "growth" in parts:
        tables["growth of what decides"] = _measure_growth()
    report(tables, machine, options.json)


# Two ranks


def _compare_ranks(model: str, images: int, rounds: int) -> list[TwoRanks]:
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
    flags = (f"--model={model}", "--device=cpu", "--decode-processes=1", "--cache-bytes=0")
    photos = Photos(_SMALL_SIZES, seed=0)
    rows = []
    with ExitStack() as stack:
        together = stack.enter_context(Server(*flags, "--nproc-per-node=2"))
        apart = [stack.enter_context(Server(*flags, "--nproc-per-node=1")) for _ in range(2)]
        for server in (together, *apart):
            server.wait_for("/health/ready")
            run_load(Load(server.url, clients=4, images=4), photos)
        for number in range(rounds):
            one = run_load(Load(together.url, clients=16, images=images), photos)
            with ThreadPoolExecutor(2) as threads:
                start = time.perf_counter()
                halves = list(threads.map(_half(photos, images), [server.url for server in apart], range(2)))
                elapsed_s = time.perf_counter() - start
            two_images_per_s = sum(half.images for half in halves) / elapsed_s
            errors = sum(count for each in (one, *halves) for _, count in each.errors)
            ratio = one.images_per_s / two_images_per_s
            rows.append(TwoRanks(number, images, one.images_per_s, two_images_per_s, ratio, errors))
            print(f"round {number}: {ratio:.3f} of two processes", flush=True)
    return rows


def _half(photos: Pictures, images: int) -> Callable[[str, int], LoadReport]:
    """A load of every other image of the mix but for their order: the first or the second half of each round of it."""

    def run(url: str, which: int) -> LoadReport:
        load = Load(url, clients=8, images=images // 2)
        return run_load(load, lambda index: photos(index // 4 * 8 + which * 4 + index % 4))

    return run


# Cost


def _given(fixed_ms: float, per_patch_us: float, per_patch_squared_ns: float) -> CostCurve:
    return CostCurve(fixed_ms, per_patch_us, per_patch_squared_ns, forwards=0, error=0.0)


def _fit(model: str, rounds: int) -> CostCurve:
    """Measure every pack in turn, and fit the median times by least squares of the relative error."""
    checkpoint = open_checkpoint(model)
    device = torch.device("cpu")
    tower = Tower(
        checkpoint.config,
        load_weights(checkpoint),
        device=device,
        dtype=choose_dtype("auto", device),
        max_patches_per_forward=10**9,
    )
    side = checkpoint.config.patch_size
    packs = [[torch.zeros(height * side, width * side, 3, dtype=torch.uint8) for height, width in p] for p in _PACKS]
    tower.encode(packs[0], ["rows"] * len(packs[0]))
    times: list[list[float]] = [[] for _ in packs]
    for _ in range(rounds):
        for canvases, taken in zip(packs, times, strict=True):
            start = time.perf_counter()
            tower.encode(canvases, ["rows"] * len(canvases))
            taken.append(time.perf_counter() - start)
    measured = np.array([statistics.median(taken) for taken in times])
    counts = [[height * width for height, width in pack] for pack in _PACKS]
    terms = np.array([[1.0, sum(pack), sum(count * count for count in pack)] for pack in counts])
    fixed, linear, quadratic = _solve_positive(terms / measured[:, None])
    errors = abs(terms @ [fixed, linear, quadratic] / measured - 1)
    return CostCurve(fixed * 1e3, linear * 1e6, quadratic * 1e9, len(measured), float(errors.max()))


def _solve_positive(relative: NDArray[np.float64]) -> tuple[float, float, float]:
    """Least squares for relative @ x = 1 with no x below 0: terms that would be are left out."""
    active = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(relative[:, active], np.ones(len(relative)), rcond=None)[0]
        if (found >= 0).all():
            values = dict(zip(active, found.tolist(), strict=True))
            return values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)
        active = [term for term, value in zip(active, found, strict=True) if value >= 0]


# Simulation


@dataclass(frozen=True, slots=True)
class _Image:
    patches: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Group:
    """So many ranks, of that speed."""

    curve: CostCurve
    ranks: int
    cap: int
    forwards: int
    gather_bytes_per_s: float

    @property
    def budget(self) -> int:
        """Patches of a batch, as the service has it."""
        return self.cap * self.forwards * self.ranks

    def rank_s(self, batch: Sequence[_Image], shares: Shares) -> list[float]:
        """What each rank computes for."""
        times = []
        for share in shares:
            counts = [batch[index].patches for index in share]
            forwards = split_packs(counts, self.cap)
            times.append(sum(self.curve.forward_s(counts[each.start : each.stop]) for each in forwards))
        return times

    def gather_s(self, rank_rows: Sequence[int]) -> float:
        """What the padded all-gather takes: every rank receives the others' rows, each as many as the fullest has."""
        return (self.ranks - 1) * max(rank_rows) * _ROW_BYTES / self.gather_bytes_per_s


def _simulate(group: _Group, mix: str, num_batches: int) -> Simulated:
    curve, ranks = group.curve, group.ranks
    batches = list(islice(_batches(group, mix), num_batches))
    by_patches = [balance([image.patches for image in batch], ranks) for batch in batches]
    by_cost = [balance(_costs(curve, batch), ranks) for batch in batches]
    busy = longest = gather = 0.0
    longest_by_cost = 0.0
    rows = moved = 0
    for batch, shares, cost_shares in zip(batches, by_patches, by_cost, strict=True):
        times = group.rank_s(batch, shares)
        busy += sum(times)
        longest += max(times)
        longest_by_cost += max(group.rank_s(batch, cost_shares))
        rank_rows = rank_loads(shares, [image.rows for image in batch])
        gather += group.gather_s(rank_rows)
        rows += sum(rank_rows)
        moved += max(rank_rows) * ranks
    total_s = longest + gather
    images_per_s = sum(map(len, batches)) / total_s
    waits = _wait_in_batches(group, mix, 0.8 * images_per_s, num_batches)
    return Simulated(
        mix=mix,
        forwards=group.forwards,
        ranks=ranks,
        images_per_s=images_per_s,
        efficiency=busy / (ranks * total_s),
        lost_to_imbalance=(longest - busy / ranks) / total_s,
        lost_to_gather=gather / total_s,
        padding=1 - rows / moved,
        cost_balance_gain=(longest + gather) / (longest_by_cost + gather) - 1,
        wait_p50=percentile(waits, 50),
        wait_p99=percentile(waits, 99),
    )


def _draw(mix: str) -> Iterator[_Image]:
    """Images of a mix at random, the same for every number of ranks."""
    plans = [plan(DEEPSEEK_V4, *size) for size in _MIXES[mix]]
    images = [_Image(each.num_patches, each.num_rows) for each in plans]
    chance = random.Random(0)
    while True:
        yield chance.choice(images)


def _batches(group: _Group, mix: str) -> Iterator[list[_Image]]:
    """Batches off a queue that never ends."""
    images, queue = _draw(mix), list[_Image]()
    while True:
        while sum(image.patches for image in queue) <= group.budget:
            queue.append(next(images))
        count = num_fitting((image.patches for image in queue), group.budget)
        yield queue[:count]
        del queue[:count]


def _costs(curve: CostCurve, batch: Sequence[_Image]) -> list[int]:
    """What each image adds to a forward, in nanoseconds."""
    return [int(1e9 * (curve.forward_s([image.patches]) - curve.fixed_ms * 1e-3)) for image in batch]


def _wait_in_batches(group: _Group, mix: str, images_per_s: float, num_batches: int) -> list[float]:
    """Waits of images that arrive at random, in units of the mean batch's time; one batch at a time works."""
    chance, images = random.Random(1), _draw(mix)
    now = arrival = 0.0
    queue: list[tuple[float, _Image]] = []
    waits: list[float] = []
    lengths: list[float] = []
    while len(lengths) < num_batches:
        while arrival <= now or not queue:
            queue.append((arrival, next(images)))
            now = max(now, queue[0][0])
            arrival += chance.expovariate(images_per_s)
        count = num_fitting((image.patches for _, image in queue), group.budget)
        batch = [image for _, image in queue[:count]]
        waits += [now - arrived for arrived, _ in queue[:count]]
        del queue[:count]
        shares = balance([image.patches for image in batch], group.ranks)
        length = max(group.rank_s(batch, shares)) + group.gather_s(rank_loads(shares, [image.rows for image in batch]))
        lengths.append(length)
        now += length
    mean = statistics.mean(lengths)
    return [wait / mean for wait in waits]


# Growth


def _measure_growth() -> list[Growth]:
    images = _draw("mixed")
    patches = [next(images).patches for _ in range(10_000)]
    rows = [
        Growth("queue: images in it", number, _median_us(partial(_drain, patches[:number]), 5) / number)
        for number in (100, 1_000, 10_000)
    ]
    rows += [
        Growth(
            "balance, 8 ranks: images in a batch", number, _median_us(partial(balance, patches[:number], 8)) / number
        )
        for number in (100, 1_000, 10_000)
    ]
    rows += [
        Growth(
            "balance, 64 images a rank: ranks",
            ranks,
            _median_us(partial(balance, patches[: 64 * ranks], ranks)) / ranks,
        )
        for ranks in (1, 10, 100)
    ]
    for ranks in (1, 10, 100):
        counts = patches[: 64 * ranks]
        call = partial(cut_apart, balance(counts, ranks), counts)
        rows.append(Growth("cut apart, 64 images a rank: ranks", ranks, _median_us(call) / ranks))
    return rows


def _drain(patches: Sequence[int]) -> None:
    """Queue these images all at once, and answer every batch as soon as it is formed."""
    asyncio.run(_queue_and_answer(patches))


async def _queue_and_answer(patches: Sequence[int]) -> None:
    async def answer(batch: Sequence[QueuedImage]) -> None:
        for image in batch:
            image.rows.set_result(ImageRows(0, 0, memoryview(b"")))

    limit = sum(patches)
    batcher = Batcher(answer, Metrics(), budget_patches=lambda: 8 * 2560, slots=2, limit_queue_patches=limit)
    planned, pixels = plan(DEEPSEEK_V4, 300, 300), np.zeros((1, 1, 3), np.uint8)
    canvases = [Canvas(pixels, replace(planned, vit_grid=(1, count))) for count in patches]
    waits = [asyncio.create_task(batcher.submit(canvas, "", "rows", "bfloat16")) for canvas in canvases]
    await asyncio.sleep(0)  # all are queued
    run = asyncio.create_task(batcher.run())
    await asyncio.gather(*waits)
    run.cancel()
    await asyncio.wait([run])


def _median_us(call: Callable[[], object], calls: int = 25) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
