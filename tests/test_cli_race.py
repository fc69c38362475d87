"""``minigpt race``: two panels on a terminal, a summary in a pipe, and the same text in both."""

from __future__ import annotations

import io
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from minigpt.cli.race import _panels
from minigpt.errors import RaceError
from minigpt.race import Lane, Racer
from tests.cli_support import (
    TEXT,
    Program,
    Terminal,
    run,
    trained_checkpoint,
    unstyled,
)
from tests.test_race import is_there

SVG = "{http://www.w3.org/2000/svg}"
WRITTEN = "MARGIT: The [bold]tide[/bold]\ncame in"

pytestmark = pytest.mark.usefixtures("own_run")


class ReplayedRace:
    """Stands for `race.Race`: both lanes are there at once, as if the processes had written them."""

    texts = (WRITTEN, WRITTEN)

    def __init__(self, path: Path, threads: int) -> None:
        self.lanes = (Lane(cached=True), Lane(cached=False))
        self.elapsed_s = 3.0
        self.asked: tuple[Any, ...] = ()

    def __enter__(self) -> ReplayedRace:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def meet(self) -> Racer:
        loaded = trained_checkpoint()
        return Racer(loaded.model.config, loaded.tokenizer.chars, loaded.start, 120)

    def run(self, *asked: Any) -> Iterator[tuple[Lane, Lane]]:
        yield self.lanes
        for lane, text, second in zip(self.lanes, self.texts, (0.01, 0.04), strict=True):
            lane.ids = trained_checkpoint().tokenizer.encode(text)
            lane.times_s = [second * (i + 1) for i in range(len(text))]
            lane.finished = True
            yield self.lanes


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> type[ReplayedRace]:
    monkeypatch.setattr("minigpt.race.Race", ReplayedRace)
    monkeypatch.setattr("minigpt.race.cores", lambda: 4)
    return ReplayedRace


# In a pipe


def test_in_a_pipe_the_text_comes_once_then_a_line_each(replayed: type[ReplayedRace]) -> None:
    done = run("race", "--checkpoint", "harbour", "--prompt", "OLE: ", "--seed", "7")
    assert (done.stderr, done.stdout.count(WRITTEN)) == ("", 1)
    assert done.stdout.startswith(f"OLE: {WRITTEN}\n\n")
    assert "\x1b" not in done.stdout
    assert re.search(r"^with the cache +37 characters in 0\.37 s, 100 a second$", done.stdout, re.MULTILINE)
    slow = r"^by recompute +37 characters in 1\.48 s, 25 a second, 4\.0 times as long$"
    assert re.search(slow, done.stdout, re.MULTILINE)
    said = " ".join(done.stdout.split())
    assert "the texts are the same, character by character" in said
    # Half of the cores each.
    assert "2 threads each on 4 cores, the torch engine, int8 weights, temperature 0.8, seed 7" in said
    assert "shared no core; the processor's outer cache" in said


def test_more_threads_than_cores_are_said_to_share_them(replayed: type[ReplayedRace]) -> None:
    said = " ".join(run("race", "--threads", "3").stdout.split())
    assert "3 threads each on 4 cores" in said
    assert "shared the cores, of which there are fewer than threads" in said


