"""``minigpt train``: learn a text, or go on with a run."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import DeviceOption
from minigpt.config import DEFAULT_PRESET, PRESETS, GPTConfig, TrainConfig, find_preset

if TYPE_CHECKING:
    from types import FrameType

    from minigpt.console import Note
    from minigpt.corpus import Corpus
    from minigpt.parallel import World
    from minigpt.stopwatch import Stopwatch
    from minigpt.tensorboard import LogCopy
    from minigpt.trainer import EvalReport, Trainer

# Characters of the sample that is shown at evaluations on a terminal; the file has more.
SHOWN_CHARS = 160

# What a run keeps beside the trainer's own state, so that --resume needs nothing but its name.
_EXTRA = {"sources": list, "encoding": str, "device": str, "threads": int}

_PRESETS_HELP = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())


class Log(str, Enum):
    """What can show a training while it runs."""

    tensorboard = "tensorboard"


def _field(name: str, about: str) -> Any:
    """An option for the settings field of that name; not given, it keeps the preset's value."""
    return typer.Option(f"--{name.replace('_', '-')}", help=about, show_default=False)


def train(
    context: typer.Context,
    corpus: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CORPUS",
            help="Files, folders of *.txt, '-' for standard input, a URL, or 'shakespeare'. Default: the bundled text.",
            show_default=False,
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option("--encoding", help="Encoding of the text. Default: utf-8.", show_default=False)
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option("--sha256", help="Refuse a text whose bytes have another digest than this."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="Name of the run. Default: made of the names of text and preset."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run of that name.")] = False,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Go on with a run, with its own settings."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", help=f"{_PRESETS_HELP}. Default: {DEFAULT_PRESET}.", show_default=False),
    ] = None,
    n_layer: Annotated[int | None, _field("n_layer", "Layers.")] = None,
    n_head: Annotated[int | None, _field("n_head", "Attention heads a layer.")] = None,
    n_embd: Annotated[int | None, _field("n_embd", "Channels.")] = None,
    block_size: Annotated[int | None, _field("block_size", "Characters in one training example.")] = None,
    window: Annotated[int | None, _field("window", "Characters that attention looks back, its own included.")] = None,
    dropout: Annotated[float | None, _field("dropout", "Share of activations dropped while training.")] = None,
    steps: Annotated[int | None, _field("steps", "Updates of the weights.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes", help="Take as many steps as fit into so many minutes, instead of --steps.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[int | None, _field("batch_size", "Examples an update.")] = None,
    muon_lr: Annotated[float | None, _field("muon_lr", "Peak learning rate of the matrices.")] = None,
    adamw_lr: Annotated[float | None, _field("adamw_lr", "Peak learning rate of everything else.")] = None,
    weight_decay: Annotated[float | None, _field("weight_decay", "Decay of the matrices, times the rate.")] = None,
    ngram_weight: Annotated[
        float | None, _field("ngram_weight", "Share of the targets that counts of the text smooth.")
    ] = None,
    warmup_steps: Annotated[int | None, _field("warmup_steps", "Steps over which the rates rise.")] = None,
    decay_fraction: Annotated[float | None, _field("decay_fraction", "Share of steps over which they fall.")] = None,
    grad_clip: Annotated[float | None, _field("grad_clip", "Largest norm of the gradient; 0 is off.")] = None,
    eval_every: Annotated[int | None, _field("eval_every", "Steps between two looks at the held-out text.")] = None,
    eval_chars: Annotated[
        int | None, _field("eval_chars", "Held-out characters read at each look; 0 reads all.")
    ] = None,
    patience: Annotated[
        int | None, _field("patience", "Looks in a row without a lower held-out loss that end the run; 0 is off.")
    ] = None,
    val_fraction: Annotated[float | None, _field("val_fraction", "Share of the text, at its end, held out.")] = None,
    seed: Annotated[int | None, _field("seed", "Same seed, same model.")] = None,
    sample_chars: Annotated[
        int | None,
        typer.Option(
            "--sample-chars",
            min=0,
            help="Characters of the sample that is kept at each look; 0 keeps none. Default: 300.",
            show_default=False,
        ),
    ] = None,
    log: Annotated[Log | None, typer.Option("--log", help="Show the training in TensorBoard too.")] = None,
    device: DeviceOption = "auto",
    precision: Annotated[
        str | None, _field("precision", "float32 or bfloat16. Default: the faster one on the device, by a short trial.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="CPU threads. Default: one a core, or the run's."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Tell in the end what the time went to.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Learn a text.

    With N processes or GPUs: torchrun --nproc-per-node N -m minigpt train ...
    """
    given = {name: value for name, value in locals().items() if value is not None}
    model_fields = {name: given[name] for name in GPTConfig.__dataclass_fields__ if name in given}
    train_fields = {name: given[name] for name in TrainConfig.__dataclass_fields__ if name in given}
    world: World = context.obj
    quiet = quiet or not world.is_main
    if log is not None:
        from minigpt.tensorboard import writer_type

        # Said before there is anything to lose.
        writer_type()
    if resume is not None:
        own = [
            *model_fields,
            *train_fields,
            *(name for name in ("minutes", "preset", "out", "sha256", "encoding", "sample_chars") if name in given),
        ]
        if force:
            own.append("force")
        if own:
            option = "--" + own[0].replace("_", "-")
            raise typer.BadParameter(f"a run goes on with its own settings: leave out {option}", param_hint="--resume")
        trainer, n_chars = _resume(resume, corpus or [], device, threads, quiet, world)
    else:
        if minutes is not None and steps is not None:
            raise typer.BadParameter("the minutes decide on the steps: leave out one of both", param_hint="--minutes")
        if minutes is not None and not 0 < minutes < math.inf:
            raise typer.BadParameter(f"{minutes:g} must be a finite number, more than 0", param_hint="--minutes")
        trainer, n_chars = _start(
            corpus or [],
            encoding or "utf-8",
            sha256,
            out,
            force,
            preset or DEFAULT_PRESET,
            model_fields,
            train_fields,
            minutes,
            sample_chars,
            device,
            threads,
            quiet,
            world,
        )
    _run(trainer, n_chars, log, profile, quiet)


def _start(
    sources: list[str],
    encoding: str,
    sha256: str | None,
    out: str | None,
    force: bool,
    preset_name: str,
    model_fields: dict[str, Any],
    train_fields: dict[str, Any],
    minutes: float | None,
    sample_chars: int | None,
    device: str,
    threads: int | None,
    quiet: bool,
    world: World,
) -> tuple[Trainer, int]:
    """A new run, and the characters of its samples."""
    # Everything that can be wrong without reading the text is said before it is read.
    preset = find_preset(preset_name)
    config = TrainConfig(**{**preset.training, **train_fields})
    shape = {**preset.model, **model_fields}
    GPTConfig(vocab_size=1, **shape)
    world.require_rows(config.batch_size)
    _require_files(sources, world)

    import torch

    from minigpt import __version__, console
    from minigpt.checkpoint import Facts
    from minigpt.device import choose_device, fastest_precision, set_threads
    from minigpt.errors import CheckpointError
    from minigpt.runs import free_name, is_run, run_folder
    from minigpt.samples import SAMPLE_CHARS
    from minigpt.trainer import Trainer

    world.join()
    chosen_device = choose_device(device, world)
    if out is not None and world.is_main and is_run(run_folder(out)) and not force:
        raise CheckpointError(
            f"there is a run in {run_folder(out)} already: go on with it by --resume {out}, replace it with --force, or"
            " choose another --out"
        )
    text = _load(sources, encoding, sha256, quiet, world)
    train_ids, val_ids = text.split(config.val_fraction, shape["block_size"])
    model_config = GPTConfig(vocab_size=len(text.tokenizer), **shape)
    # What is free is seen by rank 0, which makes the folder.
    name = out or world.from_main(lambda: free_name(f"{_slug(text.name)}-{preset_name}"))
    folder = run_folder(name)
    facts = Facts(
        corpus=text.name,
        corpus_sha256=text.sha256,
        corpus_chars=len(text.ids),
        val_fraction=config.val_fraction,
        most_frequent=text.most_frequent,
        preset=preset_name,
        minigpt_version=__version__,
        torch_version=torch.__version__,
    )
    if "precision" not in train_fields:
        config = replace(config, precision=fastest_precision(chosen_device))
    n_chars = SAMPLE_CHARS if sample_chars is None else sample_chars
    extra = {
        "sources": [_absolute(source) for source in sources],
        "encoding": encoding,
        "device": str(chosen_device),
        "threads": set_threads(threads),
        "sample_chars": n_chars,
        "processes": world.size,
    }
    if minutes is not None:
        console.notes(quiet)(f"measuring how many steps fit into {minutes:g} min")
    trainer = Trainer.start(
        folder,
        model_config,
        text.tokenizer,
        facts,
        train_ids,
        val_ids,
        config,
        device=chosen_device,
        extra=extra,
        minutes=minutes,
        choose_eval_every="eval_every" not in train_fields,
        world=world,
    )
    return trainer, n_chars


def _resume(
    name: str, sources: list[str], device: str, threads: int | None, quiet: bool, world: World
) -> tuple[Trainer, int]:
    """A run to go on with, and the characters of its samples."""
    from minigpt.checkpoint import load
    from minigpt.device import choose_device, set_threads
    from minigpt.errors import CheckpointError, CorpusError
    from minigpt.runs import LAST, find_run
    from minigpt.samples import SAMPLE_CHARS
    from minigpt.sources import STDIN
    from minigpt.trainer import Trainer

    world.join()
    # Read once, so that all go on from the same step whatever their machines keep in a folder of that name.
    folder = world.from_main(lambda: find_run(name))
    checkpoint = world.from_main(lambda: load(folder / LAST, with_state=True))
    if checkpoint.state is None:
        raise CheckpointError(f"{checkpoint.path} holds a model but no training state to resume from")
    extra = checkpoint.state.values.get("extra")
    if not isinstance(extra, dict) or not all(isinstance(extra.get(name), kind) for name, kind in _EXTRA.items()):
        raise CheckpointError(f"{checkpoint.path} does not say what it was trained on and how: train a new run")
    # Runs that are older than samples do not say how long theirs are.
    n_chars = extra.setdefault("sample_chars", SAMPLE_CHARS)
    # The same device and number of threads, unless told otherwise: with others, sums are rounded otherwise. Another
    # number of processes shares the cores in another way.
    kept_device = extra["device"] if world.size == 1 else extra["device"].partition(":")[0]
    chosen_device = choose_device(kept_device if device == "auto" else device, world)
    kept_threads = extra["threads"] if extra.get("processes", 1) == world.size else None
    extra |= {
        "device": str(chosen_device),
        "threads": set_threads(threads or kept_threads),
        "processes": world.size,
    }
    _require_files(sources or extra["sources"], world)
    if STDIN in extra["sources"] and not sources and sys.stdin is not None and sys.stdin.isatty():
        raise CorpusError(
            f"{name!r} learnt from standard input, which is gone: pipe the text in again, or name it after --resume"
        )
    text = _load(sources or extra["sources"], extra["encoding"], None, quiet, world)
    facts = checkpoint.facts
    if text.sha256 != facts.corpus_sha256:
        raise CorpusError(
            f"the text ({text.name}) is not the one that {name!r} was trained on ({facts.corpus}): give that text, or"
            " train a new run"
        )
    train_ids, val_ids = text.split(facts.val_fraction, checkpoint.model.config.block_size)
    return Trainer.resume(folder, checkpoint, train_ids, val_ids, device=chosen_device, world=world), n_chars


def _load(sources: list[str], encoding: str, sha256: str | None, quiet: bool, world: World) -> Corpus:
    from minigpt import console
    from minigpt.corpus import load_corpus
    from minigpt.errors import CorpusError

    # What has to be downloaded or encoded on the way is kept in files, which the others find.
    with world.main_first():
        text = load_corpus(
            sources, encoding=encoding, sha256=sha256, progress=console.bytes_bar("downloading", hidden=quiet)
        )
    if text.sha256 != world.from_main(lambda: text.sha256):
        raise CorpusError(f"process {world.rank} reads another text ({text.name}) than process 0: give all the same")
    for sentence in text.notes:
        console.notes(quiet)(sentence)
    return text


def _require_files(sources: list[str], world: World) -> None:
    """Checks that every process can read the text: a pipe gives it to one of them."""
    from minigpt.errors import CorpusError

    for source in sources if world.size > 1 else []:
        if _is_pipe(source):
            raise CorpusError(
                f"{source!r} is a pipe, which one process can read, and there are {world.size}: give a file instead"
            )


def _is_pipe(source: str) -> bool:
    from minigpt.sources import STDIN

    try:
        return source == STDIN or Path(source).is_fifo()
    except (OSError, ValueError):
        # A name too long, or with a NUL byte in it, is no file's.
        return False


def _absolute(source: str) -> str:
    """The source as it can be found again from another working directory."""
    from minigpt.sources import STDIN

    return str(Path(source).resolve()) if source != STDIN and Path(source).exists() else source


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(name).stem.lower()).strip("-")[:40] or "text"


def _run(trainer: Trainer, n_chars: int, log: Log | None, profile: bool, quiet: bool) -> None:
    from minigpt import console
    from minigpt.samples import keep_sample
    from minigpt.trainer import EvalReport

    note = console.notes(quiet)
    model = trainer.model
    trainer.profiling = profile
    if trainer.finished:
        why = " and ran out of --patience" if trainer.step < trainer.config.steps else ""
        note(f"this run has taken its {trainer.step:,} steps already{why}")
    else:
        facts = trainer.facts
        note(f"{facts.corpus}: {facts.corpus_chars:,} characters, {model.config.vocab_size} different ones")
        note(trainer.held_out)
        resumed = f", {trainer.step:,} of them done" if trainer.step else ""
        parameters = sum(param.numel() for param in model.parameters())
        by_clock = trainer.minutes is not None
        in_minutes = f" in {trainer.minutes:g} minute{'' if trainer.minutes == 1 else 's'}" if by_clock else ""
        often = f", evaluated every {trainer.config.eval_every:,}" if by_clock else ""
        note(f"{parameters:,} parameters, {_steps(trainer)} steps{in_minutes}{resumed}{often}, in {trainer.folder}")
        if by_clock and trainer.config.steps <= trainer.config.warmup_steps:
            note(
                f"the learning rates need {trainer.config.warmup_steps:,} steps to rise: give more --minutes, fewer"
                " --warmup-steps or a smaller model"
            )
    _tidy_folder(trainer, n_chars, note)
    held_out = trainer.facts.val_loss
    with (
        _LogCopies(trainer, log, note) as copies,
        _StopRequest(note, trainer.world.size == 1) as stop,
        console.steps_bar(trainer.config.steps, trainer.step, hidden=quiet) as bar,
    ):
        for step in trainer.steps():
            copies.update()
            if isinstance(step, EvalReport):
                held_out = step.val_loss
                note(_evaluation_line(step, _steps(trainer)))
                if n_chars:
                    text = _sample(trainer, n_chars)
                    _attempt(note, keep_sample, trainer.folder, step.step, step.val_loss, step.best, text)
                    if not bar.disable:
                        note(_excerpt(text))
            else:
                known = "" if held_out is None else f", held-out {held_out:.3f}"
                bar.set_postfix_str(f"loss {step.loss:.3f}{known}, {step.chars_per_s / 1e3:,.1f}k chars/s", False)
                # A run by the clock estimates how many there will be.
                bar.total = trainer.config.steps
                bar.update(1)
            # Whoever was asked to stop, all do, after the same step.
            asked = trainer.world.largest(stop.signal or 0)
            if asked and not trainer.finished:
                bar.close()
                trainer.save()
                again = f"minigpt train --resume {_quoted(trainer.folder)}"
                note(f"stopped and saved after step {trainer.step:,}; go on with: {again}")
                _attempt(note, _plot_losses, trainer, note)
                raise typer.Exit(128 + asked)
    _attempt(note, _plot_losses, trainer, note)
    if not quiet:
        _attempt(note, _show_losses, trainer)
    note(_summary(trainer))
    if profile:
        note(_profile(trainer.stopwatch))


def _steps(trainer: Trainer) -> str:
    """How many steps the run takes, as far as that is known."""
    return f"{'' if trainer.planned else 'about '}{trainer.config.steps:,}"


def _count(steps: int) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'}"


def _tidy_folder(trainer: Trainer, n_chars: int, note: Note) -> None:
    """Makes the samples agree with the last checkpoint, as the log does, and removes what shows an earlier run."""
    from minigpt.samples import forget_samples, keep_sample
    from minigpt.tensorboard import clear_events

    evaluated = trainer.evaluated_step or 0
    # It may have been killed before it had written the sample of this evaluation; a later save means it was not.
    is_doubtful = trainer.step == evaluated
    _attempt(note, forget_samples, trainer.folder, evaluated if is_doubtful else evaluated + 1)
    if trainer.step == 0:
        _attempt(note, clear_events, trainer.folder)
        _attempt(note, _remove_plot, trainer.folder)
    elif is_doubtful and n_chars:
        val_loss = trainer.facts.val_loss
        assert val_loss is not None
        best = trainer.best_step == evaluated
        _attempt(note, keep_sample, trainer.folder, evaluated, val_loss, best, _sample(trainer, n_chars))


def _remove_plot(folder: Path) -> None:
    from minigpt.errors import ReportError
    from minigpt.runs import LOSS_PLOT

    try:
        (folder / LOSS_PLOT).unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"cannot remove {folder / LOSS_PLOT}: {error.strerror or error}") from None


def _plot_losses(trainer: Trainer, note: Note) -> None:
    from minigpt.history import read_history
    from minigpt.plot import plot_losses
    from minigpt.runs import LOSS_PLOT

    if trainer.evaluated_step is None:
        return
    plot_losses(read_history(trainer.folder), trainer.folder / LOSS_PLOT)
    note(f"loss curve: {trainer.folder / LOSS_PLOT}")


def _show_losses(trainer: Trainer) -> None:
    from minigpt import console
    from minigpt.history import read_history

    history = read_history(trainer.folder)
    if len(history.training[0]) > 1:
        console.note_curves(
            {"training": history.training, "held-out": history.held_out}, "loss in nats a character, by step"
        )


def _attempt(note: Note, act: Callable[..., None], *args: Any) -> bool:
    """Does what shows a training and is not worth stopping it: says what went wrong, less what is not installed."""
    from minigpt.errors import MissingPackageError, ReportError

    try:
        act(*args)
    except MissingPackageError:
        return False
    except ReportError as error:
        note(str(error))
        return False
    return True


def _evaluation_line(report: EvalReport, steps: str) -> str:
    best = ", the best so far" if report.best else ""
    return (
        f"step {report.step:,} of {steps} ({report.elapsed_s:.0f} s): loss {report.train_loss:.4f}, held-out"
        f" {report.val_loss:.4f}{best}"
    )


def _sample(trainer: Trainer, n_chars: int) -> str:
    from minigpt.samples import sample

    return sample(trainer.model, trainer.tokenizer, trainer.facts.most_frequent, n_chars)


def _excerpt(text: str) -> str:
    """The first few lines of a sample, marked as such."""
    return "\n".join(f"  | {line[:76]}" for line in text[:SHOWN_CHARS].strip().splitlines())


def _summary(trainer: Trainer) -> str:
    facts, best_step = trainer.facts, trainer.best_step
    lines = [f"done: {_count(trainer.step)} in {trainer.elapsed_s:.0f} s, saved in {trainer.folder}"]
    if trainer.step < trainer.config.steps:
        lines.append(
            f"stopped early, {_count(trainer.config.steps - trainer.step)} before the end: {trainer.config.patience}"
            f" evaluations in a row were not better than that of step {best_step:,}"
        )
    # Runs of an earlier version did not measure both in the same way.
    train_loss = "" if trainer.best_train_loss is None else f"loss {trainer.best_train_loss:.4f}, "
    kept = "best and last model" if best_step == trainer.step else "best model, which is kept"
    lines.append(f"{kept}: step {best_step:,}, {train_loss}held-out {trainer.best_loss:.4f} nats a character")
    if best_step != trainer.step:
        lines.append(f"last model: step {trainer.step:,}, loss {facts.train_loss:.4f}, held-out {facts.val_loss:.4f}")
    lines += _advice(trainer)
    if trainer.minutes is not None:
        config = trainer.config
        lines.append(
            f"--steps {config.steps} --eval-every {config.eval_every} instead of --minutes {trainer.minutes:g} repeats"
            " this run"
        )
    lines.append(f"write with it: minigpt generate --checkpoint {_quoted(trainer.folder)}")
    return "\n".join(lines)


def _advice(trainer: Trainer) -> list[str]:
    """What the losses of a finished run say about it, and what to do."""
    from minigpt.fit import Fit, judge

    facts = trainer.facts
    if trainer.best_train_loss is None or facts.train_loss is None or facts.val_loss is None:
        return []
    assert trainer.best_loss is not None
    fit = judge(facts.train_loss, facts.val_loss, trainer.best_loss)
    if fit is Fit.OVERFITTING:
        return [
            "it learns its text by heart (overfitting): more text would help most, else a smaller model, more",
            "--dropout, or fewer --steps (a smaller --eval-every with --patience 2 finds out how many)",
        ]
    if fit is Fit.UNDERFITTING:
        return [
            "it could learn more from this text (underfitting): train longer (--minutes or --steps), or with a larger",
            "--preset",
        ]
    return []


def _profile(stopwatch: Stopwatch) -> str:
    """A table of where the time of the run went, and the share of the optimizer in an update."""
    from minigpt.trainer import EVALUATION_PHASES, UPDATE_PHASES

    whole = stopwatch.seconds(*UPDATE_PHASES, *EVALUATION_PHASES)
    steps = stopwatch.laps("optimizer")
    if not steps:
        return "no step was measured"
    lines = ["phase       share  ms a step"]
    for phase in (*UPDATE_PHASES, *EVALUATION_PHASES):
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
    from minigpt.runs import CHECKPOINTS

    # A path needs a separator, or it would be the name of a run under checkpoints/.
    path = str(folder) if len(folder.parts) > 1 else f".{os.sep}{folder}"
    return shlex.quote(folder.name if folder.parent == CHECKPOINTS else path)


class _LogCopies:
    """Copies the log to where ``--log`` says as it grows; on failure says so once and copies no more."""

    def __init__(self, trainer: Trainer, log: Log | None, note: Note) -> None:
        self._note = note
        self._copy: LogCopy | None = None
        if log is not None:
            from minigpt.tensorboard import LogCopy

            self._copy = LogCopy(trainer.folder, trainer.config.batch_size * trainer.model.config.block_size)

    def __enter__(self) -> _LogCopies:
        return self

    def update(self) -> None:
        if self._copy is not None and not _attempt(self._note, self._copy.update):
            self._copy = None

    def __exit__(self, *_: object) -> None:
        if self._copy is not None:
            _attempt(self._note, self._copy.close)


class _StopRequest:
    """Turns a first Ctrl-C or SIGTERM into a wish, noted in ``signal``; a second one stops at once.

    Not if there are other processes: whoever stops them may send a signal to each and to `torchrun`, which passes it
    on, and which kills what takes too long.
    """

    def __init__(self, note: Note, alone: bool) -> None:
        self.signal: int | None = None
        self._note = note
        self._alone = alone
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and self._alone:
            raise KeyboardInterrupt
        if self.signal is None:
            self._note("stopping after this step" + ("; once more stops at once" if self._alone else ""))
        self.signal = number
