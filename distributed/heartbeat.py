"""Every rank's pulse, so that a stopped or stuck process is noticed while the others wait for it.

A thread in each rank counts up its own key in torchrun's key-value store; rank 0's thread reads all keys. The clock is
rank 0's alone: what counts is how long ago it last saw a key move. A thread and no collective, because a rank may
rightly spend a minute inside one forward and a rank that is waiting in a collective cannot speak for itself. A rank
that is at one batch for too long stops counting: its process lives, but nobody will hear of it again.
"""

import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist


class Heartbeat:
    """Starts counting when made, on every rank; `stop` ends it."""

    def __init__(self, rank: int, num_ranks: int, *, interval_s: float, stall_timeout_s: float) -> None:
        self._keys = [f"patchgrid/heartbeat/{peer}" for peer in range(num_ranks)]
        self._rank = rank
        self._interval_s = interval_s
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._num_open = 0
        self._working_since: float | None = None
        self._last_seen = [time.monotonic()] * num_ranks
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def begin_batch(self) -> None:
        """A batch begins, which has to end within the stall time-out after the one before it."""
        with self._lock:
            if self._num_open == 0:
                self._working_since = time.monotonic()
            self._num_open += 1

    def end_batch(self) -> None:
        """The oldest batch has ended, on this rank's device too."""
        with self._lock:
            self._num_open -= 1
            self._working_since = time.monotonic() if self._num_open else None

    def silent_s(self) -> tuple[float, ...]:
        """Rank 0: seconds since each rank's heartbeat was last seen to move."""
        now = time.monotonic()
        return tuple(now - seen for seen in self._last_seen)

    def stop(self) -> None:
        """End the thread; the store goes away with the group."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        counts = [0] * len(self._keys)
        try:
            while not self._stopping.wait(self._interval_s):
                since = self._working_since
                if since is None or time.monotonic() - since < self._stall_timeout_s:
                    store.add(self._keys[self._rank], 1)
                if self._rank == 0:
                    for peer, key in enumerate(self._keys):
                        count = store.add(key, 0)
                        if count != counts[peer]:
                            counts[peer] = count
                            self._last_seen[peer] = time.monotonic()
        except dist.DistNetworkError:
            return  # torchrun is gone, and this process goes with it; until then the silence tells
