"""Training: it learns, it draws from nobody else's numbers, and stopping anywhere changes nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from minigpt import trainer as trainer_module
from minigpt.checkpoint import Checkpoint, Facts, TrainingState, load, save_checkpoint
from minigpt.config import GPTConfig, TrainConfig
from minigpt.corpus import Ids
from minigpt.errors import CheckpointError, ConfigError, TrainingError
from minigpt.evaluation import window_loss
from minigpt.examples import Examples
from minigpt.ngrams import NGrams
from minigpt.pacing import warmup_for
from minigpt.runs import BEST, LAST, LOG
from minigpt.tokenizer import CharTokenizer
from minigpt.trainer import (
    EVALUATION_PHASES,
    UPDATE_PHASES,
    EvalReport,
    StepReport,
    Trainer,
    training_loss,
)
from tests.run_support import assert_same_run, assert_same_tensors, facts_of, log_of, names_in, without_times

CHARS = "\n abcdef"
SHAPE = GPTConfig(vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=16, block_size=12, window=5, dropout=0.2)
# Evaluations at 5, 10, 15, 20 and, off the beat, 23; lines of training loss at 10 and 20.
CONFIG = TrainConfig(
    steps=23, batch_size=3, eval_every=5, warmup_steps=4, weight_decay=0.1, ngram_weight=0.8, eval_chars=40
)
FACTS = Facts(corpus="test", corpus_sha256="0" * 64, corpus_chars=400, val_fraction=0.25, most_frequent="a")
# As a person would meet it: the words of a message.
NO_SPACE = "No space left on device"


def text(n: int, seed: int = 0) -> Ids:
    """Random walks through the vocabulary, so that there is something to learn and something to fail at."""
    moves = np.random.default_rng(seed).integers(1, 4, n)
    return (np.cumsum(moves) % len(CHARS)).astype(np.uint8)


# Of 23 examples in a pass, so that batches of three are of two passes now and then.
TRAIN_IDS, VAL_IDS = text(290, seed=1), text(100, seed=2)


def start(folder: Path, config: TrainConfig = CONFIG, shape: GPTConfig = SHAPE, **options: Any) -> Trainer:
    return Trainer.start(folder, shape, CharTokenizer(CHARS), FACTS, TRAIN_IDS, VAL_IDS, config, **options)


def resume(folder: Path) -> Trainer:
    return Trainer.resume(folder, load(folder / LAST, with_state=True), TRAIN_IDS, VAL_IDS)


def finish(trainer: Trainer) -> list[StepReport | EvalReport]:
    return list(trainer.steps())


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@dataclass(frozen=True)
class Reference:
    """A run that never stopped, and its folder as it would have been saved after each report."""

    folder: Path
    reports: list[StepReport | EvalReport]
    weights: dict[str, Tensor]
    saved: list[Path]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    base = tmp_path_factory.mktemp("reference")
    folder = base / "straight"
    trainer = start(folder)
    reports = finish(trainer)
    # So those of every run that is compared with it.
    assert names_in(folder) == [BEST, LAST, LOG]
    # The same again, saved after each report and set aside.
    stopping = start(base / "stopping")
    saved = []
    for i, _ in enumerate(stopping.steps()):
        stopping.save()
        saved.append(shutil.copytree(base / "stopping", base / f"saved-{i}"))
    assert_same_run(base / "stopping", folder)
    return Reference(folder, reports, weights_of(trainer), saved)


# Learning


def test_one_tiny_text_is_learnt_by_heart(tmp_path: Path) -> None:
    # "aab\n" over and over: what follows an "a" is told by what stands before it.
    ids = np.tile(np.array([2, 2, 3, 0], dtype=np.uint8), 80)
    config = TrainConfig(steps=90, batch_size=4, warmup_steps=5, eval_every=90)
    shape = replace(SHAPE, block_size=32, dropout=0.0)
    trainer = Trainer.start(tmp_path / "run", shape, CharTokenizer(CHARS), FACTS, ids, ids[:100], config)
    *updates, evaluation = finish(trainer)
    assert isinstance(updates[0], StepReport)
    assert updates[0].loss == pytest.approx(math.log(len(CHARS)), abs=1e-6)
    assert isinstance(evaluation, EvalReport)
    assert evaluation.val_loss < 0.1
    assert window_loss(load(tmp_path / "run" / BEST).model, ids) < 0.1


def test_the_reports_tell_of_every_update_and_every_evaluation(reference: Reference) -> None:
    updates = [report for report in reference.reports if isinstance(report, StepReport)]
    assert [report.step for report in updates] == list(range(1, 24))
    assert [report.step for report in reference.reports if isinstance(report, EvalReport)] == [5, 10, 15, 20, 23]
    # An evaluation comes right after the update that it looks at.
    assert [report.step for report in reference.reports] == sorted(report.step for report in reference.reports)
    assert [report.lr_factor for report in updates[:4]] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert updates[-1].lr_factor == pytest.approx(1 / (23 * 0.6))
    assert all(report.grad_norm > 0 and report.chars_per_s > 0 for report in updates)


def test_the_loss_of_an_evaluation_is_that_of_the_model_it_saves(reference: Reference) -> None:
    report = next(report for report in reference.reports if isinstance(report, EvalReport))
    checkpoint = load(reference.saved[5] / BEST)
    assert checkpoint.facts.steps == report.step == 5
    assert checkpoint.facts.val_loss == report.val_loss
    assert checkpoint.facts.train_loss == report.train_loss
    assert window_loss(checkpoint.model, VAL_IDS, 40) == report.val_loss
    # As many characters of what was learnt, measured in the same way: without dropout.
    assert window_loss(checkpoint.model, TRAIN_IDS, 40) == report.train_loss
    # And not of all the held-out text, which would be another number.
    assert window_loss(checkpoint.model, VAL_IDS) != report.val_loss


@pytest.mark.parametrize(("most", "eval_chars"), [(24, 40), (24, 0), (8192, 0)])
def test_no_more_of_the_training_part_is_read_than_of_the_held_out_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, eval_chars: int
) -> None:
    monkeypatch.setattr(trainer_module, "TRAIN_CHARS", most)
    trainer = start(tmp_path / "run", replace(CONFIG, eval_chars=eval_chars))
    report = next(report for report in trainer.steps() if isinstance(report, EvalReport))
    model = load(tmp_path / "run" / BEST).model
    assert report.train_loss == window_loss(model, TRAIN_IDS, min(most, eval_chars or len(VAL_IDS)))
    assert report.val_loss == window_loss(model, VAL_IDS, eval_chars)


def test_batch_losses_in_the_log_are_means_of_ten_updates(reference: Reference) -> None:
    losses = {report.step: report.loss for report in reference.reports if isinstance(report, StepReport)}
    found = {line["step"]: line["batch_loss"] for line in log_of(reference.folder) if "batch_loss" in line}
    assert found == {
        10: pytest.approx(np.mean([losses[step] for step in range(1, 11)]), rel=1e-12),
        20: pytest.approx(np.mean([losses[step] for step in range(11, 21)]), rel=1e-12),
    }


def test_the_log_has_a_line_for_every_evaluation_and_every_tenth_update(reference: Reference) -> None:
    log = without_times(log_of(reference.folder))
    kinds = [(line["step"], sorted(line.keys() - {"step"})) for line in log]
    update, evaluation = ["batch_loss", "lr_factor"], ["best", "train_loss", "val_loss"]
    assert kinds == [
        (5, evaluation),
        (10, update),
        (10, evaluation),
        (15, evaluation),
        (20, update),
        (20, evaluation),
        (23, evaluation),
    ]
    reports = [report for report in reference.reports if isinstance(report, EvalReport)]
    for line, report in zip((line for line in log if "val_loss" in line), reports, strict=True):
        assert (line["train_loss"], line["val_loss"], line["best"]) == (
            report.train_loss,
            report.val_loss,
            report.best,
        )


def test_time_spent_is_counted_over_all_sessions(tmp_path: Path) -> None:
    trainer = start(tmp_path / "run")
    for _ in islice(trainer.steps(), 8):
        pass
    trainer.save()
    again = resume(tmp_path / "run")
    assert again.elapsed_s == trainer.elapsed_s > 0
    *_, last = finish(again)
    assert isinstance(last, EvalReport)
    assert last.elapsed_s == again.elapsed_s > trainer.elapsed_s


def test_the_counts_share_of_the_targets_is_what_is_learnt_from_and_the_rest_is_reported() -> None:
    logits = torch.tensor([[[0.0, math.log(3)]]], requires_grad=True)  # probabilities of 1/4 and 3/4
    smoothed = torch.tensor([[0.5, 0.5]])
    loss, objective = training_loss(logits, torch.tensor([[1]]), smoothed, 0.8)
    assert loss.item() == pytest.approx(math.log(4 / 3))
    assert objective.item() == pytest.approx(0.2 * math.log(4 / 3) + 0.8 * (math.log(4) + math.log(4 / 3)) / 2)
    objective.backward()  # type: ignore[no-untyped-call]
    # The probabilities less the mixed target, which is 0.4 and 0.6.
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([0.25 - 0.4, 0.75 - 0.6])


def aims_of_training(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor | None, float]]:
    """Targets, what the counts say and their share, of every update from here on."""
    aims: list[tuple[Tensor, Tensor | None, float]] = []

    def spy(logits: Tensor, *aim: Any) -> tuple[Tensor, Tensor]:
        aims.append(aim)
        return training_loss(logits, *aim)

    monkeypatch.setattr(trainer_module, "training_loss", spy)
    return aims


def test_the_counts_of_a_batch_are_those_of_its_places_in_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aims = aims_of_training(monkeypatch)
    next(start(tmp_path / "run").steps())
    ((targets, smoothed, _),) = aims
    assert smoothed is not None
    counts = NGrams(TRAIN_IDS, len(CHARS))
    # The places are told by the examples, each of which occurs once.
    for row, example in enumerate(targets.numpy()):
        windows = np.lib.stride_tricks.sliding_window_view(TRAIN_IDS, len(example))
        (place,) = np.flatnonzero((windows == example).all(axis=1))
        expected = counts.distribution(np.arange(place, place + len(example)))
        assert torch.equal(smoothed.view(*targets.shape, -1)[row], expected)


def test_the_counts_share_falls_to_half_as_the_rates_fall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aims = aims_of_training(monkeypatch)
    finish(start(tmp_path / "run", replace(CONFIG, steps=10, decay_fraction=0.5, ngram_weight=0.8)))
    # Not in the warm-up of four steps, in which the rates rise.
    assert [share for *_, share in aims] == pytest.approx([0.8] * 6 + [0.72, 0.64, 0.56, 0.48])


# Randomness


def run_to_the_end(folder: Path, config: TrainConfig = CONFIG, shape: GPTConfig = SHAPE) -> dict[str, Tensor]:
    trainer = start(folder, config, shape)
    finish(trainer)
    return weights_of(trainer)


def test_the_same_seed_gives_the_same_run_whatever_was_drawn_before(tmp_path: Path, reference: Reference) -> None:
    torch.manual_seed(12345)
    torch.rand(7)
    np.random.seed(5)
    assert_same_tensors(run_to_the_end(tmp_path / "again"), reference.weights)
    assert_same_run(tmp_path / "again", reference.folder)


def test_another_seed_gives_other_weights_from_the_first_one_on(tmp_path: Path, reference: Reference) -> None:
    other = replace(CONFIG, seed=1)
    first, second = start(tmp_path / "0"), start(tmp_path / "1", other)
    assert not torch.equal(first.model.wte.weight, second.model.wte.weight)
    assert not torch.equal(run_to_the_end(tmp_path / "2", other)["wte.weight"], reference.weights["wte.weight"])


def test_the_seed_alone_decides_the_first_weights(tmp_path: Path) -> None:
    one = start(tmp_path / "0")
    other = start(tmp_path / "1", replace(CONFIG, steps=7, batch_size=9, muon_lr=0.5, eval_every=1))
    assert_same_tensors(weights_of(one), weights_of(other))


def test_training_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    torch.manual_seed(77)
    trainer = start(tmp_path / "run")
    state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].tolist()  # type: ignore[index]
    for _ in trainer.steps():
        assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpy_state  # type: ignore[index]


def test_starting_a_run_leaves_the_random_numbers_of_others_alone(tmp_path: Path) -> None:
    torch.manual_seed(77)
    state = torch.get_rng_state()
    start(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_that_others_draw_between_two_steps_change_nothing(tmp_path: Path, reference: Reference) -> None:
    trainer = start(tmp_path / "run")
    for i, _ in enumerate(trainer.steps()):
        torch.manual_seed(i)
        torch.rand(3)
    assert_same_tensors(weights_of(trainer), reference.weights)


@pytest.mark.parametrize("eval_every", [1, 2, 7, 1000])
def test_looking_more_often_does_not_change_what_is_learnt(
    tmp_path: Path, reference: Reference, eval_every: int
) -> None:
    weights = run_to_the_end(tmp_path / "run", replace(CONFIG, eval_every=eval_every, eval_chars=0))
    assert_same_tensors(weights, reference.weights)


def test_dropout_is_on_in_training_drawn_anew_at_each_step_and_off_in_evaluation(
    tmp_path: Path, reference: Reference
) -> None:
    without = run_to_the_end(tmp_path / "without", shape=replace(SHAPE, dropout=0.0))
    assert not torch.equal(without["wte.weight"], reference.weights["wte.weight"])
    # One example, so that every batch holds the same: at rates of zero only dropout can make losses differ.
    ids = TRAIN_IDS[: SHAPE.block_size + 1]
    config = replace(CONFIG, muon_lr=0.0, adamw_lr=0.0)
    trainer = Trainer.start(tmp_path / "run", SHAPE, CharTokenizer(CHARS), FACTS, ids, VAL_IDS, config)
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.copy_(torch.rand(param.shape, generator=torch.Generator().manual_seed(1)) - 0.5)
    reports = finish(trainer)
    losses = [report.loss for report in reports if isinstance(report, StepReport)]
    assert len(set(losses)) == len(losses)
    assert len({report.val_loss for report in reports if isinstance(report, EvalReport)}) == 1


def test_every_step_draws_other_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def spy(self: Examples, *args: int) -> Any:
        examples = batch(self, *args)
        drawn.append(examples.x.tolist())
        return examples

    batch = Examples.batch
    monkeypatch.setattr(Examples, "batch", spy)
    finish(start(tmp_path / "run"))
    assert len(drawn) == CONFIG.steps
    assert all(one != other for i, one in enumerate(drawn) for other in drawn[:i])


# Stopping and going on


# Reports of the reference run: an update at each step, and evaluations behind steps 5, 10, 15, 20 and 23.
N_REPORTS = 28


@pytest.mark.parametrize("stop", range(N_REPORTS))
def test_a_run_stopped_after_any_report_and_resumed_is_the_run_that_never_stopped(
    tmp_path: Path, reference: Reference, stop: int
) -> None:
    assert len(reference.reports) == N_REPORTS
    folder = shutil.copytree(reference.saved[stop], tmp_path / "run")
    trainer = resume(folder)
    assert trainer.step == reference.reports[stop].step
    assert trainer.model.training
    reports = finish(trainer)
    expected = reference.reports[stop + 1 :]
    assert [_timeless(report) for report in reports] == [_timeless(report) for report in expected]
    assert_same_tensors(weights_of(trainer), reference.weights)
    assert_same_run(folder, reference.folder)


def _timeless(report: StepReport | EvalReport) -> StepReport | EvalReport:
    if isinstance(report, StepReport):
        return replace(report, chars_per_s=0.0)
    return replace(report, elapsed_s=0.0)


def test_a_run_stopped_after_every_report_is_the_run_that_never_stopped(tmp_path: Path, reference: Reference) -> None:
    folder = tmp_path / "run"
    start(folder)
    for _ in range(N_REPORTS):
        trainer = resume(folder)
        next(trainer.steps())
        trainer.save()
    assert finish(resume(folder)) == []
    assert_same_run(folder, reference.folder)


def test_a_run_is_on_disk_before_its_first_step(tmp_path: Path, reference: Reference) -> None:
    trainer = start(tmp_path / "run")
    before = weights_of(trainer)
    assert names_in(tmp_path / "run") == [LAST]
    again = resume(tmp_path / "run")
    assert again.step == 0
    assert_same_tensors(weights_of(again), before)
    finish(again)
    assert_same_run(tmp_path / "run", reference.folder)


def test_what_was_trained_after_the_last_save_is_trained_again(tmp_path: Path, reference: Reference) -> None:
    # As if killed three steps after an evaluation, with a line of log more than was saved.
    folder = tmp_path / "run"
    for _ in islice(start(folder).steps(), 11 + 2):
        pass
    assert resume(folder).step == 10
    finish(resume(folder))
    assert_same_run(folder, reference.folder)


def test_a_finished_run_has_nothing_left_to_do_and_nothing_changes(tmp_path: Path, reference: Reference) -> None:
    folder = shutil.copytree(reference.folder, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert finish(resume(folder)) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", [BEST, LAST])
def test_a_run_killed_between_two_files_of_one_evaluation_is_resumed_as_if_it_had_not_been(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "run"
    trainer = start(folder)

    def save(path: Path, *args: Any) -> None:
        if trainer.step == 10 and path.name == name:
            raise KeyboardInterrupt
        save_checkpoint(path, *args)

    monkeypatch.setattr(trainer_module, "save_checkpoint", save)
    with pytest.raises(KeyboardInterrupt):
        finish(trainer)
    monkeypatch.undo()
    # The log is ahead of the files.
    assert log_of(folder)[-1]["step"] == 10
    assert resume(folder).step == 5
    finish(resume(folder))
    assert_same_run(folder, reference.folder)


def test_an_evaluation_that_is_killed_right_after_its_line_of_log_is_logged_once(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Saved at step 10 and stopped before its evaluation (Ctrl-C), resumed, then killed inside that evaluation.
    assert isinstance(reference.reports[10], StepReport)
    folder = shutil.copytree(reference.saved[10], tmp_path / "run")

    def save(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer_module, "save_checkpoint", save)
    with pytest.raises(KeyboardInterrupt):
        finish(resume(folder))
    monkeypatch.undo()
    finish(resume(folder))
    assert_same_run(folder, reference.folder)


@pytest.mark.parametrize(
    "tail", ['{"step": 9, "train_lo', '{"step": 9, "train_loss": 2.0}', "\0\0\0\0", "[9]\n", "x\n"]
)
def test_a_log_that_was_cut_short_is_mended(tmp_path: Path, reference: Reference, tail: str) -> None:
    folder = shutil.copytree(reference.saved[8], tmp_path / "run")
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(tail)
    finish(resume(folder))
    assert_same_run(folder, reference.folder)


def test_a_log_that_was_lost_begins_anew(tmp_path: Path, reference: Reference) -> None:
    folder = shutil.copytree(reference.saved[8], tmp_path / "run")
    (folder / LOG).unlink()
    finish(resume(folder))
    expected = [line for line in log_of(reference.folder) if line["step"] > 5]
    assert without_times(log_of(folder)) == without_times(expected)


def test_a_log_that_is_not_text_any_more_is_no_obstacle(tmp_path: Path, reference: Reference) -> None:
    folder = shutil.copytree(reference.saved[8], tmp_path / "run")
    with (folder / LOG).open("ab") as log:
        log.write(b"\xff\xfe")
    finish(resume(folder))
    assert_same_run(folder, reference.folder)


def test_the_callers_own_values_are_kept_through_saves_and_resumes(tmp_path: Path) -> None:
    extra = {"sources": ["plays/é.txt"], "threads": 2}
    start(tmp_path / "run", extra=extra)
    for _ in range(2):
        trainer = resume(tmp_path / "run")
        next(trainer.steps())
        trainer.save()
    state = load(tmp_path / "run" / LAST, with_state=True).state
    assert state is not None
    assert state.values["extra"] == extra


# Damaged states


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def damaged(folder: Path, change: Change) -> Checkpoint:
    """The last checkpoint of a run, with a state that was changed."""
    checkpoint = load(folder / LAST, with_state=True)
    assert checkpoint.state is not None
    values, tensors = json.loads(json.dumps(checkpoint.state.values)), dict(checkpoint.state.tensors)
    change(values, tensors)
    return replace(checkpoint, state=TrainingState(values, tensors))


def assert_refused(reference: Reference, words: str, change: Change) -> None:
    """A run that was saved after step 8 is refused with one sentence, which names its file and what is wrong."""
    checkpoint = damaged(reference.saved[8], change)
    with pytest.raises(CheckpointError) as caught:
        Trainer.resume(reference.saved[8], checkpoint, TRAIN_IDS, VAL_IDS)
    assert f"the training state in {checkpoint.path} is damaged ({words}): " in str(caught.value)
    assert "\n" not in str(caught.value)


STATE_VALUES = [
    "config",
    "step",
    "best_loss",
    "best_step",
    "best_train_loss",
    "evaluated_step",
    "elapsed_s",
    "minutes",
    "stopwatch",
    "losses",
    "extra",
]


@pytest.mark.parametrize("name", STATE_VALUES)
def test_a_state_that_lacks_a_value_is_refused(reference: Reference, name: str) -> None:
    assert_refused(reference, f"it lacks '{name}'", lambda values, _: values.pop(name))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("config", None, "settings must be a JSON object, not NoneType"),
        ("config", {"steps": 0}, "steps=0 must be at least 1"),
        ("config", {"stepz": 10}, "unknown setting 'stepz': it was written by another version of minigpt"),
        ("step", "six", "step 'six' is not one of 23"),
        ("step", None, "step None is not one of 23"),
        ("elapsed_s", [], "float() argument must be a string or a real number, not 'list'"),
        ("losses", 3, "'int' object is not iterable"),
        ("losses", [None], "float() argument must be a string or a real number, not 'NoneType'"),
        ("losses", ["low"], "could not convert string to float: 'low'"),
        ("best_train_loss", "low", "could not convert string to float: 'low'"),
        ("minutes", "a few", "could not convert string to float: 'a few'"),
        ("minutes", -4, "minutes=-4 must be more than 0 and at most a year (527,040)"),
        ("stopwatch", {"forward": ["one", 0.5]}, "invalid literal for int() with base 10: 'one'"),
    ],
)
def test_a_state_with_a_wrong_value_is_refused(reference: Reference, name: str, value: Any, words: str) -> None:
    assert_refused(reference, words, lambda values, _: values.update({name: value}))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("step", 24, "step 24 is not one of 23"),
        ("step", -1, "step -1 is not one of 23"),
        ("best_loss", "low", "could not convert string to float: 'low'"),
        ("losses", [], "it has 0 losses"),
        ("extra", None, "'NoneType' object is not iterable"),
        ("evaluated_step", "five", "step 'five' is not one of 8"),
    ],
)
def test_a_state_with_a_value_that_cannot_be_is_refused(
    reference: Reference, name: str, value: Any, words: str
) -> None:
    assert_refused(reference, words, lambda values, _: values.update({name: value}))


def test_a_state_without_its_tensors_is_refused(reference: Reference) -> None:
    missing = "optimizer state 'blocks.0.attn.qkv.weight/momentum' is missing, expected (48, 16)"
    assert_refused(reference, missing, lambda _, tensors: tensors.clear())
    misshapen = "optimizer state 'norm_f.weight/exp_avg' has shape (3,), expected (16,)"
    assert_refused(reference, misshapen, lambda _, tensors: tensors.update({"norm_f.weight/exp_avg": torch.zeros(3)}))


def test_a_model_without_a_state_cannot_be_resumed(reference: Reference) -> None:
    checkpoint = load(reference.folder / BEST, with_state=True)
    with pytest.raises(CheckpointError, match="no training state"):
        Trainer.resume(reference.folder, checkpoint, TRAIN_IDS, VAL_IDS)


# Numbers that are none


def poison(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = math.inf


def at_step(folder: Path, n: int) -> tuple[Trainer, Iterator[StepReport | EvalReport]]:
    trainer = start(folder)
    steps = trainer.steps()
    for report in steps:
        if report.step == n and (isinstance(report, EvalReport) or n % CONFIG.eval_every):
            break
    return trainer, steps


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_loss_that_is_no_number_stops_before_the_update(tmp_path: Path) -> None:
    trainer, steps = at_step(tmp_path / "run", 7)
    poison(trainer)
    weights, files = weights_of(trainer), files_of(tmp_path / "run")
    with pytest.raises(TrainingError, match=r"the loss at step 8 is (nan|inf)") as caught:
        next(steps)
    assert str(tmp_path / "run") in str(caught.value)
    assert trainer.step == 7
    assert_same_tensors(weights_of(trainer), weights)
    assert files_of(tmp_path / "run") == files


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_stops_before_the_update(tmp_path: Path, value: float) -> None:
    trainer, steps = at_step(tmp_path / "run", 7)
    trainer.model.norm_f.weight.register_hook(lambda gradient: gradient * value)  # type: ignore[no-untyped-call]
    weights, files = weights_of(trainer), files_of(tmp_path / "run")
    with pytest.raises(TrainingError, match=r"the gradient norm at step 8 is (nan|inf)"):
        next(steps)
    assert trainer.step == 7
    assert_same_tensors(weights_of(trainer), weights)
    assert files_of(tmp_path / "run") == files


def test_a_run_that_met_a_number_that_is_none_goes_on_from_its_last_save(tmp_path: Path, reference: Reference) -> None:
    trainer, steps = at_step(tmp_path / "run", 7)
    poison(trainer)
    with pytest.raises(TrainingError):
        next(steps)
    again = resume(tmp_path / "run")
    assert again.step == 5
    finish(again)
    assert_same_run(tmp_path / "run", reference.folder)


@pytest.mark.parametrize("step", [4, 9])
def test_weights_that_an_update_ruined_are_not_saved(tmp_path: Path, step: int) -> None:
    trainer, steps = at_step(tmp_path / "run", step)
    next(steps)
    # What a rate far too high does: loss and gradient were still finite.
    poison(trainer)
    files = files_of(tmp_path / "run")
    with pytest.raises(TrainingError):
        next(steps)
    assert {BEST: files.get(BEST), LAST: files[LAST]} == {
        BEST: files_of(tmp_path / "run").get(BEST),
        LAST: files_of(tmp_path / "run")[LAST],
    }


# The best model


def held_out_losses(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Makes the evaluations to come find these losses; on the training part it is half a nat less each time."""
    left = [loss - part for loss in losses for part in (0.5, 0.0)]
    monkeypatch.setattr(trainer_module, "window_loss", lambda *_: left.pop(0))


