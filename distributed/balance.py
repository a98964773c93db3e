"""Which image goes to which rank: whole images, by patch count, the largest first to the least loaded rank.

Pure functions of patch counts, so every rank computes the same answer from the same batch header. With nothing to do,
longest-processing-time-first keeps the largest load within 4/3 - 1/(3 ranks) of the best one (Graham, 1969).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Shares = tuple[tuple[int, ...], ...]


def balance(num_patches: Sequence[int], backlog: Sequence[int]) -> Shares:
    """Assign every image to one rank.

    Args:
        num_patches: patches of each image, in the order of the batch.
        backlog: patches that each rank has still to do, for all ranks there are.

    Returns:
        For each rank the indexes of its images, ascending. Ties go to the earlier image and the lower rank.
    """
    shares: list[list[int]] = [[] for _ in backlog]
    loads = [(load, rank) for rank, load in enumerate(backlog)]
    heapq.heapify(loads)
    for index in sorted(range(len(num_patches)), key=lambda i: -num_patches[i]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + num_patches[index], rank))
    return tuple(tuple(sorted(share)) for share in shares)


def rank_loads(shares: Shares, weights: Sequence[int]) -> tuple[int, ...]:
    """What each rank carries: the sum of its images' weights (patches or rows)."""
    return tuple(sum(weights[index] for index in share) for share in shares)


@dataclass(frozen=True, slots=True)
class Span:
    """Where one image's rows lie in a gathered buffer: rank, first row and one past the last."""

    rank: int
    start: int
    stop: int


def cut_apart(shares: Shares, num_rows: Sequence[int]) -> list[Span]:
    """Find every image's rows after an all-gather.

    Args:
        shares: the images of each rank, as `balance` gave them.
        num_rows: rows of each image, in the order of the batch.

    Returns:
        One span per image, in the order of the batch.
    """
    spans: list[Span | None] = [None] * len(num_rows)
    for rank, share in enumerate(shares):
        start = 0
        for index in share:
            spans[index] = Span(rank, start, start + num_rows[index])
            start += num_rows[index]
    placed = [span for span in spans if span is not None]
    assert len(placed) == len(num_rows), "every image is on exactly one rank"
    return placed
