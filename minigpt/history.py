"""A run's log, one JSON object a line: the losses as training went. Written line by line, and read back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from minigpt.atomic import replacing
from minigpt.errors import CheckpointError, ReportError
from minigpt.runs import LOG


@dataclass(frozen=True)
class LoggedUpdates:
    """A line about the last few updates; see `minigpt.trainer.LOG_EVERY`."""

    # Updates done.
    step: int
    # Mean of the losses of their batches; nats a character.
    batch_loss: float
    # Share of the peak learning rates in the last of them.
    lr_factor: float
    # Of the run so far, see `minigpt.trainer.Trainer`.
    elapsed_s: float


@dataclass(frozen=True)
class LoggedEvaluation:
    """A line about one look at the held-out text; for the fields see `minigpt.trainer.EvalReport`."""

    step: int
    train_loss: float
    val_loss: float
    best: bool
    elapsed_s: float


Line = LoggedUpdates | LoggedEvaluation

# Steps, and a loss at each.
Curve = tuple[list[int], list[float]]


@dataclass(frozen=True)
class History:
    """All that a log tells, in the order of the steps."""

    updates: tuple[LoggedUpdates, ...]
    evaluations: tuple[LoggedEvaluation, ...]

    @property
    def training(self) -> Curve:
        """The training loss: of the batches every few updates, or where a run is too short for that, at evaluations."""
        if len(self.updates) > 1:
            return [line.step for line in self.updates], [line.batch_loss for line in self.updates]
        return [line.step for line in self.evaluations], [line.train_loss for line in self.evaluations]

    @property
    def held_out(self) -> Curve:
        """The held-out loss at each evaluation."""
        return [line.step for line in self.evaluations], [line.val_loss for line in self.evaluations]

    @property
    def best(self) -> LoggedEvaluation | None:
        """The evaluation with the lowest held-out loss, the first of several; None before the first evaluation."""
        return min(self.evaluations, key=lambda line: line.val_loss, default=None)


def read_history(folder: Path) -> History:
    """What the log in a run folder tells; of one that is damaged, what can be read.

    Raises:
        ReportError: there is no log, or it cannot be read.
    """
    log = folder / LOG
    try:
        text = log.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ReportError(f"cannot read {log}: {error.strerror or error}") from None
    lines = [line for line in map(parse_line, text.splitlines()) if line is not None]
    return History(
        tuple(line for line in lines if isinstance(line, LoggedUpdates)),
        tuple(line for line in lines if isinstance(line, LoggedEvaluation)),
    )


def append_line(folder: Path, line: Line) -> None:
    """Writes one more line into the log of a run folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(line)) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / LOG}: {error.strerror or error}") from None


def forget_lines(folder: Path, step: int, evaluated_step: int | None) -> None:
    """Removes from the log what was written after a run's last save: by a run that was killed, or one that is replaced.

    Args:
        step: updates done at that save; with none, the whole log goes.
        evaluated_step: that of its newest evaluation, if there was one.

    Raises:
        OSError: it cannot be read or written.
    """
    log = folder / LOG
    if not log.is_file():
        return
    if step == 0:
        log.unlink()
        return

    def is_kept(text: str) -> bool:
        line = parse_line(text) if text.endswith("\n") else None
        newest = (evaluated_step or 0) if isinstance(line, LoggedEvaluation) else step
        return line is not None and line.step <= newest

    lines = log.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
    kept = [line for line in lines if is_kept(line)]
    if kept != lines:
        with replacing(log) as file:
            file.write("".join(kept).encode())


def parse_line(text: str) -> Line | None:
    """What one line of the log tells; None for one that a kill cut short, or that is none of ours."""
    try:
        values = json.loads(text)
        step, elapsed_s = int(values["step"]), _finite(values["elapsed_s"])
        if "val_loss" in values:
            train_loss, val_loss = _finite(values["train_loss"]), _finite(values["val_loss"])
            return LoggedEvaluation(step, train_loss, val_loss, bool(values["best"]), elapsed_s)
        return LoggedUpdates(step, _finite(values["batch_loss"]), _finite(values["lr_factor"]), elapsed_s)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _finite(value: str | float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
