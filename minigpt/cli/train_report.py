"""All that a person sees of a training, and what its run folder keeps to be looked at: samples, curves, a copy for
TensorBoard. The trainer's own files are the trainer's; when to train and when to stop is the command's.
"""

from __future__ import annotations

import math
import os
import shlex
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt import console
from minigpt.errors import MissingPackageError, ReportError
from minigpt.evaluation import n_windows
from minigpt.fit import Fit, judge
from minigpt.history import read_history
from minigpt.ngrams import MOST_CHARS
from minigpt.pacing import warmup_for
from minigpt.plot import plot_losses
from minigpt.runs import BEST, CHECKPOINTS, LOSS_PLOT
from minigpt.samples import forget_samples, keep_sample, sample
from minigpt.stopwatch import Stopwatch
from minigpt.tensorboard import LogCopy, clear_events
from minigpt.trainer import COUNTING, EVALUATION_PHASES, UPDATE_PHASES, EvalReport, StepReport, Trainer

if TYPE_CHECKING:
    from tqdm import tqdm

    from minigpt.parallel import World

# Characters of the sample that is shown at evaluations on a terminal; the file has more.
SHOWN_CHARS = 160
# Columns of longer sentences: they fit every terminal.
PROSE_WIDTH = 78

# What to do about a model.
_ADVICE = {
    Fit.IGNORANT: "it has learnt nothing yet, the loss is that of a blind guess: train longer (--minutes or --steps),"
    " check the settings that differ from the preset's, or give a text in which characters come again",
    Fit.OVERFITTING: "it learns its text by heart (overfitting): more text would help most, else a smaller model, more"
    " --dropout, or fewer --steps (a smaller --eval-every with --patience 2 finds out how many)",
    Fit.FITTING: "it has learnt about what a model of its size can learn from this text: more text or a larger --preset"
    " would help most",
    Fit.UNDERFITTING: "it could learn more from this text (underfitting): train longer (--minutes or --steps), or with"
    " a larger --preset",
}


