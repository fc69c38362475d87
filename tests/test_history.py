"""The log, read back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from minigpt.errors import ReportError
from minigpt.history import LoggedEvaluation, LoggedUpdates, read_history
from minigpt.runs import LOG

UPDATES = [{"step": n, "batch_loss": 4 - n / 20, "lr_factor": 1 - n / 100, "elapsed_s": n / 8} for n in (10, 20, 30)]
EVALUATIONS = [
    {"step": n, "train_loss": 4 - n / 21, "val_loss": loss, "best": best, "elapsed_s": n / 8}
    for n, loss, best in ((15, 3.5, True), (30, 3.25, True), (40, 3.25, False))
]


def write_log(folder: Path, *lines: object) -> None:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / LOG).write_text(text, encoding="utf-8")


def test_a_log_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_log(tmp_path, *UPDATES[:1], EVALUATIONS[0], *UPDATES[1:], *EVALUATIONS[1:])
    history = read_history(tmp_path)
    assert history.updates == tuple(LoggedUpdates(**line) for line in UPDATES)  # type: ignore[arg-type]
    assert history.evaluations == tuple(LoggedEvaluation(**line) for line in EVALUATIONS)  # type: ignore[arg-type]
    assert history.training == ([10, 20, 30], [3.5, 3.0, 2.5])
    assert history.held_out == ([15, 30, 40], [3.5, 3.25, 3.25])
    # Of two that are equal the first one, as the trainer keeps it.
    assert history.best == history.evaluations[1]


def test_a_short_run_has_its_training_loss_at_evaluations(tmp_path: Path) -> None:
    write_log(tmp_path, UPDATES[0], *EVALUATIONS)
    assert read_history(tmp_path).training == ([15, 30, 40], [4 - n / 21 for n in (15, 30, 40)])


def test_lines_that_are_damaged_are_passed_over(tmp_path: Path) -> None:
    odd = [
        json.dumps({**EVALUATIONS[1], "step": math.inf}),
        json.dumps({**EVALUATIONS[1], "elapsed_s": math.nan}),
        json.dumps({**EVALUATIONS[1], "val_loss": "x"}),
        json.dumps(EVALUATIONS[1]).replace("30", "1e400"),
        "[" * 100_000,
        "\0\0",
    ]
    write_log(tmp_path, EVALUATIONS[0], "", "[3]", "x", '{"step": 30}', '{"step": 30, "train_lo', EVALUATIONS[1], *odd)
    assert [line.step for line in read_history(tmp_path).evaluations] == [15, 30]
    (tmp_path / LOG).write_bytes(b"\xff\xfe")
    history = read_history(tmp_path)
    assert (history.updates, history.evaluations, history.best) == ((), (), None)


def test_a_log_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot read .*train\.jsonl: No such file"):
        read_history(tmp_path)
