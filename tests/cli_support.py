"""What the tests of the command line share: running it in process or as a program, and one small trained model."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typer.main
from typer.testing import CliRunner

import minigpt
from minigpt.checkpoint import Checkpoint
from minigpt.cli import app, main
from tests.fault_support import arrange

# Words that Rich would take for markup, and characters beyond ASCII; no two lines alike.
LINES = (
    "MARGIT: The [bold]tide[/bold] came in :smile: and the boats went out.\n",
    "OLE: Then who shall mind the lamp at the caf\u00e9 tonight?\n",
    "MARGIT: I will, [red]and gladly; the sea has no master.\n",
    "OLE: Quiet now: the wind is up, and [/] the gulls are loud.\n",
    "\n",
)
TEXT = "".join(f"{n} {line}" if line.strip() else line for n in range(12) for line in LINES)
SHAPE = ("--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--block-size", "64", "--window", "16")
SMALL = (*SHAPE, "--batch-size", "4", "--warmup-steps", "5", "--sample-chars", "20")
# Of that shape: two layers of which each looks 15 characters further back.
RECEPTIVE_FIELD = 31
# Keys and values of 32 channels in float32, 16 positions, 2 layers.
CACHE_BYTES = 2 * 32 * 4 * 16 * 2

# For a wait that ends in a moment unless something is wrong, on however busy a machine.
PATIENCE_S = 120


# In this process


class Outcome:
    """How a command ended, and what it said where."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def json(self) -> Any:
        """The one JSON value on stdout."""
        return json.loads(self.stdout)

    @property
    def error(self) -> str:
        """The one sentence of a command that could not do it; checks that there is nothing else."""
        assert self.code == 1, (self.code, self.stdout, self.stderr)
        assert self.stdout == ""
        assert "Traceback" not in self.stderr
        assert self.stderr.startswith("minigpt: "), self.stderr
        assert self.stderr.count("\n") == 1, self.stderr
        assert self.stderr.endswith("\n")
        assert self.stderr[:-1].isprintable(), self.stderr
        return self.stderr.removeprefix("minigpt: ").strip()

    @property
    def usage(self) -> str:
        """What is wrong with the command line; checks that it was only said, with where to read more."""
        assert self.code == 2, (self.code, self.stdout, self.stderr)
        assert self.stdout == ""
        assert "Traceback" not in self.stderr
        assert self.stderr.startswith("Usage: minigpt "), self.stderr
        assert "\x1b" not in self.stderr
        return self.stderr.partition("Error: ")[2].strip()


def run(*arguments: str | Path, stdin: str | bytes | None = None, code: int | None = 0) -> Outcome:
    """Runs a command in this process; a bug's exception comes through.

    Args:
        stdin: what a pipe on its standard input holds; nothing by default.
        code: the exit code that it must have; None for any.
    """
    threads = torch.get_num_threads()
    # The shapes here are so small that a second thread would only be waited for.
    torch.set_num_threads(1)
    try:
        # Typer would make the commands anew for every call, which takes longer than most of them.
        with mock.patch("typer.testing._get_command", lambda _: _commands()):
            result = CliRunner().invoke(
                app, [str(argument) for argument in arguments], input=stdin, prog_name="minigpt", catch_exceptions=False
            )
    finally:
        torch.set_num_threads(threads)
    outcome = Outcome(result.exit_code, result.stdout, result.stderr)
    if code is not None:
        assert outcome.code == code, (arguments, outcome.code, outcome.stdout, outcome.stderr)
    return outcome


@functools.cache
def _commands() -> Any:
    return typer.main.get_command(app)


# One small model


@functools.cache
def _trained_at() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    # Removed with the object, at the end of the session.
    keeper = tempfile.TemporaryDirectory(prefix="minigpt-cli-")
    folder = Path(keeper.name)
    (folder / "harbour.txt").write_text(TEXT, encoding="utf-8")
    run("train", folder / "harbour.txt", *SMALL, "--steps", "120", "--out", folder / "run", "--quiet")
    return keeper, folder / "run"


def trained() -> Path:
    """The folder of a run on TEXT that has learnt a little, made once in a session; copy it, do not change it."""
    return _trained_at()[1]


@functools.cache
def trained_checkpoint() -> Checkpoint:
    """The best model of that run; do not change it."""
    return minigpt.load(trained() / "best.safetensors")


def place(name: str) -> Path:
    """Copies that run to ``checkpoints`` under the working folder, with its text beside; returns its folder."""
    folder = Path("checkpoints") / name
    shutil.copytree(trained(), folder)
    shutil.copy(trained().parent / "harbour.txt", "harbour.txt")
    return folder


