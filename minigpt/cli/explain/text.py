"""``minigpt explain text``: each character of a text, coloured by how surprising it was to the model."""

from __future__ import annotations

import html
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.explain.signs import legend, sign
from minigpt.cli.options import CheckpointOption, EncodingOption, JsonOption
from minigpt.cli.save import Page, SaveOption, check_save, is_page, save
from minigpt.cli.texts import known_part, read_given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.text import Text

    from minigpt.checkpoint import Checkpoint
    from minigpt.explain.surprise import Line, Summary, Tally

# Bits from which on a colour is the brightest: one in 256.
MOST_BITS = 8
# With --top, so many characters of a line have their runners-up listed, of those with so many bits: one in eight.
LISTED = 3
LISTED_FROM = 3.0
# Kinds of characters are few; of characters the costliest are shown.
CHARS = 8
# Longer texts make pages that browsers are slow with.
MOST_ON_PAGE = 20_000
# Runners-up in a page, unless --top says otherwise.
TOP_ON_PAGE = 3
# Points of the curve over a text; of longer ones a point is the mean of several lines.
MOST_POINTS = 150
PICTURE_SIZE = (11.0, 4.0)
# Tables in a narrower terminal have less between their columns.
ROOMY = 60


def text(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The text; '-' is standard input.", show_default=False)],
    top: Annotated[
        int, typer.Option("--top", min=0, help="Likeliest characters to list where a line surprised most; 0 is none.")
    ] = 0,
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", help="Drop characters that the model has never seen.")
    ] = False,
    encoding: EncodingOption = "utf-8",
    checkpoint: CheckpointOption = None,
    json: JsonOption = False,
    save_as: SaveOption = None,
) -> None:
    """See how surprising each character of a text is to a model, and so what it has not learnt.

    The surprise is -log2 of the probability that the model gave the character, in bits, after all that came before it:
    0 is certainty, and 1 a coin. Beside each line is its mean; at the end, where the bits are. The first character has
    nothing before it and is not counted.
    """
    check_save(save_as)

    from minigpt import console
    from minigpt.cli.explain.given import given_model
    from minigpt.cli.explain.screen import screen
    from minigpt.errors import PromptError
    from minigpt.explain.surprise import Summary, Tally, lines

    content = read_given(file, encoding, "text")
    loaded = given_model(checkpoint)
    n_given = len(content)
    hence = "; lines and columns are counted without them"
    content = known_part(content, loaded.tokenizer, skip_unknown, console.note, "text", hence)
    if len(content) < 2:
        raise PromptError(
            f"the model knows {len(content)} of the text's characters, and at least 2 are needed, since the first one"
            " is not predicted: give a longer text"
        )
    page = is_page(save_as)
    # Who points at a character of the page wants to see what was likelier.
    kept_top = top or (TOP_ON_PAGE if page else 0)
    summary = Summary()
    kept: list[dict[str, Any]] = []
    tallies: list[Tally] = []
    on_screen = None if json else _Screen(screen(), content, top)
    with console.steps_bar(len(content), hidden=not json) as bar:
        for line in lines(loaded.model, loaded.tokenizer, content, max(kept_top, 1)):
            summary.add(line)
            if on_screen:
                on_screen.show_line(line)
            # A long text is not kept in full where nobody asks for it.
            if json or page:
                kept.append(_line_data(line, kept_top))
            if save_as is not None:
                tallies.append(Tally(line.characters, line.total))
            bar.update(len(line.text))
    data = _data(file, loaded, n_given - len(content), summary, kept)
    if on_screen:
        on_screen.show_summary(file, summary)
    else:
        console.write_json(data)
    name = "standard input" if file == "-" else os.path.basename(file)  # noqa: PTH119  (of any name, and a URL)
    save(
        save_as,
        f"What surprised the model: {name}",
        _cut(data, MOST_ON_PAGE),
        lambda figure: _draw(figure, summary, tallies),
        lambda: _page(data, summary),
        size=PICTURE_SIZE,
    )


# As JSON


def _line_data(line: Line, top: int) -> dict[str, Any]:
    data = {
        "line": line.number,
        "text": line.text,
        "bits": [None if math.isnan(bits) else bits for bits in line.bits.tolist()],
        "total": line.total,
        "bits_per_char": line.bits_per_char,
    }
    return data | ({"likeliest": [line.runners_up(i, top) for i in range(len(line.text))]} if top else {})


