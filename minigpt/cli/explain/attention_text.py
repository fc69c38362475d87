"""What ``minigpt explain attention`` shows in a terminal: heat maps in characters, numbers, and one position apart."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from minigpt import console
from minigpt.cli.explain import shades
from minigpt.cli.explain.screen import screen
from minigpt.cli.explain.signs import Signs

if TYPE_CHECKING:
    from torch import Tensor

    from minigpt.explain.attention import Attention, Head, Step, Toy

# Columns between two heat maps, and the fewest that the title of a small one needs.
GAP = 2
SMALLEST = 16
# Columns below which tables leave out what the others tell too.
NARROW = 60
# Keys that --step lists, and of those that may not be read.
LISTED = 24
LISTED_MASKED = 4
# Weights at the ends of the shades that the legend shows.
MARKS = (0.0, 0.04, 0.16, 0.36, 0.64, 1.0)

Lines = list[Text]


def show_weights(text: str, seen: Attention, numbers: bool) -> None:
    """Shows the heads asked for: one large beside the uniform average, several small, or their numbers."""
    shown = _Screen(text)
    if numbers:
        shown.numbers(seen)
    elif len(seen.heads) == 1:
        shown.one_head(seen)
    else:
        shown.many_heads(seen)
    shown.flush()


def show_step(text: str, seen: Attention, taken: Step) -> None:
    """Shows what one position computes on the way to its output."""
    shown = _Screen(text)
    shown.step(seen, taken)
    shown.flush()


def show_toy(seed: int, toy: Toy) -> None:
    """Shows the chapter's example, line by line."""
    shown = _Screen("")
    shown.toy(seed, toy)
    shown.flush()


