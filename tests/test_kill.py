"""Ends of the `train` command that nobody asked for: killed at any moment, interrupted, told to stop.

A kill of the process is not a power cut: that what was flushed survives is left to the file system.

Starting python and importing torch takes seconds, so the commands are forks of one process that has imported it. What
is killed is then a process of its own, which ran the command line from its beginning.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from minigpt.checkpoint import load
from minigpt.history import parse_line
from tests.cli_support import PATIENCE_S, Program, as_in_a_shell
from tests.run_support import assert_same_run, names_in, wait_until

SHAPE = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 32 --window 16 --dropout 0.1 --batch-size 4 --threads 1"
COMMAND = ["train", "text.txt", "--out", "run", "--sample-chars", "20", *SHAPE.split()]
SHORT = [*COMMAND, "--steps", "30", "--eval-every", "3"]
# Runs for a second or more after its first line of log, so that a signal finds it at work.
LONG = [*COMMAND, "--steps", "120", "--eval-every", "40"]
RESUME = ["train", "--resume", "run"]
# Where that run is, in the working directory.
RUN = Path("checkpoints/run")

KILLED = -signal.SIGKILL

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


# Runs and what is left of them


def make_folder(base: Path) -> Path:
    """A working directory with a text to learn."""
    base.mkdir(exist_ok=True)
    words = ["the tide", "it comes", "no ship", "a light", "we wait", "O night!"]
    text = "\n".join(random.Random(4).choice(words) for _ in range(300))
    (base / "text.txt").write_text(text, encoding="utf-8")
    return base


def start(folder: Path, arguments: list[str], **fault: Any) -> Program:
    """A command at work in a folder, where it leaves what it says; for the fault see `fault_support.arrange`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    stdin = os.open(os.devnull, os.O_RDONLY)
    stdout, stderr = (os.open(folder / name, flags) for name in ("stdout", "stderr"))
    program = Program(*arguments, stdin=stdin, stdout=stdout, stderr=stderr, folder=folder, fault=fault)
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    return program


def run_command(folder: Path, arguments: list[str], **fault: Any) -> int:
    """The exit code of such a command, or minus the signal that killed it."""
    return start(folder, arguments, **fault).wait()


