"""``minigpt explain cache``: both ways of writing side by side, step by step."""

from __future__ import annotations

import html
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.explain.given import given_model, given_text
from minigpt.cli.explain.screen import counted, print_lines, screen
from minigpt.cli.explain.signs import legend, sign
from minigpt.cli.options import CheckpointOption, JsonOption, PromptOption
from minigpt.cli.save import Page, SaveOption, check_save, save

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.figure import Figure
    from rich.text import Text

    from minigpt.checkpoint import Checkpoint
    from minigpt.explain.cached_steps import Pass, RingMoves, Step

# Steps that the ring of the default prompt is short of being full when it is read: so the third one fills it, and those
# after it store over what was there.
SHORT_OF_FULL = 2
# Nobody reads more, and each takes two passes of the model each way.
MOST_STEPS = 500
# Columns of the names of rows, and of a way beside the other one; of the names where the ways follow each other.
NAMES, WAY, NARROW_NAMES = 18, 31, 14
# From so many columns on the ways stand side by side.
SIDE_BY_SIDE = NAMES + 2 * WAY
# Columns before a line of slots, and lines of which no more are drawn.
SLOT_NAMES, MOST_LINES = 11, 4
SIZE = (9.0, 4.0)


def cache(
    prompt: PromptOption = None,
    length: Annotated[
        int, typer.Option("--length", "-n", min=1, max=MOST_STEPS, help="Characters to write, one a step.")
    ] = 5,
    checkpoint: CheckpointOption = None,
    save_as: SaveOption = None,
    json: JsonOption = False,
) -> None:
    """Write the next characters with the cache and by recompute, and see what each step computes, reads and stores."""
    check_save(save_as, draws_pages=True)
    from minigpt import console
    from minigpt.explain.cached_steps import steps

    loaded = given_model(checkpoint)
    config = loaded.model.config
    text = given_text(loaded, prompt, max(1, config.window - SHORT_OF_FULL))
    if (reach := config.receptive_field) < len(text):
        console.note(
            f"of the text's {len(text):,} characters the last {reach:,} are read: no others can reach what follows;"
            " positions count from the first of them"
        )
        text = text[-reach:]
    found = []
    with console.steps_bar(length) as bar:
        for step in steps(loaded.model, loaded.tokenizer.encode(text), length):
            found.append(step)
            bar.update(1)
    data = _data(loaded, text, found)
    if json:
        console.write_json(data)
    else:
        _Show(loaded, text, found).all()
    save(
        save_as,
        "The KV cache, step by step",
        data,
        lambda figure: _draw(figure, found),
        lambda: _page(data, found),
        size=SIZE,
    )


def _data(loaded: Checkpoint, text: str, found: Sequence[Step]) -> dict[str, Any]:
    config = loaded.model.config
    return {
        "checkpoint": str(loaded.path),
        "prompt": text,
        "text": loaded.tokenizer.decode([step.cached_id for step in found]),
        "recomputed_text": loaded.tokenizer.decode([step.recomputed_id for step in found]),
        "n_layer": config.n_layer,
        "window": config.window,
        "receptive_field": config.receptive_field,
        "steps": [
            {
                "step": number,
                "writes": loaded.tokenizer.decode([step.cached_id]),
                "cached": {
                    **_pass_data(step.cached),
                    "rings": [
                        {
                            "layer": layer,
                            "read": ring.read,
                            "written": [{"slot": slot, "position": position} for slot, position in ring.written],
                            "evicted": [{"slot": slot, "position": position} for slot, position in ring.evicted],
                            "held": ring.held,
                        }
                        for layer, ring in enumerate(step.rings, 1)
                    ],
                },
                "recomputed": _pass_data(step.recomputed),
                "same_character": step.cached_id == step.recomputed_id,
                "logit_gap": step.logit_gap,
            }
            for number, step in enumerate(found, 1)
        ],
        "same_text": all(step.cached_id == step.recomputed_id for step in found),
        "largest_logit_gap": max(step.logit_gap for step in found),
    }


def _pass_data(done: Pass) -> dict[str, Any]:
    return {
        "computed": list(done.computed),
        "q_shape": done.q_shape,
        "kv_shape": done.kv_shape,
        "read": done.read,
        "logit_rows": done.logit_rows,
        "multiply_adds": done.work,
        "multiply_adds_so_far": done.work_so_far,
        "bytes_made": done.made_bytes,
        "bytes_made_so_far": done.made_bytes_so_far,
        "bytes_read": done.read_bytes,
        "bytes_read_so_far": done.read_bytes_so_far,
    }


