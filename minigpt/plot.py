"""Pictures in files: the house style, saving, and the loss curve of a run.

matplotlib is an extra: without it everything here is one error, and nothing else needs it. pyplot, which keeps
figures and picks a window system for the whole process, is not used.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.atomic import replacing
from minigpt.errors import MissingPackageError, ReportError
from minigpt.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for every eye, less those too pale for a white page; blue and orange first, which differ most.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
INK = "#333333"
FAINT = "#DDDDDD"

# Kinds of file, by the end of the name: what they would say of the time and the version, left out, so that equal
# pictures are equal files.
_METADATA: dict[str, dict[str, str | None]] = {".svg": {"Date": None, "Creator": "minigpt"}, ".png": {"Software": None}}

_STYLE = {
    # A page of its own: a transparent one has dark letters on a dark screen.
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    # Letters stay letters, to be found and read aloud, and names of parts are made from this and not drawn at random.
    "svg.fonttype": "none",
    "svg.hashsalt": "minigpt",
}


@contextmanager
def new_figure(width: float = 7.0, height: float = 4.0) -> Iterator[Figure]:
    """A figure in the house style, whatever the user's own style is; draw and save it before the block ends.

    Args:
        width, height: in inches.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    # It tells, on stderr, of a cache of fonts that it makes when it is imported first.
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        try:
            from matplotlib import style
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingPackageError(
                "pictures need matplotlib, which is not installed: pip install 'minigpt[plot]'"
            ) from None
        with style.context(["default", _STYLE]):
            yield Figure(figsize=(width, height))
    finally:
        logger.setLevel(level)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure in one step, as SVG or PNG by the end of the name. The same figure gives the same bytes.

    Raises:
        ReportError: the name ends otherwise, or the file cannot be written; what was there before is intact.
    """
    kind = path.suffix.lower()
    if kind not in _METADATA:
        raise ReportError(f"{path} is no name for a picture: end it in .svg or .png")
    try:
        with replacing(path) as file:
            figure.savefig(file, format=kind[1:], metadata=_METADATA[kind])
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from None


def svg(draw: Callable[[Figure], None], width: float, height: float) -> str:
    """A picture as an ``<svg>`` element, to stand in a page; arguments as of `new_figure`."""
    drawn = io.StringIO()
    with new_figure(width, height) as figure:
        draw(figure)
        figure.savefig(drawn, format="svg", metadata=_METADATA[".svg"])
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def plot_losses(history: History, path: Path) -> None:
    """Draws the losses of a run over its steps into a file, see `save_figure`.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ReportError: nothing was evaluated yet, or the file cannot be written.
    """
    with new_figure() as figure:
        draw_losses(figure.add_subplot(), history)
        save_figure(figure, path)


def draw_losses(axes: Axes, history: History) -> None:
    """Training and held-out loss over steps, with the best step marked.

    Raises:
        ReportError: nothing was evaluated yet.
    """
    from matplotlib.ticker import MaxNLocator

    best = history.best
    if best is None:
        raise ReportError("there is no loss curve before the first evaluation")
    axes.plot(*history.training, color=COLOURS[0], linewidth=1.2, label="training", gid="training")
    # Told apart by more than colour; no dots where they would run into each other.
    steps, losses = history.held_out
    marker = "o" if len(steps) <= 40 else ""
    axes.plot(
        steps, losses, color=COLOURS[1], linewidth=1.8, marker=marker, markersize=4, label="held-out", gid="held-out"
    )
    axes.plot(
        best.step,
        best.val_loss,
        color=COLOURS[1],
        linestyle="none",
        marker="o",
        markersize=10,
        markerfacecolor="none",
        markeredgewidth=1.5,
        label=f"best: {best.val_loss:.4f} at step {best.step:,}",
        gid="best",
    )
    axes.set_xlabel("steps")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.set_xlim(left=0)
    axes.set_ylabel("loss, nats a character")
    # Losses fall, so this corner is the empty one.
    axes.legend(loc="upper right")
