"""How fast the last batches were encoded."""

_MEMORY = 0.7


class PatchRate:
    """Patches per second: those of the last batches over the time that they took, the latest counting most.

    Not a mean of rates: of two batches that end together, one seems to have taken no time.
    """

    def __init__(self) -> None:
        self._patches = 0.0
        self._seconds = 0.0

    def observe(self, num_patches: int, seconds: float) -> None:
        """Count a batch."""
        self._patches = _MEMORY * self._patches + num_patches
        self._seconds = _MEMORY * self._seconds + seconds

    def seconds_for(self, num_patches: int) -> float:
        """How long so many patches take; 0 as long as nothing was observed."""
        return num_patches * self._seconds / self._patches if self._patches else 0.0

    def patches_in(self, seconds: float) -> float:
        """How many patches are encoded in that time; 0 as long as nothing was observed."""
        return seconds * self._patches / self._seconds if self._seconds else 0.0
