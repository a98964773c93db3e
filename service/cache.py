"""Rows that are known already, and rows that are being computed: nobody computes the same twice at once.

Invariant: a key is an id made from content, never from what a client says; only rows that were good are kept, and their
bytes are bounded, the least recently used leaving first. A computation lives as long as anybody waits for it, whoever
came first; an error goes to all who wait and is forgotten.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from encoder.geometry import Plan
from service.batcher import ImageRows
from service.metrics import Metrics

_MOST_FILES = 65_536


@dataclass(frozen=True, slots=True)
class KnownFile:
    """What an encoded image turned out to be when it was decoded: the id of its rows, and its plan."""

    image_id: str
    plan: Plan


@dataclass(slots=True, eq=False)
class _Flight:
    task: "asyncio.Task[ImageRows]"
    waiters: int = 0


class RowCache:
    """The rows of one front end. With a limit of 0 bytes it keeps nothing, and still joins simultaneous requests."""

    def __init__(self, limit_bytes: int, metrics: Metrics) -> None:
        self._limit_bytes = limit_bytes
        self._metrics = metrics
        self._rows: OrderedDict[str, ImageRows] = OrderedDict()
        self._bytes = 0
        self._files: OrderedDict[str, KnownFile] = OrderedDict()
        self._flights: dict[str, _Flight] = {}

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._limit_bytes > 0

    def recall(self, file_id: str) -> tuple[KnownFile, ImageRows] | None:
        """What is known of an encoded image, if its rows are still here: it need not even be decoded."""
        known = self._files.get(file_id)
        rows = self._find(known.image_id) if known is not None else None
        if known is None or rows is None:
            return None
        self._files.move_to_end(file_id)
        self._metrics.cache_lookups_total.labels("known_file").inc()
        return known, rows

    def remember(self, file_id: str, known: KnownFile) -> None:
        """What an encoded image turned out to be."""
        if self.keeps:
            self._files[file_id] = known
            if len(self._files) > _MOST_FILES:
                self._files.popitem(last=False)

    async def rows(
        self, image_id: str, compute: Callable[[], Coroutine[Any, Any, ImageRows]]
    ) -> tuple[ImageRows, bool]:
        """Rows by their id, from here or from whoever is computing them, or computed now.

        Returns the rows, and whether they were here. What `compute` raises is raised here, for all who wait.
        """
        if (rows := self._find(image_id)) is not None:
            self._metrics.cache_lookups_total.labels("known_image").inc()
            return rows, True
        flight = self._flights.get(image_id)
        self._metrics.cache_lookups_total.labels("computed" if flight is None else "joined").inc()
        if flight is None:
            flight = _Flight(asyncio.create_task(self._fly(image_id, compute)))
            self._flights[image_id] = flight
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task), False
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                flight.task.cancel()  # nobody wants it any more; no effect on one that is done
                if self._flights.get(image_id) is flight:
                    del self._flights[image_id]

    async def _fly(self, image_id: str, compute: Callable[[], Coroutine[Any, Any, ImageRows]]) -> ImageRows:
        rows = await compute()
        self._keep(image_id, rows)
        return rows

    def _find(self, image_id: str) -> ImageRows | None:
        if image_id not in self._rows:
            return None
        self._rows.move_to_end(image_id)
        return self._rows[image_id]

    def _keep(self, image_id: str, rows: ImageRows) -> None:
        if rows.data.nbytes > self._limit_bytes or image_id in self._rows:
            return
        self._rows[image_id] = rows
        self._bytes += rows.data.nbytes
        while self._bytes > self._limit_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= oldest.data.nbytes
            self._metrics.cache_evictions_total.inc()
        self._metrics.cache_bytes.set(self._bytes)
        self._metrics.cache_images.set(len(self._rows))
