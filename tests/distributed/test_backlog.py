"""Rank 0's reckoning of what the others have still to do."""

import itertools
from collections import deque

import pytest

from distributed.backlog import Backlog
from distributed.balance import balance, rank_loads


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backlog(clock: Clock) -> Backlog:
    """Of two ranks that do 10 patches a second and have nothing to do."""
    backlog = Backlog(2, clock)
    backlog.give((20, 20))
    clock.now += 2.0
    backlog.end(2.0)
    assert backlog.patches() == (0, 0)
    return backlog


def test_it_grows_by_what_is_given_and_shrinks_with_time(backlog: Backlog, clock: Clock) -> None:
    backlog.give((40, 0))
    assert backlog.patches() == (40, 0)
    clock.now += 1.0
    assert backlog.patches() == (30, 0)
    backlog.give((0, 25))
    assert backlog.patches() == (30, 25)
    clock.now += 2.8
    assert backlog.patches() == (2, 1), "at least 1 before the batch has ended"
    clock.now += 5.0
    assert backlog.patches() == (1, 1)


@pytest.mark.parametrize(("first_s", "second_s"), [(5.0, 3.0), (3.0, 2.0)], ids=["late", "early"])
def test_a_late_batch_delays_those_behind_it_and_an_early_one_brings_them_forward(
    backlog: Backlog, clock: Clock, first_s: float, second_s: float
) -> None:
    backlog.give((40, 10))
    backlog.give((30, 60))
    assert backlog.patches() == (70, 70)
    clock.now += first_s  # expected are 4, which is what rank 0 computes for by its own account
    backlog.end(4.0)
    assert backlog.patches() == (30, 30)
    clock.now += second_s
    backlog.end(3.0)
    assert backlog.patches() == (0, 0)


def test_a_batch_that_waits_for_the_one_before_is_not_late(backlog: Backlog, clock: Clock) -> None:
    backlog.give((100, 0))
    backlog.give((0, 10))
    clock.now += 10.0
    backlog.end(10.0)
    backlog.end(0.0)
    assert backlog.patches() == (0, 0)


def test_the_rate_follows_rank_0(backlog: Backlog, clock: Clock) -> None:
    for _ in range(20):
        backlog.give((20, 20))
        clock.now += 1.0
        backlog.end(1.0)
    backlog.give((40, 40))
    clock.now += 1.0
    assert backlog.patches() == pytest.approx((20, 20), abs=1)


def test_before_anything_is_known_a_rank_with_work_is_not_an_idle_one(clock: Clock) -> None:
    backlog = Backlog(3, clock)
    for rank in range(3):
        loads = rank_loads(balance([5], backlog.patches()), [5])
        assert loads.index(5) == rank
        backlog.give(loads)


def test_uneven_batches_even_out(backlog: Backlog, clock: Clock) -> None:
    """Ranks that do 10 patches a second, as they did before, with two batches open at most."""
    free_at, ends, own_s = [clock.now] * 2, deque[float](), deque[float]()
    for number, size in enumerate(itertools.islice(itertools.cycle((7, 3, 9, 5)), 200)):
        if len(ends) == 2:
            clock.now = max(clock.now, ends.popleft())
            backlog.end(own_s.popleft())
        images = [size] * (1 + number % 3)
        loads = rank_loads(balance(images, backlog.patches()), images)
        backlog.give(loads)
        free_at = [
            max(free, clock.now) + load / 10 if load else free for free, load in zip(free_at, loads, strict=True)
        ]
        ends.append(max([*free_at, *ends]))
        own_s.append(loads[0] / 10)
        assert abs(free_at[0] - free_at[1]) <= 0.9 + 0.2  # the largest image, and what rounding loses
