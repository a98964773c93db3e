"""The door: who is let in, and what all who are in hold in memory.

A request is refused here, with a time to come back after, or it is owed an answer. Bytes are counted while a body
arrives and until its answer is made; what an admitted request grows to is counted too, but never refused.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.errors import ServiceError
from service.metrics import Metrics

_LONGEST_RETRY_S = 60


class Admission:
    """Counts requests and bytes for one front end.

    requests: how many are in. draining: balancers should send no more. closed: nobody is let in any more.

    Args:
        limit_decoding_requests: requests at most between the door and the queue.
        limit_held_bytes: bytes at most when another request, or more of a body, wants in.
        waiting_s: how long the queue takes to be worked off at the measured rate, seconds.
    """

    def __init__(
        self, *, limit_decoding_requests: int, limit_held_bytes: int, waiting_s: Callable[[], float], metrics: Metrics
    ) -> None:
        self._limit_decoding_requests = limit_decoding_requests
        self._limit_held_bytes = limit_held_bytes
        self._waiting_s = waiting_s
        self._metrics = metrics
        self._held_bytes = 0
        self._decoding_requests = 0
        self.requests = 0
        self.draining = False
        self.closed = False

    @contextmanager
    def enter(self) -> Iterator["Ticket"]:
        """Let a request in until it leaves the block.

        Raises:
            ServiceError: overloaded, or draining.
        """
        if self.closed:
            raise ServiceError("draining", "the service is ending", retry_after_s=1)
        if self._decoding_requests >= self._limit_decoding_requests:
            raise self.overloaded("too many requests are being read and decoded")
        ticket = Ticket(self)
        ticket.claim(0)
        self._count(requests=1, decoding=1)
        try:
            yield ticket
        finally:
            ticket.finish_decoding()
            self._count(requests=-1, held_bytes=-ticket.held_bytes)

    def overloaded(self, message: str) -> ServiceError:
        """A refusal that says when the work of now will be done."""
        retry_after_s = min(max(1, math.ceil(self._waiting_s())), _LONGEST_RETRY_S)
        return ServiceError("overloaded", message, retry_after_s=retry_after_s)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more may be held."""
        return self._held_bytes + num_bytes < self._limit_held_bytes

    def _count(self, *, requests: int = 0, decoding: int = 0, held_bytes: int = 0) -> None:
        self.requests += requests
        self._decoding_requests += decoding
        self._held_bytes += held_bytes
        self._metrics.in_progress_requests.set(self.requests)
        self._metrics.held_bytes.set(self._held_bytes)


class Ticket:
    """One request's stay. Made by `Admission.enter`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._decoding = True
        self.held_bytes = 0

    def claim(self, num_bytes: int) -> None:
        """Hold these bytes of a body.

        Raises:
            ServiceError: overloaded; the request is not in yet and may come again.
        """
        if not self._admission.has_room(num_bytes):
            raise self._admission.overloaded("the service holds as much as it may")
        self.hold(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Hold these bytes, whatever the limit says: they belong to a request that is in."""
        self.held_bytes += num_bytes
        self._admission._count(held_bytes=num_bytes)

    def finish_decoding(self) -> None:
        """All images are queued, or none will be: another request may be read."""
        if self._decoding:
            self._decoding = False
            self._admission._count(decoding=-1)
