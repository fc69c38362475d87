"""``minigpt explain text``: the bits are the model's, and all that is shown of them is theirs."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minigpt import evaluation
from minigpt.bench import random_model
from minigpt.cli.explain.text import percent
from minigpt.config import GPTConfig
from minigpt.explain import surprise
from minigpt.explain.surprise import KINDS, PLACES, Summary, Tally, binned, kind_of, lines
from minigpt.tokenizer import CharTokenizer
from tests.cli_support import (
    TEXT,
    Outcome,
    Program,
    Terminal,
    run,
    said_of_a_full_disk,
    trained,
    trained_checkpoint,
    unstyled,
)

# Backwards it is nothing that the model has learnt.
SOME = TEXT[:320] + TEXT[300:200:-1]

pytestmark = pytest.mark.usefixtures("own_run")


@pytest.fixture
def some(own_run: None) -> Path:
    Path("some.txt").write_text(SOME, encoding="utf-8")
    return Path("some.txt")


def explain(*arguments: str | Path, **options: Any) -> Outcome:
    return run("explain", "text", *arguments, "--checkpoint", trained(), **options)


def distributions(text: str) -> list[dict[str, float]]:
    """What the model expects after each beginning of a text, read anew from its start every time."""
    loaded = trained_checkpoint()
    ids = torch.tensor([loaded.tokenizer.encode(text)])
    with torch.inference_mode():
        found = loaded.model(ids)[0].double().softmax(dim=-1)
    return [dict(zip(loaded.tokenizer.chars, row, strict=True)) for row in found.tolist()]


# What is measured


def test_the_bits_are_those_of_the_whole_text_read_at_once() -> None:
    loaded = trained_checkpoint()
    found = list(lines(loaded.model, loaded.tokenizer, SOME))
    assert "".join(line.text for line in found) == SOME
    assert [line.number for line in found] == list(range(1, len(found) + 1))
    bits = np.concatenate([line.bits for line in found])
    assert math.isnan(bits[0])
    expected = [-math.log2(row[char]) for row, char in zip(distributions(SOME), SOME[1:], strict=False)]
    np.testing.assert_allclose(bits[1:], expected, atol=1e-4)


def test_a_long_text_goes_through_the_cache_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = trained_checkpoint()
    whole = list(lines(loaded.model, loaded.tokenizer, SOME, 3))
    monkeypatch.setattr("minigpt.evaluation.STREAM_CHUNK", 7)
    for left, right in zip(whole, lines(loaded.model, loaded.tokenizer, SOME, 3), strict=True):
        assert (left.number, left.text) == (right.number, right.text)
        np.testing.assert_allclose(left.bits, right.bits, atol=1e-4)
        np.testing.assert_allclose(left.probabilities, right.probabilities, atol=1e-5)


def test_the_mean_is_that_of_the_evaluation() -> None:
    loaded = trained_checkpoint()
    summary = Summary()
    for line in lines(loaded.model, loaded.tokenizer, TEXT):
        summary.add(line)
    losses = np.concatenate(
        list(evaluation.stream_losses(loaded.model, np.array(loaded.tokenizer.encode(TEXT), dtype=np.uint8)))
    )
    assert summary.whole.characters == len(losses) == len(TEXT) - 1
    assert summary.whole.bits * math.log(2) == pytest.approx(losses.sum(dtype=np.float64), rel=1e-6)


def test_the_runners_up_are_the_likeliest() -> None:
    loaded = trained_checkpoint()
    expected = distributions(SOME)
    position = 0
    for line in lines(loaded.model, loaded.tokenizer, SOME, 4):
        for column in range(len(line.text)):
            found = line.runners_up(column, 3)
            if position == 0:
                assert found == []
            else:
                best = sorted(expected[position - 1].values(), reverse=True)[:3]
                assert [share for _, share in found] == pytest.approx(best, abs=1e-5)
                for char, share in found:
                    assert expected[position - 1][char] == pytest.approx(share, abs=1e-5)
            position += 1


def test_no_more_runners_up_are_given_than_there_are_characters() -> None:
    model = random_model(GPTConfig(vocab_size=3, n_layer=1, n_head=1, n_embd=4, block_size=4, window=2))
    (line,) = lines(model, CharTokenizer("abc"), "abcab", 9)
    runners_up = line.runners_up(1, 9)
    assert sorted(char for char, _ in runners_up) == ["a", "b", "c"]
    assert sum(share for _, share in runners_up) == pytest.approx(1)


@pytest.mark.parametrize("text", ["ab", "\nb", "a\n", "\n\n", "a\nb\n", "ab\n\nc"])
def test_every_text_comes_back_in_lines(text: str) -> None:
    model = random_model(GPTConfig(vocab_size=4, n_layer=1, n_head=1, n_embd=4, block_size=4, window=2))
    found = list(lines(model, CharTokenizer("\nabc"), text))
    assert [line.text for line in found] == text.splitlines(keepends=True)
    assert sum(line.characters for line in found) == len(text) - 1
    assert found[0].bits_per_char == (None if len(found[0].text) == 1 else found[0].total / found[0].characters)


def test_one_character_cannot_be_predicted() -> None:
    loaded = trained_checkpoint()
    with pytest.raises(ValueError, match="1 characters"):
        next(lines(loaded.model, loaded.tokenizer, "M"))


def test_a_summary_counts_every_bit_once() -> None:
    loaded = trained_checkpoint()
    summary, bits = Summary(), []
    for line in lines(loaded.model, loaded.tokenizer, SOME):
        summary.add(line)
        bits += line.bits.tolist()
    for tallies in (summary.kinds, summary.chars):
        assert sum(tally.bits for tally in tallies.values()) == pytest.approx(sum(bits[1:]))
        assert sum(tally.characters for tally in tallies.values()) == len(SOME) - 1
    for char, tally in summary.chars.items():
        assert tally.characters == SOME[1:].count(char)
        assert tally.bits == pytest.approx(sum(b for b, c in zip(bits[1:], SOME[1:], strict=True) if c == char))
    costs = [tally.bits for _, tally in summary.costliest_chars]
    assert costs == sorted(costs, reverse=True)
    # The places are the largest, each with what stood before it.
    assert [place.bits for place in summary.places] == sorted(bits[1:], reverse=True)[:PLACES]
    starts = [0, *(i + 1 for i, char in enumerate(SOME) if char == "\n")]
    for place in summary.places:
        at = starts[place.line - 1] + place.column - 1
        assert (SOME[at], bits[at]) == (place.char, place.bits)
        assert SOME[:at].endswith(place.before)
        assert len(place.before) == min(at, surprise.CONTEXT)


def test_the_costliest_lines_are_those_with_the_highest_means() -> None:
    loaded = trained_checkpoint()
    summary, means = Summary(), {}
    for line in lines(loaded.model, loaded.tokenizer, TEXT):
        summary.add(line)
        if line.characters >= surprise.FEWEST_IN_LINE:
            means[line.number] = line.bits_per_char or 0.0
    found = summary.costliest_lines
    assert [each.line for each in found] == sorted(means, key=lambda n: -means[n])[: surprise.COSTLIEST_LINES]
    assert all(TEXT.splitlines(keepends=True)[each.line - 1].startswith(each.start) for each in found)


@pytest.mark.parametrize(
    ("before", "char", "kind"),
    [
        (" ", "T", "word starts"),
        ("T", "h", "inside words"),
        ("'", "s", "word starts"),
        ("a", "\u00e9", "inside words"),
        ("1", "2", "digits"),
        ("a", " ", "spaces"),
        ("a", "\t", "spaces"),
        ("a", "\n", "line breaks"),
        ("a", "'", "punctuation"),
        ("a", "\x01", "others"),
    ],
)
def test_kinds_of_characters(before: str, char: str, kind: str) -> None:
    assert kind_of(before, char) == kind
    assert kind in KINDS


def test_neighbouring_lines_are_put_together_in_a_long_text() -> None:
    tallies = [Tally(1, 2.0), Tally(3, 2.0), Tally(0, 0.0), Tally(0, 0.0), Tally(5, 5.0)]
    assert binned(tallies, 5) == (1, [2.0, 2 / 3, None, None, 1.0])
    assert binned(tallies, 3) == (2, [1.0, None, 1.0])


@pytest.mark.parametrize(
    ("share", "words"),
    [(1.0, "100.0%"), (0.4021, "40.2%"), (0.01, "1.0%"), (0.0031, "0.31%"), (0.00009, "<0.01%"), (0.0, None)],
)
def test_probabilities_in_words(share: float, words: str | None) -> None:
    assert percent(share) == (words or "<0.01%")


# The command in a pipe


def test_in_a_pipe_each_line_has_its_bits_beside_and_under_it(some: Path) -> None:
    done = explain(some)
    told = explain(some, "--json").json
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    shown = done.stdout.splitlines()
    shown = shown[: shown.index("", shown.index("line  bits"))]
    rows = {int(row[:4]): i for i, row in enumerate(shown) if re.match(r" *\d+ +(\d+\.\d+|-)  ", row[:12])}
    for line in told["lines"]:
        row, marks = shown[rows[line["line"]] :][:2]
        assert row.startswith(f"{line['line']:>4} {line['bits_per_char']:5.2f}  ")
        assert row[12:] == line["text"].replace("\n", "\u21b5")[: 80 - 12]
        expected = "".join(str(min(int(bits or 0), 9)) if (bits or 0) >= 1 else " " for bits in line["bits"])[: 80 - 12]
        if expected.strip():
            assert marks == (" " * 12 + expected).rstrip()


def test_the_json_holds_what_is_shown(some: Path) -> None:
    done = explain(some, "--json")
    assert done.stdout.count("\n") == 1
    told, shown = done.json, explain(some).stdout
    losses = run("eval", some, "--all", "--checkpoint", trained(), "--json").json
    assert told["bits_per_char"] == pytest.approx(losses["bits_per_char"], rel=1e-6)
    assert told["characters"] == losses["characters"]
    assert f"some.txt: {told['bits_per_char']:.4f} bits a character" in shown
    assert f"over {told['characters']:,} characters" in " ".join(shown.split())
    for kind in told["kinds"]:
        if kind["characters"]:
            share = f"{kind['bits'] / told['bits']:.1%}"
            numbers = f"{kind['characters']} +{kind['bits_per_char']:.2f} +{re.escape(share)}"
            assert re.search(rf"^{kind['kind']} +{numbers}$", shown, re.MULTILINE)
    for place in told["places"]:
        assert re.search(rf"^ *{place['line']}:{place['column']} +{place['bits']:.2f}  ", shown, re.MULTILINE)
    assert len(told["places"]) == PLACES
    assert "likeliest" not in told["lines"][0]


def test_runners_up_are_listed_where_they_are_asked_for(some: Path) -> None:
    told = explain(some, "--top", "2", "--json").json
    shown = explain(some, "--top", "2").stdout
    listed = re.findall(r"^ {12}(\d+): (.) ([\d.]+) bits, (\S+%);  (.) (\S+%)  (.) (\S+%)$", shown, re.MULTILINE)
    expected = []
    for line in told["lines"]:
        bits = [value or 0.0 for value in line["bits"]]
        columns = sorted(sorted((i for i in range(len(bits)) if bits[i] >= 3), key=lambda i: -bits[i])[:3])
        for i in columns:
            likeliest = [part for char, share in line["likeliest"][i] for part in (char, percent(share))]
            row = (str(i + 1), line["text"][i], f"{bits[i]:.1f}", percent(2 ** -bits[i]), *likeliest)
            expected.append(tuple(part.replace("\n", "\u21b5").replace(" ", "\u2423") for part in row))
    assert listed == expected
    assert len(listed) > 5
    assert "%;" not in explain(some).stdout


@pytest.mark.parametrize("width", [40, 80, 250])
def test_nothing_is_wider_than_the_terminal_and_nothing_of_the_text_is_lost(
    width: int, some: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, explain(some, "--top", "5").stdout.splitlines())) <= width
    shown = explain(some).stdout.splitlines()
    assert max(map(len, shown)) <= width
    start = shown.index("line  bits") + 1
    rows = [row[12:] for row in shown[start : shown.index("", start)] if re.search(r"[^\d ]", row[12:])]
    assert "".join(rows) == SOME.replace("\n", "\u21b5")


def test_text_is_not_taken_for_markup(some: Path) -> None:
    assert "0 MARGIT: The [bold]tide[/bold] came in :smile:" in explain(some).stdout


def test_wide_and_odd_characters_keep_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from minigpt.cli.explain.screen import screen
    from minigpt.cli.explain.text import _Screen

    monkeypatch.setenv("COLUMNS", "40")
    line = surprise.Line(
        7,
        "a\u6f22b\tc\x01\n",
        np.array([1, 2.5, 0.2, 3, 12, 4, 5], np.float32),
        ("a",) * 7,
        np.full((7, 1), 0.5, np.float32),
    )
    written: list[str] = []
    on_screen = _Screen(screen(), line.text, 0)
    monkeypatch.setattr("minigpt.console.write", written.append)
    on_screen.show_line(line)
    assert "".join(written) == "   7  3.96  a\u6f22b\u2192c\ufffd\u21b5\n            12  3945\n"


# The command on a terminal


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_terminal_sees_colours_and_no_marks(some: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal("explain", "text", "some.txt", "--checkpoint", str(trained()))
    assert terminal.finish() == 0
    shown = unstyled(terminal.screen)
    assert "\x1b[" in terminal.screen
    assert "bits  0  1  2  3  4  5  6  7  8+" in shown
    assert "Under each character" not in shown
    assert "0 MARGIT: The [bold]tide[/bold] came in :smile:" in shown
    # The same totals as in a pipe.
    assert shown.partition("some.txt: ")[2] == explain(some).stdout.partition("some.txt: ")[2]


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_no_color_is_respected(some: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    program = Program(
        *("explain", "text", "some.txt", "--checkpoint", str(trained())),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={"NO_COLOR": "1", "COLUMNS": "80"},
    )
    os.close(slave)
    shown = b""
    while piece := _read(master):
        shown += piece
    os.close(master)
    assert program.wait() == 0
    assert b"[38;" not in shown
    assert b"[48;" not in shown
    assert unstyled(shown.decode("utf-8")) == explain(some).stdout


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        # Linux says so when the last program has left the terminal.
        return b""


# Where the text comes from


def test_standard_input_and_encodings_are_read(some: Path) -> None:
    wanted = explain(some, "--json").json
    for arguments, data in (((), SOME.encode()), (("--encoding", "latin-1"), SOME.encode("latin-1"))):
        told = explain("-", *arguments, "--json", stdin=data).json
        assert told == wanted | {"file": "-"}
    assert "standard input: " in explain("-", stdin=SOME).stdout


def test_unknown_characters_can_be_dropped(some: Path) -> None:
    Path("other.txt").write_text(SOME[:50] + "\u6f22\u6f22\u5b57" + SOME[50:], encoding="utf-8")
    done = explain("other.txt", "--skip-unknown", "--json")
    assert done.json == explain(some, "--json").json | {"file": "other.txt", "dropped": 3}
    assert "'\u6f22' at 50" in done.stderr


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (SOME[:50] + "\u6f22", (), "'\u6f22' at 50 (positions count from 0): leave them out, or use --skip-unknown"),
        ("", (), "is empty"),
        ("M", (), "knows 1 of"),
        ("\u6f22", ("--skip-unknown",), "knows 0 of"),
        (SOME, ("--encoding", "klingon"), "klingon"),
        (SOME, ("--checkpoint", "nowhere"), "nowhere"),
        (SOME, ("--save", "text.pdf"), "end it in .svg, .png or .html"),
        (SOME, ("--save", "no/text.html"), "there is no folder 'no'"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(content: str, arguments: tuple[str, ...], words: str) -> None:
    Path("text.txt").write_text(content, encoding="utf-8")
    checkpoint = () if "--checkpoint" in arguments else ("--checkpoint", "harbour")
    done = run("explain", "text", "text.txt", *arguments, *checkpoint, code=1)
    assert done.stdout == ""
    # With --skip-unknown it says first what it dropped.
    *notes, error = done.stderr.splitlines()
    assert all(note.startswith("dropped") for note in notes)
    assert error.startswith("minigpt: ")
    assert words in error


def test_a_missing_file_and_a_folder_are_each_a_sentence() -> None:
    assert "missing.txt" in explain("missing.txt", code=1).error
    Path("folder").mkdir()
    assert "'folder' is a folder" in explain("folder", code=1).error


def test_a_negative_top_and_no_file_are_wrong_command_lines() -> None:
    assert "--top" in explain("harbour.txt", "--top", "-1", code=2).usage
    assert "FILE" in explain(code=2).usage


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence() -> None:
    said = said_of_a_full_disk("explain", "text", "harbour.txt", "--checkpoint", str(trained()))
    assert said == "minigpt: cannot write to standard output: No space left on device\n"


# Files


def test_the_picture_shows_every_line_and_kind(some: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    from tests.test_plot import words_of

    done = explain(some, "--save", "text.svg")
    assert done.stderr == "written to text.svg\n"
    told = explain(some, "--json").json
    words = words_of(Path("text.svg"))
    assert words >= {"line of the text", "bits a character", "% of all bits", "word starts", "inside words", "a line"}
    assert f"the whole text: {told['bits_per_char']:.2f}" in words
    svg = Path("text.svg").read_text(encoding="utf-8")
    (curve,) = re.findall(r'<g id="by-line">\s*<path d="(.*?)"', svg, re.DOTALL)
    points = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", curve)]
    means = [line["bits_per_char"] for line in told["lines"]]
    assert len(points) == len(means)
    # On a linear scale that counts downwards.
    (low, high), (bottom, top) = sorted((means[0], means[1])), sorted((points[0], points[1]), reverse=True)
    for point, mean in zip(points, means, strict=True):
        assert point == pytest.approx(bottom + (top - bottom) * (mean - low) / (high - low), abs=0.01)


def test_a_png_is_written(some: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    explain(some, "--save", "text.png")
    assert Path("text.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


class Spans(HTMLParser):
    """The characters of the text in a page, with their class and title."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.outside: list[str] = []
        self._attributes: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._attributes = dict(attrs) if tag == "span" and "title" in dict(attrs) else None
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._attributes = None

    def handle_data(self, data: str) -> None:
        if self._attributes is not None:
            attributes = self._attributes
            self.found.append((data, attributes.get("class") or "", attributes["title"] or ""))


