"""Training: an iterator of reports that updates the weights, evaluates, saves, and resumes bit for bit.

All randomness of a step is a function of the seed and the step alone, so a run has no hidden state: what is saved are
the weights, the optimizer's averages and a few numbers. Only the number of steps of a run by the clock depends on
anything else, and it is written down before the first step that depends on it. Showing and stopping are the caller's.

Several processes may train together: each computes the gradient of its share of every batch, all apply the sum, and
rank 0 alone writes files. How they talk is left to `parallel`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from minigpt.checkpoint import Checkpoint, Facts, TrainingState, save_checkpoint
from minigpt.config import GPTConfig, TrainConfig, require_minutes, settings_from_json, settings_to_json
from minigpt.corpus import Ids
from minigpt.device import compiled, is_out_of_memory, require_memory
from minigpt.errors import CheckpointError, ConfigError, TrainingError
from minigpt.evaluation import window_loss
from minigpt.examples import Examples
from minigpt.history import Line, LoggedEvaluation, LoggedUpdates, append_line, forget_lines
from minigpt.model import GPT
from minigpt.ngrams import NGrams, can_count
from minigpt.optim import Optimizer, learning_rate_factor, ngram_factor
from minigpt.pacing import TRIAL_MAX_S, TRIAL_SHARE, dropout_for, eval_every_for, rates_fall, steps_for, warmup_for
from minigpt.parallel import ALONE, World
from minigpt.runs import BEST, LAST, LOG, is_run, make_folder
from minigpt.stopwatch import Stopwatch
from minigpt.tokenizer import CharTokenizer

# Of the training state: another one, or another recipe, does not go on where it was saved.
STATE_VERSION = 2
# Steps between two lines of training loss in the log.
LOG_EVERY = 10
# Of the training part, an evaluation reads as many characters as of the held-out part, but no more than this: its mean
# is then off by about a hundredth, which is enough to tell whether the two losses are apart.
TRAIN_CHARS = 8192

# What the time of an update and of an evaluation goes to, in order; the last of each is the caller's.
UPDATE_PHASES = ("batch", "smoothing", "forward", "backward", "clipping", "optimizer", "reporting")
EVALUATION_PHASES = ("evaluation", "saving", "showing")
# What is done once, before the first update of a session.
COUNTING = "counting"

# Settings that can fit a run of so many steps: the warm-up their number, the dropout how often they read how
# much text with how many parameters, and
# in a run by the clock the time between two evaluations its minutes.
FITTING = ("warmup_steps", "dropout", "eval_every")

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
    # Both measured in the same way, without dropout; nats a character.
    train_loss: float
    val_loss: float
    # Whether this is the lowest held-out loss so far.
    best: bool
    # Of the run so far, see `Trainer`.
    elapsed_s: float


class Trainer:
    """One training run and its folder.

    Make a new one with `start` and go on with one by `resume`.

    Args:
        folder: where the run is kept.
        model: on its device; trained in place.
        tokenizer, facts: written into the checkpoints.
        train_ids: ids to learn from, (N,), more than ``block_size``.
        val_ids: those held out, (N,), two or more.
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
        self._examples = Examples(train_ids, model.config.block_size, _derived_seed(config.seed, _BATCH, 0))
        if len(val_ids) < 2:
            raise ValueError("the held-out part needs at least 2 characters")
        self._val_ids = val_ids
        self._extra = extra
        self.world = world
        # The same seed gives the same weights, but for a last bit between two kinds of processor.
        world.spread(model.state_dict().values())
        self._optimizer = Optimizer(model, config)
        self._forward = compiled(model, model.lm_head.weight.device)
        # Updates done.
        self.step = 0
        self._saved_step = 0
        self.best_loss: float | None = None
        self.best_step: int | None = None
        # Of the best model.
        self.best_train_loss: float | None = None
        # What the run is to take, where that decides on the number of steps.
        self.minutes: float | None = None
        # Where the time goes. Set `profiling` to let a GPU finish each phase before the next begins.
        self.stopwatch = Stopwatch()
        self.profiling = False
        self._evaluated_step: int | None = None
        # Seconds spent in training, evaluating and saving, and in getting ready for it, over all sessions of the run.
        self.elapsed_s = 0.0
        # Of the newest batches.
        self._losses: deque[float] = deque(maxlen=LOG_EVERY)
        # Counted before the first update.
        self._ngrams: NGrams | None = None

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
        minutes: float | None = None,
        fit: Collection[str] = (),
        world: World = ALONE,
    ) -> Trainer:
        """A new run, which is on disk, ready to be resumed, when this returns. It replaces the checkpoints and the log
        that the folder held.

        Args:
            minutes: how long the run is to take, with measuring its speed, instead of ``config.steps``; more than 0,
                at most `MOST_MINUTES`. Until `planned` is true, the number of steps is an estimate.
            fit: the settings, of `FITTING`, that are to fit the run instead of being as in ``config`` and
                ``model_config``.

        Raises:
            CheckpointError: the folder cannot be written.
            ConfigError: the minutes are out of range, the model or its batches do not fit into memory, or the batch is
                too small for the processes.
            TrainingError: one of two steps on trial, which are taken before a run is replaced, has no finite loss.
            ValueError: the text is too short, or a setting cannot be fitted.
        """
        if unknown := set(fit) - set(FITTING):
            raise ValueError(f"{min(unknown)!r} cannot be fitted to a run")
        if minutes is not None:
            require_minutes(minutes)
        world.require_rows(config.batch_size)
        require_memory(model_config, config.batch_size, world.size)
        generator = torch.Generator().manual_seed(_derived_seed(config.seed, _INIT, 0))
        # Torch's layers draw from its global generator before our values replace theirs.
        try:
            with torch.random.fork_rng(devices=[]):
                model = GPT(model_config, generator).to(device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"a model of n_layer={model_config.n_layer} and n_embd={model_config.n_embd} does not fit into memory:"
                " choose smaller ones"
            ) from None
        trainer = cls(folder, model, tokenizer, facts, train_ids, val_ids, config, extra or {}, world)
        if world.is_main:
            make_folder(folder)
        if minutes is not None:
            trainer.minutes = minutes
            trainer._measure_speed(fit)
        elif world.from_main(lambda: is_run(folder)):
            # What cannot take a step must not replace a run, nor what has no finite loss after it.
            with trainer._taken_back():
                trainer._update()
                trainer._update()
            trainer._forget_laps()
        if "dropout" in fit:
            model.set_dropout(trainer.fitting_dropout)
        if "warmup_steps" in fit:
            trainer._follow(replace(trainer.config, warmup_steps=warmup_for(trainer.config.steps)))
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
        extra: dict[str, Any] | None = None,
        world: World = ALONE,
    ) -> Trainer:
        """Goes on with a run from its last checkpoint, loaded with its state.

        Args:
            extra: replaces what the caller kept beside the state; None leaves it.

        Raises:
            CheckpointError: the checkpoint has no training state, or a damaged one.
            ConfigError: the batch is too small for the processes.
        """
        state = checkpoint.require_state()
        values = state.values
        if values.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the training state in {checkpoint.path} is of another version of minigpt, which trains in"
                " another way: generate with it, or train a new run"
            )
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
                dict(values["extra"]) if extra is None else extra,
                world,
            )
            trainer.step = trainer._saved_step = _step(values["step"], config.steps)
            if values["best_loss"] is not None:
                trainer.best_loss, trainer.best_train_loss = (
                    float(values["best_loss"]),
                    float(values["best_train_loss"]),
                )
                trainer.best_step = _step(values["best_step"], trainer.step)
            if values["evaluated_step"] is not None:
                trainer._evaluated_step = _step(values["evaluated_step"], trainer.step)
            trainer.elapsed_s = float(values["elapsed_s"])
            if values["minutes"] is not None:
                trainer.minutes = float(values["minutes"])
                require_minutes(trainer.minutes)
            trainer.stopwatch = Stopwatch(values["stopwatch"])
            trainer._losses.extend(float(loss) for loss in values["losses"])
            if len(trainer._losses) != min(trainer.step, LOG_EVERY):
                raise ValueError(f"it has {len(trainer._losses)} losses")
            trainer._optimizer.load_state_tensors(state.tensors)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            fault = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"the training state in {checkpoint.path} is damaged ({fault}): generate with it, or train a new run"
            ) from None
        world.require_rows(trainer.config.batch_size)
        trainer._tidy_folder()
        return trainer

    @property
    def evaluated_step(self) -> int | None:
        """The step of the newest evaluation; None before the first one."""
        return self._evaluated_step

    @property
    def n_held_out(self) -> int:
        """Characters of the held-out part."""
        return len(self._val_ids)

    @property
    def epochs(self) -> float:
        """How often the whole run reads the training part of the text."""
        config = self.config
        return config.steps * config.batch_size * self.model.config.block_size / len(self._train_ids)

    @property
    def fitting_dropout(self) -> float:
        """The dropout that fits the run, whatever it has."""
        return dropout_for(self.epochs, self.model.n_params / len(self._train_ids))

    @property
    def planned(self) -> bool:
        """Whether ``config.steps`` is settled: a run by the clock estimates it until its rates begin to fall."""
        return self.minutes is None or self.finished or rates_fall(self.step, self.config)

    @property
    def out_of_patience(self) -> bool:
        """Whether the held-out loss did not improve in the last ``patience`` evaluations, which ends the run."""
        if not self.config.patience or self._evaluated_step is None or self.best_step is None:
            return False
        return self._evaluated_step - self.best_step >= self.config.patience * self.config.eval_every

    @property
    def finished(self) -> bool:
        """Whether there is no update left to do."""
        return self.step == self.config.steps or self.out_of_patience

    def steps(self) -> Iterator[StepReport | EvalReport]:
        """Trains to the end: a report after every update, and one after every evaluation.

        Evaluates and saves every ``eval_every`` steps and after the last one. Between two reports the caller may stop
        and call `save`; a run that is resumed from there ends in the same bits. The last step is ``config.steps``, or
        an earlier one at which the run is `out_of_patience`.

        Raises:
            TrainingError: a loss or gradient is not finite, a step does not fit into memory, or another process has
                ended. Nothing of it is saved.
            CheckpointError: a file cannot be written.
        """
        self.stopwatch.start()
        planned = self.planned
        while True:
            if not planned:
                planned = self._plan()
            # Asked before the next update, not after the last one: a run may have been saved between the two.
            due = self.step == self.config.steps or (self.step > 0 and self.step % self.config.eval_every == 0)
            if due and self._evaluated_step != self.step:
                yield self._evaluate()
                # After the last one the run is saved: its time must not move any more.
                if not self.finished:
                    self._lap("showing")
            if self.finished:
                return
            yield self._update()
            self._lap("reporting")

    @property
    def has_learnt(self) -> bool:
        """Whether more was saved, by this session or one before, than the model that training began with."""
        return self._saved_step > 0

    def save(self) -> None:
        """Writes the model and all that resuming needs to the run folder, in one step.

        Raises:
            CheckpointError: it cannot be written; what was saved before is intact.
        """
        if self.world.is_main:
            self._write_last()
        # One that went on to its end before would be a reason for `torchrun` to end the one that writes.
        self.world.wait()
        self._saved_step = self.step

    def discard(self) -> None:
        """Removes what the trainer wrote of a run that has learnt nothing, as far as that can be done; for rank 0."""
        for name in (LAST, LOG):
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    def _write_last(self) -> None:
        values = {
            "version": STATE_VERSION,
            "config": settings_to_json(self.config),
            "step": self.step,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "best_train_loss": self.best_train_loss,
            "evaluated_step": self._evaluated_step,
            "elapsed_s": self.elapsed_s,
            "minutes": self.minutes,
            "stopwatch": self.stopwatch.to_json(),
            "losses": list(self._losses),
            "extra": self._extra,
        }
        state = TrainingState(values, self._optimizer.state_tensors())
        save_checkpoint(self.folder / LAST, self.model, self.tokenizer, self._facts_now(), state)

    def _update(self) -> StepReport:
        self._count()
        try:
            return self._take_step()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(
                f"a step of --batch-size {self.config.batch_size} does not fit into memory: train a new run with a"
                " smaller one"
            ) from None

    def _count(self) -> None:
        """Counts the text, once, where counts are wanted and possible."""
        vocab_size = self.model.config.vocab_size
        wanted = self.config.ngram_weight > 0 and can_count(len(self._train_ids), vocab_size)
        if wanted and self._ngrams is None:
            self._ngrams = NGrams(self._train_ids, vocab_size)
            self._lap(COUNTING)

    def _take_step(self) -> StepReport:
        started = time.perf_counter()
        config, device = self.config, self.model.lm_head.weight.device
        # All processes make the whole batch, which costs little, and compute their rows of it.
        examples = self._examples.batch(self.step * config.batch_size, config.batch_size)
        rows = self.world.share(config.batch_size)
        x, targets = examples.x[rows].to(device), examples.y[rows].to(device)
        weight = len(x) / config.batch_size
        self._lap("batch")
        smoothed = None
        if self._ngrams is not None:
            smoothed = self._ngrams.distribution(examples.positions[rows].reshape(-1)).to(device)
        self._lap("smoothing")
        # Dropout can only draw from torch's global generators; they are put back as they were.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_derived_seed(config.seed, _DROPOUT, self.step, self.world.rank))
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
                logits = self._forward(x)
        ngram_weight = config.ngram_weight * ngram_factor(self.step, config)
        loss, objective = training_loss(logits.float(), targets, smoothed, ngram_weight)
        loss_value = self.world.sum(weight * loss.item())
        self._require_finite("loss", loss_value)
        self._lap("forward")
        objective.backward()  # type: ignore[no-untyped-call]
        self.world.sum_gradients(self.model.parameters(), weight)
        self._lap("backward")
        grad_norm = self._optimizer.clip_gradients()
        self._require_finite("gradient norm", grad_norm)
        self._lap("clipping")
        self._optimizer.step(self.step)
        self._lap("optimizer")

        factor = learning_rate_factor(self.step, config)
        self.step += 1
        self._losses.append(loss_value)
        elapsed_s = time.perf_counter() - started
        if self.step % LOG_EVERY == 0:
            batch_loss = sum(self._losses) / LOG_EVERY
            self._log(LoggedUpdates(self.step, batch_loss, factor, self.elapsed_s))
        return StepReport(self.step, loss_value, factor, grad_norm, examples.x.numel() / elapsed_s)

    def _evaluate(self) -> EvalReport:
        train_loss, val_loss = self._measure_losses()
        self._require_finite("held-out loss", val_loss)
        self._require_finite("training loss", train_loss)
        self._lap("evaluation")
        best = self.best_loss is None or val_loss < self.best_loss
        self.facts = replace(self.facts, train_loss=train_loss, val_loss=val_loss)
        self._log(LoggedEvaluation(self.step, train_loss, val_loss, best, self.elapsed_s))
        # In this order a kill in between leaves a last checkpoint that is older than the best one, and resuming from
        # it comes to the same best again.
        if best:
            self.best_loss, self.best_train_loss, self.best_step = val_loss, train_loss, self.step
            if self.world.is_main:
                save_checkpoint(self.folder / BEST, self.model, self.tokenizer, self._facts_now())
        self._evaluated_step = self.step
        self.save()
        self._lap("saving")
        return EvalReport(self.step, train_loss, val_loss, best, self.elapsed_s)

    def _measure_losses(self) -> tuple[float, float]:
        """Training and held-out loss, each over evenly spaced windows."""
        val_chars = min(self.config.eval_chars or len(self._val_ids), len(self._val_ids))
        train_loss = window_loss(self.model, self._train_ids, min(val_chars, TRAIN_CHARS), self.world)
        return train_loss, window_loss(self.model, self._val_ids, self.config.eval_chars, self.world)

    def _lap(self, phase: str) -> None:
        device = self.model.lm_head.weight.device
        if self.profiling and device.type == "cuda":
            torch.cuda.synchronize(device)
        self.elapsed_s += self.stopwatch.lap(phase)

    @contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Whatever is trained in here, the run has not begun."""
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        yield
        self.model.load_state_dict(weights)
        self._optimizer = Optimizer(self.model, self.config)
        self.step = 0
        self._losses.clear()

    def _forget_laps(self) -> None:
        """Drops what was measured of updates and evaluations; the text is counted once and for all."""
        laps = self.stopwatch.to_json()
        self.stopwatch = Stopwatch({phase: laps[phase] for phase in laps if phase == COUNTING})

    # Runs by the clock

    def _measure_speed(self, fit: Collection[str]) -> None:
        """Estimates the number of steps before the first one: trains a little, evaluates, and takes it all back."""
        assert self.minutes is not None
        seconds = self.minutes * 60
        with self._taken_back():
            # The first time is slower: memory is set aside, kernels are loaded.
            self._update()
            self._forget_laps()
            enough_s = min(TRIAL_SHARE * seconds, TRIAL_MAX_S)
            # Clocks differ: of several processes the first decides for all.
            while self.world.from_main(
                lambda: self.stopwatch.laps("optimizer") < 2 or self.stopwatch.seconds(*UPDATE_PHASES) < enough_s
            ):
                # Always the first step, which is in no log.
                self.step = 0
                self._update()
            self._measure_losses()
            self._lap("evaluation")
        if "eval_every" in fit:
            eval_every = self.world.from_main(lambda: eval_every_for(seconds, self._update_s, self._evaluation_s))
            self._follow(replace(self.config, eval_every=eval_every))
        self._plan()

    def _plan(self) -> bool:
        """Estimates the number of steps that fills the time. It is settled as soon as the rates begin to fall under the
        newest estimate: then it is written down, before the first step that depends on it. Returns whether it is."""
        assert self.minutes is not None
        if not self.planned:
            left_s = self.minutes * 60 - self.elapsed_s
            steps = self.world.from_main(
                lambda: steps_for(
                    left_s, self.step, self._evaluated_step, self._update_s, self._evaluation_s, self.config
                )
            )
            self._follow(replace(self.config, steps=steps))
        if self.planned:
            self.save()
            self._lap("saving")
        return self.planned

    def _follow(self, config: TrainConfig) -> None:
        self.config = config
        self._optimizer.reschedule(config)

    @property
    def _update_s(self) -> float:
        return self.stopwatch.mean(*UPDATE_PHASES)

    @property
    def _evaluation_s(self) -> float:
        return self.stopwatch.mean(*EVALUATION_PHASES)

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingError(
                f"the {what} at step {self.step + 1:,} is {value}; nothing of this step was saved in {self.folder}:"
                " train a new run with lower --muon-lr, --adamw-lr and --weight-decay or a longer --warmup-steps"
            )

    def _facts_now(self) -> Facts:
        return replace(self.facts, steps=self.step, elapsed_s=round(self.elapsed_s, 3))

    def _log(self, line: Line) -> None:
        if self.world.is_main:
            append_line(self.folder, line)

    def _tidy_folder(self) -> None:
        """Removes what is not of this run, up to this step: a best model and log lines of a run that was replaced,
        and log lines that were written after the last save by a run that was killed."""
        if not self.world.is_main:
            return
        try:
            if self.best_loss is None:
                (self.folder / BEST).unlink(missing_ok=True)
            forget_lines(self.folder, self.step, self._evaluated_step)
        except OSError as error:
            raise CheckpointError(f"cannot tidy the run folder {self.folder}: {error.strerror or error}") from None


def training_loss(
    logits: Tensor, targets: Tensor, smoothed: Tensor | None, ngram_weight: float
) -> tuple[Tensor, Tensor]:
    """What a batch is reported by, and what its update makes smaller.

    Args:
        logits: (B, T, V).
        targets: ids that followed, (B, T).
        smoothed: what follows the same last characters elsewhere, (B T, V); None learns from the targets alone.
        ngram_weight: its share.

    Returns:
        The cross-entropy with the targets, and with the mixture of targets and ``smoothed``; both are means in nats a
        character.
    """
    log_probabilities = logits.flatten(0, 1).log_softmax(dim=-1)  # (B T, V)
    loss = functional.nll_loss(log_probabilities, targets.flatten())
    if smoothed is None:
        return loss, loss
    smoothed_loss = -(log_probabilities * smoothed).sum(dim=-1).mean()
    return loss.detach(), torch.lerp(loss, smoothed_loss, ngram_weight)


def _step(value: Any, most: int) -> int:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"step {value!r} is not one of {most}")
    return value


def _derived_seed(seed: int, stream: int, step: int, rank: int = 0) -> int:
    return int(np.random.SeedSequence((seed, stream, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
