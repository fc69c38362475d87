"""``minigpt train``: learn a text, or go on with a run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
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
    from minigpt.trainer import EvalReport, Trainer

# Characters of the sample that is shown at evaluations on a terminal.
SAMPLE_CHARS = 160

# What a run keeps beside the trainer's own state, so that --resume needs nothing but its name.
_EXTRA = {"sources": list, "encoding": str, "device": str, "threads": int}

_PRESETS_HELP = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())


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
    batch_size: Annotated[int | None, _field("batch_size", "Examples an update.")] = None,
    muon_lr: Annotated[float | None, _field("muon_lr", "Peak learning rate of the matrices.")] = None,
    adamw_lr: Annotated[float | None, _field("adamw_lr", "Peak learning rate of everything else.")] = None,
    weight_decay: Annotated[float | None, _field("weight_decay", "Decay of the matrices, times the rate.")] = None,
    warmup_steps: Annotated[int | None, _field("warmup_steps", "Steps over which the rates rise.")] = None,
    decay_fraction: Annotated[float | None, _field("decay_fraction", "Share of steps over which they fall.")] = None,
    grad_clip: Annotated[float | None, _field("grad_clip", "Largest norm of the gradient; 0 is off.")] = None,
    eval_every: Annotated[int | None, _field("eval_every", "Steps between two looks at the held-out text.")] = None,
    eval_chars: Annotated[
        int | None, _field("eval_chars", "Held-out characters read at each look; 0 reads all.")
    ] = None,
    val_fraction: Annotated[float | None, _field("val_fraction", "Share of the text, at its end, held out.")] = None,
    seed: Annotated[int | None, _field("seed", "Same seed, same model.")] = None,
    device: DeviceOption = "auto",
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="CPU threads. Default: one a core, or the run's."),
    ] = None,
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
    if resume is not None:
        own = [
            *model_fields,
            *train_fields,
            *(name for name in ("preset", "out", "sha256", "encoding") if name in given),
        ]
        if force:
            own.append("force")
        if own:
            option = "--" + own[0].replace("_", "-")
            raise typer.BadParameter(f"a run goes on with its own settings: leave out {option}", param_hint="--resume")
        trainer = _resume(resume, corpus or [], device, threads, quiet, world)
    else:
        trainer = _start(
            corpus or [],
            encoding or "utf-8",
            sha256,
            out,
            force,
            preset or DEFAULT_PRESET,
            model_fields,
            train_fields,
            device,
            threads,
            quiet,
            world,
        )
    _run(trainer, quiet)


def _start(
    sources: list[str],
    encoding: str,
    sha256: str | None,
    out: str | None,
    force: bool,
    preset_name: str,
    model_fields: dict[str, Any],
    train_fields: dict[str, Any],
    device: str,
    threads: int | None,
    quiet: bool,
    world: World,
) -> Trainer:
    # Everything that can be wrong without reading the text is said before it is read.
    preset = find_preset(preset_name)
    config = TrainConfig(**{**preset.training, **train_fields})
    shape = {**preset.model, **model_fields}
    GPTConfig(vocab_size=1, **shape)
    world.require_rows(config.batch_size)
    _require_files(sources, world)

    import torch

    from minigpt import __version__
    from minigpt.checkpoint import Facts
    from minigpt.device import choose_device, set_threads
    from minigpt.errors import CheckpointError
    from minigpt.runs import free_name, is_run, run_folder
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
    extra = {
        "sources": [_absolute(source) for source in sources],
        "encoding": encoding,
        "device": str(chosen_device),
        "threads": set_threads(threads),
        "processes": world.size,
    }
    return Trainer.start(
        folder,
        model_config,
        text.tokenizer,
        facts,
        train_ids,
        val_ids,
        config,
        device=chosen_device,
        extra=extra,
        world=world,
    )


def _resume(name: str, sources: list[str], device: str, threads: int | None, quiet: bool, world: World) -> Trainer:
    from minigpt.checkpoint import load
    from minigpt.device import choose_device, set_threads
    from minigpt.errors import CheckpointError, CorpusError
    from minigpt.runs import LAST, find_run
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
    return Trainer.resume(folder, checkpoint, train_ids, val_ids, device=chosen_device, world=world)


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


def _run(trainer: Trainer, quiet: bool) -> None:
    from minigpt import console
    from minigpt.trainer import EvalReport

    note = console.notes(quiet)
    steps, model = trainer.config.steps, trainer.model
    if trainer.step == steps:
        note(f"this run has taken its {steps:,} steps already")
    else:
        facts = trainer.facts
        note(f"{facts.corpus}: {facts.corpus_chars:,} characters, {model.config.vocab_size} different ones")
        note(trainer.held_out)
        resumed = f", {trainer.step:,} of them done" if trainer.step else ""
        parameters = sum(param.numel() for param in model.parameters())
        note(f"{parameters:,} parameters, {steps:,} steps{resumed}, in {trainer.folder}")
    held_out = trainer.facts.val_loss
    alone = trainer.world.size == 1
    with _StopRequest(note, alone) as stop, console.steps_bar(steps, trainer.step, hidden=quiet) as bar:
        for step in trainer.steps():
            if isinstance(step, EvalReport):
                held_out = step.val_loss
                note(_evaluation_line(step, steps))
                if not bar.disable:
                    note(_sample(trainer))
            else:
                known = "" if held_out is None else f", held-out {held_out:.3f}"
                bar.set_postfix_str(f"loss {step.loss:.3f}{known}, {step.chars_per_s / 1e3:,.1f}k chars/s", False)
                bar.update(1)
            # Whoever was asked to stop, all do, after the same step.
            asked = trainer.world.largest(stop.signal or 0)
            if asked and trainer.step < steps:
                bar.close()
                trainer.save()
                again = f"minigpt train --resume {_quoted(trainer.folder)}"
                note(f"stopped and saved after step {trainer.step:,}; go on with: {again}")
                raise typer.Exit(128 + asked)
    note(_summary(trainer))


def _evaluation_line(report: EvalReport, steps: int) -> str:
    best = ", the best so far" if report.best else ""
    return (
        f"step {report.step:,} of {steps:,} ({report.elapsed_s:.0f} s): loss {report.train_loss:.4f}, held-out"
        f" {report.val_loss:.4f}{best}"
    )


def _sample(trainer: Trainer) -> str:
    """A few lines in the model's own words, marked as such; uses no random numbers of the training."""
    from minigpt.generation import generate
    from minigpt.sampling import Sampling

    tokenizer = trainer.tokenizer
    start = "\n" if "\n" in tokenizer else trainer.facts.most_frequent
    ids = generate(trainer.model, tokenizer.encode(start), SAMPLE_CHARS, sampling=Sampling(temperature=0.8))
    text = tokenizer.decode(id_ for (id_,) in ids)
    shown = "".join(char if char.isprintable() or char == "\n" else " " for char in text)
    return "\n".join(f"  | {line[:76]}" for line in shown.strip().splitlines())


def _summary(trainer: Trainer) -> str:
    facts = trainer.facts
    lines = [
        f"done: {trainer.step:,} steps in {trainer.elapsed_s:.0f} s, saved in {trainer.folder}",
        f"loss {facts.train_loss:.4f}, held-out {trainer.best_loss:.4f} nats a character (best, step"
        f" {trainer.best_step:,})",
    ]
    if trainer.best_step != trainer.step:
        lines.append(
            f"the held-out loss rose again after step {trainer.best_step:,}, whose model is kept:\n"
            "more text, fewer --steps, a smaller model or more --dropout would help"
        )
    lines.append(f"write with it: minigpt generate --checkpoint {_quoted(trainer.folder)}")
    return "\n".join(lines)


def _quoted(folder: Path) -> str:
    """The run as it is named on a shell's command line."""
    from minigpt.runs import CHECKPOINTS

    # A path needs a separator, or it would be the name of a run under checkpoints/.
    path = str(folder) if len(folder.parts) > 1 else f".{os.sep}{folder}"
    return shlex.quote(folder.name if folder.parent == CHECKPOINTS else path)


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
