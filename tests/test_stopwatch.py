"""Laps add up by phase, and go on from where another session left them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from minigpt.stopwatch import Stopwatch


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the clock."""

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(time, "perf_counter", lambda: seconds)

    set_clock(100.0)
    return set_clock


def test_time_belongs_to_the_phase_that_it_ends_with(at: Any) -> None:
    stopwatch = Stopwatch()
    at(102.0)
    assert stopwatch.lap("forward") == 2.0
    at(107.0)
    assert stopwatch.lap("backward") == 5.0
    at(111.0)
    assert stopwatch.lap("forward") == 4.0
    assert (stopwatch.laps("forward"), stopwatch.laps("backward"), stopwatch.laps("saving")) == (2, 1, 0)
    assert stopwatch.seconds("forward", "backward", "saving") == 11.0
    # Once through both, and through one that never was.
    assert stopwatch.mean("forward", "backward", "saving") == 3.0 + 5.0


def test_time_before_a_start_belongs_to_nobody(at: Any) -> None:
    stopwatch = Stopwatch()
    at(150.0)
    stopwatch.start()
    at(151.0)
    assert stopwatch.lap("forward") == 1.0


def test_laps_survive_a_trip_through_json(at: Any) -> None:
    stopwatch = Stopwatch()
    at(102.5)
    stopwatch.lap("forward")
    again = Stopwatch(json.loads(json.dumps(stopwatch.to_json())))
    at(103.0)
    again.lap("forward")
    assert (again.laps("forward"), again.seconds("forward")) == (2, 3.0)


@pytest.mark.parametrize("laps", [3, "x", {"forward": 3}, {"forward": [1]}, {"forward": ["x", 1.0]}, [["forward"]]])
def test_what_are_no_laps_is_refused(laps: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Stopwatch(laps)