# As a program of its own


def as_in_a_shell() -> dict[str, Any]:
    """Arguments of `subprocess` for a process that is to run this minigpt, wherever it is started."""
    noise = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONIOENCODING", "TERMINAL_WIDTH")
    kept = {name: value for name, value in os.environ.items() if name not in noise}
    here = str(Path(minigpt.__file__).parent.parent)
    return {
        "env": {
            **kept,
            "PYTHONPATH": here,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
        },
        "timeout": PATIENCE_S,
    }


class Program:
    """``minigpt`` as a process, started in the working folder.

    Args:
        stdin, stdout, stderr: file descriptors; they stay open here.
        folder: where it is started instead.
        env: variables of the environment that it has besides those of the tests.
        fault: what is to happen to it, see `fault_support.arrange`.
    """

    def __init__(
        self,
        *arguments: str,
        stdin: int,
        stdout: int,
        stderr: int,
        folder: Path | None = None,
        env: dict[str, str] | None = None,
        fault: dict[str, Any] | None = None,
    ) -> None:
        request = {
            "arguments": arguments,
            "folder": str(folder or Path.cwd()),
            "env": env or {},
            "fault": fault or {},
        }
        self.pid: int = _launcher().ask(request, [stdin, stdout, stderr])

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        os.kill(self.pid, signal.SIGINT)

    def wait(self) -> int:
        """The exit code; that of a process which a signal ended is below 0."""
        code: int = _launcher().ask({"wait": self.pid}, [])
        return code


class Terminal:
    """``minigpt`` on a terminal of 80 columns."""

    def __init__(self, *arguments: str) -> None:
        # Not on Windows, where the tests that need a terminal are skipped.
        import fcntl
        import termios

        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.program = Program(*arguments, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        # All that was written to the terminal.
        self.screen = ""

    def wait_for(self, is_there: Callable[[str], bool]) -> None:
        """Reads the terminal until what it shows is as wanted."""
        until = time.monotonic() + PATIENCE_S
        while not is_there(self.screen):
            assert time.monotonic() < until, self.screen
            assert self._read(), self.screen

    def finish(self) -> int:
        """Reads to the end; returns the exit code."""
        while self._read():
            pass
        os.close(self._master)
        return self.program.wait()

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 1 << 16)
        # Linux says so when the last program has left the terminal.
        except OSError:
            data = b""
        self.screen += data.decode("utf-8", "replace")
        return bool(data)


class Screen(io.StringIO):
    """A stream in this process that passes for a terminal."""

    def isatty(self) -> bool:
        return True


def unstyled(screen: str) -> str:
    """What a terminal was sent, without the codes that colour text and move the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r\n", "\n")


class _Launcher:
    """A process that imports torch once, which takes seconds, and forks into every program that is asked for."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(PATIENCE_S)
        options = as_in_a_shell()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli_support", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=options["env"],
        )
        # It ends when the other end of the socket is closed, with the session at the latest.
        theirs.close()

    def ask(self, request: dict[str, Any], descriptors: list[int]) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return json.loads(self._socket.recv(1 << 16))


@functools.cache
def _launcher() -> _Launcher:
    return _Launcher()


def _launch(connection: socket.socket) -> None:
    """Answers requests until there are no more, each a JSON object: with the pid of a new program, or its exit code."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                _become(**request, descriptors=descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        connection.send(json.dumps(answer).encode())


def _become(
    arguments: list[str], folder: str, env: dict[str, str], fault: dict[str, Any], descriptors: list[int]
) -> None:
    """Becomes ``python -m minigpt`` with these arguments and streams, and ends as that does unless a fault ends it."""
    os.environ.update(env)
    os.chdir(folder)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # As Python opens them; they know whether they are a terminal.
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", 1 if number == 2 or os.isatty(number) else -1, encoding="utf-8", closefd=False)
        for number in (1, 2)
    )
    # What started the tests may have switched it off.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if fault:
        arrange(**fault)
    sys.argv = ["minigpt", *arguments]
    main()


if __name__ == "__main__":
    # Imported for the loss curve of a run where it is installed.
    with contextlib.suppress(ImportError):
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401

    _launch(socket.socket(fileno=int(sys.argv[1])))


def said_of_a_full_disk(*arguments: str) -> str:
    """What a command says, in the working folder, when standard output is a full disk; it exits 1."""
    with open("/dev/null", "rb") as nothing, open("/dev/full", "wb") as full, open("said", "wb") as said:  # noqa: PTH123
        program = Program(*arguments, stdin=nothing.fileno(), stdout=full.fileno(), stderr=said.fileno())
        assert program.wait() == 1
    return Path("said").read_text()