@pytest.mark.parametrize("columns", [40, 250])
def test_the_summary_fits_every_width(
    columns: int, replayed: type[ReplayedRace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("race").stdout.splitlines()
    assert max(map(len, lines)) <= min(columns, 100)


def test_texts_that_differ_are_both_shown_and_a_failure(
    replayed: type[ReplayedRace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayed, "texts", (WRITTEN, WRITTEN.upper()[:7] + WRITTEN[7:-1] + "m"))
    done = run("race", "--prompt", "OLE: ", code=1)
    assert f"by recompute, NOT the same:\nOLE: {WRITTEN[:-1]}m\n" in done.stdout
    assert re.search(r"^the texts +are NOT THE SAME$", done.stdout, re.MULTILINE)
    assert run("race", "--json", code=1).json["same_text"] is False


def test_the_json_is_what_is_shown(replayed: type[ReplayedRace]) -> None:
    told = run("race", "--prompt", "OLE: ", "--seed", "7", "-t", "0.5", "--json").json
    assert (told["prompt"], told["seed"], told["temperature"], told["threads_each"], told["cores"]) == (
        *("OLE: ", 7, 0.5),
        *(2, 4),
    )
    assert (told["same_text"], told["characters"]) == (True, len(WRITTEN))
    assert told["times_as_long"] == pytest.approx(4)
    for key, second in (("cached", 0.01), ("recomputed", 0.04)):
        assert told[key]["text"] == WRITTEN
        assert told[key]["times_s"] == pytest.approx([second * (i + 1) for i in range(len(WRITTEN))])
        assert told[key]["seconds"] == pytest.approx(second * len(WRITTEN))
        assert told[key]["chars_per_s"] == pytest.approx(1 / second)


def test_a_real_race_writes_the_text_of_generate() -> None:
    told = run("race", "--prompt", "OLE: ", "--seed", "3", "-n", "50", "--threads", "1", "--json").json
    options = ("--prompt", "OLE: ", "--seed", "3", "-n", "50", "--engine", "torch", "--json")
    assert [told["cached"]["text"]] == [told["recomputed"]["text"]] == run("generate", *options).json["texts"]
    assert told["same_text"] is True


# Panels


def drawn(width: int, height: int = 40, length: int = 100, **options: Any) -> list[str]:
    """The panels of a race of which the first lane has finished."""
    race: Any = ReplayedRace(Path(), 1)
    tokenizer = trained_checkpoint().tokenizer
    fast, slow = race.lanes
    fast.ids, fast.times_s, fast.finished = tokenizer.encode((TEXT * 2)[:length]), [0.5, 2.0], True
    slow.ids, slow.times_s = tokenizer.encode("[bold]so far"), [1.5]
    terminal = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=height,
        markup=False,
        highlight=False,
        **{"color_system": None, **options},
    )
    with terminal.capture() as captured:
        terminal.print(_panels(terminal, race, race.lanes, length, tokenizer))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_panels_stand_side_by_side_where_there_is_room(width: int) -> None:
    lines = drawn(width)
    assert {len(line) for line in lines} == {width // 2 * 2}
    assert re.search(r" with the cache: first! ─.* by recompute ─", lines[0])
    assert re.search(r" 100 of 100 ─.* 12 of 100 ─", lines[-1])
    # The clock of one that has finished stands still at its last character; that of the other one goes on.
    assert re.search(r" 2\.00 s  50 a second .* 3\.00 s  8 a second ", lines[1])
    # What a model writes is no markup.
    assert any("[bold]so far" in line for line in lines)


@pytest.mark.parametrize("width", [40, 59])
def test_panels_stand_above_each_other_in_a_narrow_terminal(width: int) -> None:
    lines = drawn(width, height=24)
    assert {len(line) for line in lines} == {width}
    assert len(lines) < 24
    assert [i for i, line in enumerate(lines) if "a second" in line] == [1, len(lines) // 2 + 1]
    assert [i for i, line in enumerate(lines) if "of 100" in line] == [len(lines) // 2 - 1, len(lines) - 1]


def test_of_a_long_text_the_end_is_seen_in_a_panel_that_fits_the_screen() -> None:
    lines = drawn(80, height=12, length=1000)
    assert len(lines) < 12
    assert (TEXT * 2)[:1000].splitlines()[-1][-10:] in "\n".join(lines)


def test_panels_have_colours_unless_they_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blue and orange of `plot.COLOURS`.
    coloured = "\n".join(drawn(80, color_system="truecolor"))
    assert "38;2;0;114;178" in coloured
    assert "38;2;213;94;0" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "38;2" not in "\n".join(drawn(80, color_system="truecolor"))


# On a terminal


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_on_a_terminal_both_panels_fill_until_it_is_interrupted_and_nothing_is_left() -> None:
    terminal = Terminal("race", "--checkpoint", "harbour", "--threads", "1", "-n", "1000000")
    wanted = re.compile(r" [1-9][\d,]* of 1,000,000 .* [1-9][\d,]* of 1,000,000 ")
    terminal.wait_for(lambda screen: wanted.search(unstyled(screen)) is not None)
    pids = children_of(terminal.program)
    assert len(pids) >= 2
    terminal.program.interrupt()
    assert terminal.finish() == 130
    assert "Traceback" not in terminal.screen
    # The cursor is back.
    assert terminal.screen.rindex("\x1b[?25h") > terminal.screen.rindex("\x1b[?25l")
    assert not any(is_there(pid) for pid in pids)


def children_of(program: Program) -> list[int]:
    """The two that race, of the processes that a program has started."""
    path = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    if not path.exists():
        pytest.skip("this system does not tell the children of a process")
    pids = map(int, path.read_text().split())
    return [pid for pid in pids if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


# What cannot be done


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "OLE 漢"), "'漢' at 4"),
        (("--temperature", "-1"), "temperature=-1.0"),
        (("--checkpoint", "nowhere"), "'nowhere'"),
        (("--save", "race.pdf"), ".svg, .png or .html"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(
    options: tuple[str, ...], sentence: str, replayed: type[ReplayedRace]
) -> None:
    if "--checkpoint" not in options:
        options = (*options, "--checkpoint", "harbour")
    assert sentence in run("race", *options, code=1).error


def test_one_that_ended_too_early_is_one_sentence(
    replayed: type[ReplayedRace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Iterator[Any]:
        raise RaceError("the process that writes by recompute has ended too early (signal 9): start the race again")

    monkeypatch.setattr(replayed, "run", fail)
    assert "has ended too early" in run("race", "--checkpoint", "harbour", code=1).error


# Files


def test_the_picture_has_the_characters_of_both_over_time(replayed: type[ReplayedRace]) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    run("race", "--save", "race.svg")
    root = ElementTree.parse("race.svg").getroot()
    points = {}
    for key in ("cached", "recomputed"):
        (group,) = [group for group in root.iter(f"{SVG}g") if group.get("id") == key]
        path = next(group.iter(f"{SVG}path")).get("d", "")
        points[key] = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]
    (x0, y0), (end, top) = points["recomputed"][0], points["recomputed"][-1]
    assert points["cached"][0] == (x0, y0)
    # As many characters in a quarter of the time.
    assert points["cached"][-1] == pytest.approx((x0 + (end - x0) / 4, top), abs=0.01)
    words = {"".join(text.itertext()).strip() for text in root.iter(f"{SVG}text")}
    assert words >= {"seconds", "characters written", "with the cache: 0.37 s, 100 a second"}


def test_the_page_has_text_numbers_and_json(replayed: type[ReplayedRace]) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    told = run("race", "--prompt", "OLE: ", "--seed", "7", "--save", "race.html", "--json").json
    page = Path("race.html").read_text(encoding="utf-8")
    embedded = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert embedded is not None
    assert json.loads(embedded[1]) == told
    assert "<svg" in page
    assert f"<pre>OLE: <b>{WRITTEN}</b></pre>" in page
    assert "<td>37</td><td>1.48</td><td>25</td>" in page
