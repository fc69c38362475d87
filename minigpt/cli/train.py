"""``minigpt train``: learn a text, or go on with a run. What is seen of it is left to `train_report`."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import DeviceOption
from minigpt.config import (
    DEFAULT_PRESET,
    DROPOUTS,
    PRESETS,
    SAMPLE_CHARS,
    WARMUP_STEPS,
    GPTConfig,
    TrainConfig,
    find_preset,
    require_minutes,
)

if TYPE_CHECKING:
    from types import FrameType

    from minigpt.checkpoint import Checkpoint
    from minigpt.cli.train_report import TrainReport
    from minigpt.corpus import Corpus
    from minigpt.parallel import World
    from minigpt.trainer import Trainer

# Ctrl-C, what other programs send, and the end of a terminal, which Windows has no signal for.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]

_DROPOUTS = " or ".join(f"{share:g}" for _, share in sorted(DROPOUTS))
_PRESETS_HELP = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())


class Log(str, Enum):
    """What can show a training while it runs."""

    tensorboard = "tensorboard"


def _field(name: str, about: str) -> Any:
    """An option for the settings field of that name; not given, it has the preset's value, or one that fits the run."""
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
    dropout: Annotated[
        float | None,
        _field(
            "dropout",
            f"Share of what each layer adds that is dropped while training. Default: {_DROPOUTS} where many parameters"
            " read a short text often, else 0.",
        ),
    ] = None,
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
        float | None,
        _field("ngram_weight", "Share of the targets that counts of the text smooth at first; half of it in the end."),
    ] = None,
    warmup_steps: Annotated[
        int | None,
        _field("warmup_steps", f"Steps over which the rates rise. Default: a tenth of all, at most {WARMUP_STEPS}."),
    ] = None,
    decay_fraction: Annotated[
        float | None, _field("decay_fraction", "Share of the steps, at the end, over which the rates fall to 0.")
    ] = None,
    grad_clip: Annotated[float | None, _field("grad_clip", "Largest norm of the gradient; 0 is off.")] = None,
    eval_every: Annotated[
        int | None,
        _field("eval_every", "Steps between two evaluations on the held-out text. With --minutes: for about five."),
    ] = None,
    eval_chars: Annotated[
        int | None, _field("eval_chars", "Held-out characters read by each evaluation; 0 reads all.")
    ] = None,
    patience: Annotated[
        int | None, _field("patience", "Evaluations in a row without a lower held-out loss that end the run; 0 is off.")
    ] = None,
    val_fraction: Annotated[float | None, _field("val_fraction", "Share of the text, at its end, held out.")] = None,
    seed: Annotated[int | None, _field("seed", "Same seed, same model.")] = None,
    sample_chars: Annotated[
        int | None,
        typer.Option(
            "--sample-chars",
            min=0,
            help=f"Characters of the sample that is kept at each evaluation; 0 keeps none. Default: {SAMPLE_CHARS}.",
            show_default=False,
        ),
    ] = None,
    # torchrun takes --log for the start of options of its own, wherever it stands.
    log: Annotated[
        Log | None, typer.Option("--log", "--log-to", help="Show the training in TensorBoard too (torchrun: --log-to).")
    ] = None,
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
    # The options and nothing else, as long as this is the first statement.
    given = {name: value for name, value in locals().items() if value is not None}
    model_fields = {name: given[name] for name in GPTConfig.__dataclass_fields__ if name in given}
    train_fields = {name: given[name] for name in TrainConfig.__dataclass_fields__ if name in given}
    world: World = context.obj
    session = _Session(world, device, threads, quiet or not world.is_main, context)
    if log is not None and world.is_main:
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
        trainer, sample_chars = _resume(resume, corpus or [], session)
    else:
        if minutes is not None and steps is not None:
            raise typer.BadParameter("the minutes decide on the steps: leave out one of both", param_hint="--minutes")
        wanted = _NewRun(
            sources=corpus or [],
            encoding=encoding or "utf-8",
            sha256=sha256,
            out=out,
            force=force,
            preset=preset or DEFAULT_PRESET,
            model_fields=model_fields,
            train_fields=train_fields,
            minutes=minutes,
            sample_chars=sample_chars,
        )
        trainer, sample_chars = _start(wanted, session)

    from minigpt.cli.train_report import TrainReport

    trainer.profiling = profile
    _run(trainer, TrainReport(trainer, sample_chars, tensorboard=log is Log.tensorboard, profile=profile, quiet=quiet))


@dataclass(frozen=True)
class _Session:
    """What holds for one start of a run, be it new or resumed."""

    world: World
    device: str
    threads: int | None
    quiet: bool
    # Ends with the command.
    context: typer.Context

    def lock(self, folder: Path) -> None:
        """Keeps other processes from training the run until the command ends."""
        from minigpt.runs import locked

        if self.world.is_main:
            self.context.with_resource(locked(folder))

    def lock_free(self, base: str) -> str:
        """A name for a new run that nobody has, or is about to have, locked; decided by rank 0."""
        from minigpt.errors import LockedError
        from minigpt.runs import free_names, is_free, locked, run_folder

        def lock_one() -> str:
            for name in free_names(base):
                folder = run_folder(name)
                # Another process that was given the same name has it still, or has made its run meanwhile.
                with suppress(LockedError), ExitStack() as lock:
                    lock.enter_context(locked(folder))
                    if is_free(folder):
                        self.context.with_resource(lock.pop_all())
                        return name
            raise AssertionError("there is always another name")

        return self.world.from_main(lock_one)


