"""``minigpt explain attention``: what it shows is what the model computes, and it can be read everywhere."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from torch import Tensor, nn
from torch.nn import functional

from minigpt.cli.explain import attention_text
from minigpt.cli.explain.signs import Signs
from minigpt.config import GPTConfig
from minigpt.errors import ConfigError, PromptError
from minigpt.explain.attention import (
    MOST_CHARS,
    Attention,
    explain_attention,
    explain_step,
    explain_toy,
    furthest,
    stages,
)
from minigpt.model import GPT, attention_weights
from tests.cli_support import Screen, run, trained_checkpoint, unstyled

# Longer than the window of 16.
PROMPT = "MARGIT: The tide came in"
SVG = "{http://www.w3.org/2000/svg}"

pytestmark = pytest.mark.usefixtures("own_run")


def seen_in(text: str, layer: int | None = None, head: int | None = None) -> Attention:
    checkpoint = trained_checkpoint()
    return explain_attention(checkpoint.model, checkpoint.tokenizer.encode(text), layer, head)


def explain(*arguments: str | Path, code: int | None = 0) -> Any:
    return run("explain", "attention", "--checkpoint", "harbour", *arguments, code=code)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the width of the terminal or pipe."""
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


# The numbers


def test_every_head_is_there_and_its_rows_sum_to_one_over_what_the_window_leaves() -> None:
    seen = seen_in(PROMPT)
    assert [(head.layer, head.head) for head in seen.heads] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert seen.readable.tolist() == [min(n, 16) for n in range(1, len(PROMPT) + 1)]
    for head in (*seen.heads, seen.uniform):
        torch.testing.assert_close(head.weights.sum(dim=-1), torch.ones(len(PROMPT)))
        for i in range(len(PROMPT)):
            assert (head.weights[i, i + 1 :] == 0).all()
            assert (head.weights[i, : max(0, i - 15)] == 0).all()
            assert (head.weights[i, max(0, i - 15) : i + 1] > 0).all()


def test_the_weights_are_those_of_the_models_layers_and_heads() -> None:
    seen = seen_in(PROMPT)
    for head in seen.heads:
        layer = seen.layers[head.layer - 1]
        read = head.weights @ layer.v[head.head - 1]
        torch.testing.assert_close(read, layer.y[head.head - 1], rtol=0, atol=1e-6)
    (one,) = seen_in(PROMPT, 2, 1).heads
    assert torch.equal(one.weights, seen.heads[2].weights)
    assert [(head.layer, head.head) for head in seen_in(PROMPT, layer=2).heads] == [(2, 1), (2, 2)]
    assert [(head.layer, head.head) for head in seen_in(PROMPT, head=2).heads] == [(1, 2), (2, 2)]


def test_the_uniform_average_reads_all_alike_and_has_the_most_bits() -> None:
    seen = seen_in(PROMPT)
    n = seen.readable
    torch.testing.assert_close(seen.uniform.weights, seen.mask / n[:, None])
    torch.testing.assert_close(seen.uniform.entropy, n.double().log2(), rtol=0, atol=1e-6)
    torch.testing.assert_close(seen.uniform.distance, (n.double() - 1) / 2, rtol=0, atol=1e-5)
    for head in seen.heads:
        assert (seen.departure(head) > -1e-6).all()
        assert float(seen.departure(head).mean()) > 0.01


def test_entropy_departure_and_distance_are_what_their_names_say() -> None:
    seen = seen_in(PROMPT)
    for head in seen.heads:
        for i in (0, 7, 23):
            p = [float(weight) for weight in head.weights[i] if weight > 0]
            assert float(head.entropy[i]) == pytest.approx(-sum(x * math.log2(x) for x in p), abs=1e-9)
            divergence = sum(x * math.log2(x * len(p)) for x in p)
            assert float(seen.departure(head)[i]) == pytest.approx(divergence, abs=1e-6)
            back = sum(float(weight) * (i - j) for j, weight in enumerate(head.weights[i]))
            assert float(head.distance[i]) == pytest.approx(back, abs=1e-9)