def _data(
    file: str, loaded: Checkpoint, n_dropped: int, summary: Summary, lines: list[dict[str, Any]]
) -> dict[str, Any]:
    def tallied(tally: Tally) -> dict[str, Any]:
        return {"characters": tally.characters, "bits": tally.bits, "bits_per_char": tally.bits_per_char}

    return {
        "file": file,
        "checkpoint": str(loaded.path),
        "dropped": n_dropped,
        **tallied(summary.whole),
        "lines": lines,
        "kinds": [{"kind": kind} | tallied(tally) for kind, tally in summary.kinds.items()],
        "chars": [{"char": char} | tallied(tally) for char, tally in summary.costliest_chars],
        "costliest_lines": [
            {"line": each.line, "bits_per_char": each.bits_per_char, "start": each.start}
            for each in summary.costliest_lines
        ],
        "places": [
            {
                "line": place.line,
                "column": place.column,
                "char": place.char,
                "bits": place.bits,
                "before": place.before,
                "likeliest": place.runners_up,
            }
            for place in summary.places
        ],
    }


def _cut(data: dict[str, Any], most: int) -> dict[str, Any]:
    """The data with so many characters at most in its lines, of which it says how many there are in all."""
    lines: list[dict[str, Any]] = []
    for line in data["lines"]:
        if most <= 0:
            break
        parts = {name: line[name][:most] for name in ("text", "bits", "likeliest") if name in line}
        lines.append(line | parts)
        most -= len(parts["text"])
    return data | {"lines": lines, "lines_in_all": len(data["lines"])}


# On a screen


def percent(probability: float) -> str:
    """A probability in words of equal exactness: "40.2%", "0.31%", "<0.01%"."""
    if probability < 0.0001:
        return "<0.01%"
    return f"{probability:.2%}" if probability < 0.01 else f"{probability:.1%}"


