"""``minigpt train``: what a run leaves behind, what it says, which runs it refuses, and how it goes on with one.

How it ends by a signal is tested in `test_kill`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from minigpt import EvalReport, StepReport, Trainer, load
from minigpt.cli import main
from minigpt.cli.train_report import _held_out as held_out_words
from minigpt.config import TrainConfig
from minigpt.corpus import Corpus, load_corpus
from minigpt.runs import locked
from minigpt.samples import sample
from tests.cli_support import LINES, SHAPE, SMALL, TEXT, Outcome, Program, Screen, Terminal, place, run, unstyled
from tests.run_support import log_of, samples_of, tensorboard_of, without_times

# A moment's work on harbour.txt.
QUICK = ("harbour.txt", *SMALL, "--steps", "4", "--eval-every", "2")

pytestmark = pytest.mark.usefixtures("own_text")


def train(*options: str | Path, stdin: str | bytes | None = None) -> Outcome:
    """Trains, and checks that nothing of it was taken for the product."""
    done = run("train", *options, stdin=stdin)
    assert done.stdout == ""
    return done


def weights_of(run_folder: str | Path, file: str = "best") -> dict[str, torch.Tensor]:
    """The weights of one of the two models of a run."""
    return load(Path(run_folder) / f"{file}.safetensors").model.state_dict()


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same weights to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch, *options: str | Path, stdin: str | None = None) -> Outcome:
    """Trains, and presses Ctrl-C during that step."""
    whole = Trainer.steps

    def steps(self: Trainer) -> Iterator[StepReport | EvalReport]:
        for report in whole(self):
            if report.step == step and isinstance(report, StepReport):
                signal.raise_signal(signal.SIGINT)
            yield report

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "steps", steps)
        return run("train", *options, code=130, stdin=stdin)


# What a run leaves behind


def test_a_run_folder_holds_two_checkpoints_a_log_samples_and_the_loss_curve() -> None:
    pytest.importorskip("matplotlib")
    train(*QUICK, "--out", "a")
    assert sorted(path.name for path in Path("checkpoints/a").iterdir()) == [
        ".lock",
        "best.safetensors",
        "last.safetensors",
        "loss.svg",
        "samples.txt",
        "train.jsonl",
    ]
    assert load("checkpoints/a/last.safetensors", with_state=True).state is not None
    # The model file is all that one needs to pass on, and no larger than that.
    assert load("checkpoints/a/best.safetensors", with_state=True).state is None
    best, last = (Path(f"checkpoints/a/{name}.safetensors").stat().st_size for name in ("best", "last"))
    assert best < last / 1.5


def test_the_log_is_one_json_object_a_line() -> None:
    train("harbour.txt", *SMALL, "--steps", "25", "--eval-every", "12", "--out", "a")
    lines = log_of("checkpoints/a")
    assert all(isinstance(line, dict) for line in lines)
    assert [line["step"] for line in lines if "val_loss" not in line] == [10, 20]
    evaluations = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in evaluations] == [12, 24, 25]
    best = min(evaluations, key=lambda line: line["val_loss"])
    facts = load("checkpoints/a/best.safetensors").facts
    assert (facts.steps, facts.val_loss) == (best["step"], best["val_loss"])


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_run_ends_with_a_checkpoint_that_writes(steps: int) -> None:
    train("harbour.txt", *SMALL, "--steps", str(steps), "--out", "a")
    assert load("checkpoints/a/best.safetensors").facts.steps == steps
    assert are_equal(weights_of("checkpoints/a", "best"), weights_of("checkpoints/a", "last"))
    assert len(run("generate", "-n", "20", "--json").json["texts"][0]) == 20


def test_training_learns() -> None:
    train("harbour.txt", *SMALL, "--steps", "60", "--eval-every", "20", "--out", "a")
    losses = [line["val_loss"] for line in log_of("checkpoints/a") if "val_loss" in line]
    # A model that knows nothing but the 47 characters is at log 47 = 3.85.
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 2.6


def test_the_same_seed_is_the_same_model_and_another_one_is_not() -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        train(*QUICK, "--seed", seed, "--out", name)
    assert are_equal(weights_of("checkpoints/a"), weights_of("checkpoints/b"))
    assert not are_equal(weights_of("checkpoints/a"), weights_of("checkpoints/c"))


def test_every_setting_is_an_option() -> None:
    model = {"n_layer": 3, "n_head": 4, "n_embd": 24, "block_size": 48, "window": 12, "dropout": 0.25}
    training = {
        "steps": 3,
        "batch_size": 5,
        "muon_lr": 0.011,
        "adamw_lr": 0.0022,
        "weight_decay": 0.033,
        "ngram_weight": 0.66,
        "warmup_steps": 2,
        "decay_fraction": 0.44,
        "grad_clip": 0.55,
        "eval_every": 2,
        "eval_chars": 50,
        "patience": 4,
        "val_fraction": 0.2,
        "seed": 9,
        "precision": "bfloat16",
    }
    assert training.keys() == TrainConfig.__dataclass_fields__.keys()
    options = [
        word for name, value in (model | training).items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    train("harbour.txt", *options, "--out", "a")
    told = run("info", "--checkpoint", "a", "--json").json
    assert told["config"] == {**model, "vocab_size": len(set(TEXT))}
    assert told["training"]["val_fraction"] == 0.2
    state = load("checkpoints/a/last.safetensors", with_state=True).state
    assert state is not None
    assert state.values["config"] == training


# Which names it takes, and which runs it refuses


def test_a_run_that_exists_is_refused_and_left_alone() -> None:
    train(*QUICK, "--out", "a")
    before = {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()}
    error = run("train", *QUICK, "--out", "a", "--seed", "1", code=1).error
    for word in ("checkpoints/a", "--resume a", "--force", "--out"):
        assert word in error
    assert {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()} == before
    # One elsewhere is named as it was given.
    train(*QUICK, "--out", "elsewhere/b")
    assert "--resume elsewhere/b," in run("train", *QUICK, "--out", "elsewhere/b", code=1).error


def test_a_folder_with_files_of_others_that_a_run_would_replace_is_refused() -> None:
    folder = Path("mine")
    folder.mkdir()
    (folder / "train.jsonl").write_text("precious", encoding="utf-8")
    refused = run("train", *QUICK, "--out", "./mine", code=1).error
    assert "mine/train.jsonl" in refused and "--force" in refused
    assert (folder / "train.jsonl").read_text(encoding="utf-8") == "precious"
    assert [path.name for path in folder.iterdir()] == ["train.jsonl"]


def test_two_trainings_do_not_share_a_run() -> None:
    train(*QUICK, "--out", "a")
    before = {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()}
    with locked(Path("checkpoints/a")):
        for options in (("--resume", "a"), (*QUICK, "--out", "a", "--force"), (*QUICK, "--out", "new")):
            done = run("train", *options, code=None)
            assert done.code == (0 if "new" in options else 1)
            assert "new" in options or "another process trains checkpoints/a" in done.error
    assert {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()} == before


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (MemoryError(), "a step of --batch-size 4 does not fit into memory: train a new run with a smaller one"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "does not fit into memory"),
    ],
)
def test_what_cannot_take_a_step_replaces_no_run(fault: Exception, told: str) -> None:
    train(*QUICK, "--out", "a")
    before = {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()}
    with mock.patch("minigpt.trainer.Examples.batch", side_effect=fault):
        assert told in run("train", *QUICK, "--out", "a", "--force", code=1).error
    assert {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()} == before


def test_a_run_that_another_process_made_while_the_text_was_read_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(*QUICK, "--out", "other")

    def slowly(*args: Any, **options: Any) -> Corpus:
        shutil.copytree("checkpoints/other", "checkpoints/a")
        return load_corpus(*args, **options)

    monkeypatch.setattr("minigpt.corpus.load_corpus", slowly)
    before = Path("checkpoints/other/last.safetensors").read_bytes()
    assert "there is a run in checkpoints/a already" in run("train", *QUICK, "--out", "a", code=1).error
    assert Path("checkpoints/a/last.safetensors").read_bytes() == before


def test_a_run_without_a_name_takes_another_than_those_being_trained() -> None:
    with locked(Path("checkpoints/harbour-tiny")):
        assert "checkpoints/harbour-tiny-2" in train(*QUICK).stderr
        assert "checkpoints/harbour-tiny-3" in train(*QUICK).stderr


def test_force_replaces_the_run_and_nothing_else_in_its_folder() -> None:
    train("harbour.txt", *SMALL, "--steps", "12", "--out", "a")
    Path("checkpoints/a/notes.txt").write_text("mine", encoding="utf-8")
    old = weights_of("checkpoints/a")
    train(*QUICK, "--out", "a", "--force", "--seed", "1")
    assert not are_equal(weights_of("checkpoints/a"), old)
    assert [line["step"] for line in log_of("checkpoints/a")] == [2, 4]
    assert Path("checkpoints/a/notes.txt").read_text(encoding="utf-8") == "mine"


def test_force_with_something_wrong_leaves_the_run_alone() -> None:
    train(*QUICK, "--out", "a")
    before = {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()}
    for wrong in (("nowhere.txt",), ("--n-embd", "33"), ("--block-size", "100000"), ("--device", "abacus")):
        run("train", *QUICK, "--out", "a", "--force", *wrong, code=1)
    assert {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()} == before


def test_runs_without_a_name_get_free_ones_from_text_and_preset() -> None:
    for _ in range(3):
        train(*QUICK)
    train(*QUICK, "--preset", "small")
    Path("Two Words & [more].TXT").write_text(TEXT, encoding="utf-8")
    train("Two Words & [more].TXT", *QUICK[1:])
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == [
        "harbour-small",
        "harbour-tiny",
        "harbour-tiny-2",
        "harbour-tiny-3",
        "two-words-more-tiny",
    ]


def test_a_name_with_a_separator_is_a_folder_anywhere(tmp_path: Path) -> None:
    train(*QUICK, "--out", "here/a")
    train(*QUICK, "--out", tmp_path / "there" / "b")
    assert not Path("checkpoints").exists()
    assert are_equal(weights_of("here/a"), weights_of("there/b"))


def test_nothing_is_written_before_the_text_was_read() -> None:
    run("train", "nowhere.txt", *SMALL, "--out", "a", code=1)
    Path("short.txt").write_text("too short", encoding="utf-8")
    run("train", "short.txt", *SMALL, "--out", "a", code=1)
    assert not Path("checkpoints").exists()


# Going on


def test_a_run_goes_on_from_another_folder_as_if_it_had_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("harbour.txt", *SMALL, "--steps", "8", "--eval-every", "3", "--dropout", "0.1")
    train(*line, "--out", "whole")
    stop_after(5, monkeypatch, *line, "--out", "parts")
    assert load("checkpoints/parts/last.safetensors").facts.steps == 5
    # The text was given as a relative name.
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    done = train("--resume", "../checkpoints/parts")
    assert "5 of them done" in done.stderr
    monkeypatch.chdir(tmp_path)
    for file in ("best", "last"):
        assert are_equal(weights_of("checkpoints/parts", file), weights_of("checkpoints/whole", file))
    logs = [without_times(log_of(f"checkpoints/{name}")) for name in ("whole", "parts")]
    assert logs[0] == logs[1]


def test_a_finished_run_says_so_and_stays_as_it_is() -> None:
    train(*QUICK, "--out", "a")
    before = weights_of("checkpoints/a", "last"), log_of("checkpoints/a")
    # There is nothing left to count for.
    with mock.patch("minigpt.trainer.NGrams", side_effect=AssertionError):
        done = train("--resume", "a")
    assert "done: 4 steps" in done.stderr
    assert are_equal(weights_of("checkpoints/a", "last"), before[0])
    assert log_of("checkpoints/a") == before[1]
    assert train("--resume", "a", "--quiet").stderr == ""


@pytest.mark.parametrize(
    "option",
    [
        "--steps=9",
        "--minutes=9",
        "--patience=2",
        "--n-embd=64",
        "--dropout=0.1",
        "--muon-lr=0.1",
        "--seed=0",
        "--val-fraction=0.1",
        "--preset=tiny",
        "--out=b",
        "--sample-chars=9",
        "--force",
        f"--sha256={'0' * 64}",
    ],
)
def test_a_run_goes_on_with_its_own_settings_only(option: str) -> None:
    place("a")
    before = (Path("checkpoints/a") / "last.safetensors").read_bytes()
    usage = run("train", "--resume", "a", option, code=2).usage
    assert option.partition("=")[0] in usage
    assert (Path("checkpoints/a") / "last.safetensors").read_bytes() == before


def test_a_run_goes_on_in_its_own_encoding_only() -> None:
    place("a")
    assert "--encoding" in run("train", "--resume", "a", "--encoding", "latin-1", code=2).usage


def test_a_run_does_not_go_on_with_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(2, monkeypatch, *QUICK, "--out", "a")
    before = Path("checkpoints/a/last.safetensors").read_bytes()
    Path("harbour.txt").write_text(TEXT + "More.\n", encoding="utf-8")
    error = run("train", "--resume", "a", code=1).error
    assert "harbour.txt" in error
    assert Path("checkpoints/a/last.safetensors").read_bytes() == before
    # Where the text has moved to may be said.
    Path("harbour.txt").unlink()
    gone = run("train", "--resume", "a", code=1).error
    assert re.search(r"'a' learnt from \S+harbour\.txt, which is gone: name the text, .* after --resume a$", gone)
    Path("moved.txt").write_text(TEXT, encoding="utf-8")
    stop_after(3, monkeypatch, "moved.txt", "--resume", "a")
    # And is known from then on.
    train("--resume", "a")
    assert load("checkpoints/a/last.safetensors").facts.steps == 4


def test_an_unknown_run_to_resume_is_told_the_runs_there_are() -> None:
    place("a")
    place("b")
    error = run("train", "--resume", "c", code=1).error
    assert "'c'" in error
    assert re.search(r"\ba, b\b|\bb, a\b", error)


def test_a_text_from_standard_input_can_be_piped_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(2, monkeypatch, "-", *QUICK[1:], "--out", "a", stdin=TEXT)
    assert "stdin" in run("train", "--resume", "a", code=1, stdin="another text\n" * 40).error
    train("--resume", "a", stdin=TEXT)
    assert load("checkpoints/a/last.safetensors").facts.steps == 4


# By the clock


def test_minutes_become_steps_and_the_run_can_be_repeated_by_them() -> None:
    done = train("harbour.txt", *SMALL, "--minutes", "0.01", "--out", "clock")
    pattern = r"(--steps \d+ --eval-every \d+ .*--precision \S+) instead of --minutes (\S+) repeats"
    ((options, minutes),) = re.findall(pattern, done.stderr)
    assert minutes == "0.01"
    assert re.search(r"about [\d,]+ steps in 0.01 minutes, evaluated every \d", done.stderr)
    train("harbour.txt", *SMALL, *options.split(), "--out", "steps")
    for file in ("best", "last"):
        assert are_equal(weights_of("checkpoints/clock", file), weights_of("checkpoints/steps", file))
    clock, steps = (load(f"checkpoints/{name}/last.safetensors", with_state=True).state for name in ("clock", "steps"))
    assert clock is not None
    assert steps is not None
    assert clock.values["config"] == steps.values["config"]


@pytest.mark.parametrize(("steps", "times", "share"), [(42, None, 0.0), (43, "4.1 times", 0.2)])
def test_a_text_that_is_read_often_gets_a_dropout(steps: int, times: str | None, share: float) -> None:
    # Of 2,700 characters a step reads 256.
    line = ("harbour.txt", *SMALL, "--sample-chars", "0", "--steps", str(steps), "--eval-every", str(steps))
    said = train(*line, "--out", "a").stderr
    assert load("checkpoints/a/best.safetensors").model.config.dropout == share
    assert (f"the training part is read {times}, with a dropout of {share:g}\n" in said) is (times is not None)
    # One that is given is left alone.
    assert "with a dropout" not in train(*line, "--out", "b", "--dropout", "0").stderr
    assert load("checkpoints/b/best.safetensors").model.config.dropout == 0


def test_a_run_by_the_clock_is_repeated_with_the_dropout_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    # As of the number of steps that is estimated at first; that of the steps it comes to is another one.
    dropouts = iter([0.35])
    monkeypatch.setattr("minigpt.trainer.dropout_for", lambda *_: next(dropouts, 0.0))
    done = train("harbour.txt", *SMALL, "--minutes", "0.01", "--out", "clock")
    (repeat,) = re.findall(r"(--steps .*) instead of --minutes", done.stderr)
    assert "--dropout 0.35" in repeat
    assert "with a dropout of 0.35" in done.stderr
    train("harbour.txt", *SMALL, *repeat.split(), "--out", "steps")
    assert are_equal(weights_of("checkpoints/clock"), weights_of("checkpoints/steps"))


def test_the_rates_of_a_run_by_the_clock_rise_as_in_the_run_that_repeats_it() -> None:
    options = [*SHAPE, "--batch-size", "4", "--sample-chars", "0"]
    done = train("harbour.txt", *options, "--minutes", "0.01", "--out", "clock")
    (repeat,) = re.findall(r"(--steps .*) instead of --minutes", done.stderr)
    train("harbour.txt", *options, *repeat.split(), "--out", "steps")
    assert are_equal(weights_of("checkpoints/clock", "last"), weights_of("checkpoints/steps", "last"))
    train("harbour.txt", *options, "--steps", "40", "--out", "forty")
    state = load("checkpoints/forty/last.safetensors", with_state=True).state
    assert state is not None and state.values["config"]["warmup_steps"] == 4


def test_evaluations_that_were_asked_for_are_kept_by_the_clock() -> None:
    done = train("harbour.txt", *SMALL, "--minutes", "0.01", "--eval-every", "3", "--out", "a")
    assert "evaluated every 3" in done.stderr
    assert next(line["step"] for line in log_of("checkpoints/a") if "val_loss" in line) in (1, 2, 3)


def test_a_moment_is_one_step_with_a_word_about_the_warm_up() -> None:
    done = train("harbour.txt", *SMALL, "--minutes", "1e-6", "--out", "a")
    assert "done: 1 step in" in done.stderr
    assert re.search(r"need 5 steps to rise: .*--minutes.*--warmup-steps", done.stderr)


def test_a_run_by_the_clock_goes_on_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(2, monkeypatch, "harbour.txt", *SMALL, "--minutes", "0.01", "--eval-every", "50", "--out", "a")
    done = train("--resume", "a")
    assert "in 0.01 minutes, 2 of them done, evaluated every 50," in done.stderr
    state = load("checkpoints/a/last.safetensors", with_state=True).state
    assert state is not None
    assert f"done: {state.values['config']['steps']:,} steps" in done.stderr


def test_minutes_and_steps_exclude_each_other() -> None:
    usage = run("train", *QUICK, "--minutes", "1", "--out", "a", code=2).usage
    assert "--minutes" in usage
    assert "steps" in usage
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "527041", "1e308"])
def test_minutes_that_are_no_time_are_refused(minutes: str) -> None:
    said = run("train", "harbour.txt", *SMALL, f"--minutes={minutes}", code=1).error
    assert re.search(r"minutes=\S+ must be more than 0 and at most a year", said)
    assert not Path("checkpoints").exists()


# Texts


def corpus_of(run_name: str) -> tuple[str, int, set[str]]:
    """What a run says it was trained on: its name, its characters, and which there are."""
    told = run("info", "--checkpoint", run_name, "--json").json
    return told["training"]["corpus"], told["training"]["corpus_chars"], set(told["chars"])


def test_a_text_may_come_through_a_pipe() -> None:
    train("-", *QUICK[1:], stdin=TEXT)
    assert corpus_of("stdin-tiny") == ("stdin", len(TEXT), set(TEXT))


def test_a_folder_is_all_its_texts_in_order() -> None:
    folder = Path("plays")
    folder.mkdir()
    for name, letter in (("b.txt", "b"), ("a.txt", "a"), ("c.md", "c")):
        (folder / name).write_text(f"{letter}\n" * 100, encoding="utf-8")
    train("plays", *QUICK[1:], "--out", "folder")
    name, characters, chars = corpus_of("folder")
    assert characters == 400
    assert chars == {"a", "b", "\n"}
    assert name.index("a.txt") < name.index("b.txt")
    # The same, file by file.
    train("plays/a.txt", "plays/b.txt", *QUICK[1:], "--out", "files")
    assert are_equal(weights_of("checkpoints/folder"), weights_of("checkpoints/files"))


def test_a_text_may_be_in_another_encoding() -> None:
    Path("harbour.txt").write_bytes(TEXT.encode("latin-1"))
    assert "--encoding" in run("train", *QUICK, code=1).error
    train(*QUICK, "--encoding", "latin-1", "--out", "a")
    assert corpus_of("a")[1:] == (len(TEXT), set(TEXT))


def test_marks_and_line_ends_that_were_changed_are_said_once() -> None:
    for name in ("one.txt", "two.txt"):
        Path(name).write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    done = train("one.txt", "two.txt", *QUICK[1:], "--out", "a")
    assert done.stderr.count("byte-order mark") == 1
    assert done.stderr.count("CRLF") == 1
    assert corpus_of("a")[1:] == (2 * len(TEXT), set(TEXT))


def test_quiet_says_nothing_of_marks_and_line_ends_either() -> None:
    Path("harbour.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert train(*QUICK, "--quiet").stderr == ""


def test_without_a_text_the_bundled_one_is_learnt() -> None:
    done = train(*SMALL, "--steps", "1", "--eval-chars", "64")
    (name,) = [path.name for path in Path("checkpoints").iterdir()]
    assert "bundled" in done.stderr
    assert "bundled" in name
    assert corpus_of(name)[1] > 250_000


# What it says


def test_in_a_pipe_there_is_a_plain_line_an_evaluation() -> None:
    done = train(*QUICK, "--out", "a")
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    logged = log_of("checkpoints/a")
    assert len(lines) == len(logged) == 2
    for line, values in zip(lines, logged, strict=True):
        assert line.startswith(f"step {values['step']} of 4")
        assert f"{values['val_loss']:.4f}" in line


def test_what_is_read_and_held_out_is_said_before_the_training() -> None:
    first = train(*QUICK, "--eval-chars", "130", "--out", "a").stderr.partition("parameters")[0]
    held_out = -(-len(TEXT) // 10)
    for word in ("harbour.txt", f"{len(TEXT):,} characters", f"{len(set(TEXT))} different", f"{held_out} are held out"):
        assert word in first
    assert f"{130 / held_out:.0%}" in first


def test_the_summary_names_the_loss_and_a_command_that_works_as_printed() -> None:
    done = train("harbour.txt", *SMALL, "--steps", "30", "--eval-every", "5", "--out", "a")
    best = min(line["val_loss"] for line in log_of("checkpoints/a") if "val_loss" in line)
    summary = done.stderr[done.stderr.index("done:") :]
    assert f"{best:.4f} nats" in summary
    assert "checkpoints/a" in summary
    assert written_by(done) == Path("checkpoints/a")


@pytest.mark.parametrize("out", ["my run", "deep/in/a", "./a"])
def test_the_printed_command_works_wherever_the_run_is(out: str) -> None:
    # One of the same last name, to be mistaken for it.
    train(*QUICK, "--out", "a")
    assert (
        written_by(train(*QUICK, "--out", out, "--seed", "2")).resolve()
        == (Path(out) if "/" in out else Path("checkpoints") / out).resolve()
    )


def written_by(done: Outcome) -> Path:
    """Runs the command that a training printed as the next one; returns the folder of the run that wrote."""
    (command,) = re.findall(r"minigpt (generate .*)", done.stderr)
    told = run(*shlex.split(command), "--length", "5", "--json").json
    assert len(told["texts"][0]) == 5
    return Path(told["checkpoint"]).parent


def test_a_model_that_was_better_before_is_said_and_kept() -> None:
    # What is held out is written the other way round, so the better the rest is learnt the more it surprises.
    Path("turn.txt").write_text("abcd" * 200 + "dcba" * 22, encoding="utf-8")
    done = train("turn.txt", *SMALL, "--steps", "40", "--eval-every", "1", "--out", "a")
    losses = [line["val_loss"] for line in log_of("checkpoints/a") if "val_loss" in line]
    best = losses.index(min(losses)) + 1
    assert best < 40
    assert f"step {best}" in done.stderr[done.stderr.index("done:") :]
    assert f"best model, which is kept: step {best}," in done.stderr
    assert "last model: step 40," in done.stderr
    assert re.search(r"overfitting.*more text.*--dropout.*--patience", done.stderr, re.DOTALL)
    assert load("checkpoints/a/best.safetensors").facts.steps == best


def test_a_run_that_lost_patience_says_so_and_which_model_is_kept() -> None:
    Path("turn.txt").write_text("abcd" * 200 + "dcba" * 22, encoding="utf-8")
    line = ("turn.txt", *SMALL, "--steps", "40", "--eval-every", "1", "--patience", "3", "--out", "a")
    done = train(*line)
    losses = [line["val_loss"] for line in log_of("checkpoints/a") if "val_loss" in line]
    best, last = losses.index(min(losses)) + 1, len(losses)
    assert last == best + 3 < 40
    assert f"stopped early, {40 - last} steps before the end:\n3 evaluations in a row" in done.stderr
    assert f"better than that of step {best}" in done.stderr
    assert f"best model, which is kept: step {best}," in done.stderr
    assert load("checkpoints/a/best.safetensors").facts.steps == best
    again = train("--resume", "a")
    assert f"has taken its {last} steps already and ran out of --patience" in again.stderr
    assert f"stopped early, {40 - last} steps" in again.stderr
    assert len(log_of("checkpoints/a")) == len([*losses, *range(10, last + 1, 10)])


def test_a_model_that_could_learn_more_is_said_to() -> None:
    done = train(*QUICK, "--out", "a")
    assert re.search(r"underfitting.*--minutes.*--preset", done.stderr, re.DOTALL)
    assert "overfitting" not in done.stderr


def test_both_losses_of_the_summary_are_those_of_the_model_that_is_kept() -> None:
    done = train("harbour.txt", *SMALL, "--steps", "6", "--eval-every", "2", "--out", "a")
    facts = load("checkpoints/a/best.safetensors").facts
    assert (
        f"best and last model: step 6, loss {facts.train_loss:.4f}, held-out {facts.val_loss:.4f} nats" in done.stderr
    )


def test_what_the_time_went_to_is_told_when_asked() -> None:
    done = train(*QUICK, "--profile", "--out", "a")
    table = done.stderr[done.stderr.index("phase ") :].splitlines()
    rows = {row.split()[0]: row.split()[1:] for row in table[1:-1]}
    assert list(rows) == [
        "counting",
        "batch",
        "smoothing",
        "forward",
        "backward",
        "clipping",
        "optimizer",
        "reporting",
        "evaluation",
        "saving",
        "showing",
    ]
    # Ten shares, each rounded to a tenth.
    assert sum(float(share.rstrip("%")) for share, _ in rows.values()) == pytest.approx(100, abs=0.5)
    assert float(rows["forward"][1]) > 0
    assert re.fullmatch(r"the optimizer takes \d+% of an update of [\d.]+ ms", table[-1])
    assert "phase " not in train(*QUICK, "--out", "b").stderr
    assert train(*QUICK, "--profile", "--quiet", "--out", "c").stderr == ""


def test_what_the_time_went_to_is_told_of_a_stopped_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = stop_after(3, monkeypatch, *QUICK, "--profile", "--out", "a")
    assert re.search(r"the optimizer takes \d+% of an update", stopped.stderr)


def test_too_many_characters_to_smooth_the_targets_are_said() -> None:
    Path("many.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 520))) * 3, encoding="utf-8")
    note = "with more than 512 different characters, --ngram-weight has no effect"
    assert note in train("many.txt", *QUICK[1:], "--out", "a").stderr
    assert note not in train("many.txt", *QUICK[1:], "--ngram-weight", "0", "--out", "b").stderr
    assert note not in train(*QUICK, "--out", "c").stderr


RUINOUS = ("--muon-lr", "1e30", "--adamw-lr", "1e30", "--warmup-steps", "0")


def test_a_loss_that_is_not_finite_stops_with_advice_and_leaves_no_run() -> None:
    error = run("train", *QUICK, "-q", *RUINOUS, "--out", "a", code=1).error
    for word in ("at step 2 is", "checkpoints/a", "--muon-lr", "--adamw-lr", "--warmup-steps"):
        assert word in error
    assert [path.name for path in Path("checkpoints/a").iterdir()] == [".lock"]
    # With a copy of the log, too.
    run("train", *QUICK, "-q", *RUINOUS, "--out", "a", "--log", "tensorboard", code=1)
    assert [path.name for path in Path("checkpoints/a").iterdir()] == [".lock"]
    # So the name is free for the next try.
    train(*QUICK, "--out", "a")


def test_a_loss_that_is_not_finite_replaces_no_run() -> None:
    train(*QUICK, "--out", "a")
    before = {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()}
    run("train", *QUICK, "-q", *RUINOUS, "--out", "a", "--force", code=1)
    assert {path: path.read_bytes() for path in Path("checkpoints/a").iterdir()} == before


def test_a_run_that_fails_later_keeps_what_it_has_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(2, monkeypatch, *QUICK, "--out", "a")
    before = weights_of("checkpoints/a", "last")
    with mock.patch("minigpt.optim.Optimizer.clip_gradients", return_value=math.nan):
        assert "the gradient norm at step 3 is nan" in run("train", "--resume", "a", code=1).stderr
    assert are_equal(before, weights_of("checkpoints/a", "last"))


def test_a_reader_of_the_notes_who_leaves_stops_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
        program = Program("train", *QUICK, "--out", "a", stdin=nothing.fileno(), stdout=nothing.fileno(), stderr=writer)
        assert program.wait() == 0
    os.close(writer)
    assert load("checkpoints/a/last.safetensors").facts.steps == 4


def test_quiet_says_nothing() -> None:
    assert train(*QUICK, "--quiet").stderr == ""


def test_markup_in_names_is_printed_as_it_is() -> None:
    Path("[bold]x[red] :smile:.txt").write_text(TEXT, encoding="utf-8")
    done = train("[bold]x[red] :smile:.txt", *QUICK[1:], "--out", "[red]a")
    assert "[bold]x[red] :smile:.txt" in done.stderr
    assert "checkpoints/[red]a" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_on_a_terminal_there_are_a_bar_and_samples() -> None:
    line = ("harbour.txt", *SMALL, "--steps", "40", "--eval-every", "20", "--out", "a")
    terminal = Terminal("train", *line)
    assert terminal.finish() == 0, terminal.screen
    # The bar is drawn anew in its place, and gone in the end.
    assert "\r" in terminal.screen.replace("\r\n", "")
    shown = unstyled(terminal.screen)
    assert re.search(r"\d+%\|.*\d+/40 .*loss \d\.\d", shown)
    assert re.search(r"/40 .*loss \d\.\d+, held-out \d\.\d", shown)
    assert "%|" not in shown.rpartition("done:")[2]
    # Each evaluation shows some lines in the model's own words, told from the rest by a mark.
    for after in ("step 20 of 40", "step 40 of 40"):
        sample = re.findall(r"[\r\n] *\| (.*)", shown.partition(after)[2])
        assert sample
        assert set("".join(sample)) <= set(TEXT)
    # And the model is the one that is learnt when nobody looks.
    train(*line[:-1], "unseen")
    assert are_equal(weights_of("checkpoints/a", "last"), weights_of("checkpoints/unseen", "last"))


def test_a_quiet_training_shows_nothing_on_a_terminal_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*options: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Screen())
            patch.setattr(sys, "argv", ["minigpt", "train", *QUICK, *options])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0
            assert isinstance(sys.stderr, Screen)
            return sys.stderr.getvalue()

    assert "%|" in shown()
    assert shown("--quiet") == ""


# What it leaves to look at


def test_each_evaluation_leaves_a_sample_that_the_model_of_then_would_write() -> None:
    train(*QUICK, "--sample-chars", "40", "--out", "a")
    logged = log_of("checkpoints/a")
    samples = samples_of("checkpoints/a")
    for (step, heading, _), line in zip(samples, logged, strict=True):
        best = ", the best so far" if line["best"] else ""
        assert (step, heading) == (line["step"], f"held-out loss {line['val_loss']:.4f}{best}")
    last = load("checkpoints/a/last.safetensors")
    text = sample(last.model, last.tokenizer, "e", 40)
    indented = "".join(f"    {line}".rstrip() + "\n" for line in text.split("\n"))
    assert samples[-1][2] == f"\n{indented}\n"


def test_without_being_told_a_sample_has_200_characters_and_with_0_there_is_none() -> None:
    train("harbour.txt", *SHAPE, "--steps", "1", "--out", "a")
    ((_, _, kept),) = samples_of("checkpoints/a")
    text = re.sub(r"^    ", "", kept.removeprefix("\n"), flags=re.MULTILINE)
    # Less the spaces that ended its lines.
    assert 150 <= len(text) <= 202
    train("harbour.txt", *SMALL, "--steps", "1", "--sample-chars", "0", "--out", "b")
    assert not Path("checkpoints/b/samples.txt").exists()


@pytest.mark.parametrize("step", [3, 4, 5, 6, 7])
def test_a_run_that_was_stopped_has_the_samples_and_the_curve_of_one_that_was_not(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("harbour.txt", *SMALL, "--steps", "8", "--eval-every", "3", "--sample-chars", "30", "--dropout", "0.1")
    train(*line, "--out", "whole")
    stop_after(step, monkeypatch, *line, "--out", "parts")
    train("--resume", "parts")
    assert samples_of("checkpoints/parts") == samples_of("checkpoints/whole")
    assert [step for step, _, _ in samples_of("checkpoints/parts")] == [3, 6, 8]
    for name in ("whole", "parts"):
        assert log_of(f"checkpoints/{name}")[-1]["step"] == 8
    picture = Path("checkpoints/whole/loss.svg")
    if picture.exists():
        assert Path("checkpoints/parts/loss.svg").read_bytes() == picture.read_bytes()


def test_a_sample_that_was_lost_between_saving_and_writing_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("harbour.txt", *SMALL, "--steps", "6", "--eval-every", "3", "--sample-chars", "30")
    train(*line, "--out", "whole")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("minigpt.cli.train_report.keep_sample", stop)
        run("train", *line, "--out", "parts", code=130)
    assert not Path("checkpoints/parts/samples.txt").exists()
    assert load("checkpoints/parts/last.safetensors").facts.steps == 3
    train("--resume", "parts")
    assert samples_of("checkpoints/parts") == samples_of("checkpoints/whole")


def test_force_begins_anew_what_there_is_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    train("harbour.txt", *SMALL, "--steps", "12", "--eval-every", "4", "--out", "a")
    stop_after(1, monkeypatch, *QUICK, "--out", "a", "--force")
    assert not Path("checkpoints/a/samples.txt").exists()
    assert not Path("checkpoints/a/loss.svg").exists()
    train("--resume", "a")
    assert [step for step, _, _ in samples_of("checkpoints/a")] == [2, 4]


def test_a_run_that_stops_early_leaves_its_curve_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for step, is_there in ((1, False), (3, True)):
        stop_after(step, monkeypatch, *QUICK, "--out", f"at-{step}")
        assert Path(f"checkpoints/at-{step}/loss.svg").exists() is is_there


def test_the_curve_is_said_to_be_there_once() -> None:
    pytest.importorskip("matplotlib")
    done = train(*QUICK, "--out", "a")
    assert done.stderr.count("loss.svg") == 1
    ElementTree.parse("checkpoints/a/loss.svg")


def test_without_matplotlib_training_ends_as_ever_and_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = train(*QUICK, "--out", "a")
    assert "done: 4 steps" in done.stderr
    assert "matplotlib" not in done.stderr
    assert "loss.svg" not in done.stderr
    assert not Path("checkpoints/a/loss.svg").exists()


def test_what_cannot_be_written_to_look_at_is_said_and_fails_nothing() -> None:
    pytest.importorskip("matplotlib")
    for name in ("loss.svg", "samples.txt"):
        (Path("checkpoints/a") / name).mkdir(parents=True)
    done = train(*QUICK, "--out", "a", "--force")
    assert done.stderr.count("cannot write checkpoints/a/loss.svg") == 1
    # Not at each of its evaluations.
    assert done.stderr.count("cannot write checkpoints/a/samples.txt") == 1
    assert "done: 4 steps" in done.stderr
    assert load("checkpoints/a/last.safetensors").facts.steps == 4


def curve_in(screen: str) -> list[str]:
    """The lines of the curve that a training shows at its end, its title first."""
    lines = screen.partition("done:")[0].splitlines()
    (title,) = [i for i, line in enumerate(lines) if "nats a character, by step" in line]
    return lines[title:]


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_on_a_terminal_the_losses_are_drawn_at_the_end() -> None:
    terminal = Terminal("train", "harbour.txt", *SMALL, "--steps", "40", "--eval-every", "10", "--out", "a")
    assert terminal.finish() == 0, terminal.screen
    lines = [line for line in curve_in(unstyled(terminal.screen)) if "loss.svg" not in line]
    assert 10 < len(lines) <= 15
    assert all(len(line) <= 80 for line in lines)
    frame = [line for line in lines if line.startswith("│")]
    assert len(frame) == 10
    # Both curves, told apart without colour, and what they are.
    assert sum(line.count("o") for line in frame) == 4
    assert sum(line.count("·") for line in frame) > 20
    assert "·· training" in lines[-1]
    assert "oo held-out" in lines[-1]


def test_in_a_pipe_there_is_no_curve() -> None:
    assert "│" not in train(*QUICK, "--out", "a").stderr


# TensorBoard


@pytest.mark.parametrize("stop", [None, 10, 14, 25])
def test_tensorboard_shows_the_losses_of_the_log_once(stop: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    line = ("harbour.txt", *SMALL, "--steps", "30", "--eval-every", "12", "--sample-chars", "0", "--out", "a")
    if stop is None:
        train(*line, "--log", "tensorboard")
    else:
        stop_after(stop, monkeypatch, *line, "--log", "tensorboard")
        train("--resume", "a", "--log", "tensorboard")
    logged = log_of("checkpoints/a")
    found = tensorboard_of(Path("checkpoints/a"))
    for tag, key in (
        ("loss/held-out", "val_loss"),
        ("loss/training", "batch_loss"),
        ("learning_rate_share", "lr_factor"),
    ):
        lines = [line for line in logged if ("val_loss" in line) is (key == "val_loss")]
        assert [step for step, _ in found[tag]] == [line["step"] for line in lines]
        # In the files they are float32.
        assert [value for _, value in found[tag]] == pytest.approx([line[key] for line in lines], rel=1e-6)
    assert [step for step, _ in found["chars_per_s"]] == [10, 20, 30]
    first = next(line for line in logged if line["step"] == 10)
    assert found["chars_per_s"][0][1] == pytest.approx(10 * 4 * 64 / first["elapsed_s"], rel=1e-6)


def test_without_tensorboard_its_log_is_refused_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    error = run("train", *QUICK, "--out", "a", "--log", "tensorboard", code=1).error
    assert "pip install 'minigpt[tensorboard]'" in error
    assert not Path("checkpoints").exists()


def test_another_log_is_a_wrong_command_line() -> None:
    assert "--log" in run("train", *QUICK, "--log", "carrier-pigeon", code=2).usage
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize(
    ("eval_chars", "words"), [(0, "the last 100 .* all"), (40, "36%"), (1, "12%"), (95, "84%"), (96, "all")]
)
def test_how_much_is_held_out_and_read_is_said_in_words(eval_chars: int, words: str) -> None:
    assert re.search(words, held_out_words(100, 12, eval_chars))


def test_the_text_of_these_tests_is_what_they_say_it_is() -> None:
    assert len(TEXT) > 2500
    assert "é" in TEXT
    assert all(line in TEXT for line in LINES)