def test_the_best_model_moves_only_when_the_held_out_loss_is_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out_losses(monkeypatch, 3.0, 2.0, 2.5, 2.0, 1.9)
    trainer = start(tmp_path / "run")
    found = []
    for report in trainer.steps():
        if isinstance(report, EvalReport):
            best, last = load(tmp_path / "run" / BEST), load(tmp_path / "run" / LAST)
            found.append((report.best, best.facts.steps, best.facts.val_loss, last.facts.steps, last.facts.val_loss))
            assert (trainer.best_step, trainer.best_loss) == (best.facts.steps, best.facts.val_loss)
            assert_same_tensors(last.model.state_dict(), weights_of(trainer))
            same = torch.equal(best.model.wte.weight, trainer.model.wte.weight)
            assert same is report.best
    assert found == [
        (True, 5, 3.0, 5, 3.0),
        (True, 10, 2.0, 10, 2.0),
        (False, 10, 2.0, 15, 2.5),
        (False, 10, 2.0, 20, 2.0),
        (True, 23, 1.9, 23, 1.9),
    ]


def test_a_resumed_run_remembers_its_best_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out_losses(monkeypatch, 2.0, 2.5, 3.0, 2.1, 2.2)
    at_step(tmp_path / "run", 10)
    again = resume(tmp_path / "run")
    assert (again.best_loss, again.best_train_loss, again.best_step) == (2.0, 1.5, 5)
    assert not any(report.best for report in again.steps() if isinstance(report, EvalReport))
    assert load(tmp_path / "run" / BEST).facts.steps == 5


