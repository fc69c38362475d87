"""Training by several processes: it learns what one learns, one of them speaks and writes, and none dies unnoticed.

The runs here are processes forked from one that has imported torch, started as `torchrun` would start them, but for one
of `torchrun` itself, which takes seconds.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import typer
from torch.distributed.run import get_args_parser

from minigpt import cli
from minigpt.checkpoint import Facts, load
from minigpt.config import GPTConfig, TrainConfig
from minigpt.errors import ConfigError
from minigpt.evaluation import window_loss
from minigpt.history import Line
from minigpt.model import GPT
from minigpt.parallel import ALONE, World
from minigpt.runs import BEST, LAST, LOG, SAMPLES
from minigpt.sources import bundled_text
from minigpt.tokenizer import CharTokenizer
from minigpt.trainer import Trainer
from tests.cli_support import PATIENCE_S, SHAPE, Program, as_in_a_shell, run
from tests.run_support import assert_same_run, log_of, samples_of, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")

# Seven examples for two processes, three and four, of 422 in a pass over the text: some batches are of two passes. As
# wide as the presets and with a warm-up as long: in small square blocks and at high rates, orthogonalising makes much
# of a little rounding.
RECIPE = [*SHAPE, "--n-embd", "128", "--batch-size", "7", "--steps", "80", "--eval-every", "20", "--threads", "1"]
RECIPE += ["--warmup-steps", "50", "--sample-chars", "40"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "minigpt"]


@dataclass(frozen=True)
class Rank:
    """How one of several processes ended, and what it said."""

    code: int
    stderr: str


class Ranks:
    """Two processes of ``minigpt`` that train together; when one fails the other one is ended, as `torchrun` does."""

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._said = [folder / f"stderr-{rank}" for rank in (0, 1)]
        self.programs = []
        null = os.open(os.devnull, os.O_RDWR)
        for rank, said in enumerate(self._said):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            stderr = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self.programs.append(
                Program(
                    *map(str, arguments),
                    stdin=null,
                    stdout=null,
                    stderr=stderr,
                    env={**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                )
            )
            os.close(stderr)
        os.close(null)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.programs[rank].pid, number)

    def finish(self, *, end_others: bool = True) -> list[Rank]:
        """Waits for both.

        Args:
            end_others: as `torchrun` does when one fails.
        """
        until = time.monotonic() + PATIENCE_S
        left = dict(enumerate(self.programs))
        codes = {}
        while left:
            assert time.monotonic() < until, [said.read_text() for said in self._said]
            for rank, program in list(left.items()):
                if _has_ended(program.pid):
                    codes[rank] = left.pop(rank).wait()
                    if codes[rank] and end_others:
                        for other in left.values():
                            os.kill(other.pid, signal.SIGTERM)
            time.sleep(0.01)
        return [Rank(code, self._said[rank].read_text(encoding="utf-8")) for rank, code in sorted(codes.items())]


def _has_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"


def finished(folder: Path, *arguments: str | Path) -> list[Rank]:
    """What two processes that did what they were told said."""
    ranks = Ranks(folder, *arguments).finish()
    assert [rank.code for rank in ranks] == [0, 0], ranks
    return ranks


def has_come_to(step: int, folder: Path) -> Callable[[], bool]:
    """Whether a run has logged that step; what it did before is in its folder."""
    return lambda: (folder / LOG).is_file() and f'"step": {step},' in (folder / LOG).read_text("utf-8")


@contextmanager
def torchrun(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """``torchrun`` with two processes, as a person starts it."""
    options = as_in_a_shell()
    process = subprocess.Popen(
        [*TORCHRUN, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=options["env"],
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def assert_same_losses(found: Path, expected: Path, *, up_to: int) -> None:
    """The logs agree to 1e-4 up to a step: ten times the rounding that grew in float32 when this was written."""
    logs = [[line for line in log_of(folder) if line["step"] <= up_to] for folder in (found, expected)]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]] != []
    for line, other in zip(*logs, strict=True):
        for name in ("train_loss", "val_loss", "batch_loss", "lr_factor"):
            assert line.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-4), (line, other)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Long enough not to be learnt by heart: a loss that falls within steps makes much of a little rounding.
    path = tmp_path_factory.mktemp("text") / "harbour.txt"
    path.write_text(bundled_text().read_text(encoding="utf-8")[:30_100], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(text: Path) -> Path:
    """The folder of a run by one process."""
    folder = text.parent / "alone"
    run("train", text, *RECIPE, "--out", folder)
    return folder


@dataclass(frozen=True)
class Job:
    """What two processes left, and what each of them said."""

    folder: Path
    ranks: list[Rank]


@pytest.fixture(scope="module")
def together(text: Path) -> Job:
    """The same run by two processes."""
    folder = text.parent / "together"
    return Job(folder, finished(text.parent, "train", text, *RECIPE, "--out", folder))


# The same training


def test_two_processes_learn_as_one_does(alone: Path, together: Job) -> None:
    assert_same_losses(together.folder, alone, up_to=50)


def test_one_of_them_speaks_and_writes(alone: Path, together: Job) -> None:
    first, second = together.ranks
    for words in ("30,100 characters", "step 20 of 80", "step 80 of 80", "done: 80 steps", "write with it"):
        assert first.stderr.count(words) == 1, first.stderr
    assert second.stderr == ""
    files = {path.name for path in together.folder.iterdir()}
    assert {BEST, LAST, LOG, SAMPLES} <= files
    assert files == {path.name for path in alone.iterdir()}
    assert [line["step"] for line in log_of(together.folder)] == [10, 20, 20, 30, 40, 40, 50, 60, 60, 70, 80, 80]


def test_each_evaluation_leaves_one_sample_the_one_that_a_process_alone_leaves(alone: Path, together: Job) -> None:
    found = samples_of(together.folder)
    assert [step for step, _, _ in found] == [20, 40, 60, 80]
    # Those of the first 50 steps: later, rounding may have grown enough for another draw.
    assert found[:2] == samples_of(alone)[:2]


# Stopping and going on


def test_torchrun_told_to_stop_saves_and_says_all_once(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with torchrun("train", text, *RECIPE, "--steps", "100000", "--out", folder) as process:
        wait_until(has_come_to(30, folder))
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert process.returncode != 0
    assert stdout == ""
    for words in ("30,100 characters", "step 20 of 100,000", "stopping after this step"):
        assert stderr.count(words) == 1, stderr
    assert "terminate called" not in stderr
    (step,) = re.findall(r"stopped and saved after step ([\d,]+); go on with", stderr)
    state = load(folder / LAST, with_state=True).state
    assert state is not None
    assert state.values["step"] == int(step.replace(",", "")) >= 30
    evaluated = [line["step"] for line in log_of(folder) if "val_loss" in line]
    assert [step for step, _, _ in samples_of(folder)] == evaluated


def test_a_run_goes_on_with_two_processes_and_then_with_one(text: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ordinary = Trainer._log

    def stop_at_30(self: Trainer, line: Line) -> None:
        ordinary(self, line)
        if line.step == 30:
            signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(Trainer, "_log", stop_at_30):
        run("train", text, *RECIPE, "--out", folder, code=128 + signal.SIGTERM)
    ranks = Ranks(tmp_path, "train", "--resume", folder)
    wait_until(has_come_to(40, folder))
    # A signal to one of them stops both after the same step.
    ranks.signal(1, signal.SIGTERM)
    said = ranks.finish(end_others=False)
    assert [rank.code for rank in said] == [128 + signal.SIGTERM] * 2
    assert "stopped and saved after step" in said[0].stderr
    assert said[1].stderr == ""
    run("train", "--resume", folder)
    assert_same_losses(folder, alone, up_to=80)


def test_a_killed_process_ends_the_other_and_two_go_on_as_if_none_had_been_killed(
    text: Path, together: Job, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ranks = Ranks(tmp_path, "train", text, *RECIPE, "--quiet", "--out", folder)
    wait_until(has_come_to(30, folder))
    # The other one first, so that it is alone when this one ends.
    left, gone = ranks.programs
    ranks.programs = [left]
    os.kill(gone.pid, signal.SIGKILL)
    said = ranks.finish()[0]
    assert gone.wait() == -signal.SIGKILL
    assert said.code == 1
    assert said.stderr.startswith("minigpt: another process of this run has ended or does not answer")
    assert said.stderr.endswith("); what was saved is intact: go on with --resume\n")
    assert len(said.stderr) < 250
    assert said.stderr.count("\n") == 1
    state = load(folder / LAST, with_state=True).state
    assert state is not None
    assert state.values["step"] in (20, 40, 60)
    first, second = finished(tmp_path, "train", "--resume", folder)
    assert "done: 80 steps" in first.stderr
    assert second.stderr == ""
    assert_same_run(folder, together.folder)


def test_a_process_killed_before_anything_is_learnt_leaves_a_run_that_can_go_on(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks = Ranks(tmp_path, "train", text, *RECIPE, "--eval-every", "80", "--quiet", "--out", folder)
    wait_until(has_come_to(10, folder))
    left, gone = ranks.programs
    ranks.programs = [left]
    os.kill(gone.pid, signal.SIGKILL)
    assert ranks.finish()[0].stderr.endswith("); what was saved is intact: go on with --resume\n")
    gone.wait()
    assert load(folder / LAST, with_state=True).require_state().values["step"] == 0


# Failing


def test_an_error_of_all_is_told_once(tmp_path: Path) -> None:
    said = Ranks(tmp_path, "train", tmp_path / "missing.txt", *RECIPE).finish()
    assert all(rank.code != 0 for rank in said)
    assert "there is no file or folder" in said[0].stderr
    assert "".join(rank.stderr for rank in said).count("\n") == 1


def test_an_error_of_the_one_who_writes_ends_all(text: Path, tmp_path: Path) -> None:
    # A folder in a file, which only the first process tries to make.
    said = Ranks(tmp_path, "train", text, *RECIPE, "--quiet", "--out", text / "run").finish()
    assert all(rank.code != 0 for rank in said)
    assert "cannot make the run folder" in said[0].stderr
    assert "".join(rank.stderr for rank in said).count("\n") == 1


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of two that never meet."""
    monkeypatch.setattr(cli, "SILENT_S", 0.0)

    def become(rank: int) -> None:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))

    return become


