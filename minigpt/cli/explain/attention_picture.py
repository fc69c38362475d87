"""Pictures of ``minigpt explain attention``: heat maps side by side, and the weights of one position as bars."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minigpt.cli.explain import shades
from minigpt.cli.explain.signs import Signs
from minigpt.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from minigpt.explain.attention import Attention, Step, Toy

# Inches: one of several heat maps, one alone, and the room around them: for characters at the left of each, a title
# above each, names of the axes, and the scale.
SMALL, TOY, LARGE = 1.8, 2.4, 4.5
LEFT, TITLE, NAME, SCALE = 0.25, 0.55, 0.35, 1.0
# More characters than these on an axis would run into each other: then positions are numbered.
MOST_SIGNS = {SMALL: 24, LARGE: 64}
MOST_BARS = 64


def size_of_weights(seen: Attention) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    return _size(*_grid(seen))


def size_of_toy(toy: Toy) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    return _size(1, toy.x.shape[0] + 1, TOY)


def size_of_step(taken: Step) -> tuple[float, float]:
    """Width and height of the picture, in inches."""
    return min(12.0, 4.0 + 0.16 * int(taken.readable.sum())), 5.0


def draw_weights(figure: Figure, text: str, seen: Attention) -> None:
    """A heat map a head, layer by layer, the uniform average at the left of the first."""
    rows, columns, side = _grid(seen)
    signs = _signs(text) if len(text) <= MOST_SIGNS[side] else None
    places = [(0, 0), *((row, column) for row in range(rows) for column in range(1, columns))]
    for (row, column), head in zip(places, [seen.uniform, *seen.heads], strict=True):
        place = _place(figure, rows, columns, side, row, column)
        name = f"layer {head.layer}, head {head.head}" if head.layer else "uniform average"
        title = f"{name}\n{float(head.entropy.mean()):.2f} bits"
        image = _heat_map(place, head.weights, seen.mask, title, signs, "small" if side == SMALL else "medium")
    _scale(figure, image)


def draw_step(figure: Figure, text: str, seen: Attention, taken: Step) -> None:
    """Scaled scores and weights of one position, a bar for each key that it may read, with the uniform average."""
    readable = taken.readable.nonzero()[:, 0].tolist()
    signs = [_signs(text)[j] for j in readable]
    above, below = figure.subplots(2, 1, sharex=True)
    places = range(len(readable))
    above.bar(places, taken.stages.scaled[readable].tolist(), color=COLOURS[0], gid="scores")
    above.set_ylabel(f"score / sqrt({seen.head_dim})")
    above.set_title(f"layer {taken.layer}, head {taken.head}: what position {taken.position} reads", fontsize="medium")
    below.bar(places, taken.stages.weights[readable].tolist(), color=COLOURS[0], gid="weights")
    uniform = float(seen.uniform.weights[taken.position, readable[0]])
    below.axhline(uniform, color=COLOURS[1], linestyle="--", label=f"uniform average: {uniform:.4f}", gid="uniform")
    below.set_ylabel("weight after the softmax")
    below.legend(loc="best")
    below.set_xlabel("keys")
    _label(below.set_xticks, signs if len(signs) <= MOST_BARS else None, len(signs), readable[0])
    for axes in (above, below):
        axes.grid(visible=False, axis="x")


def draw_toy(figure: Figure, toy: Toy) -> None:
    """The weights of each text of the chapter's example, and the uniform average."""
    B, T, _ = toy.x.shape
    squares = [("uniform average", toy.uniform), *((f"text {b + 1}", toy.stages.weights[b]) for b in range(B))]
    for column, (title, weights) in enumerate(squares):
        place = _place(figure, 1, B + 1, TOY, 0, column)
        image = _heat_map(place, weights, toy.mask, title, [str(i) for i in range(T)], "medium")
        for i, j in toy.mask.nonzero().tolist():
            ink = shades.ink_on(shades.colour(math.sqrt(weights[i, j])))
            place.text(j, i, f"{float(weights[i, j]):.4f}", ha="center", va="center", color=ink, fontsize="small")
    _scale(figure, image)