class _Screen:
    """A text as it scrolls by, a line of it in as many rows as it needs."""

    def __init__(self, console: Console, content: str, top: int) -> None:
        from minigpt.cli.explain.shades import has_colours

        self._console = console
        self._top = top
        self._colours = has_colours(console)
        self._number_width = max(len(str(content.count("\n") + 1)), 4)
        # After the number and the mean of a line.
        self._gutter = self._number_width + 8
        self._columns = max(console.width - self._gutter, 8)
        self._encoding = sys.stdout.encoding or "utf-8"
        self._show_legend(content)

    def _show_legend(self, content: str) -> None:
        from rich.text import Text

        from minigpt.cli.explain.screen import print_lines, print_sentences
        from minigpt.cli.explain.shades import style

        signs = legend(content, self._encoding, spaces=False)
        told = f" {signs}." if signs else ""
        if self._colours:
            colours = Text("bits ")
            for bits in range(MOST_BITS + 1):
                colours.append(f" {bits}{'+' if bits == MOST_BITS else ''} ", style(bits / MOST_BITS, self._console))
            print_lines(self._console, colours)
            print_sentences(self._console, f"Beside each line, its bits a character.{told}")
        else:
            print_sentences(
                self._console,
                "Under each character are its whole bits, nothing for less than 1, and 9 for all from 9 on; beside"
                f" each line, its bits a character.{told}",
            )
        print_lines(self._console, "", f"{'line':>{self._number_width}}  bits")

    def _sign(self, char: str) -> str:
        """What stands for a character in a text, where a space is one."""
        return sign(char, self._encoding, spaces=False)

    def _name(self, char: str) -> str:
        """What stands for a character in a list."""
        return sign(char, self._encoding)

    def show_line(self, line: Line) -> None:
        from minigpt.cli.explain.screen import print_lines

        mean = line.bits_per_char
        gutter = f"{line.number:>{self._number_width}} {'-' if mean is None else f'{mean:.2f}':>5}  "
        for start, stop in self._rows(line.text):
            print_lines(self._console, *self._row(gutter, line, start, stop))
            gutter = " " * self._gutter
        if self._top:
            print_lines(self._console, *self._runners_up(line))

    def _rows(self, content: str) -> Iterator[tuple[int, int]]:
        """Where the rows of a line begin and end."""
        from rich.cells import cell_len

        start = width = 0
        for i, char in enumerate(content):
            cells = cell_len(self._sign(char))
            if width + cells > self._columns:
                yield start, i
                start, width = i, 0
            width += cells
        yield start, len(content)

    def _row(self, gutter: str, line: Line, start: int, stop: int) -> list[Text]:
        """Characters on their colours, or with their bits under them."""
        from rich.cells import cell_len
        from rich.text import Text

        from minigpt.cli.explain.shades import style

        row, marks = Text(gutter), " " * self._gutter
        for char, bits in zip(line.text[start:stop], line.bits[start:stop].tolist(), strict=True):
            shown = self._sign(char)
            known = not math.isnan(bits)
            # In steps of half a bit, so that neighbours can share a colour.
            row.append(shown, style(_step(bits) / (2 * MOST_BITS), self._console) if self._colours and known else "")
            marks += (str(min(int(bits), 9)) if known and bits >= 1 else "").ljust(cell_len(shown))
        marks = marks.rstrip()
        return [row] if self._colours or not marks else [row, Text(marks)]

    def _runners_up(self, line: Line) -> list[Text]:
        """What the model held likeliest where the line surprised it most."""
        from rich.text import Text

        bits = line.bits.tolist()
        places = [i for i in range(len(bits)) if bits[i] >= LISTED_FROM]
        places = sorted(sorted(places, key=lambda i: -bits[i])[:LISTED])
        return [
            Text(f"{' ' * self._gutter}{part}", "dim" if self._colours else "")
            for i in places
            for part in self._wrapped(
                f"{i + 1}: {self._name(line.text[i])} {bits[i]:.1f} bits, {percent(2 ** -bits[i])};",
                [f"{self._name(char)} {percent(share)}" for char, share in line.runners_up(i, self._top)],
            )
        ]

    def _wrapped(self, head: str, items: list[str]) -> list[str]:
        """A head and what belongs to it, in as many rows as that takes; signs of characters stay with their numbers."""
        from rich.cells import cell_len

        rows = [head]
        for item in items:
            if cell_len(rows[-1]) + 2 + cell_len(item) > self._columns:
                rows.append(f"  {item}")
            else:
                rows[-1] += f"  {item}"
        return rows

    def show_summary(self, file: str, summary: Summary) -> None:
        from minigpt.cli.explain.screen import print_lines, print_sentences, table_lines

        between = "  " if self._console.width >= ROOMY else " "
        print_lines(self._console, "")
        print_sentences(self._console, *_totals(file, summary))
        print_lines(self._console, "", *table_lines(*_kinds(summary), between=between))
        print_lines(self._console, "", *table_lines(*_chars(summary, self._name), between=between))
        if summary.costliest_lines:
            print_lines(self._console, "", *self._costliest_lines(summary))
        print_lines(self._console, "", *self._places(summary))

    def _costliest_lines(self, summary: Summary) -> list[str]:
        rows = []
        for each in summary.costliest_lines:
            head = f"{each.line:>{self._number_width}} {each.bits_per_char:5.2f}  "
            rows.append(head + self._start(each.start, self._columns))
        return ["Lines that cost the most a character", f"{'line':>{self._number_width}}  bits", *rows]

    def _places(self, summary: Summary) -> list[str]:
        """A table of which only the context gives way to the width."""
        from rich.cells import cell_len

        cells = [
            (
                f"{place.line}:{place.column}",
                f"{place.bits:.2f}",
                place.before,
                self._name(place.char),
                "  ".join(f"{self._name(char)} {percent(share)}" for char, share in place.runners_up[:1]),
            )
            for place in summary.places
        ]
        at_width = max(len("line:col"), *(len(row[0]) for row in cells))
        expected_width = max(len("expected"), *(cell_len(row[4]) for row in cells))
        room = self._console.width - at_width - expected_width - len("  bits  after  came  ") + len("after")
        context = max(len("after"), min(24, room))
        rows = []
        for at, bits, before, char, expected in cells:
            before = self._end(before, context)
            gap = " " * (context - cell_len(before))
            rows.append(f"{at:>{at_width}} {bits:>5}  {gap}{before}  {char}{' ' * (4 - cell_len(char))}  {expected}")
        heading = f"{'line:col':>{at_width}}  bits  {'after':>{context}}  came  expected"
        return ["Characters that surprised most", heading, *rows]

    def _start(self, content: str, cells: int) -> str:
        """As much of the start of a text as fits, with dots where it goes on."""
        from rich.cells import cell_len

        signs = [self._sign(char) for char in content]
        if sum(map(cell_len, signs)) <= cells:
            return "".join(signs)
        while sum(map(cell_len, signs)) > cells - 3:
            signs.pop()
        return "".join(signs) + "..."

    def _end(self, content: str, cells: int) -> str:
        """As much of the end of a text as fits."""
        from rich.cells import cell_len

        signs = [self._sign(char) for char in content]
        while sum(map(cell_len, signs)) > cells:
            signs.pop(0)
        return "".join(signs)