def test_a_batch_too_small_for_the_processes_is_refused(of_two: Callable[[int], None]) -> None:
    of_two(0)
    assert "batch_size=1 is too small for 2 processes" in run("train", "--batch-size", "1", code=1).error


def test_a_wrong_command_line_is_told_by_the_first(of_two: Callable[[int], None]) -> None:
    of_two(0)
    assert "--depth" in run("train", "--depth", "3", code=2).usage


def test_standard_input_is_refused(of_two: Callable[[int], None]) -> None:
    of_two(0)
    assert "'-' is a pipe" in run("train", "-", stdin="some text", code=1).error


def test_a_pipe_with_a_name_is_refused(of_two: Callable[[int], None], tmp_path: Path) -> None:
    of_two(0)
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in run("train", tmp_path / "pipe", code=1).error


@pytest.mark.parametrize(("arguments", "code"), [(["--batch-size", "1"], 1), (["--depth", "3"], 2)])
def test_the_others_leave_it_to_the_first(of_two: Callable[[int], None], arguments: list[str], code: int) -> None:
    of_two(1)
    assert run("train", *arguments, code=code).stderr == ""


# One process of two, without the other one


@contextmanager
def one_after_the_other(told: list[Any]) -> Iterator[None]:
    """Lets a process go through a run of two on its own: what rank 0 tells the other is kept, and rank 1 is told it."""

    def from_main(self: World, work: Callable[[], Any]) -> Any:
        if not self.is_main:
            return told.pop(0)
        told.append(work())
        return told[-1]

    with mock.patch.multiple(
        World,
        join=lambda self: None,
        sum=lambda self, value: value,
        largest=lambda self, value: value,
        sum_gradients=lambda self, params, weight: None,
        spread=lambda self, tensors: None,
        from_main=from_main,
    ):
        yield


