"""Run folders, ``checkpoints/<name>/`` under the working directory: their files, their names, which is the newest.

A run is a folder with at least one checkpoint in it; a folder without is free to be used, unless it holds files that
a run would write over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from minigpt.errors import CheckpointError, LockedError

CHECKPOINTS = Path("checkpoints")
# The model with the lowest held-out loss.
BEST = "best.safetensors"
# The newest model, with all that resuming needs.
LAST = "last.safetensors"
# One JSON object a line: losses as training went.
LOG = "train.jsonl"
# What the model wrote at each evaluation.
SAMPLES = "samples.txt"
# The losses as a picture.
LOSS_PLOT = "loss.svg"
# A folder: a copy of the log for TensorBoard.
TENSORBOARD = "tensorboard"
# Held by the process that trains the run; the system lets go of it however that ends.
LOCK = ".lock"

# A sentence that lists runs names no more than this many, the newest.
MOST_NAMED = 8


def run_folder(name: str) -> Path:
    """The folder of a run: a plain name lives under ``checkpoints/``, anything with a separator is a path.

    Raises:
        CheckpointError: the name is empty or means no folder of its own.
    """
    # Unprintable ones are line breaks, escapes, and bytes that are no text, by which no file can be opened later. The
    # root of all folders has no name.
    if not name.strip() or name in (".", "..") or not name.isprintable() or not Path(name).name:
        raise CheckpointError(f"{name!r} is not a name for a run: use letters, digits, '-' and '_'")
    return Path(name) if Path(name).name != name else CHECKPOINTS / name


def is_run(folder: Path) -> bool:
    """Whether the folder holds a checkpoint."""
    return _is_file(folder / LAST) or _is_file(folder / BEST)


def foreign_file(folder: Path) -> Path | None:
    """A file or folder that a run would replace, in a folder that is no run; None if there is none."""
    if is_run(folder):
        return None
    paths = [folder / name for name in (LOG, SAMPLES, LOSS_PLOT, TENSORBOARD)]
    return next((path for path in paths if is_there(path)), None)


def is_free(folder: Path) -> bool:
    """Whether a new run in that folder would replace nothing."""
    return not is_run(folder) and foreign_file(folder) is None


def require_free(name: str) -> None:
    """Checks that a new run of that name would replace nothing.

    Raises:
        CheckpointError: it would, or the name is none for a run.
    """
    folder = run_folder(name)
    if is_run(folder):
        raise CheckpointError(
            f"there is a run in {folder} already: go on with it by --resume {name}, replace it with --force, or choose"
            " another --out"
        )
    if foreign := foreign_file(folder):
        raise CheckpointError(
            f"a run in {folder} would replace {foreign}, which is of none: choose another --out, or replace it with"
            " --force"
        )


def make_folder(folder: Path) -> None:
    """Makes the folder of a run, with all above it, unless it is there.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(folder, error) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from training the run, whose folder is made if there is none.

    Raises:
        LockedError: one does.
        CheckpointError: the folder cannot be made.
    """
    # Here, since only training needs it.
    from filelock import FileLock, Timeout

    make_folder(folder)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise LockedError(f"another process trains {folder} just now: wait until it is done, or stop it") from None
    except NotImplementedError:
        # Some network folders know no locks; one process at a time is then up to the user.
        pass
    except OSError as error:
        raise CheckpointError(
            f"cannot write {folder / LOCK}: {error.strerror or error}; make it writable, or choose another --out"
        ) from None
    try:
        yield
    finally:
        lock.release()


def runs() -> list[str]:
    """Names of the runs under ``checkpoints/``, the newest first."""
    if not CHECKPOINTS.is_dir():
        return []
    folders = [folder for folder in CHECKPOINTS.iterdir() if folder.name.isprintable() and is_run(folder)]
    return [folder.name for folder in sorted(folders, key=_written_at, reverse=True)]


def free_names(base: str) -> Iterator[str]:
    """Those of ``base``, ``base-2``, ``base-3`` ... under which there is no run, nor what one would replace."""
    for n in count(1):
        name = base if n == 1 else f"{base}-{n}"
        if is_free(CHECKPOINTS / name):
            yield name


def find_checkpoint(name: str | None = None) -> Path:
    """The file to load for a run name, a run folder, a file, or None for the newest run.

    In a folder that is the best model, or the last where none was evaluated yet.

    Raises:
        CheckpointError: there is none; the message lists the runs there are.
    """
    if name is None:
        if not (names := runs()):
            raise CheckpointError(f"there are no runs in {CHECKPOINTS.resolve()}: train one with 'minigpt train'")
        name = names[0]
    elif _is_file(Path(name)):
        return Path(name)
    for folder in _folders(name):
        if is_run(folder):
            return folder / BEST if (folder / BEST).is_file() else folder / LAST
    raise CheckpointError(f"there is no run or checkpoint {name!r}: {_known_runs()}")


def find_run(name: str) -> Path:
    """The folder of a run that can be resumed, for its name, its folder, or the file of its newest model.

    Raises:
        CheckpointError: there is none; the message lists the runs there are.
    """
    if Path(name).name == LAST and _is_file(Path(name)):
        return Path(name).parent
    for folder in _folders(name):
        if _is_file(folder / LAST):
            return folder
    raise CheckpointError(f"there is no run {name!r} to resume: {_known_runs()}")


def _cannot_make(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot make the run folder {folder}: {error.strerror or error}; choose another --out")


def _folders(name: str) -> list[Path]:
    """Where a run of that name may be: under ``checkpoints/``, or a folder of its own, the working directory too."""
    return [Path(name)] if name in (".", "..") else [run_folder(name), Path(name)]


def _is_file(path: Path) -> bool:
    return is_there(path) and path.is_file()


def is_there(path: Path) -> bool:
    """Whether there is a file or folder of that name, however odd the name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        # A name too long, or with a NUL byte in it, is nobody's.
        return False


def _known_runs() -> str:
    names = runs()
    if len(names) > MOST_NAMED:
        names[MOST_NAMED:] = [f"and {len(names) - MOST_NAMED:,} more"]
    return f"the runs here are {', '.join(names)}" if names else f"there are no runs in {CHECKPOINTS.resolve()}"


def _written_at(folder: Path) -> int:
    return max(file.stat().st_mtime_ns for file in (folder / LAST, folder / BEST) if file.is_file())