# Patience


IMPATIENT = replace(CONFIG, steps=40, patience=2)


def test_a_run_ends_when_the_held_out_loss_did_not_improve_so_often_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once is not yet enough, and as low as before is not lower.
    held_out_losses(monkeypatch, 3.0, 3.1, 2.0, 2.5, 2.0)
    trainer = start(tmp_path / "run", IMPATIENT)
    reports = finish(trainer)
    assert [report.step for report in reports if isinstance(report, EvalReport)] == [5, 10, 15, 20, 25]
    assert (trainer.step, trainer.best_step, trainer.best_loss) == (25, 15, 2.0)
    assert trainer.finished
    assert trainer.out_of_patience
    assert load(tmp_path / "run" / BEST).facts.steps == 15


def test_a_run_that_stopped_early_has_nothing_left_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out_losses(monkeypatch, 2.0, 2.5, 2.0)
    finish(start(tmp_path / "run", IMPATIENT))
    files = files_of(tmp_path / "run")
    again = resume(tmp_path / "run")
    assert (again.step, again.finished, again.out_of_patience) == (15, True, True)
    assert finish(again) == []
    assert files_of(tmp_path / "run") == files


@pytest.mark.parametrize("stop", range(1, 18))
def test_patience_is_remembered_by_a_run_that_is_killed_after_any_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    losses = {5: 2.0, 10: 2.5, 15: 2.0, 20: 1.0}
    trainer = start(tmp_path / "run", IMPATIENT)
    monkeypatch.setattr(trainer_module, "window_loss", lambda *_: losses[trainer.step])
    for _ in islice(trainer.steps(), stop):
        pass
    trainer = resume(tmp_path / "run")
    finish(trainer)
    assert (trainer.step, trainer.best_step) == (15, 5)