def left_in_peace(folder: Path, arguments: list[str]) -> Path:
    """The folder of a run that nothing happened to."""
    assert run_command(folder, arguments) == 0, (folder / "stderr").read_text()
    # Nothing half-written stays, neither here nor in those that are compared with it; the curve needs matplotlib.
    names = set(names_in(folder / RUN))
    assert names - {".lock", "loss.svg"} == {"best.safetensors", "last.safetensors", "samples.txt", "train.jsonl"}
    return folder / RUN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a text to learn, for one test."""
    return make_folder(tmp_path / "work")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 30 steps."""
    return left_in_peace(make_folder(tmp_path_factory.mktemp("short")), SHORT)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 120 steps."""
    return left_in_peace(make_folder(tmp_path_factory.mktemp("long")), LONG)


def assert_all_load(folder: Path) -> None:
    """Whatever model files there are, they are whole."""
    for path in folder.rglob("*.safetensors"):
        load(path, with_state=True)


def assert_a_run_is_left(folder: Path) -> None:
    """A run that can go on, with nothing broken in it."""
    assert (folder / RUN / "last.safetensors").is_file()
    assert_all_load(folder)


def finish(folder: Path) -> None:
    """Lets a run go on to its end."""
    assert run_command(folder, RESUME) == 0, (folder / "stderr").read_text()


# Killed


def test_a_reference_run_is_the_same_twice(short: Path, folder: Path) -> None:
    assert run_command(folder, SHORT) == 0
    assert_same_run(folder / RUN, short)
    assert (folder / "stdout").read_text() == ""


def test_a_run_killed_at_two_moments_of_its_life_ends_as_if_left_in_peace(short: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    assert run_command(make_folder(tmp_path / "in peace"), SHORT) == 0
    life_s = time.monotonic() - started
    # Seeded moments; the first ones are spread evenly over a run's life.
    generator, n = random.Random(1), 5
    ends = []
    for i in range(n):
        folder, arguments = make_folder(tmp_path / f"work-{i}"), SHORT
        share = (i + generator.random()) / n
        for moment in (share, generator.random() * (1 - share)):
            program = start(folder, arguments)
            time.sleep(moment * life_s)
            os.kill(program.pid, signal.SIGKILL)
            ends.append(program.wait())
            assert_all_load(folder)
            if (folder / RUN / "last.safetensors").exists():
                arguments = RESUME
        assert run_command(folder, arguments) == 0, (folder / "stderr").read_text()
        assert_same_run(folder / RUN, short)
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


def test_a_run_killed_at_flush_after_flush_ends_as_if_left_in_peace(short: Path, folder: Path) -> None:
    arguments = SHORT
    for fault in FLUSHES:
        assert run_command(folder, arguments, **fault) == KILLED, (fault, (folder / "stderr").read_text())
        assert_a_run_is_left(folder)
        arguments = RESUME
    finish(folder)
    assert_same_run(folder / RUN, short)


def test_a_run_killed_at_sample_after_sample_ends_as_if_left_in_peace(short: Path, folder: Path) -> None:
    arguments = SHORT
    for fault in ({"sample": 1, "torn": True}, {"sample": 2, "torn": True}, {"sample": 1, "torn": True}, {"sample": 3}):
        assert run_command(folder, arguments, **fault) == KILLED, (fault, (folder / "stderr").read_text())
        assert_a_run_is_left(folder)
        arguments = RESUME
    finish(folder)
    assert_same_run(folder / RUN, short)


def test_a_run_killed_whenever_a_half_written_file_lies_there_ends_as_if_left_in_peace(
    short: Path, folder: Path
) -> None:
    run = folder / RUN
    arguments = SHORT
    for name in ("best", "last", "best", "last"):
        # A slow disk: each flush takes long enough to be seen, and killed, from outside.
        program = start(folder, arguments, flush=1, every=True, stall_s=0.05)
        partial = run / f".{name}.safetensors.partial"
        if arguments == SHORT:
            wait_until((run / "last.safetensors").exists)
        before = partial.stat().st_mtime_ns if partial.exists() else 0
        wait_until(lambda p=partial, t=before: p.exists() and p.stat().st_mtime_ns > t)  # type: ignore[misc]
        os.kill(program.pid, signal.SIGKILL)
        assert program.wait() == KILLED
        assert_a_run_is_left(folder)
        arguments = RESUME
    finish(folder)
    assert_same_run(folder / RUN, short)


@pytest.mark.parametrize("torn", [True, False])
def test_a_run_killed_while_it_is_made_was_never_there(short: Path, folder: Path, torn: bool) -> None:
    assert run_command(folder, SHORT, flush=1, torn=torn) == KILLED
    assert_all_load(folder)
    assert run_command(folder, RESUME) == 1
    assert "no run 'run'" in (folder / "stderr").read_text()
    # So its name is free.
    assert run_command(folder, SHORT) == 0
    assert_same_run(folder / RUN, short)


def test_a_run_killed_while_it_replaces_another_is_the_old_one_or_the_new_one(short: Path, folder: Path) -> None:
    old = shutil.copytree(short, folder / RUN)
    replacing = [*SHORT, "--seed", "1", "--force"]
    assert run_command(folder, replacing, flush=1, torn=True) == KILLED
    assert_a_run_is_left(folder)
    assert (old / "last.safetensors").read_bytes() == (short / "last.safetensors").read_bytes()
    # The new one has its name, the old best model and log are still there.
    assert run_command(folder, replacing, flush=2) == KILLED
    assert_a_run_is_left(folder)
    finish(folder)
    straight = left_in_peace(make_folder(folder / "straight"), [*SHORT, "--seed", "1"])
    assert_same_run(folder / RUN, straight)


# Asked to stop


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_a_run_that_says_where_and_goes_on_from_there(
    long: Path, folder: Path, number: signal.Signals, code: int
) -> None:
    run = folder / RUN
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
    finish(folder)
    assert_same_run(folder / RUN, long)


def start_for_real(folder: Path, arguments: list[str], stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "minigpt", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=as_in_a_shell()["env"],
    )


def steps_of(path: Path) -> int:
    """Steps that a model has learnt for."""
    return load(path).facts.steps


def test_a_second_signal_stops_at_once_and_leaves_what_was_saved_before(short: Path, folder: Path) -> None:
    run = folder / RUN
    partial = run / ".last.safetensors.partial"
    # Caught in the middle of saving after the first evaluation, on a disk that takes ten minutes.
    program = start(folder, SHORT, flush=5, stall_s=600)
    wait_until(lambda: (run / "best.safetensors").exists() and partial.exists())
    os.kill(program.pid, signal.SIGINT)
    wait_until(lambda: "once more stops at once" in (folder / "stderr").read_text())
    assert partial.exists()
    started = time.monotonic()
    os.kill(program.pid, signal.SIGINT)
    assert program.wait() == 130
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
    finish(folder)
    assert_same_run(folder / RUN, short)


def test_a_signal_during_the_last_step_lets_the_run_end_as_it_would_have(short: Path, folder: Path) -> None:
    # Two flushes at the start and four at each of ten evaluations, all of them the best so far: the 39th is that of the
    # best model of the last one, after the last step.
    program = start(folder, SHORT, flush=39, stall_s=1)
    partial = folder / RUN / ".best.safetensors.partial"
    wait_until(lambda: partial.exists() and steps_of_log(folder) == 30)
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 0
    assert "stopping" in (folder / "stderr").read_text()
    assert_same_run(folder / RUN, short)


def steps_of_log(folder: Path) -> int:
    """The last step that a run at work has logged, 0 before the first; a line may be half written."""
    log = folder / RUN / "train.jsonl"
    lines = [parse_line(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    return lines[-1].step if lines and lines[-1] else 0


# While modules are loaded


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_ctrl_c_is_not_lost_in_compiled_modules_that_drop_it(name: str, tmp_path: Path) -> None:
    # As the compiled part of torch does that imports numpy.
    (tmp_path / f"{name}.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(5)\n"
        "except KeyboardInterrupt:\n"
        "    print('dropped')\n"
    )
    here = as_in_a_shell()
    here["env"]["PYTHONPATH"] = os.pathsep.join((str(tmp_path), here["env"]["PYTHONPATH"]))
    code = f"""
import minigpt.__main__, minigpt.cli
minigpt.cli.main = lambda: __import__({name!r})
minigpt.__main__.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **here)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