def test_the_second_shows_and_writes_nothing_and_computes_as_the_first_decides(
    text: Path, of_two: Callable[[int], None], tmp_path: Path
) -> None:
    line: list[str | Path] = ["train", text, *RECIPE, "--steps", "4", "--eval-every", "2", "--profile"]
    told: list[Any] = []
    with one_after_the_other(told):
        of_two(0)
        assert "done: 4 steps" in run(*line, "--out", tmp_path / "first").stderr
        assert "float32" in told or "bfloat16" in told
        of_two(1)
        with mock.patch("minigpt.device.fastest_precision", side_effect=AssertionError):
            assert run(*line, "--log", "tensorboard", "--out", tmp_path / "second").stderr == ""
    assert told == []
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_torchrun_leaves_every_option_of_training_to_it() -> None:
    parser = get_args_parser()
    # The only one with two names: torchrun asks which of its own --log means.
    taken = {"--log"}
    for parameter in typer.main.get_command(cli.app).commands["train"].params:  # type: ignore[attr-defined]
        for option in set(parameter.opts) - taken:
            if option.startswith("-"):
                line = ["--standalone", "-m", "minigpt", "train", option, "1"]
                assert parser.parse_args(line).training_script_args == line[3:]


def test_the_clock_of_the_first_decides_on_the_steps(tmp_path: Path) -> None:
    def taken(world: World) -> tuple[TrainConfig, list[tuple[type, int]]]:
        trainer = Trainer.start(tmp_path, *_one_run(), minutes=0.005, fit={"eval_every"}, world=world)
        return trainer.config, [(type(report), report.step) for report in trainer.steps()]

    told: list[Any] = []
    with one_after_the_other(told):
        first = taken(World(0, 2))
        # To this one the minutes are over whenever it looks at its own clock.
        looks = count()
        with mock.patch("time.perf_counter", lambda: 60.0 * next(looks)):
            assert taken(World(1, 2)) == first
    assert told == []