def _grid(seen: Attention) -> tuple[int, int, float]:
    """Rows, columns and inches a side of the heat maps: a row a layer, and a column for the uniform average."""
    layers = len({head.layer for head in seen.heads})
    heads = len(seen.heads) // layers
    return layers, heads + 1, LARGE if len(seen.heads) == 1 else SMALL


def _heat_map(axes: Axes, weights: Tensor, mask: Tensor, title: str, signs: Sequence[str] | None, size: str) -> Any:
    from matplotlib.colors import PowerNorm

    axes.grid(visible=False)
    # Small weights are seen by their root, as in the terminal; what may not be read stays blank.
    image = axes.imshow(
        weights.masked_fill(~mask, math.nan).numpy(), cmap="cividis", norm=PowerNorm(0.5, 0, 1), interpolation="none"
    )
    axes.set_title(title, fontsize=size)
    letters = "x-small" if size == "small" else "small"
    axes.tick_params(length=0, labelsize=letters)
    if signs is None:
        for set_ticks in (axes.set_xticks, axes.set_yticks):
            _label(set_ticks, None, weights.shape[0], 0)
        return image
    axes.set_xticks([])
    axes.set_yticks([])
    # Letters by themselves: ticks take matplotlib seconds where there are many maps.
    for i, sign in enumerate(signs):
        for x, y, across, up in ((i, len(signs) - 0.35, "center", "top"), (-0.7, i, "right", "center_baseline")):
            # What stands between dollars is no formula here.
            axes.text(x, y, sign, ha=across, va=up, fontsize=letters, parse_math=False)
    return image


def _label(set_ticks: Any, signs: Sequence[str] | None, count: int, first: int) -> None:
    """Characters on an axis, or where there are too many of them some of their positions."""
    if signs is not None:
        # What stands between dollars is no formula here.
        set_ticks(range(count), signs, parse_math=False)
        return
    step = max(1, 10 ** (len(str(count)) - 1) // 2)
    places = [i for i in range(count) if (first + i) % step == 0]
    set_ticks(places, [str(first + i) for i in places])


def _size(rows: int, columns: int, side: float) -> tuple[float, float]:
    return NAME + columns * (side + LEFT) + SCALE, rows * (side + LEFT + TITLE) + NAME


def _place(figure: Figure, rows: int, columns: int, side: float, row: int, column: int) -> Axes:
    """The square for one heat map. Matplotlib would find places too, but takes seconds where there are many."""
    figure.set_layout_engine("none")
    width, height = _size(rows, columns, side)
    left = NAME + column * (side + LEFT) + LEFT
    bottom = NAME + (rows - 1 - row) * (side + LEFT + TITLE) + LEFT
    return figure.add_axes((left / width, bottom / height, side / width, side / height))


def _scale(figure: Figure, image: Any) -> None:
    """Names of both axes, and the colours with the weights that they stand for."""
    width, height = figure.get_size_inches()
    middle = (width - SCALE) / 2 / width
    figure.supxlabel("characters that are read (keys)", fontsize="medium", x=middle, y=0.1 / height)
    figure.supylabel("characters that read (queries)", fontsize="medium", x=0.1 / width)
    long = min(height - TITLE - NAME - LEFT, LARGE)
    place = figure.add_axes(
        ((width - SCALE + 0.25) / width, (height - TITLE - long) / height, 0.15 / width, long / height)
    )
    bar = figure.colorbar(image, cax=place, label="weight", ticks=[0, 0.04, 0.16, 0.36, 0.64, 1])
    bar.outline.set_visible(False)


def _signs(text: str) -> list[str]:
    # Fonts lack some characters of the world; an empty frame stands for those.
    warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
    signs = Signs(text, "utf-8")
    return [signs.of(char).strip() for char in text]
