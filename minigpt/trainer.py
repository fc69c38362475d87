"""Training: an iterator of reports that updates the weights, evaluates, saves, and resumes bit for bit.

All randomness of a step is a function of the seed and the step alone, so a run has no hidden state: what is saved are
the weights, the optimizer's averages and a few numbers. Showing and stopping are the caller's.

Several processes may train together: each computes the gradient of its share of every batch, all apply the sum, and
rank 0 alone writes files. How they talk is left to `parallel`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minigpt.atomic import replacing
from minigpt.checkpoint import Checkpoint, Facts, TrainingState, save_checkpoint
from minigpt.config import GPTConfig, TrainConfig, settings_from_json, settings_to_json
from minigpt.corpus import Ids, batch
from minigpt.errors import CheckpointError, ConfigError, TrainingError
from minigpt.evaluation import cross_entropy, window_loss
from minigpt.model import GPT
from minigpt.optim import Optimizer, learning_rate_factor
from minigpt.parallel import ALONE, World
from minigpt.runs import BEST, LAST, LOG
from minigpt.tokenizer import CharTokenizer

# Steps between two lines of training loss in the log.
LOG_EVERY = 10

# Separate streams of random numbers: drawing from one does not move another.
_INIT, _BATCH, _DROPOUT = range(3)


@dataclass(frozen=True)
class StepReport:
    """One update of the weights."""

    # Updates done, this one included.
    step: int
    # Of the batch, before the update; nats a character.
    loss: float
    # Share of the peak learning rates.
    lr_factor: float
    # Norm of the gradient before clipping.
    grad_norm: float
    chars_per_s: float


@dataclass(frozen=True)
class EvalReport:
    """One look at the held-out text; the run folder is up to date when it is yielded."""

    step: int
    # Mean over the batches since the last evaluation; nats a character.
    train_loss: float
    val_loss: float
    # Whether this is the lowest held-out loss so far.
    best: bool
    # Seconds spent in updates since the run began, over all its sessions.
    elapsed_s: float


class Trainer:
    """One training run and its folder.

    Make a new one with `start` and go on with one by `resume`.

    Args:
        folder: where the run is kept.
        model: on its device; trained in place.
        tokenizer, facts: written into the checkpoints.
        train_ids, val_ids: the two parts of the text, (N,).
        config: how to train.
        extra: JSON values of the caller's to keep beside the state (where the text came from, for instance).
        world: the processes that train together, joined; all make the same calls.
    """

    def __init__(
        self,
        folder: Path,
        model: GPT,
        tokenizer: CharTokenizer,
        facts: Facts,
        train_ids: Ids,
        val_ids: Ids,
        config: TrainConfig,
        extra: dict[str, Any],
        world: World = ALONE,
    ) -> None:
        self.folder = folder
        self.model = model
        self.tokenizer = tokenizer
        self.facts = facts
        self.config = config
        self._train_ids = train_ids
        self._val_ids = val_ids
        self._extra = extra
        self.world = world
        # The same seed gives the same weights, but for a last bit between two kinds of processor.
        world.spread(model.state_dict().values())
        self._optimizer = Optimizer(model, config)
        # Updates done.
        self.step = 0
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self._evaluated_step: int | None = None
        # Seconds spent in updates, over all sessions of the run.
        self.elapsed_s = 0.0
        # Of the batches since the last evaluation.
        self._losses: list[float] = []

    @classmethod
    def start(
        cls,
        folder: Path,
        model_config: GPTConfig,
        tokenizer: CharTokenizer,
        facts: Facts,
        train_ids: Ids,
        val_ids: Ids,
        config: TrainConfig,
        *,
        device: torch.device | str = "cpu",
        extra: dict[str, Any] | None = None,
        world: World = ALONE,
    ) -> Trainer:
        """A new run, which is on disk, ready to be resumed, when this returns. What the folder held is replaced.

        Raises:
            CheckpointError: the folder cannot be written.
            ConfigError: the model does not fit into memory, or the batch is too small for the processes.
        """
        world.require_rows(config.batch_size)
        generator = torch.Generator().manual_seed(_derived_seed(config.seed, _INIT, 0))
        # Torch's layers draw from its global generator before our values replace theirs.
        try:
            with torch.random.fork_rng(devices=[]):
                model = GPT(model_config, generator).to(device)
        except (RuntimeError, MemoryError):
            raise ConfigError(
                f"a model of n_layer={model_config.n_layer} and n_embd={model_config.n_embd} does not fit into memory:"
                " choose smaller ones"
            ) from None
        trainer = cls(folder, model, tokenizer, facts, train_ids, val_ids, config, extra or {}, world)
        try:
            if world.is_main:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the run folder {folder}: {error.strerror or error}") from None
        trainer.save()
        trainer._tidy_folder()
        return trainer

    @classmethod
    def resume(
        cls,
        folder: Path,
        checkpoint: Checkpoint,
        train_ids: Ids,
        val_ids: Ids,
        *,
        device: torch.device | str = "cpu",
        world: World = ALONE,
    ) -> Trainer:
        """Goes on with a run from its last checkpoint, loaded with its state.

        Raises:
            CheckpointError: the checkpoint has no training state, or a damaged one.
            ConfigError: the batch is too small for the processes.
        """
        if checkpoint.state is None:
            raise CheckpointError(f"{checkpoint.path} holds a model but no training state to resume from")
        values = checkpoint.state.values
        try:
            config = settings_from_json(TrainConfig, values["config"])
            trainer = cls(
                folder,
                checkpoint.model.to(device).train(),
                checkpoint.tokenizer,
                checkpoint.facts,
                train_ids,
                val_ids,
                config,
                dict(values["extra"]),
                world,
            )
            trainer.step = _step(values["step"], config.steps)
            if values["best_loss"] is not None:
                trainer.best_loss, trainer.best_step = (
                    float(values["best_loss"]),
                    _step(values["best_step"], trainer.step),
                )
            if values["evaluated_step"] is not None:
                trainer._evaluated_step = _step(values["evaluated_step"], trainer.step)
            trainer.elapsed_s = float(values["elapsed_s"])
            trainer._losses = [float(loss) for loss in values["losses"]]
            if len(trainer._losses) != trainer.step - (trainer._evaluated_step or 0):
                raise ValueError(f"it has {len(trainer._losses)} losses")
            trainer._optimizer.load_state_tensors(checkpoint.state.tensors)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(f"the training state in {checkpoint.path} is damaged: {error}") from None
        world.require_rows(trainer.config.batch_size)
        trainer._tidy_folder()
        return trainer

    @property
    def held_out(self) -> str:
        """How the held-out part is used, in words."""
        share = min(1.0, self.config.eval_chars / len(self._val_ids)) if self.config.eval_chars else 1.0
        read = "all" if share == 1 else f"{share:.0%}"
        return f"the last {len(self._val_ids):,} are held out; each evaluation reads {read} of them"

    def steps(self) -> Iterator[StepReport | EvalReport]:
        """Trains to the end: a report after every update, and one after every evaluation.

        Evaluates and saves every ``eval_every`` steps and after the last one. Between two reports the caller may stop
        and call `save`; a run that is resumed from there ends in the same bits.

        Raises:
            TrainingError: a loss or gradient is not finite, or another process has ended. The weights were not touched
                by it.
            CheckpointError: a file cannot be written.
        """
        while True:
            # Asked before the next update, not after the last one: a run may have been saved between the two.
            due = self.step == self.config.steps or (self.step > 0 and self.step % self.config.eval_every == 0)
            if due and self._evaluated_step != self.step:
                yield self._evaluate()
            if self.step == self.config.steps:
                return
            yield self._update()

    def save(self) -> None:
        """Writes the model and all that resuming needs to the run folder, in one step.

        Raises:
            CheckpointError: it cannot be written; what was saved before is intact.
        """
        if self.world.is_main:
            self._write_last()
        # One that went on to its end before would be a reason for `torchrun` to end the one that writes.
        self.world.wait()

    def _write_last(self) -> None:
        values = {
            "config": settings_to_json(self.config),
            "step": self.step,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "evaluated_step": self._evaluated_step,
            "elapsed_s": self.elapsed_s,
            "losses": self._losses,
            "extra": self._extra,
        }
        state = TrainingState(values, self._optimizer.state_tensors())
        save_checkpoint(self.folder / LAST, self.model, self.tokenizer, self._facts_now(), state)

    def _update(self) -> StepReport:
        started = time.perf_counter()
        config, device = self.config, self.model.lm_head.weight.device
        generator = torch.Generator().manual_seed(_derived_seed(config.seed, _BATCH, self.step))
        x, y = batch(self._train_ids, self.model.config.block_size, config.batch_size, generator)
        # All processes draw the whole batch, which costs little, and compute their rows of it.
        rows = self.world.share(config.batch_size)
        x, y = x[rows], y[rows]
        weight = len(x) / config.batch_size
        # Dropout can only draw from torch's global generators; they are put back as they were.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_derived_seed(config.seed, _DROPOUT, self.step, self.world.rank))
            loss = cross_entropy(self.model(x.to(device)), y.to(device))
        loss_value = self.world.sum(weight * loss.item())
        self._require_finite("loss", loss_value)
        loss.backward()  # type: ignore[no-untyped-call]
        self.world.sum_gradients(self.model.parameters(), weight)
        grad_norm = self._optimizer.clip_gradients()
        self._require_finite("gradient norm", grad_norm)
        self._optimizer.step(self.step)

        factor = learning_rate_factor(self.step, config)
        self.step += 1
        self._losses.append(loss_value)
        elapsed_s = time.perf_counter() - started
        self.elapsed_s += elapsed_s
        if self.step % LOG_EVERY == 0:
            recent = self._losses[-LOG_EVERY:]
            self._log(step=self.step, train_loss=sum(recent) / len(recent), lr_factor=factor, elapsed_s=self.elapsed_s)
        return StepReport(self.step, loss_value, factor, grad_norm, config.batch_size * x.shape[1] / elapsed_s)

    def _evaluate(self) -> EvalReport:
        val_loss = window_loss(self.model, self._val_ids, self.config.eval_chars, self.world)
        self._require_finite("held-out loss", val_loss)
        train_loss = sum(self._losses) / len(self._losses)
        best = self.best_loss is None or val_loss < self.best_loss
        self.facts = replace(self.facts, train_loss=train_loss, val_loss=val_loss)
        self._log(step=self.step, train_loss=train_loss, val_loss=val_loss, best=best, elapsed_s=self.elapsed_s)
        # In this order a kill in between leaves a last checkpoint that is older than the best one, and resuming from
        # it comes to the same best again.
        if best:
            self.best_loss, self.best_step = val_loss, self.step
            if self.world.is_main:
                save_checkpoint(self.folder / BEST, self.model, self.tokenizer, self._facts_now())
        self._losses = []
        self._evaluated_step = self.step
        self.save()
        return EvalReport(self.step, train_loss, val_loss, best, self.elapsed_s)

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                f"the {what} after {self.step:,} steps is {value}; {self.folder} is as it was saved before: train again"
                " with lower --muon-lr and --adamw-lr or a longer --warmup-steps"
            )

    def _facts_now(self) -> Facts:
        return replace(self.facts, steps=self.step, elapsed_s=round(self.elapsed_s, 3))

    def _log(self, **values: Any) -> None:
        if not self.world.is_main:
            return
        try:
            with (self.folder / LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(values) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.folder / LOG}: {error.strerror or error}") from None

    def _tidy_folder(self) -> None:
        """Removes what is not of this run, up to this step: a best model and log lines of a run that was replaced,
        and log lines that were written after the last save by a run that was killed."""
        if not self.world.is_main:
            return
        try:
            self._tidy()
        except OSError as error:
            raise CheckpointError(f"cannot tidy the run folder {self.folder}: {error.strerror or error}") from None

    def _tidy(self) -> None:
        if self.best_loss is None:
            (self.folder / BEST).unlink(missing_ok=True)
        log = self.folder / LOG
        if not log.is_file():
            return
        if self.step == 0:
            log.unlink()
            return
        lines = log.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
        evaluated = self._evaluated_step or 0
        kept = [line for line in lines if _logged_step(line) <= (evaluated if "val_loss" in line else self.step)]
        if kept != lines:
            with replacing(log) as file:
                file.write("".join(kept).encode())


def _step(value: Any, most: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"step {value!r} is not one of {most}")
    return value


def _logged_step(line: str) -> float:
    """The step that a line of the log tells of; infinity for a line that was cut short."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _derived_seed(seed: int, stream: int, step: int, rank: int = 0) -> int:
    # Rank 0 draws as a process alone does.
    path = (seed, stream, step, rank) if rank else (seed, stream, step)
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0] >> np.uint64(1))