def _step(bits: float) -> int:
    """The half bits of a colour, up to the brightest."""
    return min(round(2 * bits), 2 * MOST_BITS)


# In tables

_Table = tuple[str, "Sequence[str]", list[list[str]]]


def _totals(file: str, summary: Summary) -> list[str]:
    mean = summary.whole.bits_per_char or 0.0
    return [
        f"{'standard input' if file == '-' else file}: {mean:.4f} bits a character ({mean * math.log(2):.4f} nats),"
        f" {summary.whole.bits:,.0f} bits over {summary.whole.characters:,} characters. The first character has nothing"
        " before it and is not counted."
    ]


def _tally_cells(tally: Tally, whole: Tally) -> list[str]:
    mean = tally.bits_per_char
    share = tally.bits / whole.bits if whole.bits else 0.0
    return [f"{tally.characters:,}", "-" if mean is None else f"{mean:.2f}", f"{share:.1%}"]


def _kinds(summary: Summary) -> _Table:
    return (
        "Bits by kind",
        ("\nkind", "\ntimes", "bits\neach", "of all\nbits"),
        [[kind, *_tally_cells(tally, summary.whole)] for kind, tally in summary.kinds.items() if tally.characters],
    )


def _chars(summary: Summary, name: Callable[[str], str]) -> _Table:
    costliest = summary.costliest_chars
    return (
        f"Bits by character ({min(CHARS, len(costliest))} of {len(costliest)})",
        ("\nchar", "\ntimes", "bits\neach", "of all\nbits"),
        [[name(char), *_tally_cells(tally, summary.whole)] for char, tally in costliest[:CHARS]],
    )


# In pictures


def _draw(figure: Figure, summary: Summary, tallies: list[Tally]) -> None:
    """Bits a character along the text, and what kinds of characters they went to."""
    from minigpt.explain.surprise import binned
    from minigpt.plot import COLOURS

    by_line, by_kind = figure.subplots(1, 2, width_ratios=(2, 1))
    size, means = binned(tallies, MOST_POINTS)
    xs = [1 + size * i for i in range(len(means))]
    # A line of one character, the first, has no mean.
    ys = [math.nan if mean is None else mean for mean in means]
    by_line.plot(
        xs,
        ys,
        color=COLOURS[0],
        linewidth=1.2,
        marker="o" if len(xs) <= 40 else "",
        markersize=4,
        label="a line" if size == 1 else f"{size} lines together",
        gid="by-line",
    )
    mean = summary.whole.bits_per_char or 0.0
    by_line.axhline(
        mean, color=COLOURS[1], linestyle="--", linewidth=1.5, label=f"the whole text: {mean:.2f}", gid="mean"
    )
    by_line.set_xlabel("line of the text")
    by_line.set_ylabel("bits a character")
    by_line.set_ylim(bottom=0)
    by_line.xaxis.set_major_formatter("{x:,.0f}")
    by_line.xaxis.get_major_locator().set_params(integer=True)
    by_line.legend(loc="best")

    kinds = [(kind, tally) for kind, tally in reversed(summary.kinds.items()) if tally.characters]
    bars = by_kind.barh(
        [kind for kind, _ in kinds],
        [100 * tally.bits / summary.whole.bits if summary.whole.bits else 0.0 for _, tally in kinds],
        color=COLOURS[0],
    )
    by_kind.bar_label(bars, [f"{tally.bits_per_char:.2f} bits each" for _, tally in kinds], padding=3)
    by_kind.set_xlabel("% of all bits")
    # Room for the longest bar's words.
    by_kind.set_xlim(0, 1.5 * max(bar.get_width() for bar in bars))
    by_kind.grid(axis="y", visible=False)


