"""Two batches open at once on every rank: the answers are those of one at a time, in order, and faults surface."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_group import Group, Pixels, random_canvases

# queueing_worker's colours; the module itself is torchrun's to import.
BUSY, LONG_BUSY, FILLS, BREAKS, RAISES = (0, 100, 0), (0, 200, 0), (0, 0, 100), (200, 0, 0), (0, 0, 200)


@pytest.fixture(scope="module")
def start_queueing(
    start_group: Callable[..., Group], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., tuple[Group, Path]]]:
    """Starts groups of queueing_worker that have said hello; with each comes the folder of its ranks' traces."""

    def start(num_ranks: int, **options: Any) -> tuple[Group, Path]:
        trace_dir = tmp_path_factory.mktemp("trace")
        patch.setenv("TRACE_DIR", str(trace_dir))
        group = start_group(num_ranks, worker_module="queueing_worker", **options)
        group.hello()
        return group, trace_dir

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield start


@pytest.fixture(scope="module")
def group(start_queueing: Callable[..., tuple[Group, Path]]) -> tuple[Group, Path]:
    return start_queueing(2, stall_timeout_s=0.5)


def plain(*colours: tuple[int, int, int]) -> list[Pixels]:
    """One image per colour, the first for rank 0 and the second for rank 1."""
    return [np.full((84, 84, 3), colour, np.uint8) for colour in colours]


def test_the_next_batch_is_started_first_and_the_rows_stay_the_same(
    group: tuple[Group, Path], encode_together: Callable[..., Any]
) -> None:
    ranks, trace_dir = group
    batches = [[*plain(BUSY, BUSY), *random_canvases([(size, 7), (3, size)], seed=size)] for size in (1, 2, 8)]
    together = encode_together(ranks, batches)
    one_at_a_time = [encode_together(ranks, [batch])[0] for batch in batches]
    for rows, expected in zip(together, one_at_a_time, strict=True):
        for image, expected_image in zip(rows, expected, strict=True):
            assert np.array_equal(image, expected_image)
    warm_up, overlapped = ["start", "finish"], ["start", "start", "finish", "start", "finish", "finish"]
    for rank in (0, 1):
        assert (trace_dir / f"rank-{rank}").read_text().split()[:8] == warm_up + overlapped


def test_a_batch_that_is_repeated_for_a_peer_s_memory_is_answered_once_and_in_its_turn(
    group: tuple[Group, Path], encode_together: Callable[..., Any]
) -> None:
    ranks, _ = group
    batches = [plain(BUSY, BUSY), plain(BUSY, FILLS), plain(BUSY, BUSY)]
    before, repeated, after = encode_together(ranks, batches)
    (expected,) = encode_together(ranks, [plain(BUSY, FILLS)])
    assert np.array_equal(repeated, expected)
    assert np.array_equal(before, after)


def test_a_device_that_hangs_makes_its_rank_fall_silent(
    group: tuple[Group, Path], encode_together: Callable[..., Any]
) -> None:
    ranks, _ = group
    encode_together(ranks, [plain(BUSY, LONG_BUSY)])  # rank 1's device goes on, for longer than the stall time-out
    time.sleep(2.5)
    silent_s = ranks.ping().silent_s
    assert silent_s[1] > 1.0 > silent_s[0]


def test_stop_finishes_what_is_open(group: tuple[Group, Path], encode_together: Callable[..., Any]) -> None:
    ranks, _ = group
    first, second = encode_together(ranks, [plain(BUSY, BUSY), plain(BUSY, BUSY)], stop=True)
    assert np.array_equal(first, second)
    assert ranks.wait() == 0


def test_a_fault_after_the_start_ends_the_group(
    start_queueing: Callable[..., tuple[Group, Path]], encode_together: Callable[..., Any]
) -> None:
    ranks, _ = start_queueing(2)
    encode_together(ranks, [plain(BUSY, BREAKS)])
    assert ranks.wait() == 1
    failure = ranks.failure()
    assert failure is not None
    assert (failure.rank, failure.phase) == (1, "serve")
    assert "illegal memory access" in failure.reason


def test_a_batch_that_cannot_be_started_does_not_cost_the_one_before_its_answer(
    start_queueing: Callable[..., tuple[Group, Path]], encode_together: Callable[..., Any]
) -> None:
    ranks, _ = start_queueing(1)
    (rows,) = encode_together(ranks, [plain(BUSY), plain(RAISES)], num_answers=1)
    assert len(rows) == 1
    assert ranks.wait() == 1
    failure = ranks.failure()
    assert failure is not None
    assert "could not queue" in failure.reason
