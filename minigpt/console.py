"""What the commands share in talking to a person: notes on stderr, tables and JSON on stdout.

stdout is the product; everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from minigpt.errors import OutputError
from minigpt.history import Curve

Note = Callable[[str], None]

# Columns that curves need, and more than these they do not gain from.
CURVES_MIN_WIDTH = 40
CURVES_MAX_WIDTH = 100


def note(text: str) -> None:
    """One message to the person, on stderr, above a progress bar if there is one.

    Where nobody reads it any more (``2>&1 | head``), it and all later ones are lost: what it tells of goes on.
    """
    try:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        sys.stderr = _nowhere()


def notes(quiet: bool) -> Note:
    """`note`, or with --quiet a function that says nothing."""
    return _silent if quiet else note


def write(text: str) -> None:
    """Text of the product to stdout, at once and as it is: no wrapping, no markup.

    Raises:
        OutputError: it cannot be written (a full disk). A reader that went away is a BrokenPipeError.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer would fail once more at exit.
        sys.stdout = _nowhere()
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from None


def write_json(value: Any) -> None:
    """One JSON object to stdout."""
    write(json.dumps(value) + "\n")


def write_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table to stdout: Rich on a terminal, plain aligned columns in a pipe. All but the first column are numbers."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title) if title else None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for i, header in enumerate(headers):
            table.add_column(Text(header), justify="right" if i else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    if title:
        write(title + "\n")
    for row in (headers, *rows):
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))]  # noqa: B905
        write("  ".join(cells).rstrip() + "\n")


def note_curves(curves: dict[str, Curve], title: str) -> None:
    """Two curves drawn in characters, on a terminal's stderr; in a pipe, or where there is no room for them, nothing.

    Args:
        curves: by name; the first is drawn in small dots, the second in circles, so that they need no colour.
    """
    from rich.console import Console

    terminal = Console(stderr=True)
    if not sys.stderr.isatty() or terminal.width < CURVES_MIN_WIDTH:
        return
    from uniplot import plot_to_string

    width = min(terminal.width, CURVES_MAX_WIDTH)
    picture = plot_to_string(
        xs=[steps for steps, _ in curves.values()],
        ys=[values for _, values in curves.values()],
        x_min=0,
        lines=[True, False],
        legend_labels=list(curves),
        title=title,
        width=width,
        line_length_hard_cap=width,
        height=10,
        character_set="ascii",
        force_ascii_characters=["·", "o"],
        color=["green", "magenta"] if terminal.color_system and not terminal.no_color else False,
        x_gridlines=[],
        y_gridlines=[],
    )
    try:
        picture.encode(sys.stderr.encoding or "utf-8")
    except UnicodeEncodeError:
        # Escapes instead of its frame and dots would be no picture.
        return
    note(picture)


def bytes_bar(description: str, *, hidden: bool = False) -> Callable[[int, int | None], None]:
    """A progress callback (done, total) in bytes that draws a bar on a terminal, unless hidden."""
    bar: tqdm[Any] | None = None

    def progress(done: int, total: int | None) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                desc=description,
                disable=hidden or None,
                file=sys.stderr,
                leave=False,
            )
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return progress


@contextmanager
def steps_bar(total: int, initial: int = 0, *, hidden: bool = False) -> Iterator[tqdm[Any]]:
    """A progress bar on a terminal's stderr, gone when it is done; silent elsewhere, or if it is to be hidden."""
    with tqdm(
        total=total,
        initial=initial,
        bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}",
        # None leaves the choice to whether stderr is a terminal.
        disable=hidden or None,
        file=sys.stderr,
        leave=False,
        dynamic_ncols=True,
    ) as bar:
        yield bar


def _silent(_: str) -> None:
    pass


def _nowhere() -> TextIO:
    """A stream that takes everything and keeps nothing."""
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123
