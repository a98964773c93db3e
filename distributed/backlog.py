"""What every rank still has to do, as rank 0 reckons it: so that a batch fills up what the one before left uneven.

A rank goes on to the next batch while others are at this one, and nobody tells rank 0 how far they are. It knows what
it gave to whom and when, when all were done with a batch, and how fast it is itself. Ranks are taken to be equally
fast.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from distributed.rate import PatchRate


class Backlog:
    """Used by the thread that gives batches out and by the one that sees them end, in the same order."""

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rate = PatchRate()
        self._free_at = [0.0] * num_ranks  # when each rank will have done all that it was given
        self._open: deque[tuple[float, Sequence[int]]] = deque()  # when each batch will have ended; its patches by rank

    def patches(self) -> tuple[int, ...]:
        """Patches that each rank has still to do, and at least 1 where it has part in a batch that has not ended."""
        now = self._clock()
        with self._lock:
            return tuple(
                max(round(self._rate.patches_in(free_at - now)), int(any(patches[rank] for _, patches in self._open)))
                for rank, free_at in enumerate(self._free_at)
            )

    def give(self, rank_patches: Sequence[int]) -> None:
        """Count a batch that is given out now, by its patches on each rank."""
        now = self._clock()
        with self._lock:
            ends_at = max(now, self._open[-1][0]) if self._open else now  # batches end in order
            for rank, patches in enumerate(rank_patches):
                if patches:
                    self._free_at[rank] = max(self._free_at[rank], now) + self._rate.seconds_for(patches)
                    ends_at = max(ends_at, self._free_at[rank])
            self._open.append((ends_at, rank_patches))

    def end(self, own_s: float) -> None:
        """The oldest batch has ended on all ranks now, and rank 0 computed for `own_s` seconds of it.

        What was expected of those behind it moves by as much as it came late or early.
        """
        now = self._clock()
        with self._lock:
            expected_at, rank_patches = self._open.popleft()
            late_s = now - expected_at
            self._free_at = [free_at + late_s for free_at in self._free_at]
            self._open = deque((ends_at + late_s, patches) for ends_at, patches in self._open)
            if rank_patches[0]:
                self._rate.observe(rank_patches[0], own_s)
