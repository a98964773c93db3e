"""What the front end counts, for Prometheus: names begin with patchgrid_ and end in their unit.

Invariant: one registry for each front end, and no label value comes from a client.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from service.errors import ERRORS

Stage = Literal["decode", "queue", "link", "encode", "gather", "reply"]

_NAMESPACE = "patchgrid"
_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PATCHES_BUCKETS = tuple(float(2**exponent) for exponent in range(8, 21))
_RATIO_BUCKETS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0, 4.0, 8.0)


class Metrics:
    """The service's counters, gauges and histograms, each under the name that Prometheus sees less its prefix."""

    def __init__(self) -> None:
        # A *_created series for each counter has no unit and no reader.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace=_NAMESPACE, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace=_NAMESPACE, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, namespace=_NAMESPACE, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, text, labels, namespace=_NAMESPACE, registry=registry, buckets=buckets)

        self.requests_total = counter("requests_total", "Requests by outcome: ok, or the code of the error.", "outcome")
        self.images_total = counter("images_total", "Images answered with rows.")
        self.patches_total = counter("patches_total", "Patches of the images answered with rows.")
        self.rows_total = counter("rows_total", "Rows answered.")
        self.queue_images = gauge("queue_images", "Images that wait for the group.")
        self.queue_patches = gauge("queue_patches", "Patches that wait for the group.")
        self.images_dropped_total = counter(
            "images_dropped_total", "Images whose request was gone before their rows came, by where they were.", "where"
        )
        self.images_not_finite_total = counter("images_not_finite_total", "Images whose rows were not finite.")
        self.images_quarantined_total = counter("images_quarantined_total", "Images found to crash the ranks.")
        self.in_progress_requests = gauge("in_progress_requests", "Requests that were let in and are not answered.")
        self.held_bytes = gauge("held_bytes", "Bytes of bodies, canvases and rows held for requests.")
        self.cache_lookups_total = counter("cache_lookups_total", "Images by how their rows were come by.", "result")
        self.cache_evictions_total = counter("cache_evictions_total", "Images whose rows made room for others.")
        self.cache_bytes = gauge("cache_bytes", "Bytes of rows that are kept.")
        self.cache_images = gauge("cache_images", "Images whose rows are kept.")
        self.batch_size_patches = histogram("batch_size_patches", "Patches in a batch.", _PATCHES_BUCKETS)
        stage_seconds = histogram("stage_seconds", "Time in each stage.", _SECONDS_BUCKETS, "stage")
        self.rank_patches_total = counter("rank_patches_total", "Patches encoded by each rank.", "rank")
        self.imbalance_ratio = histogram("imbalance_ratio", "Largest load of a batch / mean load.", _RATIO_BUCKETS)
        self.restarts_total = counter("restarts_total", "Times the group was started again.")
        self.ready = gauge("ready", "1 while the service takes work, else 0.")

        # A series that is there from the start, at 0, is one that a rate or an alert can be built on.
        for outcome in ("ok", "disconnected", *ERRORS):
            self.requests_total.labels(outcome)
        for result in ("known_file", "known_image", "joined", "computed"):
            self.cache_lookups_total.labels(result)
        for where in ("queue", "flight"):
            self.images_dropped_total.labels(where)
        self._stages = {stage: stage_seconds.labels(stage) for stage in get_args(Stage)}

    @contextmanager
    def time_stage(self, stage: Stage) -> Iterator[None]:
        """Observe how long the block takes, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observe_stage(stage, time.perf_counter() - start)

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        """Observe how long a stage took."""
        self._stages[stage].observe(seconds)

    def observe_loads(self, rank_patches: Sequence[int]) -> None:
        """Count one batch's patches on each rank (index = rank) and how unevenly they fell."""
        for rank, patches in enumerate(rank_patches):
            self.rank_patches_total.labels(str(rank)).inc(patches)
        if total := sum(rank_patches):
            self.imbalance_ratio.observe(max(rank_patches) * len(rank_patches) / total)

    def render(self) -> tuple[bytes, str]:
        """The exposition text, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