class _Show:
    """Prints it, as wide as the terminal is."""

    def __init__(self, loaded: Checkpoint, text: str, found: Sequence[Step]) -> None:
        self._model = loaded.model
        self._text = text
        self._found = found
        self._new = loaded.tokenizer.decode([step.cached_id for step in found])
        self._terminal = screen()
        self._width = self._terminal.width
        # Two numbers of one way.
        self._pair = "{:>13} {:>15}" if self._width >= SIDE_BY_SIDE else "{:>10} {:>12}"
        self._encoding = sys.stdout.encoding or "utf-8"

    def all(self) -> None:
        config = self._model.config
        signs = legend(map(self._one_column, self._text + self._new), self._encoding)
        self._line(f"prompt    {self._cropped(''.join(map(self._sign, self._text)), self._width - 11)}")
        self._prose(
            f"          {counted(len(self._text), 'character')}, positions from 0" + (f"; {signs}" if signs else "")
        )
        alike = all(ring == step.rings[0] for step in self._found for ring in step.rings)
        self._prose(
            f"cache     a ring of {config.window:,} slots for each of {counted(config.n_layer, 'layer')}"
            f" ({'all did the same' if alike else 'below that of layer 1'}). What is in it was looked up after every"
            " step, comparing keys and values bit for bit. Beneath a slot: + stored, x stored where another one was"
            " evicted."
        )
        self._prose(
            "bytes     of keys and values: those that a step makes, and those that it reads, counted for each query"
            " that reads them. Weights are left out: both ways read all of them in every step."
        )
        for number, step in enumerate(self._found, 1):
            self._step(number, step)
        self._why()
        self._end()

    def _step(self, number: int, step: Step) -> None:
        whole = self._text + self._new
        end = step.cached.computed.stop
        took = "reads the prompt" if number == 1 else f"takes in {whole[end - 1]!r} at position {end - 1:,}"
        ring, passes = step.rings[0], (step.cached, step.recomputed)
        self._line()
        self._prose(f"step {number:,} {took}, writes {whole[end]!r}", style="bold")
        rows = [
            ("computed", *(_span(done.computed) for done in passes)),
            ("q (B, H, T, D)", *(_shape(done.q_shape) for done in passes)),
            ("k, v (B, H, S, D)", *(_shape(done.kv_shape) for done in passes)),
            ("keys, values read", *(_span(done.read) for done in passes)),
            ("stored", _stored(ring), "nothing is kept"),
            ("evicted", _evicted(ring), "-"),
            ("", *[self._pair.format("this step", "so far")] * 2),
        ]
        for name, part in (("multiply-adds", "work"), ("bytes made", "made_bytes"), ("bytes read", "read_bytes")):
            rows.append((name, *(self._pair.format(*_numbers(done, part)) for done in passes)))
        self._rows(rows)
        self._ring(ring, whole)

    def _ring(self, ring: RingMoves, text: str) -> None:
        from rich.text import Text

        # Slots a line: all, or a multiple of 8 that there is room for.
        room = self._width - SLOT_NAMES - 2
        per_line = len(ring.held) if len(ring.held) <= room else max(8, room // 8 * 8)
        written, evicted = dict(ring.written), dict(ring.evicted)
        starts = list(range(0, len(ring.held), per_line))
        if len(starts) > MOST_LINES:
            shown = [start for start in starts if any(start <= slot < start + per_line for slot in written)][
                :MOST_LINES
            ]
        else:
            shown = starts
        for start in shown:
            slots = range(start, min(start + per_line, len(ring.held)))
            line = Text(f"{'slots' if start == shown[0] else '':<5}{start:>{SLOT_NAMES - 6},} |")
            for slot in slots:
                position = ring.held[slot]
                # What is stored is marked beneath, too; a whole prompt in reverse could not be read.
                style = "reverse bold" if slot in written and len(written) == 1 else ""
                line.append(" " if position is None else self._sign(text[position]), style=style)
            line.append("|")
            self._print(line)
            marks = "".join("x" if slot in evicted else "+" if slot in written else " " for slot in slots)
            if marks.strip():
                self._line(f"{'':{SLOT_NAMES}}{marks.rstrip()}")
        if len(shown) < len(starts):
            self._prose(f"({counted(len(starts), 'line')} of slots, of which {len(shown):,} are shown)")

    def _why(self) -> None:
        last = self._found[-1]
        cached, recomputed = last.cached, last.recomputed
        keys = self._model.new_cache().keys
        self._line()
        self._line("why no old query is ever read", style="bold")
        self._prose(
            f"In step {len(self._found):,} the recompute made {counted(recomputed.q_shape[2], 'query')} a layer and"
            f" gave {counted(recomputed.logit_rows, 'row')} of logits, of which the last one was used: the others"
            f" predict characters that are there already. The pass with the cache made {cached.q_shape[2]:,} and gave"
            f" {cached.logit_rows:,}. A query is used once, by its own position, in the pass that makes it. A later"
            " position brings a query of its own, and of the earlier ones it reads keys and values. So these are what"
            f" the cache holds, {_shape(tuple(keys.shape))} of each, and there is no place for queries in it."
        )
        if not any(step.rings[0].evicted for step in self._found):
            window = self._model.config.window
            self._prose(
                f"Nothing was evicted, for the ring of {window:,} slots never had to take one more. To see it, give a"
                f" longer --prompt or --length (more than {window:,} characters in all), or leave --prompt out."
            )

    def _end(self) -> None:
        last = self._found[-1]
        cached, recomputed = last.cached, last.recomputed
        same = all(step.cached_id == step.recomputed_id for step in self._found)
        gap = max(step.logit_gap for step in self._found)
        self._line()
        self._line("the same in the end", style="bold")
        self._prose(
            f"logits    largest gap of any two {last.logit_gap:.1e} in the last step, {gap:.1e} in all"
            f" {counted(len(self._found), 'step')}"
        )
        self._prose(
            f"text      both wrote {self._new!r}"
            if same
            else f"text      NOT the same: {self._new!r} with the cache, but not by recompute"
        )
        self._prose(
            f"work      {cached.work_so_far:,} multiply-adds with the cache, {recomputed.work_so_far:,} by recompute,"
            f" {recomputed.work_so_far / cached.work_so_far:.1f} times as many; in the last step"
            f" {recomputed.work / cached.work:.1f} times"
        )

    # How

    def _rows(self, rows: Sequence[tuple[str, ...]]) -> None:
        """What rows are about, and that of both ways: side by side, or one after the other where there is no room."""
        ways = ("with the cache", "by recompute")
        if self._width >= SIDE_BY_SIDE:
            for name, cached, recomputed in [("", *ways), *rows]:
                self._line(f"{name:{NAMES}}{cached:{WAY}}{recomputed}".rstrip())
            return
        for way, heading in enumerate(ways, 1):
            self._line(f"- {heading}")
            for row in rows:
                self._line(f"{row[0]:{NARROW_NAMES}} {row[way]}".rstrip())

    def _prose(self, text: str, style: str = "") -> None:
        """A paragraph; the lines of one that starts with a name in ten columns start where its text does."""
        import textwrap

        indent = " " * 10 if text[8:10] == "  " else ""
        for line in textwrap.wrap(text, min(self._width, 100), subsequent_indent=indent, break_on_hyphens=False):
            self._line(line, style)

    def _line(self, text: str = "", style: str = "") -> None:
        from rich.text import Text

        self._print(Text(text, style=style))

    def _print(self, line: Text) -> None:
        print_lines(self._terminal, line)

    def _sign(self, char: str) -> str:
        """What stands for a character, one column wide."""
        return sign(self._one_column(char), self._encoding)

    def _one_column(self, char: str) -> str:
        """The character, or one that cannot be shown for those that would take two columns."""
        from rich.cells import cell_len

        return "\0" if cell_len(char) > 1 else char

    def _cropped(self, text: str, room: int) -> str:
        """The end of a text, with dots before it where it is too long."""
        return text if len(text) <= room else f"... {text[-(room - 4) :]}"


def _numbers(done: Pass, part: str) -> tuple[str, str]:
    """What a pass counted, and that with all before it."""
    return f"{getattr(done, part):,}", f"{getattr(done, f'{part}_so_far'):,}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _span(positions: Iterable[int]) -> str:
    """Positions, and how many they are."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][-1] + 1:
            runs[-1][1:] = [position]
        else:
            runs.append([position])
    count = sum(run[-1] - run[0] + 1 for run in runs)
    named = ", ".join(" to ".join(f"{position:,}" for position in run) for run in runs)
    return named if count == 1 else f"{named} ({count:,})"


def _stored(ring: RingMoves) -> str:
    slots, positions = zip(*sorted(ring.written, key=lambda pair: pair[1]), strict=True)
    if len(slots) == 1:
        return f"{positions[0]:,} in slot {slots[0]:,}"
    return f"{positions[0]:,} to {positions[-1]:,} in {len(slots):,} slots"


def _evicted(ring: RingMoves) -> str:
    if not ring.evicted:
        return "none"
    return ", ".join(f"{position:,} from slot {slot:,}" for slot, position in ring.evicted)


# The picture and the page


def _draw(figure: Figure, found: Sequence[Step]) -> None:
    from matplotlib.ticker import MaxNLocator

    from minigpt.plot import COLOURS

    numbers = range(1, len(found) + 1)
    work, moved = figure.subplots(1, 2)
    for way, label, colour, marker in (
        ("cached", "with the cache", COLOURS[0], "o"),
        ("recomputed", "by recompute", COLOURS[1], "s"),
    ):
        passes = [getattr(step, way) for step in found]
        shape = {"color": colour, "marker": marker if len(found) <= 40 else "", "markersize": 4, "linewidth": 1.8}
        work.plot(numbers, [done.work_so_far / 1e6 for done in passes], label=label, gid=f"work-{way}", **shape)
        moved.plot(
            numbers,
            [(done.made_bytes_so_far + done.read_bytes_so_far) / 1e6 for done in passes],
            label=label,
            gid=f"bytes-{way}",
            **shape,
        )
    work.set_ylabel("million multiply-adds so far")
    moved.set_ylabel("keys and values made and read so far, MB")
    for axes in (work, moved):
        axes.set_xlabel("steps, one character each")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left")


def _page(data: dict[str, Any], found: Sequence[Step]) -> Page:
    from minigpt import plot

    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "step",
            "writes",
            "positions computed",
            "keys read",
            "stored",
            "evicted",
            "multiply-adds so far",
            "bytes so far",
            "positions computed",
            "keys read",
            "multiply-adds so far",
            "bytes so far",
            "largest logit gap",
        )
    )
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(number, told["writes"], step)) + "</tr>\n"
        for number, (told, step) in enumerate(zip(data["steps"], found, strict=True), 1)
    )
    same = "The same characters both ways" if data["same_text"] else "NOT the same characters both ways"
    return Page(
        f"<p>After <code>{html.escape(repr(data['prompt']))}</code>, {len(data['prompt']):,} characters, positions from"
        f" 0. {same}: <code>{html.escape(repr(data['text']))}</code>; the largest gap of any two logits is"
        f" {data['largest_logit_gap']:.1e}. Bytes are those of the keys and values made and read.</p>\n"
        f"<figure>{plot.svg(lambda figure: _draw(figure, found), *SIZE)}</figure>\n"
        '<div class="wide"><table>\n<tr><th colspan="2"></th><th colspan="6">with the cache</th><th colspan="4">by'
        f" recompute</th><th></th></tr>\n<tr>{head}</tr>\n{rows}</table></div>",
        style=".wide { overflow-x: auto; } td { white-space: nowrap; } th { vertical-align: bottom; }"
        " tr:nth-child(n+3) { border-top: 1px solid var(--faint); }",
    )


def _cells(number: int, written: str, step: Step) -> tuple[str, ...]:
    def way(done: Pass) -> tuple[str, str, str, str]:
        return (
            _span(done.computed),
            _span(done.read),
            f"{done.work_so_far:,}",
            f"{done.made_bytes_so_far + done.read_bytes_so_far:,}",
        )

    cached, recomputed = way(step.cached), way(step.recomputed)
    ring = step.rings[0]
    return (
        str(number),
        repr(written),
        *cached[:2],
        _stored(ring),
        _evicted(ring),
        *cached[2:],
        *recomputed,
        f"{step.logit_gap:.1e}",
    )