class _Screen:
    """Lines for the terminal that standard output is, or for a pipe, until they are written at once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._console = screen()
        self._encoding = sys.stdout.encoding or "utf-8"
        self._width = self._console.width
        self._colours = shades.has_colours(self._console)
        self._signs = Signs(text, self._encoding)
        self._console.begin_capture()

    def flush(self) -> None:
        """Writes all lines."""
        written = self._console.end_capture()
        if not self._console.is_terminal:
            written = "".join(f"{line.rstrip()}\n" for line in written.splitlines())
        console.write(written)

    @property
    def _narrow(self) -> bool:
        return self._width < NARROW

    # Lines

    def _say(self, sentence: str = "") -> None:
        """Words, wrapped where they are too long."""
        self._console.print(Text(sentence))

    def _draw(self, line: Text) -> None:
        """A line that was made to fit."""
        if not self._colours:
            line.rstrip()
        self._console.print(line, no_wrap=True, overflow="crop", crop=True)

    def _beside(self, blocks: Sequence[Lines], widths: Sequence[int]) -> None:
        """Draws blocks of lines side by side."""
        for i in range(max(map(len, blocks))):
            line = Text()
            for block, width in zip(blocks, widths, strict=True):
                part = block[i].copy() if i < len(block) else Text()
                part.pad_right(max(width + GAP - part.cell_len, 0))
                line.append_text(part)
            self._draw(line)

    # Heat maps

    def _style(self, weight: float) -> str:
        """The colours of a cell. The root makes small weights seen."""
        return shades.style(math.sqrt(weight), self._console)

    def _colour(self, weight: float) -> str:
        return shades.name(math.sqrt(weight), self._console)

    def _cell(self, weight: float, readable: float, width: int) -> Text:
        """A weight of a heat map; where nothing may be read nothing is drawn."""
        if not readable:
            return Text(" " * width)
        if self._colours:
            return Text(" " * width, self._style(weight))
        return Text(_symbol(weight).ljust(width))

    def _pair(self, above: float | None, below: float | None) -> Text:
        """Two weights, one above the other in the halves of one character; None may not be read."""
        if above is None and below is None:
            return Text(" ")
        if above is None or below is None:
            return Text("▀", self._colour(above)) if above is not None else Text("▄", self._colour(below or 0.0))
        return Text("▀", f"{self._colour(above)} on {self._colour(below)}")

    def _axis(self, chars: str, width: int) -> Text:
        return Text("".join(self._signs.of(char) + " " * (width - self._signs.width) for char in chars))

    def _map(self, head: Head, seen: Attention, n: int, width: int, labels: Sequence[str]) -> Lines:
        """The last n rows and columns of a head, under its characters."""
        weights, mask = _last(head.weights, n), _last(seen.mask, n)
        lines = [Text(" " * cell_len(labels[0])) + self._axis(self._text[-n:], width)]
        for label, row, readable in zip(labels, weights, mask, strict=True):
            line = Text(label)
            for weight, may in zip(row, readable, strict=True):
                line.append_text(self._cell(weight, may, width))
            lines.append(line)
        return lines

    def _small_map(self, head: Head, seen: Attention, n: int) -> Lines:
        """The same in half as many lines: two rows in one, where the terminal can."""
        chars = [self._signs.of(char) for char in self._text[-n:]]
        if not self._halves:
            return self._map(head, seen, n, self._signs.width, [f"{char} " for char in chars])
        rows: list[list[float | None]] = [
            [weight if may else None for weight, may in zip(row, readable, strict=True)]
            for row, readable in zip(_last(head.weights, n), _last(seen.mask, n), strict=True)
        ]
        if n % 2:
            rows.append([None] * n)
            chars.append(" ")
        lines = [Text("  ") + self._axis(self._text[-n:], 1)]
        for i in range(0, len(rows), 2):
            line = Text(chars[i] + chars[i + 1])
            for above, below in zip(rows[i], rows[i + 1], strict=True):
                line.append_text(self._pair(above, below))
            lines.append(line)
        return lines

    @property
    def _halves(self) -> bool:
        """Whether two rows go into one line: the halves need two colours, and characters of one column."""
        try:
            "▀▄".encode(self._encoding)
        except UnicodeEncodeError:
            return False
        return self._colours and self._signs.width == 1

    def many_heads(self, seen: Attention) -> None:
        """Small heat maps of all heads asked for, layer by layer."""
        T = len(self._text)
        layers: dict[int, list[Head]] = {}
        for head in seen.heads:
            layers.setdefault(head.layer, []).append(head)
        heads = max(map(len, layers.values()))
        across = min(heads, max(1, (self._width + GAP) // (SMALLEST + GAP)))
        # As even as can be: six heads stand three and three, not four and two.
        across = math.ceil(heads / math.ceil(heads / across))
        room = (self._width + GAP) // across - GAP
        n = min(T, max(1, room // self._signs.width - 2))
        width = max(SMALLEST, (n + 2) * self._signs.width)
        # Several layers in a line where there is room for them.
        abreast = max(1, (self._width + GAP) // ((width + GAP) * heads)) if across == heads else 1

        self._say(f"What each head reads in {self._quoted(n)}")
        self._say()
        self._legend_beside(seen, n, width)
        groups = list(layers.values())
        for i in range(0, len(groups), abreast):
            line = [head for group in groups[i : i + abreast] for head in group]
            for j in range(0, len(line), across * abreast):
                shown = line[j : j + across * abreast]
                self._say()
                blocks = []
                for head in shown:
                    title = f"L{head.layer} H{head.head} {float(head.entropy.mean()):.2f} bits"
                    blocks.append([Text(title, "bold"), *self._small_map(head, seen, n)])
                self._beside(blocks, [width] * len(shown))
        self._say()
        if len(groups) == 1:
            self._summaries(seen)
        else:
            by_departure = sorted(seen.heads, key=lambda head: float(seen.departure(head).mean()))
            for word, head in (("Closest to", by_departure[0]), ("Furthest from", by_departure[-1])):
                self._say(
                    f"{word} the uniform average: layer {head.layer}, head {head.head}, by"
                    f" {float(seen.departure(head).mean()):.2f} bits."
                )
        self._say("One head large: --layer, --head. Weights: --numbers. One position: --step.")

    def _legend_beside(self, seen: Attention, n: int, width: int) -> None:
        """The uniform average, with what the pictures mean on its right, or below where that is too narrow."""
        block = [Text("uniform average", "bold"), *self._small_map(seen.uniform, seen, n)]
        sentences = [
            f"A row is a character that reads, a column one that is read{self._window(seen)}. The uniform average"
            " reads them all alike.",
            f"L: layer, H: head. Bits: mean entropy of all rows, from 0 (reads one character) to"
            f" {float(seen.uniform.entropy.mean()):.2f} (the uniform average).",
        ]
        room = self._width - width - GAP
        if room < 36:
            self._beside([block], [width])
            self._say()
            for sentence in sentences:
                self._say(sentence)
            self._scale(self._width)
            self._signs_legend(n)
            return
        side = [line for sentence in sentences for line in Text(sentence).wrap(self._console, room)]
        side += self._scale_lines(room)
        if legend := self._signs.legend(self._text[-n:]):
            side += Text(legend).wrap(self._console, room)
        self._beside([block, side], [width, room - GAP])

    def one_head(self, seen: Attention) -> None:
        """One heat map with its characters and entropies, as large as there is room for, the uniform average beside."""
        (head,) = seen.heads
        T, digits = len(self._text), len(str(len(self._text) - 1))
        label = digits + 1 + self._signs.width + 1
        room = self._width - label - 5
        # Square cells and both maps if that fits, then narrow cells, then the head alone.
        least = self._signs.width
        for width, both in ((2, True), (least, True), (2, False), (least, False)):
            fits = (room - 6 if both else room - 5) // (width * (2 if both else 1))
            if fits >= T and width >= least:
                break
        n = min(T, max(1, fits))
        shown = seen.uniform.entropy[-n:].tolist()
        rows = range(T - n, T)
        labels = [f"{i:{digits}} {self._signs.of(self._text[i])} " for i in rows]
        left = self._map(head, seen, n, width, labels)
        _append(left, "bits", [f"{bits:.2f}" for bits in head.entropy[-n:].tolist()])
        blocks = [[Text(f"layer {head.layer}, head {head.head}", "bold"), *left]]
        uniform = self._map(seen.uniform, seen, n, width, [""] * n) if both else [Text() for _ in range(n + 1)]
        _append(uniform, "bits" if both else "even", [f"{bits:.2f}" for bits in shown])
        blocks.append([Text("uniform average" if both else "", "bold"), *uniform])
        self._say(f"What one head reads in {self._quoted(n)}")
        self._say()
        for first, second in zip(*blocks, strict=True):
            first.pad_right(label + n * width + 5 - first.cell_len)
            self._draw(first + Text(" " if both else "") + second)
        self._say()
        self._say(f"A row is a character that reads, a column one that is read{self._window(seen)}.")
        self._say(f"Bits: entropy of a row{'' if both else '; even: that of the uniform average'}.")
        self._scale(self._width)
        self._signs_legend(n)
        self._say()
        self._summaries(seen)

    def _scale(self, room: int) -> None:
        for line in self._scale_lines(room):
            self._draw(line)

    def _scale_lines(self, room: int) -> Lines:
        """What the shades mean."""
        if self._colours:
            line = Text("weights ")
            for mark in MARKS:
                line.append(f" {mark:g} ", self._style(mark))
            return [line]
        # The symbols stand for tenths of the root. Spaces inside a part are none to wrap at.
        parts = [f"{_symbol(((i + 0.5) / 10) ** 2)}\u00a0to\u00a0{((i + 1) / 10) ** 2:.2f}" for i in range(1, 10)]
        return [Text(line.replace("\u00a0", " ")) for line in textwrap.wrap("weights " + ", ".join(parts), room)]

    def _signs_legend(self, n: int) -> None:
        if legend := self._signs.legend(self._text[-n:]):
            self._say(legend)

    def _window(self, seen: Attention) -> str:
        """Says that the window cuts off what is older, where it does."""
        if len(self._text) <= seen.window:
            return ": itself and all before it"
        return f": itself and the {seen.window - 1} before it (the window of {seen.window})"

    def _quoted(self, n: int) -> str:
        """The part of the text that is shown, and what is not."""
        shown = "".join(self._signs.of(char).strip() or char for char in self._text[-n:])
        if n == len(self._text):
            return f"'{shown}' ({n} character{'' if n == 1 else 's'})"
        return f"'{shown}': the last {n} of {len(self._text):,} characters, as many as fit"

    def _summaries(self, seen: Attention) -> None:
        """How much each head departs from the uniform average, which comes last."""
        headers = ("bits", "below", "back") if self._narrow else ("bits", "below uniform", "characters back")
        names = [f"layer {head.layer}, head {head.head}" for head in seen.heads] + ["uniform average"]
        room = max(map(len, [*names, "mean of all rows"]))
        self._draw(Text(f"{'mean of all rows':{room}}" + "".join(f"  {header}" for header in headers), "bold"))
        for name, head in zip(names, (*seen.heads, seen.uniform), strict=True):
            means = (head.entropy.mean(), seen.departure(head).mean(), head.distance.mean())
            cells = [f"{float(mean):{len(header) + 2}.2f}" for mean, header in zip(means, headers, strict=True)]
            self._draw(Text(f"{name:{room}}" + "".join(cells)))

    # Numbers

    def numbers(self, seen: Attention) -> None:
        """The weights with four decimals, as many as fit; what is left out is summed up."""
        T, digits = len(self._text), len(str(len(self._text) - 1))
        label = digits + 1 + self._signs.width
        tail = "  bits" if self._narrow else "  uniform  bits"
        room = self._width - label - len(tail)
        cropped = room // 7 < T
        n = min(T, max(1, (room - 8 * cropped) // 7))
        self._say(f"The weights of each head in {self._quoted(n)}")
        sentences = ["A row is a character that reads, and sums to 1.", "Bits: the entropy of the row."]
        if not self._narrow:
            sentences.insert(1, "Uniform: the weight that the uniform average gives each character it may read.")
        if cropped:
            sentences.append("Earlier: the sum of the columns left out.")
        self._say(" ".join(sentences))
        self._signs_legend(n)
        for head in seen.heads:
            self._say()
            self._draw(Text(f"layer {head.layer}, head {head.head}", "bold"))
            header = " " * label + ("earlier".rjust(8) if cropped else "")
            columns = "".join(" " * (7 - self._signs.width) + self._signs.of(char) for char in self._text[-n:])
            self._draw(Text(header + columns + tail))
            earlier = head.weights[-n:, : T - n].sum(dim=-1).tolist()
            weights, mask = _last(head.weights, n), _last(seen.mask, n)
            for i in range(n):
                line = Text(f"{T - n + i:{digits}} {self._signs.of(self._text[T - n + i])}")
                if cropped:
                    line.append(f"{earlier[i]:8.4f}")
                for weight, may in zip(weights[i], mask[i], strict=True):
                    shade = self._style(weight) if self._colours and may else ""
                    line.append(" ").append(f"{weight:.4f}", shade or "dim")
                if not self._narrow:
                    # Of its own position, which is always one of those that it may read.
                    line.append(f"{float(seen.uniform.weights.diagonal()[T - n + i]):9.4f}")
                line.append(f"{float(head.entropy[T - n + i]):6.2f}")
                self._draw(line)
        self._say()
        self._summaries(seen)

    # One position

    def step(self, seen: Attention, taken: Step) -> None:
        """Query, scores, scale, mask, softmax and weighted sum of one position."""
        place, D = taken.position, seen.head_dim
        char = self._signs.of(self._text[place]).strip()
        self._say(
            f"How {char!r}, position {taken.position} of 0 to {len(self._text) - 1}, reads: layer {taken.layer}, head"
            f" {taken.head}, head_dim D = {D}"
        )
        self._signs_legend(len(self._text))
        self._say()
        self._heading("1. Its query", f"q = RMSNorm(W_q x), turned by its position, ({D},)")
        self._vector("   q = ", taken.query)
        self._say()
        self._heading("2-5. Each key k_j: score, scale, mask, softmax", "softmax(q k^T / sqrt(D))")
        listed, left_out = self._listed(taken)
        digits = len(str(len(self._text) - 1))
        indent = digits + 1 + self._signs.width
        headers = ["q . k_j", "scaled" if self._narrow else f"/ sqrt({D})", "masked", "softmax"]
        # What a column takes, and its decimals; the uniform average and the bars where there is room.
        columns, decimals = ((8,) * 4, 3) if self._narrow else ((10, 12, 10, 9, 9), 4)
        if not self._narrow:
            headers.append("uniform")
        bar_room = min(30, self._width - indent - sum(columns) - 2)
        cells = [f"{header:>{width}}" for header, width in zip(headers, columns, strict=True)]
        self._draw(Text(" " * indent + "".join(cells), "bold"))
        uniform: list[float] = seen.uniform.weights[place].tolist()
        way = taken.stages
        for j in listed:
            weight, may = float(way.weights[j]), bool(taken.readable[j])
            numbers = [f"{float(each[j]):.{decimals}f}" for each in (way.scores, way.scaled, way.masked)]
            numbers += [f"{weight:.4f}", f"{uniform[j]:.4f}"]
            cells = [f"{number:>{width}}" for number, width in zip(numbers, columns, strict=False)]
            line = Text(f"{j:{digits}} {self._signs.of(self._text[j])}{''.join(cells)}", "" if may else "dim")
            if bar_room >= 8 and may:
                length = round(weight * bar_room)
                line.append("  ")
                line.append_text(Text(" " * length, self._style(0.25)) if self._colours else Text("#" * length))
            self._draw(line)
        for sentence in left_out:
            self._say(sentence)
        most = float(seen.uniform.entropy[place])
        self._say(
            f"The weights sum to {float(way.weights.sum()):.4f}. Their entropy is {taken.entropy:.2f} bits, that of the"
            f" uniform average log2({int(taken.readable.sum())}) = {most:.2f}."
        )
        self._say()
        self._heading("6. The weighted sum of the values", f"y = sum_j a_j v_j, ({D},)")
        name_room = digits + self._signs.width + 10
        for j in listed:
            if taken.readable[j]:
                sign = self._signs.of(self._text[j])
                self._vector(f"{j:{digits}} {sign} {float(way.weights[j]):.4f} v = ", taken.parts[j])
        if others := [j for j in taken.readable.nonzero()[:, 0].tolist() if j not in listed]:
            self._vector(f"{'all others':>{name_room}} = ", taken.parts[others].sum(dim=0))
        self._vector(f"{'sum':>{name_room}} = ", taken.output)
        self._vector(f"{'the model':>{name_room}} = ", taken.model_output)
        self._say(
            f"The largest of the {D} differences between the sum and the model's own output: {taken.gap:.1e}"
            " (float32 keeps about seven digits)"
        )

    def _listed(self, taken: Step) -> tuple[list[int], list[str]]:
        """The keys to list, in order, and sentences about those that are not."""
        readable = taken.readable.nonzero()[:, 0].tolist()
        weights: list[float] = taken.stages.weights.tolist()
        kept = sorted(sorted(readable, key=lambda j: -weights[j])[:LISTED])
        sentences = []
        if len(kept) < len(readable):
            rest = sum(weights[j] for j in readable) - sum(weights[j] for j in kept)
            sentences.append(
                f"{len(readable) - len(kept)} more keys with smaller weights, {rest:.4f} together (--json has all)"
            )
        older = [j for j in range(len(weights)) if j < readable[0]]
        later = [j for j in range(len(weights)) if j > readable[-1]]
        older_shown, later_shown = older[-LISTED_MASKED:], later[:LISTED_MASKED]
        for name, all_, shown in (("older than the window", older, older_shown), ("later", later, later_shown)):
            if len(shown) < len(all_):
                sentences.append(f"{len(all_) - len(shown)} more keys {name}: masked, weight 0")
        return [*older_shown, *kept, *later_shown], sentences

    def _heading(self, title: str, formula: str) -> None:
        self._console.print(Text.assemble((title, "bold"), ": ", formula))

    def _vector(self, name: str, numbers: Tensor) -> None:
        """As many numbers as fit on the line, and how many more there are."""
        values = [f"{value:7.4f}" for value in numbers.tolist()]
        width = max(map(len, values)) + 1
        n = min(len(values), max(1, (self._width - cell_len(name)) // width))
        if n < len(values):
            n = max(1, (self._width - cell_len(name) - len(f" ... {len(values)} more")) // width)
        more = f" ... {len(values) - n} more" if n < len(values) else ""
        self._draw(Text(name + "".join(value.rjust(width) for value in values[:n]) + more))

    # The chapter's example

    def toy(self, seed: int, toy: Toy) -> None:
        """Every line of the chapter with what it gives."""
        B, T, C = toy.x.shape
        D = toy.q.shape[-1]
        self._say(
            f"Self-attention of random vectors: B, T, C = {B}, {T}, {C}, head size {D}, torch.manual_seed({seed})."
            " Rows are positions."
        )
        self._stage("x = torch.randn(B, T, C)", toy.x)
        self._say()
        for name in ("key", "query", "value"):
            self._draw(Text(f"{name:5} = nn.Linear(C, {D}, bias=False)"))
        self._stage("q = query(x)", toy.q)
        self._stage("k = key(x)", toy.k)
        self._stage("wei = q @ k.transpose(-2, -1)", toy.stages.scores)
        self._stage(f"wei = wei / {D} ** 0.5", toy.stages.scaled)
        self._stage("tril = torch.tril(torch.ones(T, T))", toy.mask.float())
        self._stage("wei = wei.masked_fill(tril == 0, -inf)", toy.stages.masked)
        self._stage("wei = wei.softmax(dim=-1)", toy.stages.weights, heat=True)
        self._say("Rows sum to 1, and depend on the input. The uniform average does not:")
        self._stage("tril / tril.sum(dim=-1, keepdim=True)", toy.uniform, heat=True)
        self._say(
            f"Entropy of the last rows: {', '.join(f'{bits:.4f}' for bits in toy.entropy[:, -1].tolist())} bits; of the"
            f" uniform average log2({T}) = {float(toy.uniform_entropy[-1]):.4f}."
        )
        self._stage("v = value(x)", toy.v)
        self._stage("out = wei @ v", toy.out)
        self._say(f"The largest difference between out and what the models' own attention gives: {toy.gap:.1e}")

    def _stage(self, code: str, numbers: Tensor, *, heat: bool = False) -> None:
        """A line of code, the shape of what it gives, and that: the texts of a batch side by side where they fit."""
        self._say()
        shape = ", ".join(map(str, numbers.shape))
        # On a line of its own rather than wrapped.
        gap = "  " if len(code) + len(shape) + 6 <= self._width else "\n  "
        self._console.print(Text.assemble((code, "bold"), f"{gap}# ({shape})"))
        texts: list[list[list[float]]] = (numbers if numbers.dim() == 3 else numbers[None]).tolist()
        C = len(texts[0][0])
        across = max(1, min(len(texts), (self._width + GAP) // (C * 8 + 3 + GAP)))
        n = C if self._width >= C * 8 + 3 else max(1, (self._width - 4 - len(f" ... {C} more")) // 8)
        for start in range(0, len(texts), across):
            blocks = []
            for rows in texts[start : start + across]:
                lines = []
                for i, row in enumerate(rows):
                    line = Text("[ " if i == 0 else "  ")
                    for value in row[:n]:
                        style = self._style(value) if heat and self._colours and value else ""
                        line.append(f"{value:7.4f}", style).append(" ")
                    if n < C:
                        line.append(f"... {C - n} more")
                    lines.append(line)
                lines[-1].rstrip()
                lines[-1].append(" ]")
                blocks.append(lines)
            self._beside(blocks, [max(line.cell_len for line in block) for block in blocks])


def _symbol(weight: float) -> str:
    """A character for a weight, by its root: never blank, which is kept for what may not be read."""
    return shades.symbol(max(math.sqrt(weight), 0.1))


def _last(square: Tensor, n: int) -> list[list[float]]:
    """The last n rows and columns as lists."""
    rows: list[list[float]] = square[-n:, -n:].tolist()
    return rows


def _append(lines: Lines, title: str, cells: Sequence[str]) -> None:
    """Puts a column of numbers on the right of a block of lines."""
    for line, cell in zip(lines, (title, *cells), strict=True):
        line.append(f"{cell:>5}")