def test_the_furthest_head_is_the_one_with_the_fewest_bits() -> None:
    seen = seen_in(PROMPT)
    assert furthest(seen) is min(seen.heads, key=lambda head: float(head.entropy.mean()))
    assert furthest(seen, 5) is min(seen.heads, key=lambda head: float(head.entropy[4]))


def test_the_stages_are_those_of_the_formula_with_the_mask_before_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    way = stages(q, k, mask)
    products = torch.einsum("htd,hsd->hts", q, k)
    torch.testing.assert_close(way.scores, products)
    torch.testing.assert_close(way.scaled, products / 8**0.5)
    assert (way.masked[:, ~mask] == -math.inf).all()
    assert torch.equal(way.masked[:, mask], way.scaled[:, mask])
    assert torch.equal(way.weights, attention_weights(q, k, mask))
    torch.testing.assert_close(way.weights, way.masked.exp() / way.masked.exp().sum(dim=-1, keepdim=True))


@pytest.mark.parametrize("position", [0, 8, 23])
def test_a_step_is_a_row_of_its_head_and_ends_at_what_the_model_gave(position: int) -> None:
    seen = seen_in(PROMPT)
    for head in seen.heads:
        taken = explain_step(seen, head, position)
        torch.testing.assert_close(taken.stages.weights, head.weights[position], rtol=0, atol=1e-6)
        torch.testing.assert_close(taken.stages.scores, taken.keys @ taken.query, rtol=0, atol=1e-4)
        torch.testing.assert_close(taken.parts.sum(dim=0), taken.output, rtol=0, atol=1e-6)
        assert torch.equal(taken.model_output, seen.layers[head.layer - 1].y[head.head - 1, position])
        assert 0 <= taken.gap < 1e-6
        assert taken.entropy == pytest.approx(float(head.entropy[position]), abs=1e-5)


def test_in_float64_every_step_of_every_head_ends_at_what_the_model_gave_to_its_rounding(tiny_model: GPT) -> None:
    seen = explain_attention(tiny_model, [1, 2, 3, 4, 5, 6, 0, 1])
    for head in seen.heads:
        for position in range(8):
            taken = explain_step(seen, head, position)
            assert taken.output.dtype == torch.float64
            assert taken.gap < 1e-13


def test_a_gap_is_found_where_the_model_gave_something_else() -> None:
    seen = seen_in(PROMPT)
    with torch.inference_mode():
        seen.layers[0].y[0, 3, 2] += 0.5
    assert explain_step(seen, seen.heads[0], 3).gap == pytest.approx(0.5, abs=1e-5)
    assert explain_step(seen, seen.heads[0], 4).gap < 1e-6


