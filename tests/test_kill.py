"""Ends of the `train` command that nobody asked for: killed at any moment, interrupted, told to stop.

A kill of the process is not a power cut: that what was flushed survives is left to the file system.

Starting python and importing torch takes seconds, so one process, this file run as a program, imports it once and
forks for each command. What is killed is then a process of its own, which ran the command line from its beginning.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHAPE = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 32 --window 16 --dropout 0.1 --batch-size 4 --threads 1"
COMMAND = ["train", "text.txt", "--out", "run", "--sample-chars", "20", *SHAPE.split()]
SHORT = [*COMMAND, "--steps", "30", "--eval-every", "3"]
# Runs for a second or more after its first line of log, so that a signal finds it at work.
LONG = [*COMMAND, "--steps", "120", "--eval-every", "40"]
RESUME = ["train", "--resume", "run"]

# For a wait that ends in a moment unless something is wrong, on however busy a machine.
PATIENCE_S = 60
KILLED = -signal.SIGKILL

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


# The process that forks


def _drive() -> None:
    """Reads requests, one JSON object a line, and answers each with one: the pid of a new command, or how one ended."""
    import torch

    from minigpt.config import GPTConfig
    from minigpt.model import GPT

    for name in ("cli", "samples", "trainer"):
        import_module(f"minigpt.{name}")
    with suppress(ImportError):
        # What the loss curve is drawn with takes long too.
        import_module("matplotlib.backends.backend_svg")
    torch.set_num_threads(1)
    # The first tensors without memory make torch import for a second or more, and loading a checkpoint makes some.
    with torch.device("meta"):
        GPT(GPTConfig(vocab_size=2))
    print(0, flush=True)  # noqa: T201
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _run_command(**request)
        print(answer, flush=True)  # noqa: T201


def _run_command(folder: str, arguments: list[str], fault: dict[str, Any]) -> None:
    """Becomes ``minigpt`` with these arguments in that folder, and ends the process with its exit code."""
    os.chdir(folder)
    for descriptor, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(name, flags), descriptor)
    # What a shell that runs this in the background may have switched off.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 70
    try:
        from minigpt.cli import main

        _arrange(**fault)
        sys.argv = ["minigpt", *arguments]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _arrange(
    flush: int = 0, log: int = 0, sample: int = 0, torn: bool = False, stall_s: float = 0.0, every: bool = False
) -> None:
    """Makes the process die at its n-th flush of a file or folder to disk, or behind its n-th line of log or sample.

    Args:
        torn: leave only half of the file that is being written.
        stall_s: wait that long there instead of dying.
        every: not only there but at each flush from then on.
    """
    from minigpt import samples
    from minigpt.history import Line
    from minigpt.trainer import Trainer

    flushes = lines = kept = 0

    def die(descriptor: int) -> None:
        if torn:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        if stall_s:
            time.sleep(stall_s)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(descriptor: Any) -> None:
        nonlocal flushes
        flushes += 1
        if flushes == flush or (every and flushes > flush):
            die(descriptor)
        ordinary_fsync(descriptor)

    def log_line(self: Trainer, line: Line) -> None:
        nonlocal lines
        ordinary_log(self, line)
        lines += 1
        if lines == log:
            with (self.folder / "train.jsonl").open("r+b") as file:
                if torn:
                    # Half of the last line, not of the whole log.
                    file.truncate(max(0, file.seek(0, os.SEEK_END) - 20))
                os.kill(os.getpid(), signal.SIGKILL)

    def keep_sample(folder: Path, *values: Any) -> None:
        nonlocal kept
        ordinary_keep_sample(folder, *values)
        kept += 1
        if kept == sample:
            with (folder / "samples.txt").open("r+b") as file:
                if torn:
                    # Through the heading of the last sample, or through its text.
                    file.truncate(file.seek(0, os.SEEK_END) - (60 if kept % 2 else 20))
                os.kill(os.getpid(), signal.SIGKILL)

    ordinary_fsync, ordinary_log, ordinary_keep_sample = os.fsync, Trainer._log, samples.keep_sample
    samples.keep_sample = keep_sample  # type: ignore[assignment]
    os.fsync = fsync  # type: ignore[assignment]
    Trainer._log = log_line  # type: ignore[method-assign]


class Driver:
    """The forking process, seen from the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        # Ready: from here on only the commands themselves take time.
        assert self._answer() == 0

    def start(self, folder: Path, arguments: list[str], **fault: Any) -> int:
        """Starts a command; returns its pid."""
        return self._ask({"folder": str(folder), "arguments": arguments, "fault": fault})

    def wait(self, pid: int) -> int:
        """Waits for a command to end; returns its exit code, or minus the signal that killed it."""
        return self._ask({"wait": pid})

    def run(self, folder: Path, arguments: list[str], **fault: Any) -> int:
        return self.wait(self.start(folder, arguments, **fault))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def environment() -> dict[str, str]:
    """One thread from the start, since a fork keeps only one, and this checkout wherever the command runs."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


# Runs and what is left of them


def make_folder(base: Path) -> Path:
    """A working directory with a text to learn."""
    base.mkdir(exist_ok=True)
    words = ["the tide", "it comes", "no ship", "a light", "we wait", "O night!"]
    text = "\n".join(random.Random(4).choice(words) for _ in range(300))
    (base / "text.txt").write_text(text, encoding="utf-8")
    return base


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "work")


class Reference:
    """A run that was left in peace."""

    def __init__(self, driver: Driver, base: Path, command: list[str]) -> None:
        folder = make_folder(base)
        assert driver.run(folder, command) == 0, (folder / "stderr").read_text()
        self.run = folder / "checkpoints" / "run"


@pytest.fixture(scope="module")
def short(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(driver, tmp_path_factory.mktemp("short"), SHORT)


@pytest.fixture(scope="module")
def long(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(driver, tmp_path_factory.mktemp("long"), LONG)


def without_times(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: without_times(value) for key, value in values.items() if key not in ("elapsed_s", "stopwatch")}
    return values


def log_of(run: Path) -> list[Any]:
    return [without_times(json.loads(line)) for line in (run / "train.jsonl").read_text().splitlines()]


def assert_same_run(folder: Path, reference: Reference) -> None:
    """All files are those of the run that was left in peace, to the bit, but for the times in the log and facts."""
    from safetensors import safe_open

    run = folder / "checkpoints" / "run"
    # Nothing half-written stays either.
    names = {path.name for path in run.iterdir()}
    assert names == {path.name for path in reference.run.iterdir()}
    # The curve needs matplotlib.
    assert names - {".lock", "loss.svg"} == {"best.safetensors", "last.safetensors", "samples.txt", "train.jsonl"}
    for name in names & {"loss.svg", "samples.txt"}:
        assert (run / name).read_bytes() == (reference.run / name).read_bytes()
    for name in ("best.safetensors", "last.safetensors"):
        with safe_open(run / name, framework="pt") as one, safe_open(reference.run / name, framework="pt") as other:
            assert _facts(one.metadata()) == _facts(other.metadata())
            assert sorted(one.keys()) == sorted(other.keys())
            for key in one.keys():  # noqa: SIM118
                # As bytes: bits, not values.
                assert one.get_tensor(key).numpy().tobytes() == other.get_tensor(key).numpy().tobytes(), key
    assert log_of(run) == log_of(reference.run)


def _facts(metadata: dict[str, str]) -> dict[str, Any]:
    values = {key: without_times(json.loads(value)) for key, value in metadata.items()}
    if "state" in values:
        # Where the text lay, which is another folder each time.
        del values["state"]["extra"]["sources"]
    return values


def assert_all_load(folder: Path) -> None:
    """Whatever model files there are, they are whole."""
    from minigpt.checkpoint import load

    for path in folder.rglob("*.safetensors"):
        load(path, with_state=True)


def assert_a_run_is_left(folder: Path) -> None:
    assert (folder / "checkpoints" / "run" / "last.safetensors").is_file()
    assert_all_load(folder)


def finish(driver: Driver, folder: Path) -> None:
    assert driver.run(folder, RESUME) == 0, (folder / "stderr").read_text()


def wait_until(happened: Callable[[], bool]) -> None:
    """Looks every few milliseconds; what never happens is a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


