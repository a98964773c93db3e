import re

from service.errors import ERRORS
from service.metrics import Metrics


def exposition(metrics: Metrics) -> str:
    text, media_type = metrics.render()
    assert media_type.startswith("text/plain")
    return text.decode()


def test_every_name_has_the_prefix() -> None:
    names = re.findall(r"^# TYPE (\S+)", exposition(Metrics()), re.MULTILINE)
    assert len(names) > 12
    assert all(name.startswith("patchgrid_") for name in names)
    assert not any(name.endswith("_created") for name in names)


def test_every_outcome_is_there_from_the_start() -> None:
    text = exposition(Metrics())
    for outcome in ("ok", "disconnected", *ERRORS):
        assert f'patchgrid_requests_total{{outcome="{outcome}"}} 0.0' in text


def test_a_stage_is_timed_however_it_ends() -> None:
    metrics = Metrics()
    with metrics.time_stage("decode"):
        pass
    try:
        with metrics.time_stage("decode"):
            raise KeyError
    except KeyError:
        pass
    assert 'patchgrid_stage_seconds_count{stage="decode"} 2.0' in exposition(metrics)


def test_loads_are_counted_by_rank_with_their_imbalance() -> None:
    metrics = Metrics()
    metrics.observe_loads((300, 100))
    metrics.observe_loads((100, 100))
    text = exposition(metrics)
    assert 'patchgrid_rank_patches_total{rank="0"} 400.0' in text
    assert 'patchgrid_rank_patches_total{rank="1"} 200.0' in text
    assert "patchgrid_imbalance_ratio_sum 2.5" in text


def test_a_batch_without_patches_has_no_imbalance() -> None:
    metrics = Metrics()
    metrics.observe_loads((0, 0))
    assert "patchgrid_imbalance_ratio_count 0.0" in exposition(metrics)


def test_two_front_ends_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.images_total.inc()
    assert "patchgrid_images_total 1.0" in exposition(first)
    assert "patchgrid_images_total 0.0" in exposition(second)


def test_the_process_is_watched_too() -> None:
    assert "patchgrid_process_resident_memory_bytes" in exposition(Metrics())
