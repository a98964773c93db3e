"""The stages that /metrics tells of: how long images, batches and answers spent in each.

Invariant: a stage is counted once for what goes through it together, so sums are of stages, not of images.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

_SUM = re.compile(r'^patchgrid_stage_seconds_sum\{stage="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds in each stage, since the server began or between two readings."""

    seconds: Mapping[str, float]

    @classmethod
    def of(cls, url: str) -> "Stages":
        """As the server tells now."""
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        return cls({stage: float(value) for stage, value in _SUM.findall(text)})

    def since(self, before: "Stages") -> "Stages":
        """What came on top."""
        return Stages({stage: value - before.seconds[stage] for stage, value in self.seconds.items()})

    def ms(self, *stages: str) -> float:
        """Milliseconds in these stages together."""
        return 1e3 * sum(self.seconds[stage] for stage in stages)