# Killed


def test_a_reference_run_is_the_same_twice(driver: Driver, short: Reference, folder: Path) -> None:
    assert driver.run(folder, SHORT) == 0
    assert_same_run(folder, short)
    assert (folder / "stdout").read_text() == ""


def test_a_run_killed_at_two_moments_of_its_life_ends_as_if_left_in_peace(
    driver: Driver, short: Reference, tmp_path: Path
) -> None:
    started = time.monotonic()
    assert driver.run(make_folder(tmp_path / "in peace"), SHORT) == 0
    life_s = time.monotonic() - started
    # Seeded moments; the first ones are spread evenly over a run's life.
    generator, n = random.Random(1), 5
    ends = []
    for i in range(n):
        folder, arguments = make_folder(tmp_path / f"work-{i}"), SHORT
        share = (i + generator.random()) / n
        for moment in (share, generator.random() * (1 - share)):
            pid = driver.start(folder, arguments)
            time.sleep(moment * life_s)
            os.kill(pid, signal.SIGKILL)
            ends.append(driver.wait(pid))
            assert_all_load(folder)
            if (folder / "checkpoints" / "run" / "last.safetensors").exists():
                arguments = RESUME
        assert driver.run(folder, arguments) == 0, (folder / "stderr").read_text()
        assert_same_run(folder, short)
    # One that is faster than the run in peace ends by itself before it is killed; most are not.
    assert set(ends) <= {KILLED, 0}
    assert ends.count(KILLED) > n // 2


