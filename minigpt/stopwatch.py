"""Where time goes: seconds by phase, and how often each phase was gone through. Knows nothing of training."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any


class Stopwatch:
    """All time since the last lap belongs to the phase that the next lap names.

    Args:
        laps: what `to_json` gave, to go on from; times add up over the sessions of a run.

    Raises:
        TypeError, ValueError: that is not what it gave.
    """

    def __init__(self, laps: Mapping[str, Sequence[Any]] | None = None) -> None:
        # Phase -> laps, seconds in all.
        self._laps = {str(phase): (int(n), float(seconds)) for phase, (n, seconds) in dict(laps or {}).items()}
        self._since = time.perf_counter()

    def start(self) -> None:
        """What has passed since the last lap belongs to no phase."""
        self._since = time.perf_counter()

    def lap(self, phase: str) -> float:
        """Ends a phase; returns the seconds it took."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        n, before = self._laps.get(phase, (0, 0.0))
        self._laps[phase] = (n + 1, before + seconds)
        return seconds

    def laps(self, phase: str) -> int:
        """How often a phase was gone through."""
        return self._laps.get(phase, (0, 0.0))[0]

    def seconds(self, *phases: str) -> float:
        """Seconds in these phases, all together."""
        return sum(self._laps.get(phase, (0, 0.0))[1] for phase in phases)

    def mean(self, *phases: str) -> float:
        """Seconds of going once through these phases; one that was never gone through counts as none."""
        return sum(self.seconds(phase) / self.laps(phase) for phase in phases if self.laps(phase))

    def to_json(self) -> dict[str, list[float]]:
        """Phase -> laps, seconds."""
        return {phase: [n, seconds] for phase, (n, seconds) in self._laps.items()}
