"""``minigpt race``: the same text with the cache and by recompute, at the same time."""

from __future__ import annotations

import html
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.explain.screen import counted, screen
from minigpt.cli.options import CheckpointOption, JsonOption
from minigpt.cli.save import Page, SaveOption, check_save, save
from minigpt.config import DEFAULT_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType
    from rich.panel import Panel

    from minigpt.race import Lane, Race

# Columns from which on the panels stand side by side.
SIDE_BY_SIDE = 60
# Lines of text in a panel, and lines of it besides them: its frame, its clock and its bar.
MOST_LINES, BESIDES = 14, 5
# Between two pictures on the terminal.
INTERVAL_S = 0.1
# Columns that lines of the summary do not gain from.
WIDEST = 100
SIZE = (7.0, 4.0)


@dataclass(frozen=True)
class _Result:
    """What both have written, and how."""

    checkpoint: str
    prompt: str
    # With the cache and by recompute.
    texts: tuple[str, str]
    lanes: tuple[Lane, Lane]
    threads: int
    cores: int
    temperature: float
    seed: int

    @property
    def same(self) -> bool:
        return self.texts[0] == self.texts[1]

    @property
    def times_as_long(self) -> float:
        """That the recompute took."""
        cached, recomputed = self.lanes
        return recomputed.seconds / cached.seconds


def race(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    length: Annotated[int, typer.Option("--length", "-n", min=1, help="New characters to write.")] = 300,
    checkpoint: CheckpointOption = None,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Below 1 safer, above 1 wilder, 0 always the likeliest.")
    ] = 0.8,
    seed: Annotated[
        int | None,
        typer.Option("--seed", "-s", min=0, help="Same seed, same text. Default: a new one each time."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="CPU threads of each of the two. Default: half of the cores."),
    ] = None,
    save_as: SaveOption = None,
    json: JsonOption = False,
) -> None:
    """Watch the same text being written twice at the same time: with the cache, and by recompute."""
    check_save(save_as, draws_pages=True)
    from minigpt import console
    from minigpt.cli.texts import check_known
    from minigpt.errors import PromptError
    from minigpt.race import Race, cores, fair_threads
    from minigpt.runs import find_checkpoint
    from minigpt.sampling import Sampling
    from minigpt.tokenizer import CharTokenizer

    if prompt == "":
        raise PromptError("the prompt is empty: give at least one character, or leave --prompt out")
    sampling = Sampling(temperature)
    path = find_checkpoint(checkpoint)
    if checkpoint is None:
        console.note(f"with {path.parent.name}, the newest run ({path})")
    if threads is None:
        threads = fair_threads()
    if seed is None:
        seed = time.time_ns() % 2**32
    shows_panels = sys.stdout.isatty() and not json
    if shows_panels:
        console.note("two processes load the model")
    with Race(path, threads) as running:
        racer = running.meet()
        tokenizer = CharTokenizer(racer.chars)
        check_known(prompt or "", tokenizer)
        if racer.steps == 0:
            console.note(f"{path} has taken no step of training yet: what it writes is noise")
        if (reach := racer.config.receptive_field) < len(prompt or ""):
            console.note(f"of the prompt's {len(prompt or ''):,} characters the last {reach:,} are read")
        states = running.run(tokenizer.encode(prompt or racer.start), length, sampling, seed, INTERVAL_S)
        if shows_panels:
            _watch(running, states, length, tokenizer)
        else:
            with console.steps_bar(2 * length) as bar:
                for lanes in states:
                    bar.update(sum(len(lane.ids) for lane in lanes) - bar.n)
        cached, recomputed = running.lanes
    result = _Result(
        checkpoint=str(path),
        prompt=prompt or "",
        texts=(tokenizer.decode(cached.ids), tokenizer.decode(recomputed.ids)),
        lanes=(cached, recomputed),
        threads=threads,
        cores=cores(),
        temperature=temperature,
        seed=seed,
    )
    data = _data(result)
    if json:
        console.write_json(data)
    else:
        _show(result)
    save(
        save_as,
        "The same text, with the cache and by recompute",
        data,
        lambda figure: _draw(figure, result),
        lambda: _page(result),
        size=SIZE,
    )
    if not result.same:
        raise typer.Exit(1)


def _data(result: _Result) -> dict[str, Any]:
    return {
        "checkpoint": result.checkpoint,
        "prompt": result.prompt,
        "characters": len(result.lanes[0].ids),
        "engine": "torch",
        "weights": DEFAULT_FORMAT,
        "threads_each": result.threads,
        "cores": result.cores,
        "temperature": result.temperature,
        "seed": result.seed,
        "same_text": result.same,
        "times_as_long": result.times_as_long,
        **{
            key: {
                "text": text,
                "seconds": lane.seconds,
                "chars_per_s": lane.chars_per_s,
                "times_s": [round(seconds, 6) for seconds in lane.times_s],
            }
            for key, lane, text in zip(("cached", "recomputed"), result.lanes, result.texts, strict=True)
        },
    }


# On a terminal