# One after the other in one run. A session of a resumed run flushes four times an evaluation: the best model (while it
# is the best), its folder, the last one, its folder.
FLUSHES = [
    {"flush": 3, "torn": True},
    {"flush": 4},
    {"flush": 2},
    {"flush": 1, "torn": True},
    {"flush": 3, "torn": True},
    {"flush": 3},
    {"flush": 4},
    {"flush": 6},
    {"log": 1},
    {"flush": 11, "torn": True},
    {"log": 2, "torn": True},
    {"log": 3},
]


def test_a_run_killed_at_flush_after_flush_ends_as_if_left_in_peace(
    driver: Driver, short: Reference, folder: Path
) -> None:
    arguments = SHORT
    for fault in FLUSHES:
        assert driver.run(folder, arguments, **fault) == KILLED, (fault, (folder / "stderr").read_text())
        assert_a_run_is_left(folder)
        arguments = RESUME
    finish(driver, folder)
    assert_same_run(folder, short)


def test_a_run_killed_at_sample_after_sample_ends_as_if_left_in_peace(
    driver: Driver, short: Reference, folder: Path
) -> None:
    arguments = SHORT
    for fault in ({"sample": 1, "torn": True}, {"sample": 2, "torn": True}, {"sample": 1, "torn": True}, {"sample": 3}):
        assert driver.run(folder, arguments, **fault) == KILLED, (fault, (folder / "stderr").read_text())
        assert_a_run_is_left(folder)
        arguments = RESUME
    finish(driver, folder)
    assert_same_run(folder, short)


def test_a_run_killed_whenever_a_half_written_file_lies_there_ends_as_if_left_in_peace(
    driver: Driver, short: Reference, folder: Path
) -> None:
    run = folder / "checkpoints" / "run"
    arguments = SHORT
    for name in ("best", "last", "best", "last"):
        # A slow disk: each flush takes long enough to be seen, and killed, from outside.
        pid = driver.start(folder, arguments, flush=1, every=True, stall_s=0.05)
        partial = run / f".{name}.safetensors.partial"
        if arguments == SHORT:
            wait_until((run / "last.safetensors").exists)
        before = partial.stat().st_mtime_ns if partial.exists() else 0
        wait_until(lambda p=partial, t=before: p.exists() and p.stat().st_mtime_ns > t)  # type: ignore[misc]
        os.kill(pid, signal.SIGKILL)
        assert driver.wait(pid) == KILLED
        assert_a_run_is_left(folder)
        arguments = RESUME
    finish(driver, folder)
    assert_same_run(folder, short)


@pytest.mark.parametrize("torn", [True, False])
def test_a_run_killed_while_it_is_made_was_never_there(
    driver: Driver, short: Reference, folder: Path, torn: bool
) -> None:
    assert driver.run(folder, SHORT, flush=1, torn=torn) == KILLED
    assert_all_load(folder)
    assert driver.run(folder, RESUME) == 1
    assert "no run 'run'" in (folder / "stderr").read_text()
    # So its name is free.
    assert driver.run(folder, SHORT) == 0
    assert_same_run(folder, short)


