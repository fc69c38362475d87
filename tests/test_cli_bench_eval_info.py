"""``minigpt bench``, ``eval`` and ``info``: their numbers are right, and stdout is theirs alone."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional

from minigpt import GPT
from minigpt.bench import PositionTimes, agreement, measure_engines, measure_positions, measure_text
from minigpt.peers import PeerSpeed
from tests.cli_support import (
    CACHE_BYTES,
    RECEPTIVE_FIELD,
    TEXT,
    Outcome,
    Terminal,
    run,
    trained,
    trained_checkpoint,
    unstyled,
)

EVAL_KEYS = {"characters", "nats_per_char", "bits_per_char", "perplexity", "weights", "unknown", "by_position"}
# The last tenth of the text, rounded up.
HELD_OUT = TEXT[len(TEXT) * 9 // 10 :]

pytestmark = pytest.mark.usefixtures("own_run")


# bench


@pytest.fixture(scope="module", autouse=True)
def _few_repeats() -> Iterator[None]:
    """Measures less often than it should to be exact: here only the form of the numbers is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minigpt.bench.measure_positions", functools.partial(measure_positions, repeats=1))
        patch.setattr("minigpt.bench.measure_text", functools.partial(measure_text, repeats=1))
        patch.setattr("minigpt.bench.measure_engines", functools.partial(measure_engines, repeats=1))
        patch.setattr("minigpt.bench.REPEATS_OF_ENGINES", 1)
        yield


@pytest.fixture(scope="module")
def bench_json() -> dict[str, Any]:
    done = run("bench", "--checkpoint", trained(), "--threads", "1", "--json")
    assert done.stdout.count("\n") == 1
    assert isinstance(done.json, dict)
    return done.json


@pytest.fixture(scope="module")
def bench_text() -> Outcome:
    return run("bench", "--checkpoint", trained(), "--threads", "1")


def test_the_bench_first_checks_that_both_modes_write_the_same(bench_json: dict[str, Any]) -> None:
    agreement = bench_json["agreement"]
    assert agreement["same_ids"] is True
    # Past the edges where a cache could go wrong.
    assert agreement["characters"] > RECEPTIVE_FIELD
    # Rounding in float32, and not nothing, for the sums are done in another order.
    assert 0 < agreement["logit_gap"] < 1e-4


def test_the_bench_measures_at_powers_of_two_far_past_the_window(bench_json: dict[str, Any]) -> None:
    positions = [row["position"] for row in bench_json["positions"]]
    assert positions == [2**power for power in range(len(positions))]
    assert positions[-1] >= max(4 * 16, RECEPTIVE_FIELD)
    for row in bench_json["positions"]:
        assert all(0 < row[name] < 60_000 for name in ("prefill_ms", "cached_ms", "recomputed_ms"))
    assert bench_json["text"]["characters"] >= 256
    assert bench_json["text"]["cached_s"] > 0
    assert bench_json["text"]["recomputed_s"] > 0


