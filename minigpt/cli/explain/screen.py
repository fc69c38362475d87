"""Standard output as explanations are laid out for it."""

from __future__ import annotations

import html
import io
import os
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

# Columns in a pipe, unless COLUMNS says otherwise.
PIPE_WIDTH = 80


class _Drawn(io.StringIO):
    """What Rich has drawn: it takes it for standard output, which `console.write` alone may write to."""

    def isatty(self) -> bool:
        return sys.stdout.isatty()


def screen() -> Console:
    """Rich's view of standard output: how wide it is, and which colours it shows; print with `print_lines`."""
    from rich.console import Console

    # Rich would take the width of a terminal that only standard input or error is.
    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    return Console(file=_Drawn(), width=PIPE_WIDTH if piped else None, markup=False, emoji=False, highlight=False)


def print_lines(console: Console, *lines: Text | str) -> None:
    """Lines to standard output, each as long as it is: nothing is wrapped, cropped or taken for markup.

    Args:
        console: of `screen`.

    Raises:
        OutputError: it cannot be written.
    """
    from minigpt.console import write

    for line in lines:
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, _Drawn)
    write(console.file.getvalue())
    console.file.seek(0)
    console.file.truncate()


def print_sentences(console: Console, *sentences: str) -> None:
    """Sentences to standard output, each wrapped to its width.

    Raises:
        OutputError: it cannot be written.
    """
    print_lines(console, *(line for sentence in sentences for line in textwrap.wrap(sentence, console.width)))


def counted(number: int, what: str) -> str:
    """A number and what it counts, in words."""
    return f"{number:,} {what if number == 1 else 'queries' if what == 'query' else what + 's'}"


def table_lines(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, between: str = "  "
) -> list[str]:
    """A table in aligned columns: the first to the left, the others, which are numbers, to the right.

    Args:
        headings: of two lines each; lines that are empty in all of them are left out.
        rows: an empty one is a gap.
        between: two columns.
    """
    from rich.cells import cell_len

    lines = [*zip(*(heading.split("\n") for heading in headings), strict=True), *rows]
    lines = [line for line in lines if not line or any(line)]
    widths = [max(cell_len(line[i]) for line in lines if line) for i in range(len(headings))]
    shown = [title]
    for line in lines:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(line, widths)]  # noqa: B905
        cells = (gap + cell if i else cell + gap for i, (cell, gap) in enumerate(zip(line, gaps, strict=True)))
        shown.append(between.join(cells).rstrip())
    return shown


def table_html(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table in a page."""
    names = (html.escape(heading.strip()).replace("\n", "<br>") for heading in headings)
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows if row)
    return f"<h2>{html.escape(title)}</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>\n"