# In a page

_STYLE = """
.legend span, .text span { font-family: ui-monospace, monospace; }
.legend span { padding: 0.1rem 0.5rem; }
.text { font: 15px/1.7 ui-monospace, monospace; overflow-x: auto; }
.text div { display: grid; grid-template-columns: 8.5rem 1fr; }
.text div > b { font-weight: normal; opacity: 0.75; white-space: pre; }
.text div > p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
td:last-child.words, .words { text-align: left; white-space: pre-wrap; }
"""


def _page(data: dict[str, Any], summary: Summary) -> Page:
    from minigpt.cli.explain.screen import table_html
    from minigpt.cli.explain.shades import colour, ink_on

    shades = [colour(step / (2 * MOST_BITS)) for step in range(2 * MOST_BITS + 1)]
    style = _STYLE + "".join(
        f".b{step} {{ background: rgb{shade}; color: {ink_on(shade)}; }}\n" for step, shade in enumerate(shades)
    )
    legend = "".join(
        f'<span class="b{2 * bits}">{bits}{"+" if bits == MOST_BITS else ""}</span>' for bits in range(MOST_BITS + 1)
    )
    cut = _cut(data, MOST_ON_PAGE)
    shown = sum(len(line["text"]) for line in cut["lines"])
    there_are = sum(len(line["text"]) for line in data["lines"])
    some = f" Here are the first {shown:,} of {there_are:,} characters." if shown < there_are else ""
    return Page(
        "".join(f"<p>{html.escape(sentence)}</p>\n" for sentence in _totals(data["file"], summary))
        + f'<p class="legend">Bits: {legend}</p>\n'
        f"<p>Point at a character to see its bits and what was likelier.{some}</p>\n"
        f'<div class="text">\n<div><b>line   bits</b><p></p></div>\n{_lines_html(cut["lines"])}</div>\n'
        + table_html(*_kinds(summary))
        + table_html(*_chars(summary, sign))
        + _places_html(summary),
        style=style,
    )


def _visible(char: str) -> str:
    """A character as a page shows it in a text, where a space is one."""
    return sign(char, spaces=False)


def _lines_html(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        mean = "-" if line["bits_per_char"] is None else f"{line['bits_per_char']:.2f}"
        likeliest = line.get("likeliest") or [[]] * len(line["text"])
        chars = "".join(map(_char_html, line["text"], line["bits"], likeliest))
        rows.append(f"<div><b>{line['line']:>4}  {mean:>5}</b><p>{chars}</p></div>\n")
    return "".join(rows)


def _char_html(char: str, bits: float | None, likeliest: list[tuple[str, float]]) -> str:
    shown = html.escape(_visible(char))
    if bits is None:
        return f'<span title="the first character is not predicted">{shown}</span>'
    told = f"{sign(char)}  {bits:.2f} bits, {percent(2**-bits)}"
    if likeliest:
        told += "; likeliest " + "  ".join(f"{sign(other)} {percent(share)}" for other, share in likeliest)
    return f'<span class="b{_step(bits)}" title="{html.escape(told)}">{shown}</span>'


def _places_html(summary: Summary) -> str:
    rows = "".join(
        f"<tr><td>{place.line:,}:{place.column:,}</td><td>{place.bits:.2f}</td>"
        f"<td><code>{html.escape(''.join(map(_visible, place.before)))}</code></td>"
        f'<td><code class="b{_step(place.bits)}">{html.escape(sign(place.char))}</code></td>'
        f'<td class="words">'
        f"{'  '.join(f'<code>{html.escape(sign(c))}</code> {percent(p)}' for c, p in place.runners_up)}</td></tr>\n"
        for place in summary.places
    )
    return (
        "<h2>Characters that surprised most</h2>\n<table>\n<tr><th>line:col</th><th>bits</th><th>after</th>"
        f'<th>came</th><th class="words">likeliest</th></tr>\n{rows}</table>\n'
    )
