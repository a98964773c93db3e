"""Images that took the worker group down, remembered for a while so that they cannot do it again.

Known by a digest of their pixels, so that neither another file name nor another layout brings them back.
"""

import time
from collections import OrderedDict

_MOST_IMAGES = 10_000


class Quarantine:
    """A bounded set of digests, each for `duration_s` seconds from when it was last added."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, digest: str) -> None:
        """Take an image in; the oldest leaves if there are too many."""
        self._until.pop(digest, None)
        self._until[digest] = time.monotonic() + self._duration_s
        if len(self._until) > _MOST_IMAGES:
            self._until.popitem(last=False)

    def __contains__(self, digest: str) -> bool:
        until = self._until.get(digest)
        if until is not None and until < time.monotonic():
            del self._until[digest]
            return False
        return until is not None
