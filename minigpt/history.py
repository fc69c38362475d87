"""What a run's log tells, read back: the losses as training went. `trainer` writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minigpt.errors import ReportError
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


def parse_line(line: str) -> LoggedUpdates | LoggedEvaluation | None:
    """What one line of the log tells; None for one that a kill cut short, or that is none of ours."""
    try:
        values = json.loads(line)
        step, elapsed_s = int(values["step"]), float(values["elapsed_s"])
        if "val_loss" in values:
            train_loss, val_loss = float(values["train_loss"]), float(values["val_loss"])
            return LoggedEvaluation(step, train_loss, val_loss, bool(values["best"]), elapsed_s)
        return LoggedUpdates(step, float(values["batch_loss"]), float(values["lr_factor"]), elapsed_s)
    except (ValueError, KeyError, TypeError):
        return None
