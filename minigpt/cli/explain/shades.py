"""How numbers from 0 to 1 look in a terminal: colours that every eye tells apart, or characters without colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Colour = tuple[int, int, int]

# Five colours of the map cividis, dark to light, which looks the same to eyes without red or green (Nunez, Anderton,
# Renslow 2018, "Optimizing colormaps with consideration for color vision deficiency"; the values are matplotlib's).
_CIVIDIS: tuple[Colour, ...] = ((0, 34, 78), (65, 77, 107), (125, 124, 120), (188, 175, 111), (254, 232, 56))
# The nearest to that map among the 256 colours of a terminal, each lighter than the one before, by number. Rich would
# choose each by itself, and would take several neighbours for one grey.
_OF_256: tuple[tuple[int, Colour], ...] = (
    (17, (0, 0, 95)),
    (24, (0, 95, 135)),
    (60, (95, 95, 135)),
    (102, (135, 135, 135)),
    (144, (175, 175, 135)),
    (185, (215, 215, 95)),
    (227, (255, 255, 95)),
)
# By number, since what goes by the names black and white is another grey in every theme.
_INKS = {"black": "color(16)", "white": "color(231)"}
# From nothing to all, for terminals and pipes without colours.
_BLOCKS = " .:-=+*#%@"


def colour(value: float) -> Colour:
    """The colour of a number from 0 to 1, for a background on any terminal: letters on it bring their own colour."""
    place = min(max(value, 0.0), 1.0) * (len(_CIVIDIS) - 1)
    left = min(int(place), len(_CIVIDIS) - 2)
    share = place - left
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_CIVIDIS[left], _CIVIDIS[left + 1], strict=True))
    return red, green, blue


def ink_on(background: Colour) -> str:
    """Black or white, whichever is read better on a colour."""
    # Weights of the eye for red, green and blue (ITU-R BT.601).
    light = sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), background, strict=True))
    # A grey so light has the same contrast to both.
    return "black" if light > 118 else "white"


def name(value: float, console: Console | None = None) -> str:
    """What Rich calls the colour of a number from 0 to 1, on a terminal with as many colours as that one."""
    number, _ = _nearest(value)
    red, green, blue = colour(value)
    return f"color({number})" if _has_256(console) else f"rgb({red},{green},{blue})"


def style(value: float, console: Console | None = None) -> str:
    """What Rich calls the colours of a cell with that number; None is a terminal with all colours."""
    background = _nearest(value)[1] if _has_256(console) else colour(value)
    return f"{_INKS[ink_on(background)]} on {name(value, console)}"


def _nearest(value: float) -> tuple[int, Colour]:
    return _OF_256[min(int(min(max(value, 0.0), 1.0) * len(_OF_256)), len(_OF_256) - 1)]


def _has_256(console: Console | None) -> bool:
    return console is not None and console.color_system == "256"


def symbol(value: float) -> str:
    """A character that is the darker, the larger the number."""
    return _BLOCKS[min(int(min(max(value, 0.0), 1.0) * len(_BLOCKS)), len(_BLOCKS) - 1)]


def has_colours(console: Console) -> bool:
    """Whether that terminal shows enough colours, and the person wants them (NO_COLOR)."""
    # Of sixteen colours no two neighbours of the map would differ.
    return console.is_terminal and console.color_system in ("256", "truecolor") and not console.no_color