# The parts


@pytest.mark.parametrize("n", [0, 1, 4, 5, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_everything_once_and_about_equal(n: int, size: int) -> None:
    shares = [list(range(n))[World(rank, size).share(n)] for rank in range(size)]
    assert list(chain(*shares)) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_world_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    assert (world.rank, world.size, world.local_rank, world.is_main) == (5, 8, 1, False)
    assert world.local_size == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert World.from_environment().local_size == 4
    monkeypatch.delenv("LOCAL_RANK")
    world = World.from_environment()
    assert (world.rank, world.size, world.local_rank, world.is_main) == (0, 1, 0, True)


def test_alone_nothing_is_changed_and_nobody_met() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    param.grad = gradient = torch.tensor([0.1, 0.3])
    ALONE.join()
    ALONE.sum_gradients([param], 1.0)
    assert param.grad is gradient
    assert torch.equal(gradient, torch.tensor([0.1, 0.3]))
    assert ALONE.sum(0.1) == 0.1
    assert ALONE.largest(7) == 7
    assert ALONE.from_main(lambda: "mine") == "mine"
    assert ALONE.first_to_fail()
    assert not torch.distributed.is_initialized()


def test_each_process_drops_other_activations(tmp_path: Path) -> None:
    seeds = {}
    for name, world in (("alone", ALONE), ("first", World(0, 2)), ("second", World(1, 2))):
        trainer = Trainer.start(tmp_path, *_one_run())
        trainer.world = world
        with (
            mock.patch.object(torch, "manual_seed", wraps=torch.manual_seed) as manual_seed,
            mock.patch.object(World, "sum", lambda self, value: value),
            mock.patch.object(World, "sum_gradients", lambda self, params, weight: None),
        ):
            next(trainer.steps())
        seeds[name] = manual_seed.call_args.args
    assert seeds["first"] == seeds["alone"] != seeds["second"]


def _one_run() -> tuple[Any, ...]:
    """Arguments of `Trainer.start` but for the folder."""
    chars = "\n abcdef"
    shape = GPTConfig(vocab_size=len(chars), n_layer=1, n_head=1, n_embd=8, block_size=8, window=4, dropout=0.2)
    facts = Facts(corpus="test", corpus_sha256="0" * 64, corpus_chars=400, val_fraction=0.25, most_frequent="a")
    ids = np.random.default_rng(3).integers(0, len(chars), 400).astype(np.uint8)
    return shape, CharTokenizer(chars), facts, ids[:300], ids[300:], TrainConfig(batch_size=4)


def test_one_more_process_than_examples_is_refused() -> None:
    World(0, 4).require_rows(4)
    with pytest.raises(ConfigError, match="batch_size=3 is too small for 4 processes"):
        World(0, 4).require_rows(3)


@pytest.mark.parametrize("size", [2, 3, 9])
def test_the_windows_of_all_processes_make_the_loss_of_one(size: int) -> None:
    config = GPTConfig(vocab_size=7, n_layer=1, n_head=1, n_embd=8, block_size=8, window=4)
    model = GPT(config, torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(2))
    ids = np.random.default_rng(3).integers(0, 7, 60).astype(np.uint8)
    parts = []
    for rank in range(size):
        world = World(rank, size)
        with mock.patch.object(world, "sum", lambda value: value):
            parts.append(window_loss(model, ids, 0, world))
    # Seven windows: of nine processes two have none.
    assert sum(parts) == pytest.approx(window_loss(model, ids), rel=1e-12)
    assert sum(part == 0 for part in parts) == max(0, size - 7)
