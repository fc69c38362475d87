"""``--save FILE``: what a command shows, as a picture (.svg, .png) or a page (.html), by the end of the name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".svg", ".png", ".html")

SaveOption = Annotated[
    str | None,
    typer.Option("--save", help="Also write it to a file: a picture (.svg, .png) or a page by itself (.html)."),
]


@dataclass(frozen=True)
class Page:
    """What makes up a page; see `page.write_page`."""

    body: str
    style: str = ""
    script: str = ""


def check_save(name: str | None, *, draws_pages: bool = False) -> None:
    """Refuses a name that `save` could not take, before anything is computed.

    Args:
        draws_pages: whether there is a picture in the page, too.

    Raises:
        ReportError: the name ends otherwise, is that of a folder, too long, or in none that can be written to.
        MissingPackageError: there is a picture to draw, and matplotlib is not installed.
    """
    from minigpt.errors import MissingPackageError, ReportError

    if name is None:
        return
    path = Path(name)
    if path.suffix.lower() not in KINDS:
        raise ReportError(
            f"{name!r} is no name for what --save writes: end it in {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        )
    try:
        if not path.parent.is_dir():
            raise ReportError(f"cannot write {name!r}: there is no folder {str(path.parent)!r}")
        # Of a name that is too long this fails.
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ReportError(f"cannot write {name!r}: {error.strerror or error}") from None
    if path.is_dir():
        raise ReportError(f"cannot write {name!r}: it is a folder")
    if not os.access(path.parent, os.W_OK):
        raise ReportError(f"cannot write {name!r}: the folder {str(path.parent)!r} cannot be written to")
    if draws_pages or not is_page(name):
        import importlib.util

        if importlib.util.find_spec("matplotlib") is None:
            raise MissingPackageError("pictures need matplotlib, which is not installed: pip install 'minigpt[plot]'")


def is_page(name: str | None) -> bool:
    """Whether that is a name for a page."""
    return name is not None and Path(name).suffix.lower() == ".html"


def save(
    name: str | None,
    title: str,
    data: Any,
    draw: Callable[[Figure], None],
    page: Callable[[], Page] | None = None,
    *,
    size: tuple[float, float] = (7.0, 4.0),
) -> None:
    """Writes the file, if one is asked for, and says so.

    Args:
        title: the page's.
        data: what --json prints, kept in the page.
        draw: draws the picture.
        page: makes what a page shows; None shows the picture.
        size: of the picture, width and height in inches.

    Raises:
        ReportError, MissingPackageError: as `check_save`, or it cannot be written; what was there before is intact.
    """
    if name is None:
        return
    from minigpt import console, plot
    from minigpt.page import write_page

    path = Path(name)
    if is_page(name):
        made = page() if page else Page(f"<figure>{plot.svg(draw, *size)}</figure>")
        write_page(path, title, made.body, data, style=made.style, script=made.script)
    else:
        with plot.new_figure(*size) as figure:
            draw(figure)
            plot.save_figure(figure, path)
    console.note(f"written to {path}")