def test_the_toy_gives_what_the_chapters_lines_give() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    toy = explain_toy(5)
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        x = torch.randn(2, 4, 6)
        key, query, value = nn.Linear(6, 16, bias=False), nn.Linear(6, 16, bias=False), nn.Linear(6, 16, bias=False)
        k, q, v = key(x), query(x), value(x)
        wei = q @ k.transpose(-2, -1) * 16**-0.5
        tril = torch.tril(torch.ones(4, 4))
        wei = functional.softmax(wei.masked_fill(tril == 0, float("-inf")), dim=-1)
        out = wei @ v
    pairs: list[tuple[Tensor, Tensor]] = [(toy.x, x), (toy.q, q), (toy.k, k), (toy.v, v)]
    for ours, theirs in (*pairs, (toy.stages.weights, wei), (toy.out, out)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(toy.uniform, tril / tril.sum(dim=1, keepdim=True))
    assert toy.gap < 1e-6
    assert not torch.equal(explain_toy(6).x, toy.x)


def test_bad_arguments_are_told_what_there_is() -> None:
    for wrong, sentence in (
        ({"layer": 3}, "layer 3 does not exist: this model has layers 1 to 2"),
        ({"layer": 0}, "layer 0 does not exist"),
        ({"head": 9}, "head 9 does not exist: this model has heads 1 to 2"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            seen_in(PROMPT, **wrong)
    seen = seen_in(PROMPT)
    for position in (24, 25, -1):
        with pytest.raises(ConfigError, match=f"position {position} does not exist: this text has positions 0 to 23"):
            explain_step(seen, seen.heads[0], position)
    with pytest.raises(PromptError, match=r"1,001 characters.*at most 1,000"):
        seen_in("M" * (MOST_CHARS + 1))
    one = GPT(GPTConfig(vocab_size=3, n_layer=1, n_head=1, n_embd=4, block_size=4, window=2))
    with pytest.raises(ConfigError, match=r"this model has one layer$"):
        explain_attention(one, [0, 1], layer=2)


# The command: JSON


def test_json_holds_every_weight_and_what_is_said_of_each_head() -> None:
    told = explain("--prompt", PROMPT, "--json").json
    seen = seen_in(PROMPT)
    assert told["prompt"] == PROMPT
    assert (told["window"], told["head_dim"]) == (16, 16)
    assert told["readable"] == seen.readable.tolist()
    assert told["uniform"]["weight"] == [round(1 / n, 7) for n in told["readable"]]
    assert told["uniform"]["entropy"] == pytest.approx([math.log2(n) for n in told["readable"]], abs=1e-6)
    assert len(told["heads"]) == 4
    for each, head in zip(told["heads"], seen.heads, strict=True):
        assert (each["layer"], each["head"]) == (head.layer, head.head)
        torch.testing.assert_close(torch.tensor(each["weights"]), head.weights, rtol=0, atol=1e-7)
        assert all(weight == 0 for i, row in enumerate(each["weights"]) for weight in row[i + 1 :])
        assert each["mean_entropy"] == pytest.approx(float(head.entropy.mean()))
        assert each["mean_departure"] == pytest.approx(told["uniform"]["mean_entropy"] - each["mean_entropy"])
        assert each["mean_distance"] == pytest.approx(float(head.distance.mean()))


def test_json_of_one_layer_and_head_has_that_alone() -> None:
    heads = explain("--prompt", PROMPT, "--layer", "2", "--head", "1", "--json").json["heads"]
    assert [(head["layer"], head["head"]) for head in heads] == [(2, 1)]


def test_json_of_a_step_has_every_number_of_the_way() -> None:
    told = explain("--prompt", PROMPT, "--step", "--position", "20", "--layer", "1", "--head", "2", "--json").json
    seen = seen_in(PROMPT)
    taken = explain_step(seen, seen.heads[1], 20)
    assert (told["layer"], told["head"], told["position"], told["char"]) == (1, 2, 20, PROMPT[20])
    for name, exact in (
        *(("query", taken.query), ("keys", taken.keys), ("values", taken.values)),
        *(("scores", taken.stages.scores), ("scaled", taken.stages.scaled), ("weights", taken.stages.weights)),
        *(("output", taken.output), ("model_output", taken.model_output)),
    ):
        torch.testing.assert_close(torch.tensor(told[name]), exact, rtol=0, atol=0)
    assert [score is None for score in told["masked"]] == [not 5 <= j <= 20 for j in range(24)]
    assert told["gap"] == taken.gap < 1e-6


def test_json_of_the_toy_has_its_shapes() -> None:
    told = run("explain", "attention", "--toy", "--seed", "3", "--json").json
    assert (told["seed"], told["shape"], told["head_size"]) == (3, [2, 4, 6], 16)
    toy = explain_toy(3)
    for name, exact in (("x", toy.x), ("q", toy.q), ("weights", toy.stages.weights), ("out", toy.out)):
        torch.testing.assert_close(torch.tensor(told[name]), exact, rtol=0, atol=0)
    assert told["masked"][0][0][1:] == [None] * 3
    # The same without a model anywhere.
    assert told["weights"][1][3] == pytest.approx(toy.stages.weights[1, 3].tolist())


# The command: text


def test_the_numbers_are_those_of_the_json_and_the_rest_of_a_row_is_summed_up(wide: Callable[[int], None]) -> None:
    wide(250)
    weights = explain("--prompt", PROMPT, "--layer", "2", "--head", "1", "--json").json["heads"][0]["weights"]
    shown = explain("--prompt", PROMPT, "--layer", "2", "--head", "1", "--numbers").stdout
    rows = re.findall(r"^ *(\d+) (.)((?: \d\.\d{4}){24})   (\d\.\d{4})  (\d\.\d\d)$", shown, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(24))
    for i, (_, char, numbers, uniform, bits) in enumerate(rows):
        assert char == PROMPT[i].replace(" ", "␣")
        assert numbers.split() == [f"{weight:.4f}" for weight in weights[i]]
        assert sum(map(float, numbers.split())) == pytest.approx(1, abs=24 * 5e-5)
        assert set(numbers.split()[i + 1 :]) <= {"0.0000"}
        assert uniform == f"{1 / min(i + 1, 16):.4f}"
        assert float(bits) == pytest.approx(-sum(p * math.log2(p) for p in weights[i] if p), abs=0.006)
    wide(80)
    shown = explain("--prompt", PROMPT, "--layer", "2", "--head", "1", "--numbers").stdout
    assert "the last 7 of 24 characters" in shown
    rows = re.findall(r"^ *(\d+) . +(\d\.\d{4})((?: \d\.\d{4}){7}) ", shown, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(17, 24))
    for number, earlier, numbers in rows:
        row = weights[int(number)]
        assert float(earlier) == pytest.approx(sum(row[:17]), abs=1e-4)
        assert numbers.split() == [f"{weight:.4f}" for weight in row[17:]]


def test_one_head_is_a_triangle_beside_the_uniform_average() -> None:
    shown = explain("--prompt", "The tide", "--layer", "1", "--head", "2").stdout
    head = seen_in("The tide", 1, 2).heads[0]
    lines = shown.splitlines()
    assert re.fullmatch(r"layer 1, head 2 +uniform average", lines[2])
    assert re.fullmatch(r" +T h e ␣ t i d e +bits +T h e ␣ t i d e +bits", lines[3])
    symbols = " .:-=+*#%@"
    for i in range(8):
        row = r"((?:\S ){" + str(i + 1) + r"}) +(\d\.\d\d)"
        ((label, cells, bits, uniform, most),) = re.findall(rf"^(\d .) {row} {row}$", lines[4 + i])
        assert label == f"{i} {'The␣tide'[i]}"
        expected = [symbols[max(1, min(int(10 * math.sqrt(float(w))), 9))] for w in head.weights[i, : i + 1]]
        assert cells.split() == expected
        assert len(set(uniform.split())) == 1
        assert (bits, most) == (f"{float(head.entropy[i]):.2f}", f"{math.log2(i + 1):.2f}")
    assert f"{float(head.entropy.mean()):.2f}" in shown


def test_all_heads_are_shown_small_with_characters_on_both_axes() -> None:
    shown = explain("--prompt", "The tide came in").stdout
    seen = seen_in("The tide came in")
    titles = [f"L{head.layer} H{head.head} {float(head.entropy.mean()):.2f} bits" for head in seen.heads]
    for title in titles:
        assert title in shown
    assert shown.count("The␣tide␣came␣in") == 1 + 1 + 4
    lines = shown.splitlines()
    first = next(i for i, line in enumerate(lines) if titles[0] in line)
    assert [line[0] for line in lines[first + 2 : first + 18]] == list("The␣tide␣came␣in")
    far, close = furthest(seen), max(seen.heads, key=lambda head: float(head.entropy.mean()))
    assert f"Furthest from the uniform average: layer {far.layer}, head {far.head}, by" in shown
    assert f"Closest to the uniform average: layer {close.layer}, head {close.head}, by" in shown


def test_the_window_is_seen_in_a_text_that_is_longer() -> None:
    lines = explain("--prompt", PROMPT, "--layer", "1", "--head", "1").stdout.splitlines()
    last = next(line for line in lines if line.startswith("23 n "))
    # Eight characters that are too old, then the window.
    assert re.match(r"23 n {9}\S{16} ", last)
    assert any("the window of 16" in line for line in lines)


def test_a_step_shows_each_stage_and_both_outputs() -> None:
    shown = explain("--prompt", PROMPT, "--step", "--layer", "1", "--head", "2", "--position", "19").stdout
    told = explain("--prompt", PROMPT, "--step", "--layer", "1", "--head", "2", "--position", "19", "--json").json
    assert "How 'm', position 19 of 0 to 23, reads: layer 1, head 2, head_dim D = 16" in shown
    assert f"{told['query'][0]:.4f}" in shown
    rows = re.findall(r"^ *(\d+) . +(\S+) +(\S+) +(\S+) +(0\.\d{4}|1\.0000) +(0\.\d{4})(?:  #*)?$", shown, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(24))
    for number, score, scaled, masked, weight, uniform in rows:
        j = int(number)
        assert (score, scaled) == (f"{told['scores'][j]:.4f}", f"{told['scaled'][j]:.4f}")
        assert masked == ("-inf" if told["masked"][j] is None else f"{told['masked'][j]:.4f}")
        assert (weight, uniform) == (f"{told['weights'][j]:.4f}", f"{told['uniform'][j]:.4f}")
    for name, numbers in (("sum", told["output"]), ("the model", told["model_output"])):
        (line,) = re.findall(rf"^ +{name} = (.*) \.\.\. \d+ more$", shown, re.MULTILINE)
        assert line.split() == [f"{number:.4f}" for number in numbers[: len(line.split())]]
    assert f"{told['gap']:.1e}" in shown
    assert "log2(16) = 4.00" in shown


def test_a_step_is_of_the_last_position_and_the_head_that_departs_most_there() -> None:
    far = furthest(seen_in(PROMPT), 23)
    told = explain("--prompt", PROMPT, "--step", "--json").json
    assert (told["position"], told["layer"], told["head"]) == (23, far.layer, far.head)


def test_of_many_keys_a_step_lists_the_largest_and_sums_up_the_others() -> None:
    prompt = PROMPT * 3
    shown = explain("--prompt", prompt, "--step", "--layer", "1", "--head", "1", "--position", "59").stdout
    # All of the window of 16 fits; of 44 older and 12 later keys four each are listed.
    assert "40 more keys older than the window: masked, weight 0" in shown
    assert "8 more keys later: masked, weight 0" in shown
    assert len(re.findall("-inf", shown)) == 8


def test_the_toy_shows_every_line_with_its_numbers_and_shapes() -> None:
    shown = run("explain", "attention", "--toy", "--seed", "5").stdout
    toy = explain_toy(5)
    for line in (
        *("x = torch.randn(B, T, C)  # (2, 4, 6)", "q = query(x)  # (2, 4, 16)", "out = wei @ v  # (2, 4, 16)"),
        *("wei = q @ k.transpose(-2, -1)  # (2, 4, 4)", "wei = wei / 16 ** 0.5  # (2, 4, 4)"),
        *("wei = wei.masked_fill(tril == 0, -inf)  # (2, 4, 4)", "wei = wei.softmax(dim=-1)  # (2, 4, 4)"),
        "torch.manual_seed(5)",
    ):
        assert line in shown
    for numbers in (toy.x, toy.stages.scores, toy.stages.scaled, toy.stages.weights, toy.out[..., :8]):
        for number in numbers.flatten().tolist():
            assert f"{number:.4f}" in shown
    assert "-inf" in shown
    assert run("explain", "attention", "--toy", "--numbers", "--seed", "5").stdout == shown


@pytest.mark.parametrize("columns", [40, 80, 250])
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--layer", "1"),
        ("--layer", "1", "--head", "1"),
        ("--numbers", "--layer", "2"),
        ("--step",),
        ("--toy",),
        ("--layer", "1", "--head", "1", "--prompt", PROMPT * 10),
        ("--prompt", PROMPT * 10),
        ("--prompt", "M"),
    ],
)
def test_a_pipe_of_any_width_gets_plain_lines_that_fit(
    columns: int, arguments: tuple[str, ...], wide: Callable[[int], None]
) -> None:
    wide(columns)
    done = explain(*arguments) if "--toy" not in arguments else run("explain", "attention", *arguments)
    assert "\x1b" not in done.stdout
    assert done.stdout.strip()
    assert all(len(line) <= columns for line in done.stdout.splitlines())
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.parametrize("columns", [40, 80, 250])
def test_wide_characters_keep_the_columns_in_line(
    columns: int, wide: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    wide(columns)
    text = "漢字 a\nb漢"
    seen = explain_attention(trained_checkpoint().model, [1, 2, 3, 4, 5, 6, 7])
    one = explain_attention(trained_checkpoint().model, [1, 2, 3, 4, 5, 6, 7], 1, 1)
    attention_text.show_weights(text, seen, numbers=False)
    attention_text.show_weights(text, one, numbers=True)
    attention_text.show_step(text, seen, explain_step(seen, seen.heads[0], 6))
    assert max(cell_len(line) for line in capsys.readouterr().out.splitlines()) <= columns
    attention_text.show_weights(text, one, numbers=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= columns
    start = next(i for i, line in enumerate(lines) if line.startswith("layer 1, head 1")) + 1
    axis, *rows = [
        [part for char in line for part in (char, "")[: cell_len(char)]] for line in lines[start : start + 8]
    ]
    # A position, a space, two columns for the character that reads, a space; then two columns for each key.
    assert axis[5:19] == ["漢", "", "字", "", "␣", " ", "a", " ", "↵", " ", "b", " ", "漢", ""]
    for i, row in enumerate(rows):
        assert row[2] == axis[5 + 2 * i]
        assert [row[5 + 2 * j] != " " for j in range(7)] == [j <= i for j in range(7)]


def test_a_long_text_says_how_much_of_it_is_shown(wide: Callable[[int], None]) -> None:
    wide(80)
    large = explain("--prompt", PROMPT * 10, "--layer", "1", "--head", "1").stdout
    # 80 less six for the position and its character and five each for two entropies.
    assert "the last 64 of 240 characters, as many as fit" in " ".join(large.split())
    assert len(re.findall(r"^[12]\d\d \S ", large, re.MULTILINE)) == 64
    # Two heads side by side, each with two columns for the character that reads.
    small = explain("--prompt", PROMPT * 10).stdout
    assert "the last 37 of 240 characters, as many as fit" in " ".join(small.split())


def test_without_a_prompt_the_model_writes_one_always_the_same() -> None:
    told = explain("--json").json
    assert len(told["prompt"]) == 16
    assert explain("--json").json == told
    assert explain("--numbers", "--json").json["prompt"] == told["prompt"][:8]


@pytest.mark.parametrize("term", ["xterm-256color", "xterm-truecolor", "xterm"])
def test_a_terminal_gets_colours_and_the_same_words(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLORTERM", raising=False)
    if term == "xterm-truecolor":
        monkeypatch.setenv("COLORTERM", "truecolor")
    attention_text.show_weights(PROMPT, seen_in(PROMPT), numbers=False)
    shown = screen.getvalue()
    # Of two rows in one line, one is below: by a number that all such terminals have, or by red, green and blue.
    assert bool(re.search(r";48;5;\d+m▀", shown)) is (term == "xterm-256color")
    assert bool(re.search(r";48;2;\d+;\d+;\d+m▀", shown)) is (term == "xterm-truecolor")
    # Sixteen colours are too few, so that symbols stand for them.
    assert ("▀" in shown) is (term != "xterm")
    assert "L2 H2 " in unstyled(shown)


def test_with_no_color_a_terminal_gets_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    attention_text.show_weights(PROMPT, seen_in(PROMPT), numbers=False)
    # Bold is no colour; none of the codes sets one.
    codes = {part for code in re.findall(r"\x1b\[([\d;]*)m", screen.getvalue()) for part in code.split(";")}
    assert codes <= {"", "0", "1", "2"}
    assert "@" in screen.getvalue()
    assert "▀" not in screen.getvalue()


# Signs


def test_signs_take_equal_columns_and_say_what_they_stand_for() -> None:
    signs = Signs("a b\n\t\x07", "utf-8")
    assert [signs.of(char) for char in "a b\n\t\x07"] == ["a", "␣", "b", "↵", "→", "�"]
    assert signs.legend("a b\n") == "↵ is a line break, ␣ is a space"
    assert signs.legend("ab") == ""
    wide = Signs("a漢\n", "utf-8")
    assert [wide.of(char) for char in "a漢\n"] == ["a ", "漢", "↵ "]
    # An accent that joins the character before it.
    assert Signs("e\u0301", "utf-8").of("\u0301") == "�"
    ascii_signs = Signs("a \n\u00e9", "ascii")
    assert [ascii_signs.of(char) for char in "a \n\u00e9"] == ["a", "_", "$", "?"]
    assert ascii_signs.legend("a \n") == "$ is a line break, _ is a space"


# The command: files


def test_a_picture_has_a_heat_map_for_every_head_with_its_characters() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    done = explain("--prompt", "a $ b $", "--save", "map.svg", code=None)
    # The model has never seen a dollar.
    assert "'$'" in done.error
    done = explain("--prompt", "The tide", "--save", "map.svg")
    assert "written to map.svg" in done.stderr
    words = ["".join(text.itertext()).strip() for text in ElementTree.parse("map.svg").getroot().iter(f"{SVG}text")]
    for layer in (1, 2):
        for head in (1, 2):
            assert f"layer {layer}, head {head}" in words
    assert "uniform average" in words
    # On both axes of five maps.
    assert words.count("T") == 10
    assert words.count("␣") == 10


@pytest.mark.parametrize("arguments", [("--step",), ("--layer", "1", "--head", "1"), ("--prompt", PROMPT * 4)])
@pytest.mark.parametrize("name", ["it.png", "it.svg"])
def test_each_view_can_be_saved(name: str, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    explain(*arguments, "--save", name)
    assert Path(name).read_bytes().startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


def test_the_toy_and_a_step_make_pages_too() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    run("explain", "attention", "--toy", "--save", "toy.html")
    page = Path("toy.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert f"{float(explain_toy(0).stages.weights[0, 1, 0]):.4f}" in page
    explain("--step", "--save", "step.html")
    assert "<svg" in Path("step.html").read_text(encoding="utf-8")


# The command: what is wrong


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layer", "7"), ("layer 7 does not exist: this model has layers 1 to 2",)),
        (("--head", "0"), ("head 0 does not exist: this model has heads 1 to 2",)),
        (("--step", "--position", "99"), ("position 99 does not exist: this text has positions 0 to 15",)),
        (("--prompt", ""), ("the prompt is empty",)),
        (("--prompt", "The 漢"), ("never seen", "leave them out")),
        (("--prompt", "M" * 1001), ("1,001 characters", "at most 1,000")),
        (("--prompt", "M" * 301, "--save", "page.html"), ("301 characters", "at most 300")),
        (("--save", "map.pdf"), ("'map.pdf'", ".svg", ".html")),
        (("--save", "nowhere/map.html"), ("'nowhere/map.html'", "no folder 'nowhere'")),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    error = explain(*arguments, code=1).error
    for word in words:
        assert word in error
    assert not list(Path().glob("*.html"))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--toy", "--seed", str(2**64)), "--seed"),
        (("--toy", "--prompt", "a"), "--toy"),
        (("--toy", "--checkpoint", "harbour"), "--toy"),
        (("--toy", "--step"), "--toy"),
        (("--toy", "--layer", "1"), "--toy"),
        (("--seed", "1"), "--seed"),
        (("--position", "1"), "--position"),
        (("--step", "--numbers"), "--step"),
    ],
)
def test_options_that_do_not_go_together_are_a_wrong_command_line(arguments: tuple[str, ...], option: str) -> None:
    assert option in run("explain", "attention", *arguments, code=2).usage


def test_a_file_that_cannot_be_written_is_a_sentence() -> None:
    Path("page.html").mkdir()
    error = explain("--prompt", "The", "--save", "page.html", "--json", code=None)
    assert error.code == 1
    assert error.stderr.startswith("minigpt: cannot write 'page.html': it is a folder")
