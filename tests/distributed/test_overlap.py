"""Two batches open at once on every rank: the answers are those of one at a time, in order, and faults surface."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_group import Group, Pixels, random_canvases

# queueing_worker's colours; the module itself is torchrun's to import.
BUSY, LONG_BUSY, SLEEPS = (0, 100, 0), (0, 200, 0), (100, 100, 0)
FILLS, BREAKS, RAISES = (0, 0, 100), (200, 0, 0), (0, 0, 200)


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


def read_trace(trace_dir: Path, rank: int, *kinds: str) -> list[tuple[str, float]]:
    """What a rank did of these kinds, and when."""
    lines = [line.split() for line in (trace_dir / f"rank-{rank}").read_text().splitlines()]
    return [(what, float(when)) for what, when in lines if what in kinds]


def plain(*colours: tuple[int, int, int]) -> list[Pixels]:
    """One image per colour, the first for rank 0 and the second for rank 1."""
    return [np.full((84, 84, 3), colour, np.uint8) for colour in colours]


def test_the_next_batch_is_started_first_and_the_rows_stay_the_same(
    start_queueing: Callable[..., tuple[Group, Path]],
) -> None:
    ranks, trace_dir = start_queueing(2)
    batches = [[*plain(BUSY, BUSY), *random_canvases([(size, 7), (3, size)], seed=size)] for size in (1, 2, 8)]
    together = ranks.encode_all(batches, "v41")
    for canvases, (_, rows) in zip(batches, together, strict=True):
        _, one_at_a_time = ranks.encode(canvases, "v41")
        for image, expected in zip(rows, one_at_a_time, strict=True):
            assert np.allclose(image, expected, rtol=1e-4, atol=1e-5)
    warm_up, overlapped = ["start", "finish"], ["start", "start", "finish", "start", "finish"]
    for rank in (0, 1):
        trace = [what for what, _ in read_trace(trace_dir, rank, "start", "finish")]
        assert trace[:7] == warm_up + overlapped


def test_an_idle_rank_takes_the_next_batch_while_another_is_at_the_one_before(
    start_queueing: Callable[..., tuple[Group, Path]],
) -> None:
    ranks, trace_dir = start_queueing(2)
    other, ours = random_canvases([(4, 5), (6, 6)], seed=1)
    begun_at = time.monotonic()
    (first, _), (second, rows) = ranks.encode_all([plain(SLEEPS), [other, ours]])
    assert first.rank_patches == (36, 0)
    assert second.rank_patches == (20, 36)
    rank_0_has_first = next(when for _, when in read_trace(trace_dir, 0, "encode") if when > begun_at)
    rank_1_has_both = [when for _, when in read_trace(trace_dir, 1, "encode") if when > begun_at][1]
    assert rank_1_has_both < rank_0_has_first
    _, expected = ranks.encode([other, ours])
    for image, expected_image in zip(rows, expected, strict=True):
        assert np.allclose(image, expected_image, rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_repeated_for_a_peer_s_memory_is_answered_once_and_in_its_turn(
    start_queueing: Callable[..., tuple[Group, Path]], capfd: pytest.CaptureFixture[str]
) -> None:
    ranks, _ = start_queueing(2)
    (_, before), (answer, repeated), (_, after) = ranks.encode_all(
        [plain(BUSY, BUSY), plain(BUSY, FILLS), plain(BUSY, BUSY)]
    )
    assert answer.rank_patches == (36, 36)
    _, expected = ranks.encode(plain(BUSY, FILLS))
    assert np.array_equal(repeated, expected)
    assert np.array_equal(before, after)
    assert ranks.stop() == 0
    assert "from here on" not in capfd.readouterr().err, "forwards stay as large: the batch before had held the memory"


def test_a_device_that_hangs_makes_its_rank_fall_silent(start_queueing: Callable[..., tuple[Group, Path]]) -> None:
    ranks, _ = start_queueing(2, stall_timeout_s=0.5)
    ranks.encode(plain(BUSY, LONG_BUSY))  # rank 1's device goes on, for longer than the stall time-out
    time.sleep(2.5)
    silent_s = ranks.ping().silent_s
    assert silent_s[1] > 1.0 > silent_s[0]


def test_batches_that_wait_for_room_let_no_rank_time_out(
    start_queueing: Callable[..., tuple[Group, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEP_S", "5")
    ranks, _ = start_queueing(2, collective_timeout_s=4.0)
    # For five seconds rank 0 cannot say what the others have to do next.
    answers = ranks.encode_all([plain(SLEEPS, SLEEPS), *[plain(BUSY, BUSY)] * 3])
    assert [answer.rank_patches for answer, _ in answers] == [(36, 36)] * 4
    assert ranks.stop() == 0


def test_stop_finishes_what_is_open(start_queueing: Callable[..., tuple[Group, Path]]) -> None:
    ranks, _ = start_queueing(2)
    for _ in range(2):
        ranks.send(plain(BUSY, BUSY), "rows", "float32")
    ranks.send_stop()
    (_, first), (_, second) = ranks.receive_rows(), ranks.receive_rows()
    assert np.array_equal(first, second)
    assert ranks.wait() == 0


def test_a_fault_after_the_start_ends_the_group(start_queueing: Callable[..., tuple[Group, Path]]) -> None:
    ranks, _ = start_queueing(2)
    ranks.send(plain(BUSY, BREAKS), "rows", "float32")
    assert ranks.wait() == 1
    failure = ranks.failure()
    assert failure is not None
    assert (failure.rank, failure.phase) == (1, "serve")
    assert "illegal memory access" in failure.reason


def test_no_rank_answers_for_one_that_failed(start_queueing: Callable[..., tuple[Group, Path]]) -> None:
    ranks, _ = start_queueing(2)
    (plain_image, other) = random_canvases([(6, 6), (6, 6)], seed=2)
    # Were rank 1 to go on, its rows of the third batch would be taken for its rows of the second.
    ranks.encode_all([plain(BUSY, BUSY), [plain_image, *plain(RAISES)], [plain_image, other]], num_answers=1)
    assert ranks.wait() == 1
    assert not ranks.has_more()
    failure = ranks.failure()
    assert failure is not None
    assert "could not queue" in failure.reason


def test_a_batch_that_cannot_be_encoded_does_not_cost_the_one_before_its_answer(
    start_queueing: Callable[..., tuple[Group, Path]],
) -> None:
    ranks, _ = start_queueing(1)
    ((_, rows),) = ranks.encode_all([plain(BUSY), plain(RAISES)], num_answers=1)
    assert len(rows) == 1
    assert ranks.wait() == 1
    failure = ranks.failure()
    assert failure is not None
    assert "could not queue" in failure.reason
