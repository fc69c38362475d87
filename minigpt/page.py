"""Self-contained web pages: one file, no outside address, and all that it shows as JSON in it."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from minigpt.atomic import replacing
from minigpt.errors import ReportError

# Light and dark as the reader's system is; the colours of `plot.COLOURS` keep their contrast on both.
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #222222; --faint: #dddddd; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e8e8; --faint: #3a3d44; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
figure { margin: 1rem 0; background: #ffffff; }
figure svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; }
td, th { padding: 0.15rem 0.6rem; text-align: right; }
code, pre { font-family: ui-monospace, monospace; }
"""


def write_page(path: Path, title: str, body: str, data: Any, *, style: str = "", script: str = "") -> None:
    """Writes a page in one step.

    Args:
        title: text, shown as the heading too.
        body: HTML below the heading.
        data: what JSON can hold; the page's script finds it in the element ``data``.
        style, script: CSS and JavaScript of this page.

    Raises:
        ReportError: it cannot be written; what was there before is intact.
    """
    # No text in it can end the element that holds it.
    embedded = json.dumps(data).replace("<", "\\u003c")
    name = html.escape(title)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{name}</title>\n'
        f"<style>{_STYLE}{style}</style>\n</head>\n<body>\n<h1>{name}</h1>\n{body}\n"
        f'<script type="application/json" id="data">{embedded}</script>\n'
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )
    try:
        with replacing(path) as file:
            file.write(page.encode("utf-8", "replace"))
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from None
