"""Threads that do what they are given, in order."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from distributed.lane import Lane, use_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _our_threads() -> Iterator[None]:
    """What was set last is what new threads begin with: the tests that follow are to have theirs."""
    before = torch.get_num_threads()
    yield
    use_threads(before)


def test_work_is_done_in_order_by_one_thread() -> None:
    lane = Lane("work", CPU)
    done: list[tuple[int, int]] = []
    futures = [lane.do(lambda number=number: done.append((number, threading.get_ident()))) for number in range(100)]
    futures[-1].result()
    assert [number for number, _ in done] == list(range(100))
    assert len({thread for _, thread in done}) == 1
    assert done[0][1] != threading.get_ident()


def test_what_is_raised_comes_to_whoever_asked_and_the_next_is_done() -> None:
    lane = Lane("work", CPU)
    failed: Future[float] = lane.do(lambda: 1 / 0)
    assert lane.do(lambda: "next").result() == "next"
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_every_lane_keeps_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    lanes = [Lane("work", CPU, num_threads) for num_threads in (3, 1, 2)]
    rows = torch.ones(1000, 1000)
    for _ in range(2):
        assert [lane.do(torch.get_num_threads).result() for lane in lanes] == [3, 1, 2]
        assert [float(lane.do((rows + 1).sum).result()) for lane in lanes] == [2e6] * 3
    assert torch.get_num_threads() == before
