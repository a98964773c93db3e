"""Balance and cut: every image once, the Graham bound, and rows found where they were put."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from distributed.balance import balance, cut_apart, rank_loads

patch_counts = st.lists(st.integers(1, 9189), max_size=60)


@given(patch_counts, st.integers(1, 16))
def test_every_image_is_on_exactly_one_rank(counts: list[int], num_ranks: int) -> None:
    shares = balance(counts, [0] * num_ranks)
    assert len(shares) == num_ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(counts)))


@given(patch_counts, st.integers(1, 16))
def test_the_largest_load_is_at_most_the_mean_plus_the_largest_image(counts: list[int], num_ranks: int) -> None:
    loads = rank_loads(balance(counts, [0] * num_ranks), counts)
    assert max(loads) <= sum(counts) / num_ranks + max(counts, default=0)


def smallest_possible_load(counts: Sequence[int], num_ranks: int) -> int:
    placements = itertools.product(range(num_ranks), repeat=len(counts))
    return min(
        max(sum(count for count, rank in zip(counts, placement, strict=True) if rank == r) for r in range(num_ranks))
        for placement in placements
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 3))
def test_the_largest_load_is_within_grahams_bound_of_the_best(counts: list[int], num_ranks: int) -> None:
    largest = max(rank_loads(balance(counts, [0] * num_ranks), counts))
    assert largest <= smallest_possible_load(counts, num_ranks) * (4 / 3 - 1 / (3 * num_ranks)) + 1e-9


def test_fewer_images_than_ranks_leave_the_later_ranks_empty() -> None:
    assert balance([5], [0] * 4) == ((0,), (), (), ())


def test_equal_images_go_round_the_ranks_in_order() -> None:
    assert balance([7] * 5, [0] * 2) == ((0, 2, 4), (1, 3))


@given(st.lists(st.tuples(st.integers(1, 9189), st.integers(1, 1024)), max_size=40), st.integers(1, 8))
def test_cut_apart_finds_every_row_of_every_image_again(images: list[tuple[int, int]], num_ranks: int) -> None:
    shares = balance([patches for patches, _ in images], [0] * num_ranks)
    num_rows = [rows for _, rows in images]
    gathered = [[(index, row) for index in share for row in range(num_rows[index])] for share in shares]
    spans = cut_apart(shares, num_rows)
    for index, span in enumerate(spans):
        assert gathered[span.rank][span.start : span.stop] == [(index, row) for row in range(num_rows[index])]
    assert sum(span.stop - span.start for span in spans) == sum(len(rows) for rows in gathered)