@dataclass(frozen=True)
class _Origin:
    """What a run keeps beside the trainer's own state, so that --resume needs nothing but its name."""

    sources: list[str]
    encoding: str
    device: str
    threads: int
    sample_chars: int
    processes: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> _Origin:
        """What `to_json` gave to the trainer that wrote the checkpoint.

        Raises:
            CheckpointError: it holds no such thing.
        """
        from minigpt.errors import CheckpointError

        values: Any = checkpoint.require_state().values.get("extra")
        try:
            origin = cls(**values)
        except TypeError:
            origin = None
        if origin is None or not origin._is_sound():
            raise CheckpointError(f"{checkpoint.path} does not say what it was trained on and how: train a new run")
        return origin

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def _is_sound(self) -> bool:
        if not isinstance(self.sources, list):
            return False
        are_strings = all(isinstance(value, str) for value in (*self.sources, self.encoding, self.device))
        are_numbers = all(isinstance(value, int) for value in (self.threads, self.sample_chars, self.processes))
        return are_strings and are_numbers and self.threads > 0 and self.sample_chars >= 0


@dataclass(frozen=True)
class _NewRun:
    """What a new run is to be."""

    sources: list[str]
    encoding: str
    sha256: str | None
    # None makes a name of those of text and preset.
    out: str | None
    force: bool
    preset: str
    # Those that differ from the preset's.
    model_fields: dict[str, Any]
    train_fields: dict[str, Any]
    minutes: float | None
    # None is the default.
    sample_chars: int | None

    def require_free(self, world: World) -> None:
        """Checks, on rank 0, that a run with a name of its own would replace nothing, unless it is to."""
        from minigpt.runs import require_free

        if self.out is not None and not self.force and world.is_main:
            require_free(self.out)


def _start(wanted: _NewRun, session: _Session) -> tuple[Trainer, int]:
    """A new run, and the characters of its samples."""
    # Everything that can be wrong without reading the text is said before it is read.
    world = session.world
    preset = find_preset(wanted.preset)
    config = TrainConfig(**{**preset.training, **wanted.train_fields})
    shape = {**preset.model, **wanted.model_fields}
    GPTConfig(vocab_size=1, **shape)
    if wanted.minutes is not None:
        require_minutes(wanted.minutes)
    world.require_rows(config.batch_size)
    _require_files(wanted.sources, world)

    import torch

    from minigpt import __version__, console
    from minigpt.checkpoint import Facts
    from minigpt.device import choose_device, fastest_precision, set_threads
    from minigpt.runs import run_folder
    from minigpt.trainer import FITTING, Trainer

    world.join()
    chosen_device = choose_device(session.device, world)
    used_threads = set_threads(session.threads)
    folder = run_folder(wanted.out) if wanted.out is not None else None
    wanted.require_free(world)
    text = _load(wanted.sources, wanted.encoding, wanted.sha256, session)
    train_ids, val_ids = text.split(config.val_fraction, shape["block_size"])
    model_config = GPTConfig(vocab_size=len(text.tokenizer), **shape)
    if folder is None:
        folder = run_folder(session.lock_free(f"{_slug(text.name)}-{wanted.preset}"))
    else:
        session.lock(folder)
        # Another process may have made one while the text was read.
        wanted.require_free(world)
    facts = Facts(
        corpus=text.name,
        corpus_sha256=text.sha256,
        corpus_chars=len(text.ids),
        val_fraction=config.val_fraction,
        most_frequent=text.most_frequent,
        preset=wanted.preset,
        minigpt_version=__version__,
        torch_version=torch.__version__,
    )
    if "precision" not in wanted.train_fields:
        # Tried with the threads that it is for. One for all, though each may find another one the faster.
        config = replace(config, precision=world.from_main(lambda: fastest_precision(chosen_device)))
    sample_chars = SAMPLE_CHARS if wanted.sample_chars is None else wanted.sample_chars
    origin = _Origin(
        [_absolute(source) for source in wanted.sources],
        wanted.encoding,
        str(chosen_device),
        used_threads,
        sample_chars,
        world.size,
    )
    if wanted.minutes is not None:
        console.notes(session.quiet)(f"measuring how many steps fit into {wanted.minutes:g} min")
    trainer = Trainer.start(
        folder,
        model_config,
        text.tokenizer,
        facts,
        train_ids,
        val_ids,
        config,
        device=chosen_device,
        extra=origin.to_json(),
        minutes=wanted.minutes,
        fit=set(FITTING) - wanted.train_fields.keys() - wanted.model_fields.keys(),
        world=world,
    )
    return trainer, sample_chars