def test_a_run_killed_while_it_replaces_another_is_the_old_one_or_the_new_one(
    driver: Driver, short: Reference, folder: Path
) -> None:
    old = shutil.copytree(short.run, folder / "checkpoints" / "run")
    replacing = [*SHORT, "--seed", "1", "--force"]
    assert driver.run(folder, replacing, flush=1, torn=True) == KILLED
    assert_a_run_is_left(folder)
    assert (old / "last.safetensors").read_bytes() == (short.run / "last.safetensors").read_bytes()
    # The new one has its name, the old best model and log are still there.
    assert driver.run(folder, replacing, flush=2) == KILLED
    assert_a_run_is_left(folder)
    finish(driver, folder)
    straight = make_folder(folder / "straight")
    assert driver.run(straight, [*SHORT, "--seed", "1"]) == 0
    other = Reference.__new__(Reference)
    other.run = straight / "checkpoints" / "run"
    assert_same_run(folder, other)


# Asked to stop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_a_run_that_says_where_and_goes_on_from_there(
    driver: Driver, long: Reference, folder: Path, number: signal.Signals, code: int
) -> None:
    run = folder / "checkpoints" / "run"
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = start_for_real(folder, LONG, stdout, stderr)
        wait_until((run / "train.jsonl").exists)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == code
    message = (folder / "stderr").read_text()
    assert "stopping" in message
    found = re.search(r"stopped and saved after step (\d+)\b.*--resume run\n", message)
    assert found is not None, message
    assert "Traceback" not in message
    assert (folder / "stdout").read_text() == ""
    assert_a_run_is_left(folder)
    assert steps_of(run / "last.safetensors") == int(found[1])
    # In the middle, so that going on is put to the test.
    assert 10 <= int(found[1]) < 120
    finish(driver, folder)
    assert_same_run(folder, long)


def start_for_real(folder: Path, arguments: list[str], stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "minigpt", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment(),
    )


def steps_of(path: Path) -> int:
    from minigpt.checkpoint import load

    return load(path).facts.steps


def test_a_second_signal_stops_at_once_and_leaves_what_was_saved_before(
    driver: Driver, short: Reference, folder: Path
) -> None:
    run = folder / "checkpoints" / "run"
    partial = run / ".last.safetensors.partial"
    # Caught in the middle of saving after the first evaluation, on a disk that takes ten minutes.
    pid = driver.start(folder, SHORT, flush=5, stall_s=600)
    wait_until(lambda: (run / "best.safetensors").exists() and partial.exists())
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: "once more stops at once" in (folder / "stderr").read_text())
    assert partial.exists()
    started = time.monotonic()
    os.kill(pid, signal.SIGINT)
    assert driver.wait(pid) == 130
    assert time.monotonic() - started < PATIENCE_S
    assert "Traceback" not in (folder / "stderr").read_text()
    assert "stopped and saved" not in (folder / "stderr").read_text()
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock",
        "best.safetensors",
        "last.safetensors",
        "train.jsonl",
    ]
    assert_a_run_is_left(folder)
    assert steps_of(run / "last.safetensors") == 0
    assert steps_of(run / "best.safetensors") == 3
    finish(driver, folder)
    assert_same_run(folder, short)


def test_a_signal_during_the_last_step_lets_the_run_end_as_it_would_have(
    driver: Driver, short: Reference, folder: Path
) -> None:
    # Two flushes at the start and four at each of ten evaluations, all of them the best so far: the 39th is that of the
    # best model of the last one, after the last step.
    pid = driver.start(folder, SHORT, flush=39, stall_s=1)
    partial = folder / "checkpoints" / "run" / ".best.safetensors.partial"
    wait_until(lambda: partial.exists() and steps_of_log(folder) == 30)
    os.kill(pid, signal.SIGTERM)
    assert driver.wait(pid) == 0
    assert "stopping" in (folder / "stderr").read_text()
    assert_same_run(folder, short)


def steps_of_log(folder: Path) -> int:
    try:
        return int(log_of(folder / "checkpoints" / "run")[-1]["step"])
    except (OSError, ValueError, IndexError):
        return 0


if __name__ == "__main__":
    _drive()