def test_the_work_beside_the_times_is_what_the_matrices_need(bench_json: dict[str, Any]) -> None:
    with safe_open(trained() / "best.safetensors", framework="pt") as file:
        # One multiply-add a weight and position, but for the table that is only looked up, and the norms.
        weights = sum(
            math.prod(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118  (not a mapping)
            if "norm" not in name and "wte" not in name
        )

    def attention(position: int) -> int:
        """Of one position: two multiply-adds a channel, key and layer."""
        return 2 * 32 * 2 * min(position + 1, 16)

    for row in bench_json["positions"]:
        position = row["position"]
        assert row["cached_work"] == weights + attention(position)
        # Only what can matter is computed again.
        read = min(position + 1, RECEPTIVE_FIELD)
        assert row["recomputed_work"] == read * weights + sum(map(attention, range(read)))


def test_the_bench_names_what_it_measured(bench_json: dict[str, Any]) -> None:
    assert bench_json["parameters"] == sum(param.numel() for param in trained_checkpoint().model.parameters())
    assert bench_json["config"]["n_embd"] == 32
    assert bench_json["receptive_field"] == RECEPTIVE_FIELD
    assert (bench_json["threads"], bench_json["dtype"], bench_json["device"]) == (1, "float32", "cpu")
    assert str(os.cpu_count()) in bench_json["machine"]
    assert bench_json["torch"] == torch.__version__
    assert bench_json["cache_bytes"] == CACHE_BYTES
    assert bench_json["cache_bytes_per_layer"] == CACHE_BYTES / 2
    assert Path(bench_json["model"]).samefile(trained() / "best.safetensors")


def test_in_a_pipe_the_bench_is_plain_columns(bench_text: Outcome, bench_json: dict[str, Any]) -> None:
    assert bench_text.stderr == ""
    assert "\x1b" not in bench_text.stdout
    assert bench_text.stdout.isascii()
    lines = bench_text.stdout.splitlines()
    (header,) = [line for line in lines if line.startswith("position")]
    rows = [line for line in lines if re.match(r"\d+ +\d", line)]
    assert [int(row.split()[0]) for row in rows] == [row["position"] for row in bench_json["positions"]]
    # A number ends where its column does, and no column is missing anywhere.
    assert {len(row) for row in rows} == {len(header)}
    assert {len(row.split()) for row in rows} == {8}
    works = [
        [f"{row[name] / 1e6:.2f}" for name in ("cached_work", "recomputed_work")] for row in bench_json["positions"]
    ]
    assert [[row.split()[5], row.split()[6]] for row in rows] == works


def test_the_bench_says_it_all_in_words_too(bench_text: Outcome) -> None:
    for word in (
        "the same characters",
        "logit gap",
        f"{CACHE_BYTES:,} in all",
        f"{CACHE_BYTES // 2:,} bytes a layer",
        "1 thread",
        "float32",
        f"torch {torch.__version__}",
        "window 16",
        "256 characters",
        "with the cache",
        "by recompute",
    ):
        assert word in bench_text.stdout


def test_the_bench_shows_every_engine(bench_text: Outcome, bench_json: dict[str, Any]) -> None:
    ways = [(row["engine"], row["weights"], row["threads"], row["cached"]) for row in bench_json["engines"]]
    expected = [("torch", "float32", 1, False), ("torch", "float32", 1, True)]
    if importlib.util.find_spec("numba") is not None:
        expected += [("fused", weights, 1, True) for weights in ("float32", "float16", "int8")]
    assert ways == expected
    for row in bench_json["engines"]:
        assert row["same_ids"] is True
        assert 0 < row["chars_per_s"] < 1e7
        assert (row["share_of_limit"] is None) is not row["cached"]
    lines = bench_text.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("engine  "))
    for (engine, weights, threads, cached), line in zip(expected, lines[start + 1 :], strict=False):
        cells = re.split(" {2,}", line)
        assert cells[:3] == [engine if cached else f"{engine}, no cache", weights, str(threads)]
        assert re.fullmatch(r"[\d,]+", cells[3])
        assert [re.fullmatch(r"\d+%", cell) is not None for cell in cells[5:]] == [True] * cached
    assert bench_json["peers"] == []


def test_the_bench_against_others_shows_ratios_and_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {"transformers": [], "ctranslate2": [], "llama.cpp": ["llama_cpp", "gguf"]}
    monkeypatch.setattr("minigpt.peers.missing", lacking.__getitem__)

    def measured(model: GPT, names: list[str], threads: int) -> Iterator[Any]:
        assert (names, threads) == (["ctranslate2", "transformers"], 1)
        yield None
        yield [PeerSpeed("ctranslate2", "int8", 2, 1000.0, 1, 1500.0)]

    monkeypatch.setattr("minigpt.peers.measure_peers", measured)
    options = ("bench", "--checkpoint", "harbour", "--threads", "1", "--against", "ctranslate2, transformers,llama.cpp")
    told = run(*options, "--json")
    assert told.json["peers"] == [
        {
            "peer": "ctranslate2",
            "weights": "int8",
            "threads": 2,
            "chars_per_s": 1000.0,
            "our_threads": 1,
            "our_chars_per_s": 1500.0,
        }
    ]
    assert told.stderr == (
        "llama.cpp is left out, for llama_cpp and gguf are not installed (pip install 'minigpt[peers]')\n"
    )
    shown = run(*options).stdout
    assert re.search(r"^ctranslate2 +int8 +2 +1,000 +1 +1,500 +1\.50$", shown, re.MULTILINE)


def test_a_bench_against_nothing_is_a_wrong_command_line() -> None:
    assert "--against" in run("bench", "--checkpoint", "harbour", "--against", ",", code=2).usage


def test_a_bench_against_others_without_the_fused_engine_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.peers.missing", lambda _: [])
    monkeypatch.setattr("minigpt.engine.fused_reason", lambda _: "there is no numba")
    error = run("bench", "--checkpoint", "harbour", "--against", "transformers", code=1).error
    assert error.endswith("the fused engine, which cannot run here: there is no numba")