def _resume(name: str, sources: list[str], session: _Session) -> tuple[Trainer, int]:
    """A run to go on with, and the characters of its samples."""
    from minigpt.checkpoint import load
    from minigpt.device import choose_device, set_threads
    from minigpt.errors import CorpusError
    from minigpt.runs import LAST, find_run, is_there
    from minigpt.sources import STDIN
    from minigpt.trainer import Trainer

    world = session.world
    world.join()
    # Read once, so that all go on from the same step whatever their machines keep in a folder of that name.
    folder = world.from_main(lambda: find_run(name))
    session.lock(folder)
    checkpoint = world.from_main(lambda: load(folder / LAST, with_state=True))
    origin = _Origin.from_checkpoint(checkpoint)
    # The same device and number of threads, unless told otherwise: with others, sums are rounded otherwise. Another
    # number of processes shares the cores in another way.
    kept_device = origin.device if world.size == 1 else origin.device.partition(":")[0]
    chosen_device = choose_device(kept_device if session.device == "auto" else session.device, world)
    kept_threads = origin.threads if origin.processes == world.size else None
    origin = replace(
        origin,
        sources=[_absolute(source) for source in sources] or origin.sources,
        device=str(chosen_device),
        threads=set_threads(session.threads or kept_threads),
        processes=world.size,
    )
    _require_files(sources or origin.sources, world)
    for source in origin.sources:
        if not sources and Path(source).is_absolute() and not is_there(Path(source)):
            raise CorpusError(
                f"{name!r} learnt from {source}, which is gone: name the text, where it is now, after --resume {name}"
            )
    if STDIN in origin.sources and not sources and sys.stdin is not None and sys.stdin.isatty():
        raise CorpusError(
            f"{name!r} learnt from standard input, which is gone: pipe the text in again, or name it after --resume"
        )
    text = _load(sources or origin.sources, origin.encoding, None, session)
    facts = checkpoint.facts
    if text.sha256 != facts.corpus_sha256:
        raise CorpusError(
            f"the text ({text.name}) is not, or no longer, the one that {name!r} was trained on ({facts.corpus}): name"
            " that text after --resume, or train a new run"
        )
    train_ids, val_ids = text.split(facts.val_fraction, checkpoint.model.config.block_size)
    trainer = Trainer.resume(
        folder, checkpoint, train_ids, val_ids, device=chosen_device, extra=origin.to_json(), world=world
    )
    return trainer, origin.sample_chars


def _load(sources: list[str], encoding: str, sha256: str | None, session: _Session) -> Corpus:
    from minigpt import console
    from minigpt.corpus import load_corpus
    from minigpt.errors import CorpusError

    world = session.world
    # What has to be downloaded or encoded on the way is kept in files, which the others find.
    with world.main_first():
        text = load_corpus(
            sources, encoding=encoding, sha256=sha256, progress=console.bytes_bar("downloading", hidden=session.quiet)
        )
    if text.sha256 != world.from_main(lambda: text.sha256):
        raise CorpusError(f"process {world.rank} reads another text ({text.name}) than process 0: give all the same")
    for sentence in text.notes:
        console.notes(session.quiet)(sentence)
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
    from minigpt.runs import is_there
    from minigpt.sources import STDIN

    return str(Path(source).resolve()) if source != STDIN and is_there(Path(source)) else source


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(name).stem.lower()).strip("-")[:40] or "text"


def _run(trainer: Trainer, report: TrainReport) -> None:
    from minigpt.trainer import EvalReport

    alone = trainer.world.size == 1
    with _a_run_or_nothing(trainer), _StopRequest(report.stopping, alone) as stop, report:
        for step in trainer.steps():
            if isinstance(step, EvalReport):
                report.evaluated(step)
            else:
                report.updated(step)
            # Whoever was asked to stop, all do, after the same step.
            asked = trainer.world.largest(stop.signal or 0)
            if asked and not trainer.finished:
                trainer.save()
                report.stopped()
                raise typer.Exit(128 + asked)
    report.finished()


@contextmanager
def _a_run_or_nothing(trainer: Trainer) -> Iterator[None]:
    """Leaves no run that failed before it had learnt anything: the newest run is what others go on from."""
    from minigpt.errors import LostProcessError, ReportError, TrainingError
    from minigpt.tensorboard import clear_events

    try:
        yield
    except LostProcessError:
        raise
    except TrainingError:
        if trainer.world.is_main and not trainer.has_learnt:
            trainer.discard()
            with suppress(ReportError):
                clear_events(trainer.folder)
        raise


class _StopRequest:
    """Turns a first Ctrl-C, SIGTERM or end of the terminal into a wish, noted in ``signal``; a second stops at once.

    Not if there are other processes: whoever stops them may send a signal to each and to `torchrun`, which passes it
    on, and which kills what takes too long.
    """

    def __init__(self, heard: Callable[[bool], None], alone: bool) -> None:
        self.signal: int | None = None
        # Told of the first one, and whether a second one would stop at once.
        self._heard = heard
        self._alone = alone
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _StopRequest:
        for number in STOP_SIGNALS:
            # Whoever is told to ignore one (by nohup, for instance) goes on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None and self._alone:
            raise KeyboardInterrupt
        if self.signal is None:
            self._heard(self._alone)
        self.signal = number
