"""Ranks that are not there: batches, shares and forwards as the service forms them, and only time made up.

Invariant: it plans with the service's own functions: batches by `num_fitting`, shares by `balance` and `Backlog`,
forwards by `split_packs`. Time is a cost curve's and a gather's rate's.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from benchmarks._cost import CostCurve
from benchmarks._report import percentile
from distributed.backlog import Backlog
from distributed.balance import Shares, balance, rank_loads
from encoder.config import DEEPSEEK_V4
from encoder.geometry import plan
from encoder.packing import split_packs
from service.batcher import num_fitting
from service.bench_images import MIXES

_ROW_BYTES = DEEPSEEK_V4.out_width * 2


@dataclass(frozen=True, slots=True)
class Simulated:
    """A full queue: where the ranks' time goes.

    forwards: of the cap that a batch may hold for each rank. efficiency: of all ranks' time, that in which they encode.
    gather: what moving the rows takes, beside the encoding, as a share of the whole time. padding: of the bytes that it
    moves, those that are zeros. cost_balance_gain: throughput with shares balanced by estimated cost, against by
    patches, which is what runs. wait_p50, wait_p99: open loop at 80 % of this throughput, from arrival to the start of
    the batch, in units of the mean batch's time.
    """

    mix: str
    forwards: int
    ranks: int
    images_per_s: float
    efficiency: float
    gather: float
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


class Ranks:
    """The group at work as in distributed/rank.py: each rank at its own pace, two batches open at most.

    weigh: what each image of a batch counts when they are shared.
    """

    def __init__(self, group: Group, weigh: Callable[[Sequence[SimulatedImage]], list[int]]) -> None:
        self.busy_s = 0.0
        self.gather_s = 0.0
        self.rows = 0
        self.moved_rows = 0
        self._group = group
        self._weigh = weigh
        self._clock_s = 0.0
        self._backlog = Backlog(group.ranks, lambda: self._clock_s)
        self._free_at = [0.0] * group.ranks
        self._open: deque[tuple[float, float]] = deque()
        self._ends = deque([0.0, 0.0], maxlen=2)

    def room_at(self) -> float:
        """When the next batch can be given."""
        return self._ends[0]

    def end_at(self) -> float:
        """When all that was given is answered."""
        return self._ends[-1]

    def encode(self, batch: Sequence[SimulatedImage], given_at: float) -> None:
        """Give the ranks a batch."""
        while self._open and self._open[0][0] <= given_at:
            self._clock_s, own_s = self._open.popleft()
            self._backlog.end(own_s)
        self._clock_s = given_at
        weights = self._weigh(batch)
        shares = balance(weights, self._backlog.patches())
        self._backlog.give(rank_loads(shares, weights))
        times = self._group.rank_s(batch, shares)
        self._free_at = [
            max(free_at, given_at) + time_s if share else free_at
            for free_at, time_s, share in zip(self._free_at, times, shares, strict=True)
        ]
        computed_at = max(free_at for free_at, share in zip(self._free_at, shares, strict=True) if share)
        rank_rows = rank_loads(shares, [image.rows for image in batch])
        gather_s = self._group.gather_s(rank_rows)
        self._ends.append(max(self._ends[-1], computed_at) + gather_s)
        self._open.append((self._ends[-1], times[0]))
        self.busy_s += sum(times)
        self.gather_s += gather_s
        self.rows += sum(rank_rows)
        self.moved_rows += max(rank_rows) * self._group.ranks


def simulate(group: Group, mix: str, num_batches: int) -> Simulated:
    batches = list(islice(_batches(group, mix), num_batches))
    by_patches, by_cost = Ranks(group, _patches), Ranks(group, partial(_costs, group.curve))
    for ranks in (by_patches, by_cost):
        for batch in batches:
            ranks.encode(batch, ranks.room_at())
    total_s = by_patches.end_at()
    images_per_s = sum(map(len, batches)) / total_s
    waits = _wait_in_batches(group, mix, 0.8 * images_per_s, num_batches)
    return Simulated(
        mix=mix,
        forwards=group.forwards,
        ranks=group.ranks,
        images_per_s=images_per_s,
        efficiency=by_patches.busy_s / (group.ranks * total_s),
        gather=by_patches.gather_s / total_s,
        padding=1 - by_patches.rows / by_patches.moved_rows,
        cost_balance_gain=total_s / by_cost.end_at() - 1,
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


def _patches(batch: Sequence[SimulatedImage]) -> list[int]:
    return [image.patches for image in batch]


def _costs(curve: CostCurve, batch: Sequence[SimulatedImage]) -> list[int]:
    """What each image adds to a forward, in nanoseconds."""
    return [int(1e9 * (curve.forward_s([image.patches]) - curve.fixed_ms * 1e-3)) for image in batch]


def _wait_in_batches(group: Group, mix: str, images_per_s: float, num_batches: int) -> list[float]:
    """Waits of images that arrive at random, in units of the mean batch's time."""
    chance, images = random.Random(1), draw_images(mix)
    ranks = Ranks(group, _patches)
    arrival = 0.0
    queue: list[tuple[float, SimulatedImage]] = []
    waits: list[float] = []
    for _ in range(num_batches):
        now = max(ranks.room_at(), queue[0][0] if queue else arrival)
        while arrival <= now:
            queue.append((arrival, next(images)))
            arrival += chance.expovariate(images_per_s)
        count = num_fitting((image.patches for _, image in queue), group.budget)
        waits += [now - arrived for arrived, _ in queue[:count]]
        ranks.encode([image for _, image in queue[:count]], now)
        del queue[:count]
    mean_s = ranks.busy_s / (group.ranks * num_batches)
    return [wait / mean_s for wait in waits]
