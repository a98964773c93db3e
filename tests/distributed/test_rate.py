"""How fast the last batches were."""

import pytest

from distributed.rate import PatchRate


def test_nothing_is_known_before_the_first_batch() -> None:
    assert PatchRate().seconds_for(1000) == PatchRate().patches_in(1.0) == 0.0


def test_it_follows_the_latest_batches() -> None:
    rate = PatchRate()
    for _ in range(20):
        rate.observe(1000, 1.0)
    assert rate.seconds_for(500) == pytest.approx(0.5)
    for _ in range(20):
        rate.observe(1000, 4.0)
    assert rate.patches_in(2.0) == pytest.approx(500, rel=0.01)


def test_batches_that_end_together_are_not_taken_for_fast_ones() -> None:
    rate = PatchRate()
    for _ in range(10):
        rate.observe(1000, 0.995)
        rate.observe(1000, 0.005)
    assert rate.seconds_for(2000) == pytest.approx(1.0, rel=0.25)
