"""What every rank still has to do, as rank 0 reckons it: so that a batch fills up what the one before left uneven.

A rank goes on to the next batch while others are at this one. Nobody tells rank 0 how far they are; it knows what it
gave them, when, when all were done with a batch, and how fast it is itself. Ranks are taken to be equally fast.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

_MEMORY = 0.7


class Backlog:
    """Used by the thread that gives batches out and by the one that sees them end, in the same order."""

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = [0.0] * num_ranks  # when each rank will have done all that it was given
        self._open: deque[tuple[float, Sequence[int]]] = deque()  # when each batch will be done; its patches by rank
        self._patches = 0.0
        self._seconds = 0.0

    def patches(self) -> tuple[int, ...]:
        """Patches that each rank has still to do, and at least 1 where it has part in a batch that has not ended."""
        now = self._clock()
        with self._lock:
            rate = self._patches / self._seconds if self._seconds else 0.0
            return tuple(
                max(round((free_at - now) * rate), int(any(patches[rank] for _, patches in self._open)))
                for rank, free_at in enumerate(self._free_at)
            )

    def give(self, rank_patches: Sequence[int]) -> None:
        """Count a batch that is given out now, by its patches on each rank."""
        now = self._clock()
        with self._lock:
            s_per_patch = self._seconds / self._patches if self._patches else 0.0
            ends_at = now
            for rank, patches in enumerate(rank_patches):
                if patches:
                    self._free_at[rank] = max(self._free_at[rank], now) + patches * s_per_patch
                    ends_at = max(ends_at, self._free_at[rank])
            self._open.append((ends_at, rank_patches))

    def end(self, own_s: float) -> None:
        """All ranks are done with the oldest batch now, for which rank 0 computed `own_s` seconds.

        What was expected of those behind it moves by as much as it came late or early.
        """
        now = self._clock()
        with self._lock:
            expected_at, rank_patches = self._open.popleft()
            late_s = now - expected_at
            self._free_at = [free_at + late_s for free_at in self._free_at]
            self._open = deque((ends_at + late_s, patches) for ends_at, patches in self._open)
            if rank_patches[0]:
                self._patches = _MEMORY * self._patches + rank_patches[0]
                self._seconds = _MEMORY * self._seconds + own_s
