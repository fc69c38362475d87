"""Shades: a larger number is lighter to every eye, with many colours, few or none, and letters on it are legible."""

from __future__ import annotations

import io

import pytest
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.style import Style

from minigpt.cli.explain import shades

STEPS = [i / 100 for i in range(101)]


def lightness(colour: tuple[int, int, int]) -> float:
    """As the eye weighs red, green and blue (ITU-R BT.601)."""
    return sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), colour, strict=True))


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """As WCAG 2.2 defines it, from 1 to 21."""

    def luminance(colour: tuple[int, int, int]) -> float:
        parts = [part / 255 for part in colour]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def console(colours: str | None, **options: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=colours, **options)  # type: ignore[arg-type]


def triplet(name: str) -> tuple[int, int, int]:
    red, green, blue = Color.parse(name).get_truecolor()
    return red, green, blue


def test_colours_are_those_of_the_map_and_grow_lighter_without_a_step_back() -> None:
    assert shades.colour(0) == (0, 34, 78)
    assert shades.colour(0.5) == (125, 124, 120)
    assert shades.colour(1) == (254, 232, 56)
    lights = [lightness(shades.colour(step)) for step in STEPS]
    assert lights == sorted(lights)
    assert len({shades.colour(step) for step in STEPS}) == len(STEPS)


def test_colours_are_those_of_matplotlib() -> None:
    colormaps = pytest.importorskip("matplotlib", reason="has the map").colormaps
    for place in (0.0, 0.25, 0.5, 0.75, 1.0):
        theirs = [255 * part for part in colormaps["cividis"](place)[:3]]
        assert shades.colour(place) == pytest.approx(theirs, abs=3)


def test_numbers_outside_are_taken_to_the_ends() -> None:
    for take in (shades.colour, shades.symbol, shades.style):
        assert take(-0.5) == take(0)
        assert take(1.5) == take(1)


@pytest.mark.parametrize("colours", ["256", "truecolor"])
def test_a_terminal_gets_colours_that_it_has_and_each_is_lighter(colours: str) -> None:
    terminal = console(colours)
    names = list(dict.fromkeys(shades.name(step, terminal) for step in STEPS))
    lights = [lightness(triplet(name)) for name in names]
    assert lights == sorted(set(lights))
    assert len(names) >= 7
    system = ColorSystem.EIGHT_BIT if colours == "256" else ColorSystem.TRUECOLOR
    for name in names:
        # Nothing is left for Rich to choose.
        assert Color.parse(name).downgrade(system) == Color.parse(name)


@pytest.mark.parametrize("colours", ["256", "truecolor"])
def test_letters_on_every_shade_are_legible(colours: str) -> None:
    for step in STEPS:
        style = Style.parse(shades.style(step, console(colours)))
        assert style.color is not None
        assert style.bgcolor is not None
        ink = {"color(16)": (0, 0, 0), "color(231)": (255, 255, 255)}[style.color.name]
        red, green, blue = style.bgcolor.get_truecolor()
        assert contrast(ink, (red, green, blue)) >= 4.5


def test_symbols_grow_darker_from_nothing_to_all() -> None:
    assert shades.symbol(0) == " "
    assert shades.symbol(1) == "@"
    assert "".join(shades.symbol(i / 10 + 0.05) for i in range(10)) == " .:-=+*#%@"


def test_colours_are_for_terminals_that_have_enough_and_for_people_who_want_them() -> None:
    assert shades.has_colours(console("256"))
    assert shades.has_colours(console("truecolor"))
    assert not shades.has_colours(console("standard"))
    assert not shades.has_colours(console(None))
    assert not shades.has_colours(console("truecolor", no_color=True))
    assert not shades.has_colours(Console(file=io.StringIO()))
