"""The front end's view of the group's heartbeat: pings to rank 0, and what its pongs say of every rank."""

import asyncio
import itertools
import time

from distributed.link import FrontLink
from distributed.messages import Ping, Pong

_PINGS_PER_TIMEOUT = 4


class Pulse:
    """One group's heartbeat, which may pause for `timeout_s` seconds."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.begin()

    def begin(self) -> None:
        """A new life of the group has just spoken."""
        self.hear(Pong(nonce=0, silent_s=()))

    def hear(self, pong: Pong) -> None:
        """Take in an answer."""
        self._pong, self._heard_at = pong, time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the most silent rank was last known to be alive."""
        return time.monotonic() - self._heard_at + max(self._pong.silent_s, default=0.0)

    @property
    def is_lost(self) -> bool:
        """Whether some rank has been silent for too long."""
        return self.age_s > self._timeout_s

    async def watch(self, link: FrontLink) -> str:
        """Ping until the group is found silent twice in a row, or gone; returns which.

        Once is not enough: it is also what a front end finds that was paused itself and has just woken up.
        """
        times_silent = 0
        for nonce in itertools.count(1):
            if not await link.send(Ping(nonce)):
                return "rank 0 is gone"
            await asyncio.sleep(self._timeout_s / _PINGS_PER_TIMEOUT)
            times_silent = times_silent + 1 if self.is_lost else 0
            if times_silent == 2:
                break
        return f"no heartbeat for {self.age_s:.1f} s"