def _watch(running: Race, states: Iterator[tuple[Lane, Lane]], length: int, tokenizer: Any) -> None:
    """Draws both panels until both have finished."""
    from rich.console import Console
    from rich.live import Live

    terminal = Console(file=sys.stdout, markup=False, highlight=False)
    with Live(console=terminal, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        for lanes in states:
            live.update(_panels(terminal, running, lanes, length, tokenizer), refresh=True)


def _panels(terminal: Console, running: Race, lanes: tuple[Lane, Lane], length: int, tokenizer: Any) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    # Both, and a line below for the cursor.
    beside = terminal.width >= SIDE_BY_SIDE
    room = terminal.height - 1 if beside else (terminal.height - 1) // 2
    lines = max(1, min(MOST_LINES, room - BESIDES))
    width = terminal.width // 2 if beside else terminal.width
    first = min((lane for lane in lanes if lane.finished), key=lambda lane: lane.seconds, default=None)
    panels = [_panel(terminal, running, lane, length, tokenizer, width, lines, lane is first) for lane in lanes]
    if not beside:
        return Group(*panels)
    grid = Table.grid()
    grid.add_row(*panels)
    return grid


def _panel(
    terminal: Console, running: Race, lane: Lane, length: int, tokenizer: Any, width: int, lines: int, is_first: bool
) -> Panel:
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    from minigpt.plot import COLOURS

    colour = COLOURS[0 if lane.cached else 1]
    inner = width - 4
    done = len(lane.ids)
    seconds = lane.seconds if lane.finished else running.elapsed_s
    # No more of it than can be seen, so that a long text is drawn as fast as a short one.
    newest = tokenizer.decode(lane.ids[-inner * lines :])
    text = Text("".join(char if char.isprintable() or char == "\n" else " " for char in newest))
    wrapped = text.wrap(terminal, inner)[-lines:]
    clock = f"{seconds:.2f} s  {lane.chars_per_s:,.0f} a second"
    return Panel(
        Group(
            Text(clock, style="bold", no_wrap=True, overflow="crop"),
            ProgressBar(length, done, width=inner, style="grey50", complete_style=colour, finished_style=colour),
            Text(),
            *wrapped,
            *[Text()] * (lines - len(wrapped)),
        ),
        title=Text(f"{lane.name}: first!" if is_first else lane.name),
        title_align="left",
        subtitle=Text(f"{done:,} of {length:,}"),
        subtitle_align="left",
        border_style=colour,
        box=box.ROUNDED,
        width=width,
    )


# Afterwards


def _show(result: _Result) -> None:
    from minigpt import console

    width = min(screen().width, WIDEST)
    cached, recomputed = result.lanes
    number = len(cached.ids)
    if not sys.stdout.isatty():
        console.write(f"{result.prompt}{result.texts[0]}\n\n")
        if not result.same:
            console.write(f"by recompute, NOT the same:\n{result.prompt}{result.texts[1]}\n\n")
    for lane in result.lanes:
        _paragraph(
            lane.name,
            f"{number:,} characters in {lane.seconds:.2f} s, {lane.chars_per_s:,.0f} a second"
            + (f", {result.times_as_long:.1f} times as long" if lane is recomputed else ""),
            width,
        )
    _paragraph("the texts", "are the same, character by character" if result.same else "are NOT THE SAME", width)
    _paragraph(
        "run with",
        f"{counted(result.threads, 'thread')} each on {counted(result.cores, 'core')}, the torch engine,"
        f" {DEFAULT_FORMAT} weights, temperature {result.temperature:g}, seed {result.seed}",
        width,
    )
    _paragraph("shared", _shared(result), width)


def _shared(result: _Result) -> str:
    """What the two could take from each other."""
    crowded = 2 * result.threads > result.cores
    return (
        ("the cores, of which there are fewer than threads, " if crowded else "no core; ")
        + "the processor's outer cache, its way to memory and its heat, so both are slower than alone, and the drawing,"
        f" {1 / INTERVAL_S:.0f} times a second in a third process that neither waits for; when the first has finished,"
        " the other has all to itself"
    )


def _paragraph(name: str, text: str, width: int) -> None:
    import textwrap

    from minigpt import console

    indent = " " * 16
    for line in textwrap.wrap(f"{name:16}{text}", width, subsequent_indent=indent):
        console.write(line + "\n")


# The picture and the page


def _draw(figure: Figure, result: _Result) -> None:
    from minigpt.plot import COLOURS

    axes = figure.add_subplot()
    for lane, key, colour, line in zip(result.lanes, ("cached", "recomputed"), COLOURS, ("-", "--"), strict=False):
        axes.plot(
            [0.0, *lane.times_s],
            range(len(lane.times_s) + 1),
            color=colour,
            linestyle=line,
            linewidth=1.8,
            label=f"{lane.name}: {lane.seconds:.2f} s, {lane.chars_per_s:,.0f} a second",
            gid=key,
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("characters written")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _page(result: _Result) -> Page:
    from minigpt import plot

    rows = "".join(
        f"<tr><th>{lane.name}</th><td>{len(lane.ids):,}</td><td>{lane.seconds:.2f}</td><td>{lane.chars_per_s:,.0f}</td>"
        "</tr>\n"
        for lane in result.lanes
    )
    same = "The same text" if result.same else "NOT the same text"
    texts = result.texts[:1] if result.same else result.texts
    return Page(
        f"<p>{same}; the recompute took {result.times_as_long:.1f} times as long. Both ran at the same time, with"
        f" {counted(result.threads, 'thread')} each. Shared: {html.escape(_shared(result))}.</p>\n"
        f"<figure>{plot.svg(lambda figure: _draw(figure, result), *SIZE)}</figure>\n"
        "<table>\n<tr><th></th><th>characters</th><th>seconds</th><th>characters a second</th></tr>\n"
        f"{rows}</table>\n"
        + "".join(f"<pre>{html.escape(result.prompt)}<b>{html.escape(text)}</b></pre>\n" for text in texts),
        style="pre { white-space: pre-wrap; } b { font-weight: normal; }",
    )
