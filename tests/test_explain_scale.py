"""``minigpt explain scale``: variances, softmaxes and gradients are those of the formulas, and shown as they are."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt.explain.recording import record
from minigpt.explain.scale import HEAD_SIZES, LOGITS, experiment, gradient, measure, measure_layers, sharpened
from tests.cli_support import Outcome, Terminal, run, said_of_a_full_disk, trained, trained_checkpoint, unstyled
from tests.model_support import normal


@pytest.fixture(scope="module")
def shown() -> Outcome:
    return run("explain", "scale", "--checkpoint", trained(), "--prompt", "MARGIT: The tide came in")


@pytest.fixture(scope="module")
def told() -> Any:
    return run("explain", "scale", "--checkpoint", trained(), "--prompt", "MARGIT: The tide came in", "--json").json


# What is measured


def test_the_five_logits_of_the_chapter_sharpen_as_it_says() -> None:
    assert LOGITS == (0.1, -0.2, 0.3, -0.2, 0.5)
    assert [round(weight, 4) for weight in sharpened(1)] == [0.1925, 0.1426, 0.2351, 0.1426, 0.2872]
    assert [round(weight, 4) for weight in sharpened(6)] == [0.0638, 0.0105, 0.2118, 0.0105, 0.7033]


@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0, 40.0])
def test_the_gradient_is_that_of_autograd(factor: float) -> None:
    logits = normal(6, 5) * factor
    for row, through in zip(logits, gradient(logits.softmax(dim=-1)), strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(dim=-1), row)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(through, jacobian.norm(), rtol=1e-12, atol=1e-9)


def test_the_gradient_is_the_length_that_a_random_one_has_after_the_softmax() -> None:
    logits = normal(5).requires_grad_()
    arriving = normal(20_000, 5, seed=1)
    weights = logits.softmax(dim=-1).expand_as(arriving)
    (sample,) = torch.autograd.grad(weights[0] @ arriving[0], logits, retain_graph=True)
    jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(dim=-1), logits)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(arriving[0] @ jacobian, sample)
    lengths = (arriving @ jacobian).square().sum(dim=-1)
    assert lengths.mean().sqrt().item() == pytest.approx(gradient(weights[0].detach()).item(), rel=0.02)


def test_the_gradient_is_nothing_of_a_certain_row_and_a_half_of_a_tie() -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert gradient(weights).tolist() == [0, 0.5, 0]


def test_what_is_measured_is_what_the_formulas_give() -> None:
    q, k = normal(2, 3, 6), normal(2, 3, 6, seed=1)
    # The first query reads one key, and has nothing to choose.
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    found = measure(q, k, mask)
    read = [(q[b, t] @ k[b, s]).item() for b in range(2) for t in range(3) for s in range(t + 1)]
    rows = [[(q[b, t] @ k[b, s]).item() for s in range(t + 1)] for b in range(2) for t in (1, 2)]

    def softmax(row: list[float], divisor: float) -> list[float]:
        exponentials = [math.exp(score / divisor) for score in row]
        return [each / sum(exponentials) for each in exponentials]

    def variance(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return sum((value - mean) ** 2 for value in values) / len(values)

    assert (found.head_size, found.rows, found.keys) == (6, 4, 2.5)
    assert found.var_q == pytest.approx(variance(q.flatten().tolist()))
    assert found.var_k == pytest.approx(variance(k.flatten().tolist()))
    assert found.var_scores == pytest.approx(variance(read))
    assert found.var_scaled == pytest.approx(variance(read) / 6)
    assert found.var_independent == pytest.approx(6 * found.var_q * found.var_k)
    for softmaxes, divisor in ((found.with_scale, math.sqrt(6)), (found.without_scale, 1.0)):
        weights = [softmax(row, divisor) for row in rows]
        assert softmaxes.largest == pytest.approx(sum(map(max, weights)) / 4)
        through = [gradient(torch.tensor(row, dtype=torch.float64)).item() for row in weights]
        assert softmaxes.gradient == pytest.approx(sum(through) / 4)
        assert softmaxes.starved == sum(each < 0.01 for each in through) / 4


def test_starved_queries_are_counted() -> None:
    q = torch.tensor([[0.0, 0.0], [30.0, 0.0], [0.0, 0.0], [0.0, 30.0]], dtype=torch.float64)
    found = measure(q, torch.eye(2, dtype=torch.float64))
    assert found.without_scale.starved == 0.5
    assert found.without_scale.largest == pytest.approx((0.5 + 1 + 0.5 + 1) / 4)


def test_queries_that_read_one_key_each_have_no_softmax_to_measure() -> None:
    with pytest.raises(ValueError, match="two keys"):
        measure(normal(3, 4), normal(3, 4), torch.eye(3, dtype=torch.bool))


def test_the_experiment_finds_what_the_theory_says() -> None:
    rows = experiment(seed=1)
    assert [row.head_size for row in rows] == list(HEAD_SIZES) == [4, 8, 16, 32, 64, 128, 256]
    for row in rows:
        assert row.rows == 16_384
        assert row.var_q == pytest.approx(1, abs=0.02)
        assert row.var_k == pytest.approx(1, abs=0.02)
        assert row.var_scores == pytest.approx(row.head_size, rel=0.03)
        assert row.var_scaled == pytest.approx(1, abs=0.03)
    for left, right in itertools.pairwise(rows):
        assert right.without_scale.largest > left.without_scale.largest
        assert right.without_scale.gradient < left.without_scale.gradient
        assert right.without_scale.starved > left.without_scale.starved
        assert right.with_scale.gradient == pytest.approx(left.with_scale.gradient, abs=0.01)
    assert experiment(seed=1) == rows
    assert experiment(seed=2)[0].var_q != rows[0].var_q


def test_a_layer_is_measured_under_the_models_own_mask() -> None:
    loaded = trained_checkpoint()
    recording = record(loaded.model, loaded.tokenizer.encode("MARGIT: The tide came in and the boats"))
    found = measure_layers(recording)
    T, window, n_head = 38, 16, 2
    reads = [min(t + 1, window) for t in range(1, T)]
    for layer, measured in zip(recording.layers, found, strict=True):
        assert (measured.head_size, measured.rows) == (16, n_head * len(reads))
        assert measured.keys == sum(reads) / len(reads)
        # The weights are those with which the model reads.
        assert measured.with_scale.largest == pytest.approx(layer.weights[:, 1:].amax(dim=-1).mean().item(), rel=1e-6)
        unscaled = (layer.q.double() @ layer.k.double().mT).masked_fill(~layer.mask, -math.inf).softmax(dim=-1)[:, 1:]
        assert measured.without_scale.largest == pytest.approx(unscaled.amax(dim=-1).mean().item(), rel=1e-4)
        assert measured.without_scale.gradient == pytest.approx(gradient(unscaled).mean().item(), rel=1e-3)


# The command


def test_the_json_has_what_was_measured(told: Any) -> None:
    assert [row["var_scores"] for row in told["experiment"]] == [row.var_scores for row in experiment(0)]
    assert (told["seed"], told["queries"], told["keys"]) == (0, 16_384, 8)
    assert told["logits"]["softmax_times_factor"] == sharpened(6)
    loaded = trained_checkpoint()
    recording = record(loaded.model, loaded.tokenizer.encode("MARGIT: The tide came in"))
    for n, (layer, measured) in enumerate(zip(told["model"]["layers"], measure_layers(recording), strict=True), 1):
        assert layer["layer"] == n
        assert layer["var_q"] == pytest.approx(measured.var_q, rel=1e-6)
        assert layer["with_scale"]["gradient"] == pytest.approx(measured.with_scale.gradient, rel=1e-5)
    assert told["model"]["prompt"] == "MARGIT: The tide came in"
    assert Path(told["model"]["checkpoint"]).samefile(trained() / "best.safetensors")


def test_the_tables_show_the_numbers_of_the_json(shown: Outcome, told: Any) -> None:
    assert shown.stderr == ""
    assert "\x1b" not in shown.stdout
    assert shown.stdout.isascii()
    rows = [(str(row["head_size"]), row, row["head_size"]) for row in told["experiment"]]
    rows += [(f"layer {row['layer']}", row, row["var_independent"]) for row in told["model"]["layers"]]
    for name, row, theory in rows:
        numbers = [f"{row['var_q']:.3f}", f"{row['var_k']:.3f}", f"{row['var_scores']:.2f}", f"{theory:.2f}"]
        assert re.search(
            rf"^{name} +{' +'.join(map(re.escape, numbers))} +{row['var_scaled']:.3f}$", shown.stdout, re.M
        )
        both = (row["with_scale"], row["without_scale"])
        numbers = [f"{each['largest']:.3f}" for each in both] + [f"{each['gradient']:.3f}" for each in both]
        numbers += [f"{each['starved']:.1%}" for each in both]
        assert re.search(rf"^{name} +{' +'.join(map(re.escape, numbers))}$", shown.stdout, re.M)
    assert re.search(r"^1 x  0\.1925  0\.1426  0\.2351  0\.1426  0\.2872$", shown.stdout, re.M)
    assert re.search(r"^6 x  0\.0638  0\.0105  0\.2118  0\.0105  0\.7033$", shown.stdout, re.M)


def test_what_it_says_is_taken_from_the_numbers(shown: Outcome, told: Any) -> None:
    said = " ".join(shown.stdout.split())
    first, last = told["experiment"][0], told["experiment"][-1]
    assert f"becomes {last['var_scores'] / first['var_scores']:.1f} times as large (in theory 64)" in said
    assert f"{last['with_scale']['largest']:.3f} with the scale and {last['without_scale']['largest']:.3f}" in said
    layers = told["model"]["layers"]
    less = sum(layer["without_scale"]["gradient"] < layer["with_scale"]["gradient"] for layer in layers)
    assert f"the gradient smaller in {less} of {len(layers)} layers" in said
    assert "the variance of q is " + " to ".join(f"{v:.3f}" for v in sorted(row["var_q"] for row in layers)) in said


@pytest.mark.parametrize("width", [40, 80, 250])
def test_nothing_is_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run("explain", "scale", "--checkpoint", trained()).stdout.splitlines()
    assert max(map(len, lines)) <= width
    left_out = any("left out" in line for line in lines)
    assert left_out is (width == 40)
    assert any(line.split()[:1] == ["layer"] and line.rstrip().endswith("%") for line in lines) is not left_out


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_terminal_shows_the_same(shown: Outcome) -> None:
    terminal = Terminal("explain", "scale", "--checkpoint", str(trained()), "--prompt", "MARGIT: The tide came in")
    assert terminal.finish() == 0
    assert unstyled(terminal.screen) == shown.stdout


def test_without_a_model_the_experiment_stands_alone(own_folder: None, told: Any) -> None:
    done = run("explain", "scale", "--json")
    assert done.json["model"] is None
    assert done.json["experiment"] == told["experiment"]
    assert "there is no model to measure" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "layer" not in run("explain", "scale").stdout


def test_another_seed_draws_other_numbers(told: Any, own_folder: None) -> None:
    again = run("explain", "scale", "--seed", "7", "--json").json
    assert again["seed"] == 7
    assert again["experiment"][0]["var_q"] != told["experiment"][0]["var_q"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "M"), "no position reads more than 1 key"),
        (("--prompt", "M" * 1025), "1,025 characters, and at most 1,024"),
        (("--prompt", "M\u6f22"), "'\u6f22' at 1"),
        (("--checkpoint", "nowhere"), "nowhere"),
        (("--save", "scale.pdf"), "end it in .svg, .png or .html"),
        (("--save", "no/where.svg"), "there is no folder 'no'"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(own_run: None, arguments: tuple[str, ...], words: str) -> None:
    checkpoint = () if "--checkpoint" in arguments else ("--checkpoint", "harbour")
    assert words in run("explain", "scale", *arguments, *checkpoint, code=1).error


def test_a_prompt_needs_a_model(own_folder: None) -> None:
    assert "there are no runs" in run("explain", "scale", "--prompt", "MARGIT", code=1).error


def test_a_negative_seed_is_a_wrong_command_line() -> None:
    assert "--seed" in run("explain", "scale", "--seed", "-1", code=2).usage


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(own_folder: None) -> None:
    said = said_of_a_full_disk("explain", "scale", "--checkpoint", str(trained()))
    assert said == "minigpt: cannot write to standard output: No space left on device\n"


# Files


def test_the_picture_has_every_point(own_run: None) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    from tests.test_plot import words_of

    done = run("explain", "scale", "--checkpoint", "harbour", "--save", "scale.svg")
    assert done.stderr == "written to scale.svg\n"
    words = words_of(Path("scale.svg"))
    assert words >= {"variance of the scores", "gradient through the softmax", "head size", "4", "256", "scaled", "raw"}
    assert any(word.startswith("the model's layers (") for word in words)
    svg = Path("scale.svg").read_text(encoding="utf-8")
    for panel in ("variance of the scores", "largest weight of a query", "gradient through the softmax"):
        for kind in ("with", "without"):
            (group,) = re.findall(rf'<g id="{kind}-{panel}">(.*?)</g>', svg, re.DOTALL)
            assert len(re.findall(r"[ML] \S+ \S+", group.split("/>")[0])) == len(HEAD_SIZES)


def test_a_png_is_written_and_the_same_again(own_run: None) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    for name in ("1.png", "2.png"):
        run("explain", "scale", "--checkpoint", "harbour", "--save", name)
    assert Path("1.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert Path("1.png").read_bytes() == Path("2.png").read_bytes()


def test_the_page_stands_alone_with_its_data(own_run: None) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    done = run("explain", "scale", "--checkpoint", "harbour", "--save", "scale.html", "--json")
    page = Path("scale.html").read_text(encoding="utf-8")
    embedded = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert [json.loads(data) for data in embedded] == [done.json]
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?https?:", page)
    cell = f"<td>{done.json['experiment'][-1]['var_scores']:.2f}</td>"
    assert cell in page
    assert "<svg" in page
