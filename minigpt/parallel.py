"""The processes that train one model together, as ``torchrun`` starts them, and all that they tell each other.

Owns every call of torch.distributed: what is computed from the numbers that come back is left to the trainer. Numbers
on a CUDA device travel over NCCL, all others over gloo. Torch is not imported before a world of several is joined.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from minigpt.errors import ConfigError, LostProcessError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

# A process that ended is noticed at once; this is for one that hangs, and longer than rank 0 is ever busy alone, with a
# download for instance.
TIMEOUT = timedelta(minutes=30)

# How long a process that keeps the count of those that failed waits for the others, which may have been killed.
ASKED_S = 5.0

Value = TypeVar("Value")


class World:
    """The processes of one run, seen from one of them; by default this process alone, for which nothing here does
    anything.

    All of them make the same calls in the same order. A call waits for the others.

    Args:
        rank: the number of this process, from 0.
        size: how many there are.
        local_rank: the number of this process among those on its machine.
        local_size: how many those are.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, local_size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        # Torch's key-value store, through which processes find each other; None before they have.
        self._store: Any = None
        # Whether this process met an error.
        self._failed = False

    @classmethod
    def from_environment(cls) -> World:
        """The world that ``torchrun`` describes in RANK, WORLD_SIZE and LOCAL_RANK; this process alone without them."""
        found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        if not all(value.isdecimal() for value in found):
            return cls()
        rank, size, local_rank = map(int, found)
        # Other launchers leave this one out.
        local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
        return cls(rank, size, local_rank, int(local_size) if local_size.isdecimal() else size)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and talks to the person."""
        return self.rank == 0

    def require_rows(self, batch_size: int) -> None:
        """Checks that every process gets a part of the batch.

        Raises:
            ConfigError: there are more processes than examples.
        """
        if batch_size < self.size:
            raise ConfigError(
                f"batch_size={batch_size} is too small for {self.size} processes: start at most {batch_size}, or raise"
                " --batch-size"
            )

    def share(self, n: int) -> slice:
        """Which of n things this process works on; those of all processes together are each thing once."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    # Joining and leaving

    def join(self) -> None:
        """Meets the others, at the place that ``torchrun`` says.

        Raises:
            TrainingError: they cannot be reached.
        """
        if self.size == 1:
            return
        import torch

        # Torch's compiler imports it, and what it finds as the group then it keeps for ever; a group that is kept has
        # threads, of which the interpreter may die when it ends.
        import torch.distributed.nn
        from torch import distributed
        from torch.distributed.rendezvous import rendezvous

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and distributed.is_nccl_available() else "gloo"
        try:
            store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=TIMEOUT))
            distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise TrainingError(
                f"process {self.rank} of {self.size} cannot meet the others ({_reason(error)}): start them all with"
                " torchrun"
            ) from None
        self._store = store

    def leave(self) -> None:
        """Closes the connections; those who still wait for this process learn that it is gone."""
        if self._store is None:
            return
        from torch import distributed

        distributed.destroy_process_group()
        # Those others ask who tells of the error, and without torchrun it is rank 0 that keeps the count.
        if self._failed and self.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            until = time.monotonic() + ASKED_S
            while self._store.add("failed", 0) < self.size and time.monotonic() < until:
                time.sleep(0.01)
        self._store = None

    def first_to_fail(self) -> bool:
        """Whether this process is the one to tell of an error: whoever asks first, or rank 0 where they never met.

        An error that all of them make is told once in this way, and so is one that a single process makes and that the
        others only feel as a lost connection.
        """
        if self._store is None:
            return self.is_main
        self._failed = True
        try:
            times_asked: int = self._store.add("failed", 1)
        except RuntimeError:
            # What kept count has ended.
            return True
        return times_asked == 1

    # Telling each other

    def sum(self, value: float) -> float:
        """The sum of the numbers of all processes, the same bits on each."""
        return value if self.size == 1 else float(self._reduced(value, "sum"))

    def largest(self, value: int) -> int:
        """The largest of the numbers of all processes."""
        return value if self.size == 1 else int(self._reduced(value, "max"))

    def sum_gradients(self, params: Iterable[Tensor], weight: float) -> None:
        """Replaces each gradient by the sum of those of all processes, each times the weight of its process.

        With weights that sum to 1 that is the gradient of the whole batch from those of its parts.
        """
        if self.size == 1:
            return
        import torch
        from torch import distributed

        grads = [param.grad for param in params if param.grad is not None]
        # In one piece: what a message costs hardly depends on its length.
        flat = torch.cat([grad.flatten() for grad in grads]).mul_(weight)
        with _connected():
            distributed.all_reduce(flat)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for grad, summed in zip(grads, parts, strict=True):
            grad.copy_(summed.view_as(grad))

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Replaces what the tensors of the other processes hold by what those of rank 0 do."""
        if self.size == 1:
            return
        from torch import distributed

        with _connected():
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def from_main(self, work: Callable[[], Value]) -> Value:
        """What the work returns on rank 0, where alone it is done; it is pickled for the others."""
        if self.size == 1:
            return work()
        import torch
        from torch import distributed

        answer: list[Any] = [work() if self.is_main else None]
        with _connected():
            distributed.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
        value: Value = answer[0]
        return value

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A block that rank 0 goes through before the others, who find what it has left: files, for instance."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    def wait(self) -> None:
        """Returns when all processes have come here."""
        self.largest(0)

    def _reduced(self, value: float, how: str) -> float:
        import torch
        from torch import distributed

        numbers = torch.tensor([value], dtype=torch.float64)
        with _connected():
            distributed.all_reduce(numbers, {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}[how])
        return numbers.item()


# The world of a process that nobody else trains with.
ALONE = World()


@contextmanager
def _connected() -> Iterator[None]:
    # Gloo and NCCL have no other error for a connection that is closed or silent. Theirs is dropped before ours is
    # raised: its frames would keep the process group, which is to be left.
    reason = None
    try:
        yield
    except RuntimeError as error:
        reason = _reason(error)
    if reason is not None:
        raise LostProcessError(
            f"another process of this run has ended or does not answer ({reason}); what was saved is intact: go on with"
            " --resume"
        )


def _reason(error: Exception) -> str:
    """The first sentence of an error of torch's, without the place in its code."""
    sentence = str(error).partition("\n")[0].partition(". ")[0]
    return re.sub(r"^\[\S+\] ", "", sentence).rstrip(".") or type(error).__name__
