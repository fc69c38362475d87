"""What is said to a person: notes that nobody may be left to read, and curves that fit the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from minigpt.console import note, note_curves
from tests.cli_support import Screen, unstyled


def test_notes_that_nobody_reads_any_more_are_lost_and_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    note("Lost.")
    note("Lost, too.")


@pytest.mark.parametrize(
    ("columns", "no_color", "term", "is_drawn", "is_coloured"),
    [
        (80, "", "xterm", True, True),
        (80, "1", "xterm", True, False),
        (80, "", "dumb", True, False),
        (40, "", "xterm", True, True),
        (250, "", "xterm", True, True),
        (39, "", "xterm", False, False),
    ],
)
def test_the_curve_fits_the_terminal_and_its_colours(
    monkeypatch: pytest.MonkeyPatch, columns: int, no_color: str, term: str, is_drawn: bool, is_coloured: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    for name, value in (("COLUMNS", str(columns)), ("NO_COLOR", no_color), ("TERM", term)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    steps = list(range(10, 201, 10))
    curve = steps, [4 - step / 100 for step in steps]
    note_curves({"training": curve, "held-out": (steps[1::2], curve[1][1::2])}, "losses")
    assert isinstance(sys.stderr, Screen)
    shown = sys.stderr.getvalue()
    assert ("losses" in shown) is is_drawn
    assert ("\x1b" in shown) is is_coloured
    assert all(len(line) <= min(columns, 100) for line in unstyled(shown).splitlines())
    assert len(shown.splitlines()) <= 15