class TrainReport:
    """Shows one training as it goes and keeps what is to be looked at later.

    A block under ``with`` begins and ends it; in there it is told of every report of the trainer, and after it that the
    run is finished. Of several processes rank 0 alone shows and keeps anything, so nothing here may ask the others.

    Args:
        trainer: the run, new or resumed, before its next step.
        sample_chars: characters of the sample that is kept at each evaluation; 0 keeps none.
        tensorboard: copy the log for TensorBoard.
        profile: tell in the end what the time went to.
        quiet: show nothing.

    Raises:
        ReportError: from ``with``, where TensorBoard's folder cannot be written. All that fails later is said, and
            stops nothing.
    """

    def __init__(self, trainer: Trainer, sample_chars: int, *, tensorboard: bool, profile: bool, quiet: bool) -> None:
        # All that is shown goes through the notes and the bar, all that is kept through `_attempt` and the copy.
        self._speaks = trainer.world.is_main
        self._trainer = trainer
        self._sample_chars = sample_chars if self._speaks else 0
        self._tensorboard = tensorboard and self._speaks
        self._profile = profile
        self._quiet = quiet or not self._speaks
        self._note = console.notes(self._quiet)
        self._held_out = trainer.facts.val_loss
        self._bar: tqdm[Any]
        self._copy: LogCopy | None = None
        self._opened = ExitStack()
        # What went wrong with something that is tried again and again is said once.
        self._said: set[str] = set()

    def __enter__(self) -> TrainReport:
        self._note(_opening(self._trainer))
        self._tidy_folder()
        if self._tensorboard:
            config = self._trainer.config
            self._copy = LogCopy(self._trainer.folder, config.batch_size * self._trainer.model.config.block_size)
        self._bar = self._opened.enter_context(
            console.steps_bar(self._trainer.config.steps, self._trainer.step, hidden=self._quiet)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        if self._copy is not None:
            self._attempt(self._copy.close)

    def updated(self, report: StepReport) -> None:
        """The weights were updated."""
        self._update_copy()
        known = "" if self._held_out is None else f", held-out {self._held_out:.3f}"
        self._bar.set_postfix_str(f"loss {report.loss:.3f}{known}, {report.chars_per_s / 1e3:,.1f}k chars/s", False)
        # A run by the clock estimates how many there will be.
        self._bar.total = self._trainer.config.steps
        self._bar.update(1)

    def evaluated(self, report: EvalReport) -> None:
        """The model was evaluated and saved."""
        self._update_copy()
        self._held_out = report.val_loss
        self._note(_evaluation_line(report, _steps(self._trainer)))
        if self._sample_chars:
            text = self._sample()
            self._attempt(keep_sample, self._trainer.folder, report.step, report.val_loss, report.best, text)
            if not self._bar.disable:
                self._note(_excerpt(text))

    def stopping(self, once_more: bool) -> None:
        """Somebody asked to stop; if they ask once more, that may stop at once."""
        self._note("stopping after this step" + ("; once more stops at once" if once_more else ""))

    def stopped(self) -> None:
        """The run was stopped before its end, and saved."""
        self._bar.close()
        self._attempt(self._plot_losses)
        self._note_profile()
        again = f"{_program(self._trainer.world)} train --resume {_quoted(self._trainer.folder)}"
        self._note(f"stopped and saved after step {self._trainer.step:,}; go on with: {again}")

    def finished(self) -> None:
        """There is no step left to take; the ``with`` block has ended."""
        self._attempt(self._plot_losses)
        if not self._quiet:
            self._attempt(self._show_losses)
        self._note(_summary(self._trainer))
        self._note_profile()

    def _note_profile(self) -> None:
        if self._profile:
            self._note(_profile(self._trainer.stopwatch))

    def _attempt(self, act: Callable[..., None], *args: Any) -> bool:
        """Does what is not worth stopping a training: says what went wrong, less what is not installed."""
        if not self._speaks:
            return False
        try:
            act(*args)
        except MissingPackageError:
            return False
        except ReportError as error:
            text = str(error)
            if text not in self._said:
                self._said.add(text)
                self._note(text)
            return False
        return True

    def _update_copy(self) -> None:
        if self._copy is not None and not self._attempt(self._copy.update):
            self._copy = None

    def _tidy_folder(self) -> None:
        """Makes the samples agree with the last checkpoint, as the log does, and removes what shows an earlier run."""
        trainer = self._trainer
        evaluated = trainer.evaluated_step or 0
        # It may have been killed before it had written the sample of this evaluation; a later save means it was not.
        is_doubtful = trainer.step == evaluated
        tidied = self._attempt(forget_samples, trainer.folder, evaluated if is_doubtful else evaluated + 1)
        if trainer.step == 0:
            self._attempt(clear_events, trainer.folder)
            self._attempt(_remove_plot, trainer.folder)
        elif tidied and is_doubtful and self._sample_chars:
            val_loss = trainer.facts.val_loss
            assert val_loss is not None
            best = trainer.best_step == evaluated
            self._attempt(keep_sample, trainer.folder, evaluated, val_loss, best, self._sample())

    def _sample(self) -> str:
        trainer = self._trainer
        return sample(trainer.model, trainer.tokenizer, trainer.facts.most_frequent, self._sample_chars)

    def _plot_losses(self) -> None:
        folder = self._trainer.folder
        if self._trainer.evaluated_step is None:
            return
        plot_losses(read_history(folder), folder / LOSS_PLOT)
        self._note(f"loss curve: {folder / LOSS_PLOT}")

    def _show_losses(self) -> None:
        history = read_history(self._trainer.folder)
        if len(history.training[0]) > 1:
            console.note_curves(
                {"training": history.training, "held-out": history.held_out}, "loss in nats a character, by step"
            )


def _opening(trainer: Trainer) -> str:
    """What is learnt by what, for how long and where."""
    facts, config = trainer.facts, trainer.config
    if trainer.finished:
        why = " and ran out of --patience" if trainer.step < config.steps else ""
        return f"this run has taken its {_count(trainer.step)} already{why}"
    plural = "step" if config.steps == 1 else "steps"
    precision = "" if config.precision == "float32" else f", in {config.precision}"
    resumed = f", {trainer.step:,} of them done" if trainer.step else ""
    by_clock = trainer.minutes is not None
    in_minutes = f" in {trainer.minutes:g} minute{'' if trainer.minutes == 1 else 's'}" if by_clock else ""
    often = f", evaluated every {config.eval_every:,}" if by_clock else ""
    lines = [
        f"{facts.corpus}: {facts.corpus_chars:,} characters, {trainer.model.config.vocab_size:,} different ones",
        _held_out(trainer.n_held_out, trainer.model.config.block_size, config.eval_chars),
        f"{trainer.model.n_params:,} parameters, {_steps(trainer)} {plural}{in_minutes}{resumed}{often}{precision}, in"
        f" {trainer.folder}",
    ]
    if dropout := trainer.model.config.dropout:
        epochs = f"{trainer.epochs:,.0f}" if trainer.epochs >= 10 else f"{trainer.epochs:.2g}"
        lines.append(f"the training part is read {epochs} times, with a dropout of {dropout:g}")
    if config.ngram_weight and trainer.model.config.vocab_size > MOST_CHARS:
        lines.append(f"with more than {MOST_CHARS} different characters, --ngram-weight has no effect")
    if by_clock and config.steps <= config.warmup_steps:
        lines.append(
            f"the learning rates need {_count(config.warmup_steps)} to rise: give more --minutes, fewer --warmup-steps"
            " or a smaller model"
        )
    return "\n".join(lines)


def _held_out(n_chars: int, block_size: int, eval_chars: int) -> str:
    """How the held-out part is used."""
    there_are, read = n_windows(n_chars, block_size), n_windows(n_chars, block_size, eval_chars)
    share = "all" if read == there_are else f"{min(99, max(1, round(100 * read * block_size / n_chars)))}%"
    return f"the last {n_chars:,} are held out; each evaluation reads {share} of them"


def _steps(trainer: Trainer) -> str:
    """How many steps the run takes, as far as that is known."""
    return f"{'' if trainer.planned else 'about '}{trainer.config.steps:,}"


def _rounds(patience: int) -> str:
    return "one evaluation was" if patience == 1 else f"{patience} evaluations in a row were"


def _program(world: World) -> str:
    """What starts as many processes again."""
    return "minigpt" if world.size == 1 else f"torchrun --nproc-per-node {world.local_size} -m minigpt"


def _count(steps: int) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'}"


def _remove_plot(folder: Path) -> None:
    try:
        (folder / LOSS_PLOT).unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"cannot remove {folder / LOSS_PLOT}: {error.strerror or error}") from None