def test_without_patience_no_loss_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out_losses(monkeypatch, 2.0, 3.0, 4.0, 5.0, 6.0)
    trainer = start(tmp_path / "run")
    finish(trainer)
    assert (trainer.step, trainer.finished, trainer.out_of_patience) == (23, True, False)


def test_patience_that_is_never_lost_changes_nothing(tmp_path: Path, reference: Reference) -> None:
    assert_same_tensors(run_to_the_end(tmp_path / "run", replace(CONFIG, patience=5)), reference.weights)


# By the clock


class Clock:
    """Stands still but for what is done: updates, evaluations, saves. Times are powers of two, and so without noise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.update_s = 0.5
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Examples, "batch", self._slow(Examples.batch, lambda: self.update_s))
        monkeypatch.setattr(trainer_module, "window_loss", self._slow(window_loss, lambda: 0.25))
        monkeypatch.setattr(trainer_module, "save_checkpoint", self._slow(save_checkpoint, lambda: 0.125))

    def _slow(self, function: Callable[..., Any], seconds: Callable[[], float]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            self.now += seconds()
            return function(*args)

        return slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def start_by_the_clock(folder: Path, config: TrainConfig = CONFIG, minutes: float = 1.0) -> Trainer:
    return start(folder, config, minutes=minutes, fit={"eval_every"})


@pytest.mark.parametrize("decay_fraction", [0.0, 0.3, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("warmup_steps", [0, 4, 1000])
def test_a_run_by_the_clock_ends_on_time(
    tmp_path: Path, clock: Clock, decay_fraction: float, warmup_steps: int
) -> None:
    trainer = start_by_the_clock(
        tmp_path / "run", replace(CONFIG, decay_fraction=decay_fraction, warmup_steps=warmup_steps)
    )
    # Measuring the speed is part of it; one save, of the new run, is not.
    reports = finish(trainer)
    assert trainer.elapsed_s == clock.now - 0.125 == pytest.approx(60, rel=0.05)
    assert trainer.step == trainer.config.steps > 80
    assert 4 <= sum(isinstance(report, EvalReport) for report in reports) <= 7


@pytest.mark.parametrize("update_s", [0.25, 1.0])
def test_a_run_by_the_clock_ends_on_time_though_it_was_measured_wrong_at_first(
    tmp_path: Path, clock: Clock, update_s: float
) -> None:
    trainer = start_by_the_clock(tmp_path / "run")
    clock.update_s = update_s
    finish(trainer)
    assert trainer.elapsed_s == pytest.approx(60, rel=0.05)


def test_what_the_caller_does_between_two_reports_takes_of_the_time(tmp_path: Path, clock: Clock) -> None:
    trainer = start_by_the_clock(tmp_path / "run")
    for report in trainer.steps():
        clock.now += 1.0 if isinstance(report, EvalReport) else 0.125
    assert clock.now == pytest.approx(60, rel=0.05)


def test_a_run_by_the_clock_is_that_of_its_number_of_steps(tmp_path: Path, clock: Clock) -> None:
    trainer = start_by_the_clock(tmp_path / "clock")
    finish(trainer)
    assert trainer.config == replace(CONFIG, steps=trainer.step, eval_every=trainer.config.eval_every)
    finish(start(tmp_path / "steps", trainer.config))
    for name in (BEST, LAST):
        assert_same_tensors(load_file(tmp_path / "clock" / name), load_file(tmp_path / "steps" / name))
    logs = [without_times(log_of(tmp_path / name)) for name in ("clock", "steps")]
    assert logs[0] == logs[1]
    found, expected = (facts_of(tmp_path / name / LAST) for name in ("clock", "steps"))
    assert found["state"].pop("minutes") == 1.0
    assert expected["state"].pop("minutes") is None
    assert found == expected


def test_measuring_the_speed_leaves_no_trace(tmp_path: Path, clock: Clock) -> None:
    trainer = start_by_the_clock(tmp_path / "clock")
    assert clock.now > 1
    # But for the time it took.
    assert (trainer.step, trainer.elapsed_s) == (0, clock.now - 0.125)
    assert_same_tensors(weights_of(trainer), weights_of(start(tmp_path / "steps")))
    assert names_in(tmp_path / "clock") == [LAST]
    assert next(trainer.steps()) == next(start(tmp_path / "again", trainer.config).steps())


def test_the_number_of_steps_is_on_disk_before_the_first_step_that_depends_on_it(tmp_path: Path, clock: Clock) -> None:
    trainer = start_by_the_clock(tmp_path / "run")
    for report in trainer.steps():
        if isinstance(report, StepReport) and report.step > CONFIG.warmup_steps and report.lr_factor < 1:
            break
    assert trainer.planned
    # About two fifths of the time are over.
    assert trainer.elapsed_s == pytest.approx(24, abs=2)
    again = resume(tmp_path / "run")
    assert again.step == trainer.step - 1
    assert again.config == trainer.config
    assert again.planned
    clock.update_s = 4.0
    finish(again)
    assert again.step == trainer.config.steps


@pytest.mark.parametrize("stop", [0, 3, 20, 30, 38, 50, 80])
def test_a_run_by_the_clock_that_is_killed_still_ends_on_time(tmp_path: Path, clock: Clock, stop: int) -> None:
    trainer = start_by_the_clock(tmp_path / "run")
    for _ in islice(trainer.steps(), stop):
        pass
    # A night passes.
    clock.now += 30_000
    again = resume(tmp_path / "run")
    assert again.step <= trainer.step
    finish(again)
    assert again.elapsed_s == pytest.approx(60, rel=0.05)
    steps = start(tmp_path / "steps", again.config)
    finish(steps)
    assert_same_tensors(weights_of(again), weights_of(steps))
    # It is finished, however much time may seem to be left.
    assert finish(resume(tmp_path / "run")) == []


@pytest.mark.parametrize(("minutes", "steps"), [(1e-6, 1), (0.02, 1), (0.1, 7)])
@pytest.mark.parametrize("decay_fraction", [0.0, 0.6, 1.0])
def test_a_run_of_a_moment_takes_a_step_at_least(
    tmp_path: Path, clock: Clock, minutes: float, steps: int, decay_fraction: float
) -> None:
    trainer = start_by_the_clock(tmp_path / "run", replace(CONFIG, decay_fraction=decay_fraction), minutes)
    finish(trainer)
    assert trainer.step == trainer.best_step == trainer.config.steps == steps


def test_a_run_by_the_clock_that_lost_patience_stays_as_it_is(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(tmp_path / "run", IMPATIENT, minutes=1.0)
    held_out_losses(monkeypatch, 2.0, 2.5, 2.0)
    finish(trainer)
    assert (trainer.step, trainer.out_of_patience) == (15, True)
    files = files_of(tmp_path / "run")
    again = resume(tmp_path / "run")
    assert finish(again) == []
    assert again.config == trainer.config
    assert files_of(tmp_path / "run") == files


def test_evaluations_of_a_run_by_the_clock_may_be_given(tmp_path: Path, clock: Clock) -> None:
    trainer = start(tmp_path / "run", minutes=0.2)
    reports = finish(trainer)
    assert [report.step for report in reports if isinstance(report, EvalReport)][:3] == [5, 10, 15]
    assert trainer.config.warmup_steps == CONFIG.warmup_steps


def test_the_warm_up_of_a_run_by_the_clock_may_be_fitted(tmp_path: Path, clock: Clock) -> None:
    trainer = start(tmp_path / "run", minutes=0.2, fit={"warmup_steps"})
    # Before the first step, from the first estimate, and then for good.
    chosen = warmup_for(trainer.config.steps)
    assert chosen != CONFIG.warmup_steps
    finish(trainer)
    assert trainer.config.warmup_steps == chosen


@pytest.mark.parametrize("minutes", [0.0, -1.0, math.inf, math.nan])
def test_minutes_that_are_none_are_refused(tmp_path: Path, minutes: float) -> None:
    with pytest.raises(ConfigError, match="minutes"):
        start(tmp_path / "run", minutes=minutes)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_fitted_is_a_mistake_in_code(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'warmup' cannot be fitted"):
        start(tmp_path / "run", fit={"dropout", "warmup"})
    assert not (tmp_path / "run").exists()


def test_the_time_of_a_run_is_told_by_phase(tmp_path: Path, clock: Clock) -> None:
    trainer = start(tmp_path / "run")
    for report in trainer.steps():
        clock.now += 2.0 if isinstance(report, EvalReport) else 1.0
    stopwatch = resume(tmp_path / "run").stopwatch
    assert [stopwatch.laps(phase) for phase in UPDATE_PHASES] == [23] * 7
    assert [stopwatch.seconds(phase) for phase in UPDATE_PHASES] == [23 * 0.5, 0, 0, 0, 0, 0, 23.0]
    # All but the last save and what the caller did after it.
    assert [stopwatch.laps(phase) for phase in EVALUATION_PHASES] == [5, 4, 4]
    assert stopwatch.seconds("evaluation", "showing") == 5 * 0.5 + 4 * 2.0


# The folder


def test_a_new_run_in_an_old_folder_clears_away_the_old_one_and_nothing_else(
    tmp_path: Path, reference: Reference
) -> None:
    folder = shutil.copytree(reference.folder, tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    start(folder, replace(CONFIG, seed=3))
    assert names_in(folder) == [LAST, "notes.txt"]
    assert load(folder / LAST).facts.steps == 0


def test_a_replaced_run_is_as_good_as_new_even_if_killed_before_it_was_tidied(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The old best model and log are those of another seed.
    folder = tmp_path / "run"
    run_to_the_end(folder, replace(CONFIG, seed=3))
    monkeypatch.setattr(Trainer, "_tidy_folder", lambda _: None)
    start(folder)
    monkeypatch.undo()
    assert names_in(folder) == [BEST, LAST, LOG]
    finish(resume(folder))
    assert_same_run(folder, reference.folder)


def test_a_folder_is_made_with_all_above_it(tmp_path: Path) -> None:
    start(tmp_path / "a" / "b" / "run")
    assert names_in(tmp_path / "a" / "b" / "run") == [LAST]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(CheckpointError, match="cannot make the run folder") as caught:
            start(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("n", range(1, 9))
def test_a_disk_that_fills_up_at_any_write_leaves_a_run_that_can_go_on(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        # Of the files and folders that are flushed after the start, the n-th and all that follow.
        if calls >= n:
            raise OSError(errno.ENOSPC, NO_SPACE)
        ordinary(descriptor)

    folder = tmp_path / "run"
    trainer, ordinary = start(folder), os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=NO_SPACE):
        finish(trainer)
    monkeypatch.undo()
    # What is flushed are, in turn, a file and its folder: the best model and the last one of each evaluation. A folder
    # that cannot be flushed is passed over, and the next file cannot either.
    failed = n if n % 2 else n + 1
    assert calls == failed
    assert set(names_in(folder)) <= {BEST, LAST, LOG}
    assert resume(folder).step == 5 * ((failed - 1) // 4)
    finish(resume(folder))
    assert_same_run(folder, reference.folder)


def test_a_log_that_cannot_be_written_is_one_sentence_and_the_run_can_go_on(
    tmp_path: Path, reference: Reference
) -> None:
    folder = tmp_path / "run"
    trainer = start(folder)
    (folder / LOG).mkdir()
    with pytest.raises(CheckpointError, match=f"cannot write .*{LOG}"):
        finish(trainer)
    (folder / LOG).rmdir()
    finish(resume(folder))
    assert_same_run(folder, reference.folder)
