"""Ranks that are not there: batches, shares and forwards as the service forms them, and only time made up.

Invariant: it plans with the service's own functions: batches by `num_fitting`, shares by `balance`, forwards by
`split_packs`. Time is a cost curve's and a gather's rate's.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from benchmarks._cost import CostCurve
from benchmarks._report import percentile
from distributed.balance import Shares, balance, rank_loads
from encoder.config import DEEPSEEK_V4
from encoder.geometry import plan
from encoder.packing import split_packs
from service.batcher import num_fitting
from service.bench_images import MIXES

_ROW_BYTES = DEEPSEEK_V4.out_width * 2


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
class SimulatedImage:
    patches: int
    rows: int


@dataclass(frozen=True, slots=True)
class Group:
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

    def rank_s(self, batch: Sequence[SimulatedImage], shares: Shares) -> list[float]:
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


def simulate(group: Group, mix: str, num_batches: int) -> Simulated:
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


def draw_images(mix: str) -> Iterator[SimulatedImage]:
    """Images of a mix at random, the same for every number of ranks."""
    plans = [plan(DEEPSEEK_V4, *size) for size in MIXES[mix]]
    images = [SimulatedImage(each.num_patches, each.num_rows) for each in plans]
    chance = random.Random(0)
    while True:
        yield chance.choice(images)


def _batches(group: Group, mix: str) -> Iterator[list[SimulatedImage]]:
    """Batches off a queue that never ends."""
    images, queue = draw_images(mix), list[SimulatedImage]()
    while True:
        while sum(image.patches for image in queue) <= group.budget:
            queue.append(next(images))
        count = num_fitting((image.patches for image in queue), group.budget)
        yield queue[:count]
        del queue[:count]


def _costs(curve: CostCurve, batch: Sequence[SimulatedImage]) -> list[int]:
    """What each image adds to a forward, in nanoseconds."""
    return [int(1e9 * (curve.forward_s([image.patches]) - curve.fixed_ms * 1e-3)) for image in batch]


def _wait_in_batches(group: Group, mix: str, images_per_s: float, num_batches: int) -> list[float]:
    """Waits of images that arrive at random, in units of the mean batch's time; one batch at a time works."""
    chance, images = random.Random(1), draw_images(mix)
    now = arrival = 0.0
    queue: list[tuple[float, SimulatedImage]] = []
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