def _evaluation_line(report: EvalReport, steps: str) -> str:
    best = ", the best so far" if report.best else ""
    return (
        f"step {report.step:,} of {steps} ({report.elapsed_s:.0f} s): loss {report.train_loss:.4f}, held-out"
        f" {report.val_loss:.4f}{best}"
    )


def _excerpt(text: str) -> str:
    """The first few lines of a sample, marked as such."""
    return "\n".join(f"  | {line[:76]}" for line in text[:SHOWN_CHARS].strip().splitlines())


def _summary(trainer: Trainer) -> str:
    facts, best_step = trainer.facts, trainer.best_step
    lines = [f"done: {_count(trainer.step)} in {trainer.elapsed_s:.0f} s, saved in {trainer.folder}"]
    if trainer.step < trainer.config.steps:
        lines += [
            f"stopped early, {_count(trainer.config.steps - trainer.step)} before the end:",
            f"{_rounds(trainer.config.patience)} not better than that of step {best_step:,}",
        ]
    kept = "best and last model" if best_step == trainer.step else "best model, which is kept"
    if not (trainer.folder / BEST).exists():
        kept = f"best model, whose {BEST} is gone"
    losses = f"loss {trainer.best_train_loss:.4f}, held-out {trainer.best_loss:.4f} nats a character"
    lines.append(f"{kept}: step {best_step:,}, {losses}")
    if best_step != trainer.step:
        lines.append(f"last model: step {trainer.step:,}, loss {facts.train_loss:.4f}, held-out {facts.val_loss:.4f}")
    lines += _advice(trainer)
    if trainer.minutes is not None:
        config = trainer.config
        warmup = f" --warmup-steps {config.warmup_steps}" if config.warmup_steps != warmup_for(config.steps) else ""
        dropout = trainer.model.config.dropout
        dropped = f" --dropout {dropout:g}" if dropout != trainer.fitting_dropout else ""
        lines.append(
            f"--steps {config.steps} --eval-every {config.eval_every}{warmup}{dropped} --precision {config.precision}"
            f" instead of --minutes {trainer.minutes:g} repeats this run"
        )
    lines.append(f"write with it: minigpt generate --checkpoint {_quoted(trainer.folder)}")
    return "\n".join(lines)


def _advice(trainer: Trainer) -> list[str]:
    """What the losses of a finished run say about it, and what to do."""
    facts = trainer.facts
    assert facts.train_loss is not None and facts.val_loss is not None and trainer.best_loss is not None
    fit = judge(facts.train_loss, facts.val_loss, trainer.best_loss, math.log(trainer.model.config.vocab_size))
    return textwrap.wrap(_ADVICE[fit], PROSE_WIDTH, break_on_hyphens=False)


def _profile(stopwatch: Stopwatch) -> str:
    """A table of where the time of the run went, and the share of the optimizer in an update."""
    phases = (COUNTING, *UPDATE_PHASES, *EVALUATION_PHASES)
    whole = stopwatch.seconds(*phases)
    steps = stopwatch.laps("optimizer")
    if not steps:
        return "no step was measured"
    lines = ["phase       share  ms a step"]
    for phase in phases:
        seconds = stopwatch.seconds(phase)
        lines.append(f"{phase:<10} {seconds / whole:>6.1%} {seconds / steps * 1000:>10.2f}")
    update = stopwatch.seconds(*UPDATE_PHASES)
    lines.append(
        f"the optimizer takes {stopwatch.seconds('optimizer') / update:.0%} of an update of {update / steps * 1000:.1f}"
        " ms"
    )
    return "\n".join(lines)


def _quoted(folder: Path) -> str:
    """The run as it is named on a shell's command line."""
    # A path needs a separator, or it would be the name of a run under checkpoints/.
    path = str(folder) if len(folder.parts) > 1 else f".{os.sep}{folder}"
    return shlex.quote(folder.name if folder.parent == CHECKPOINTS else path)
