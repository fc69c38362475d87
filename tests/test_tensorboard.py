"""The copy of the log for TensorBoard: every line once, whatever happened to the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minigpt.errors import MissingPackageError, ReportError
from minigpt.runs import LOG, TENSORBOARD
from minigpt.tensorboard import LogCopy, clear_events, writer_type
from tests.run_support import tensorboard_of

TAGS = ["loss/training", "learning_rate_share", "chars_per_s", "loss/held-out"]


def log(folder: Path, *steps: int) -> None:
    """Adds lines to a log: updates at tens, an evaluation at each other step."""
    with (folder / LOG).open("a", encoding="utf-8") as file:
        for step in steps:
            if step % 10 == 0:
                file.write(
                    f'{{"step": {step}, "batch_loss": {4 - step / 64}, "lr_factor": 0.5, "elapsed_s": {step / 8}}}\n'
                )
            else:
                file.write(
                    f'{{"step": {step}, "train_loss": 3.0, "val_loss": {5 - step / 64}, "best": true,'
                    f' "elapsed_s": {step / 8}}}\n'
                )


def values(*steps: int) -> dict[str, list[tuple[int, float]]]:
    """What it should show of the lines that `log` writes."""
    updates = [step for step in steps if step % 10 == 0]
    return {
        "loss/training": [(step, 4 - step / 64) for step in updates],
        "learning_rate_share": [(step, 0.5) for step in updates],
        # Ten steps of 48 characters in ten eighths of a second.
        "chars_per_s": [(step, 384.0) for step in updates],
        "loss/held-out": [(step, 5 - step / 64) for step in steps if step % 10],
    }


@pytest.fixture(autouse=True)
def _tensorboard(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("tensorboard", reason="copies for TensorBoard")


def test_every_line_is_shown_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    copy = LogCopy(tmp_path, 48)
    copy.update()
    log(tmp_path, 10, 15)
    copy.update()
    copy.update()
    # A process that is killed now has told all.
    assert tensorboard_of(tmp_path) == values(10, 15)
    log(tmp_path, 20, 30, 31)
    copy.update()
    assert tensorboard_of(tmp_path) == values(10, 15, 20, 30, 31)
    copy.close()
    assert tensorboard_of(tmp_path) == values(10, 15, 20, 30, 31)


def test_a_session_that_goes_on_shows_no_point_twice_and_none_that_was_lost(tmp_path: Path) -> None:
    log(tmp_path, 10, 15)
    first = LogCopy(tmp_path, 48)
    log(tmp_path, 20, 25, 30)
    first.update()
    first.close()
    # Its clock was ahead.
    (events,) = (tmp_path / TENSORBOARD).iterdir()
    events.rename(events.with_name(f"events.out.tfevents.9999999999.{events.name.split('.', 4)[4]}"))
    # What was after the last save is gone from the log, and a line that was not copied is there.
    (tmp_path / LOG).unlink()
    log(tmp_path, 10, 15, 17, 20)
    second = LogCopy(tmp_path, 48)
    assert tensorboard_of(tmp_path) == values(10, 15, 17, 20)
    log(tmp_path, 25, 30, 40)
    second.update()
    second.close()
    assert tensorboard_of(tmp_path) == values(10, 15, 17, 20, 25, 30, 40)


def test_the_events_of_an_earlier_run_go_and_nothing_else(tmp_path: Path) -> None:
    clear_events(tmp_path)
    log(tmp_path, 10)
    LogCopy(tmp_path, 48).close()
    (tmp_path / TENSORBOARD / "notes.txt").write_text("mine")
    clear_events(tmp_path)
    assert [path.name for path in (tmp_path / TENSORBOARD).iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / TENSORBOARD).write_text("in the way")
    with pytest.raises(ReportError, match=r"cannot write .*tensorboard") as caught:
        LogCopy(tmp_path, 48)
    assert "\n" not in str(caught.value)


def test_without_tensorboard_there_is_a_sentence_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'minigpt\[tensorboard\]'") as caught:
        writer_type()
    assert "\n" not in str(caught.value)
