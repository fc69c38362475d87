"""Two processes that write the same text at the same time, one with the cache and one by recompute.

Each loads the checkpoint by itself, computes with threads of its own and takes the times of its characters by its own
clock; they exchange nothing while they write. What they have written comes through pipes that a thread of this process
empties at once, so neither ever waits for what is done with it here. Both end with this process, however that ends.

Torch is imported by them and not here.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minigpt.config import DEFAULT_FORMAT, GPTConfig
from minigpt.errors import MinigptError, RaceError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from minigpt.sampling import Sampling

# Between two messages of a process: so rarely that they cost it nothing.
MESSAGE_S = 0.03
# Characters that each writes and forgets before the start, for the first ones of a process are slow.
WARM_UP = 3
# How long an end that was noticed may take.
ENDING_S = 5.0


@dataclass(frozen=True)
class Racer:
    """What both have loaded."""

    config: GPTConfig
    # Of the tokenizer.
    chars: str
    # The character that a text without a prompt starts from.
    start: str
    # Of training; 0 is a model that has learnt nothing.
    steps: int


@dataclass
class Lane:
    """How far one of the two is. Grows while they race, and is whole at any time."""

    cached: bool
    # What it has written, and when: seconds since its start, by its own clock.
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def name(self) -> str:
        return "with the cache" if self.cached else "by recompute"

    @property
    def seconds(self) -> float:
        """From its start to its newest character; 0 before the first."""
        return self.times_s[-1] if self.times_s else 0.0

    @property
    def chars_per_s(self) -> float:
        """Of all so far."""
        return len(self.ids) / self.seconds if self.seconds else 0.0


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fair_threads() -> int:
    """Threads that each of two gets, of as many as there are cores."""
    return max(1, cores() // 2)


class Race:
    """The two processes, which load the checkpoint from the moment on that they are made; a context that ends them.

    Both write with the torch engine, and with weights rounded as ``minigpt generate`` rounds them: its text is theirs.

    Args:
        path: of the checkpoint.
        threads: of each process.

    Raises:
        RaceError: they cannot be started.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.lanes = (Lane(cached=True), Lane(cached=False))
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._collector: threading.Thread | None = None
        self._news = threading.Condition()
        # Which one has said why it cannot go on, and that; or which one is gone without a word.
        self._failed: tuple[int, str | None] | None = None
        self._started_s = math.inf
        context = multiprocessing.get_context("spawn")
        try:
            with _deaf_to_interrupts():
                for lane in self.lanes:
                    ours, theirs = context.Pipe()
                    self._pipes.append(ours)
                    process = context.Process(target=_run, args=(theirs, path, lane.cached, threads), daemon=True)
                    process.start()
                    self._processes.append(process)
                    # Now the other process alone holds this end, so that its end is felt here.
                    theirs.close()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise RaceError(f"cannot start two more processes: {error.strerror or error}") from None
            raise

    def __enter__(self) -> Race:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends both processes, and waits until they are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes = []
        # It ends when nobody can send any more.
        if self._collector is not None:
            self._collector.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []

    @property
    def pids(self) -> list[int | None]:
        """Of the processes."""
        return [process.pid for process in self._processes]

    @property
    def elapsed_s(self) -> float:
        """Seconds since both were told to start, by the clock of this process; 0 before."""
        return max(0.0, time.perf_counter() - self._started_s)

    def meet(self) -> Racer:
        """Waits until both have loaded the checkpoint. First of all, and once.

        Raises:
            RaceError: one of them has ended, what it said of the checkpoint, or they have loaded different ones.
        """
        (racer, weights), (_, others) = (self._receive(i) for i in range(2))
        if weights != others:
            raise RaceError("the checkpoint was replaced while both were loading it: start the race again")
        found: Racer = racer
        return found

    def run(
        self, prompt: Sequence[int], length: int, sampling: Sampling, seed: int, interval_s: float = 0.1
    ) -> Iterator[tuple[Lane, Lane]]:
        """Lets both warm up, and start at once when both have. Once, after `meet`.

        Args:
            prompt, length, sampling, seed: as of `generation.generate`.

        Yields:
            The lanes, every ``interval_s`` seconds, and at last when both have finished.

        Raises:
            RaceError: one of them has ended too early.
        """
        for i in range(2):
            self._send(i, (list(prompt), length, sampling, seed))
        for i in range(2):
            self._receive(i)
        self._started_s = time.perf_counter()
        # Both wait for this and nothing else.
        for i in range(2):
            self._send(i, None)
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()
        is_over = False
        while not is_over:
            with self._news:
                is_over = self._news.wait_for(self._is_over, interval_s)
            if self._failed is not None:
                raise self._failure(*self._failed)
            yield self.lanes

    def _is_over(self) -> bool:
        return self._failed is not None or all(lane.finished for lane in self.lanes)

    def _collect(self) -> None:
        """Takes in all messages as they come, until both have finished or one cannot."""
        lane_of = dict(zip(self._pipes, self.lanes, strict=True))
        while lane_of:
            for pipe in wait(list(lane_of)):
                assert isinstance(pipe, Connection)
                lane = lane_of[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    kind, value = "error", None
                with self._news:
                    if kind == "error":
                        self._failed = (self.lanes.index(lane), value)
                        self._news.notify()
                        return
                    ids, times_s, lane.finished = value
                    lane.times_s += times_s
                    lane.ids += ids
                    self._news.notify()
                if lane.finished:
                    del lane_of[pipe]

    def _receive(self, i: int) -> Any:
        try:
            kind, value = self._pipes[i].recv()
        except (EOFError, OSError):
            kind, value = "error", None
        if kind == "error":
            raise self._failure(i, value)
        return value

    def _send(self, i: int, message: Any) -> None:
        try:
            self._pipes[i].send(message)
        except OSError:
            raise self._failure(i, None) from None

    def _failure(self, i: int, said: str | None) -> RaceError:
        if said is not None:
            return RaceError(said)
        process = self._processes[i]
        process.join(ENDING_S)
        code = process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return RaceError(
            f"the process that writes {self.lanes[i].name} has ended too early ({how}): start the race again"
        )


# In the processes


def _run(pipe: Connection, path: Path, cached: bool, threads: int) -> None:
    """All that one of the two does. It ends when nobody holds the other end of the pipe any more."""
    # Ctrl-C is for the process that started this one, which then ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Nobody may be there any more.
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            _race(pipe, path, cached, threads)
        except MinigptError as error:
            pipe.send(("error", str(error)))


def _race(pipe: Connection, path: Path, cached: bool, threads: int) -> None:
    # Here, since the process that shows the race needs no torch.
    from minigpt.checkpoint import load
    from minigpt.device import set_threads
    from minigpt.generation import generate
    from minigpt.weights import round_weights

    set_threads(threads)
    loaded = load(path)
    model = loaded.model
    # Numbers that two different models do not share.
    weights = [param.double().sum().item() for param in model.parameters()]
    pipe.send(("loaded", (Racer(model.config, loaded.tokenizer.chars, loaded.start, loaded.facts.steps), weights)))
    round_weights(model, DEFAULT_FORMAT)
    prompt, length, sampling, seed = pipe.recv()

    def written(n: int) -> Iterator[list[int]]:
        return generate(model, prompt, n, sampling=sampling, seed=seed, use_cache=cached)

    for _ in written(WARM_UP):
        pass
    pipe.send(("ready", None))
    pipe.recv()
    started_s = time.perf_counter()
    ids: list[int] = []
    times_s: list[float] = []
    told_s = 0.0
    for (id_,) in written(length):
        now_s = time.perf_counter() - started_s
        ids.append(id_)
        times_s.append(now_s)
        if now_s - told_s >= MESSAGE_S:
            pipe.send(("written", (ids, times_s, False)))
            ids, times_s, told_s = [], [], now_s
    pipe.send(("written", (ids, times_s, True)))


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never hear Ctrl-C, not even while Python starts; this one does, later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    # A process that the first start would start, too, and then listen to signals again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