def test_a_bench_against_an_unknown_program_is_told_those_there_are() -> None:
    error = run("bench", "--checkpoint", "harbour", "--against", "gpt4all", code=1).error
    for word in ("'gpt4all'", "transformers", "ctranslate2", "llama.cpp"):
        assert word in error


def test_a_bench_of_a_checkpoint_and_a_preset_is_a_wrong_command_line() -> None:
    assert "--preset" in run("bench", "--checkpoint", "harbour", "--preset", "tiny", code=2).usage


def test_a_bench_of_an_unknown_preset_is_told_those_there_are() -> None:
    error = run("bench", "--preset", "huge", code=1).error
    for word in ("'huge'", "tiny", "small", "base"):
        assert word in error


def test_without_any_checkpoint_random_weights_are_measured_and_an_interruption_prints_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(model: GPT, at: list[int]) -> Iterator[PositionTimes]:
        yield from measure_positions(model, at[:2], repeats=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("minigpt.bench.agreement", lambda model, _: agreement(model, 5))
    monkeypatch.setattr("minigpt.bench.measure_positions", interrupted)
    shutil.rmtree("checkpoints")
    told = run("bench", "--json", code=130).json
    assert told["model"] == "random weights of preset tiny"
    assert told["agreement"]["same_ids"] is True
    # Of weights that are not all zero, where any two modes would agree.
    assert told["agreement"]["logit_gap"] > 0
    assert [row["position"] for row in told["positions"]] == [1, 2]
    assert told["text"] is None
    shown = run("bench", code=130).stdout
    assert "random weights of preset tiny" in shown
    assert re.search(r"^1 .*\n2 .*\n", shown, re.MULTILINE)
    assert "characters from one" not in shown


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_on_a_terminal_the_bench_shows_a_bar_and_a_table_also_when_it_is_interrupted() -> None:
    terminal = Terminal("bench", "--checkpoint", "harbour", "--threads", "1")
    # One of its measurements after the check, of which many are left.
    terminal.wait_for(lambda screen: re.search(r" [2-8]/1\d ", screen) is not None)
    terminal.program.interrupt()
    assert terminal.finish() == 130
    shown = unstyled(terminal.screen)
    assert "Traceback" not in shown
    assert "the same characters" in shown
    # Rich draws the line under the head of a table.
    assert re.search(r"\u2500{9}.*\n *1 .*\n", shown)
    assert "characters from one" not in shown


def test_the_bench_saves_what_it_measured_as_a_picture() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    done = run("bench", "--checkpoint", "harbour", "--threads", "1", "--save", "bench.svg", "--json")
    assert done.stderr == "written to bench.svg\n"
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse("bench.svg").getroot()
    for unit in ("ms", "work"):
        points: list[tuple[float, float]] = []
        values: list[tuple[float, float]] = []
        for way in ("cached", "recomputed"):
            (group,) = [group for group in root.iter(f"{svg}g") if group.get("id") == f"{unit}-{way}"]
            path = next(group.iter(f"{svg}path")).get("d", "")
            points += [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]
            values += [(math.log(row["position"]), math.log(row[f"{way}_{unit}"])) for row in done.json["positions"]]
        # Both on the same two logarithmic scales.
        assert len(points) == len(values) == 2 * len(done.json["positions"])
        for axis in (0, 1):
            low, high = (extreme(range(len(values)), key=lambda i: values[i][axis]) for extreme in (min, max))
            unit_length = (points[high][axis] - points[low][axis]) / (values[high][axis] - values[low][axis])
            for point, value in zip(points, values, strict=True):
                expected = points[low][axis] + (value[axis] - values[low][axis]) * unit_length
                assert point[axis] == pytest.approx(expected, abs=0.01)
    words = {"".join(text.itertext()).strip() for text in root.iter(f"{svg}text")}
    assert words >= {"position", "milliseconds a character", "million multiply-adds a character", "with the cache"}


def test_the_bench_saves_a_page_with_its_json() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    told = run("bench", "--checkpoint", "harbour", "--threads", "1", "--save", "bench.html", "--json").json
    page = Path("bench.html").read_text(encoding="utf-8")
    embedded = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert embedded is not None
    assert json.loads(embedded[1]) == told
    assert "<svg" in page
    for row in told["positions"]:
        assert f"<tr><td>{row['position']}</td><td>{row['prefill_ms']:.2f}</td><td>{row['cached_ms']:.2f}</td>" in page


def test_a_bench_that_could_not_be_saved_is_told_at_once() -> None:
    assert "there is no folder 'no'" in run("bench", "--save", "no/bench.svg", code=1).error


# eval


def naive_losses(text: str) -> list[float]:
    """The loss of each character but the first, in one call without a cache, in float64."""
    checkpoint = trained_checkpoint()
    idx = torch.tensor([checkpoint.tokenizer.encode(text)])
    with torch.inference_mode():
        logits = copy.deepcopy(checkpoint.model).double()(idx)[0, :-1]
    losses: list[float] = functional.cross_entropy(logits, idx[0, 1:], reduction="none").tolist()
    return losses


def test_eval_measures_the_mean_loss_of_one_stream() -> None:
    # Far longer than the block of 64, and no text of its own.
    text = "".join(reversed(TEXT))[:1500]
    Path("other.txt").write_text(text, encoding="utf-8")
    done = run("eval", "other.txt", "--json")
    told = done.json
    assert done.stdout.count("\n") == 1
    assert set(told) == EVAL_KEYS
    losses = naive_losses(text)
    assert told["characters"] == len(losses) == 1499
    assert told["nats_per_char"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert told["bits_per_char"] == pytest.approx(told["nats_per_char"] / math.log(2))
    assert told["perplexity"] == pytest.approx(math.exp(told["nats_per_char"]))
    assert told["unknown"] == 0


def test_positions_are_bands_from_an_empty_context_to_far_past_the_block() -> None:
    told = run("eval", "harbour.txt", "--all", "--json").json["by_position"]
    assert [(band["from"], band["to"]) for band in told] == [(0, 16), (16, 64), (64, 128), (128, 320), (320, 640)]
    # Streams of 640 predictions, side by side.
    starts = range(0, len(TEXT) - 640, 640)
    streams = [naive_losses(TEXT[start : start + 641]) for start in starts]
    for band in told:
        losses = [loss for stream in streams for loss in stream[band["from"] : band["to"]]]
        assert band["nats_per_char"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_of_the_text_it_was_trained_on_only_what_was_held_out_is_read() -> None:
    done = run("eval", "harbour.txt", "--json")
    losses = naive_losses(HELD_OUT)
    assert done.json["characters"] == len(losses)
    assert done.json["nats_per_char"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    for word in ("held-out", f"{len(HELD_OUT)} characters", "--all"):
        assert word in done.stderr
    # By what is in it, not by its name.
    Path("harbour.txt").rename("renamed.txt")
    assert run("eval", "renamed.txt", "--json").stdout == done.stdout


def test_all_of_the_text_is_read_when_asked_for() -> None:
    told = run("eval", "harbour.txt", "--all", "--json").json
    losses = naive_losses(TEXT)
    assert told["characters"] == len(losses)
    assert told["nats_per_char"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_unknown_characters_are_left_out_and_counted() -> None:
    text = TEXT[:300]
    Path("other.txt").write_text(text[:100] + "漢漢字" + text[100:] + "[漢", encoding="utf-8")
    told = run("eval", "other.txt", "--json").json
    losses = naive_losses(text + "[")
    assert (told["unknown"], told["characters"]) == (4, len(losses))
    assert told["nats_per_char"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    shown = run("eval", "other.txt").stdout
    for word in ("4 characters", "2 kinds", f"{'漢'!r} 3", f"{'字'!r} 1"):
        assert word in shown


def test_eval_in_a_pipe_is_plain_text() -> None:
    done = run("eval", "harbour.txt", "--all", "--checkpoint", "harbour")
    told = run("eval", "harbour.txt", "--all", "--json").json
    assert "\x1b" not in done.stdout
    assert f"{told['nats_per_char']:.4f} nats" in done.stdout
    assert f"{told['bits_per_char']:.4f} bits" in done.stdout
    assert f"{told['characters']:,} characters" in done.stdout
    for band in told["by_position"]:
        assert re.search(
            rf"^{band['from'] + 1} to {band['to']} +{band['nats_per_char']:.4f}$", done.stdout, re.MULTILINE
        )
    assert done.stderr == ""


def test_eval_says_which_run_it_takes() -> None:
    assert "harbour" in run("eval", "harbour.txt").stderr.splitlines()[0]


def test_eval_reads_a_text_from_standard_input_in_any_encoding() -> None:
    wanted = run("eval", "harbour.txt", "--json").stdout
    assert run("eval", "-", "--encoding", "latin-1", "--json", stdin=TEXT.encode("latin-1")).stdout == wanted


def test_two_characters_are_enough_to_be_measured_and_one_is_not() -> None:
    losses = naive_losses("MA")
    assert run("eval", "-", "--json", stdin="MA").json["nats_per_char"] == pytest.approx(losses[0], abs=1e-5)
    assert "1" in run("eval", "-", "--checkpoint", "harbour", stdin="M漢漢", code=1).error
    assert "0" in run("eval", "-", "--checkpoint", "harbour", stdin="漢字", code=1).error


@pytest.mark.parametrize(("weights", "most"), [("float32", 0.0), ("float16", 5e-4), ("int8", 0.02)])
def test_eval_measures_rounded_weights(weights: str, most: float) -> None:
    exact, told = (run("eval", "harbour.txt", *options, "--json").json for options in ((), ("--weights", weights)))
    assert (exact["weights"], told["weights"]) == ("float32", weights)
    gap = abs(told["nats_per_char"] - exact["nats_per_char"])
    assert gap <= most
    assert (gap > 0) is (most > 0)
    assert f", {weights} weights\n" in run("eval", "harbour.txt", "--weights", weights).stdout


# info


def test_info_tells_what_a_checkpoint_is() -> None:
    done = run("info", "--checkpoint", "harbour", "--json")
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    told = done.json
    assert told["config"] == {
        "vocab_size": len(set(TEXT)),
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "block_size": 64,
        "window": 16,
        # It has read its text eleven times.
        "dropout": 0.2,
    }
    assert told["chars"] == "".join(sorted(set(TEXT)))
    assert (told["head_dim"], told["receptive_field"]) == (16, RECEPTIVE_FIELD)
    assert (told["cache_bytes"], told["cache_bytes_per_char"]) == (CACHE_BYTES, CACHE_BYTES / 16)
    facts = told["training"]
    assert (facts["corpus"], facts["corpus_chars"], facts["val_fraction"]) == ("harbour.txt", len(TEXT), 0.1)
    log = [json.loads(line) for line in Path("checkpoints/harbour/train.jsonl").read_text("utf-8").splitlines()]
    assert facts["val_loss"] == min(line["val_loss"] for line in log if "val_loss" in line)
    assert facts["torch_version"] == torch.__version__
    assert told["default_weights"] == "int8"


def test_the_parts_of_a_model_sum_to_the_whole() -> None:
    told = run("info", "--json").json["parameters"]
    total = told.pop("total")
    with safe_open(trained() / "best.safetensors", framework="pt") as file:
        counts = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert sum(told.values()) == total == sum(counts.values())
    for part, count in told.items():
        word = part.rstrip("s")
        assert count == sum(
            number for name, number in counts.items() if word in name and (part == "norms" or "norm" not in name)
        )


def test_info_in_words_has_the_same_numbers() -> None:
    told = run("info", "--checkpoint", "harbour", "--json").json
    shown = run("info", "--checkpoint", "harbour").stdout
    assert "\x1b" not in shown
    for name, value in told["config"].items():
        assert re.search(rf"^{name} +{re.escape(str(value))}$", shown, re.MULTILINE)
    for value in (*told["parameters"].values(), told["training"]["corpus_chars"], told["cache_bytes"]):
        assert re.search(rf"\b{value:,}\b", shown)
    assert f"{told['training']['val_loss']:.4f}" in shown
    assert told["training"]["corpus_sha256"][:12] in shown
    # What cannot be seen in a vocabulary is written as Python would, so that it stays on one line.
    assert repr(told["chars"])[1:-1] in shown
    assert re.search(r"^weights +rounded to int8 by generate, unless it is told otherwise$", shown, re.MULTILINE)


def test_info_of_a_file_with_training_state_is_about_the_model_in_it() -> None:
    told = run("info", "--checkpoint", "checkpoints/harbour/last.safetensors", "--json").json
    assert told["parameters"] == run("info", "--json").json["parameters"]


def test_info_of_a_run_stopped_before_its_first_evaluation_says_so() -> None:
    Path("checkpoints/harbour/best.safetensors").unlink()
    # The checkpoint that a run starts with is all that is left of one that is killed in its first step.
    with mock.patch("minigpt.trainer.Trainer._take_step", side_effect=KeyboardInterrupt):
        run(
            *("train", "harbour.txt", "--n-layer", "1", "--n-head", "1", "--n-embd", "8", "--block-size", "32"),
            *("--window", "8", "--steps", "3", "--out", "new"),
            code=130,
        )
    assert "not evaluated yet" in run("info", "--checkpoint", "new").stdout
    assert "has taken no step of training yet" in run("generate", "--checkpoint", "new", "-n", "3").stderr
    assert run("info", "--checkpoint", "new", "--json").json["training"]["val_loss"] is None
