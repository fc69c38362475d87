"""What goes wrong in a process of its own when a test wants it to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from minigpt import samples
from minigpt.cli import train_report
from minigpt.history import Line
from minigpt.trainer import Trainer


def arrange(
    flush: int = 0, log: int = 0, sample: int = 0, torn: bool = False, stall_s: float = 0.0, every: bool = False
) -> None:
    """Makes the process die at its n-th flush of a file or folder to disk, or behind its n-th line of log or sample.

    Args:
        torn: leave only half of the file that is being written.
        stall_s: wait that long there instead of dying.
        every: not only there but at each flush from then on.
    """
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
    patched: tuple[tuple[Any, str, Any], ...] = (
        (os, "fsync", fsync),
        (Trainer, "_log", log_line),
        (train_report, "keep_sample", keep_sample),
    )
    for owner, name, function in patched:
        setattr(owner, name, function)