def test_the_page_has_every_character_with_its_bits_and_runners_up(some: Path) -> None:
    done = explain(some, "--save", "text.html", "--json")
    page = Path("text.html").read_text(encoding="utf-8")
    spans = Spans()
    spans.feed(page)
    assert spans.outside == []
    assert "http" not in page
    assert "".join(char for char, _, _ in spans.found) == SOME.replace("\n", "\u21b5")
    told = done.json
    bits = [value for line in told["lines"] for value in line["bits"]]
    likeliest = [value for line in told["lines"] for value in line["likeliest"]]
    assert spans.found[0][2] == "the first character is not predicted"
    for (_, name, title), value, expected in zip(spans.found[1:], bits[1:], likeliest[1:], strict=True):
        assert name == f"b{min(round(2 * value), 16)}"
        assert f" {value:.2f} bits, {percent(2**-value)}; likeliest " in title
        assert len(expected) == 3
        assert title.endswith(percent(expected[-1][1]))
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(embedded) == told | {"lines_in_all": len(told["lines"])}


def test_the_page_of_a_long_text_shows_its_start_and_says_so(some: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By its name the command would be found.
    monkeypatch.setattr(importlib.import_module("minigpt.cli.explain.text"), "MOST_ON_PAGE", 100)
    done = explain(some, "--save", "text.html")
    page = Path("text.html").read_text(encoding="utf-8")
    spans = Spans()
    spans.feed(page)
    assert "".join(char for char, _, _ in spans.found) == SOME[:100].replace("\n", "\u21b5")
    assert f"the first 100 of {len(SOME)} characters" in page
    # Nothing is cut elsewhere, and runners-up are listed on the screen only where they are asked for.
    assert done.stdout == explain(some).stdout
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(embedded)["characters"] == len(SOME) - 1
