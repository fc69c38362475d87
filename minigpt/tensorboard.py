"""The log of a run, copied into TensorBoard's files as it grows. TensorBoard is an extra.

The log is exact whatever happened to the run, and the copy is always made of all of it: a session that goes on with a
run replaces what earlier sessions wrote, and tells a TensorBoard that has read it to forget it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.errors import MissingPackageError, ReportError
from minigpt.history import LoggedUpdates, parse_line
from minigpt.runs import LOG, TENSORBOARD

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def writer_type() -> type[SummaryWriter]:
    """Torch's writer of TensorBoard's files.

    Raises:
        MissingPackageError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingPackageError(
            "--log tensorboard needs TensorBoard, which is not installed: pip install 'minigpt[tensorboard]'"
        ) from None
    return SummaryWriter


def clear_events(folder: Path) -> None:
    """Removes what was written for an earlier run in this folder; what others put beside it stays.

    Raises:
        ReportError: it cannot be removed.
    """
    try:
        for path in (folder / TENSORBOARD).glob("events.out.tfevents.*"):
            path.unlink()
        if (folder / TENSORBOARD).is_dir() and not any((folder / TENSORBOARD).iterdir()):
            (folder / TENSORBOARD).rmdir()
    except OSError as error:
        raise ReportError(f"cannot tidy {folder / TENSORBOARD}: {error.strerror or error}") from None


class LogCopy:
    """Copies a run's log into its ``tensorboard`` folder: call `update` when the log has grown, and `close` at the end.

    Args:
        folder: of the run, whose log is tidy.
        chars_per_step: characters that one update learns from.

    Raises:
        MissingPackageError: TensorBoard is not installed.
        ReportError: the folder cannot be written.
    """

    def __init__(self, folder: Path, chars_per_step: int) -> None:
        self._log = folder / LOG
        self._copied_bytes = 0
        self._chars_per_step = chars_per_step
        # Speed is the work since the line before, by the time since then.
        self._step, self._elapsed_s = 0, 0.0
        writer = writer_type()
        # TensorBoard orders its files by the second in their names: of two sessions in one second, or by a clock that
        # was set back, the earlier could be shown as the later.
        clear_events(folder)
        self._writer = self._guarded(writer, str(folder / TENSORBOARD), purge_step=0)
        self.update()

    def update(self) -> None:
        """Copies the lines that were added since the last time.

        Raises:
            ReportError: the log cannot be read, or the copy not written.
        """
        self._guarded(self._copy)

    def close(self) -> None:
        """Writes what is left.

        Raises:
            ReportError: it cannot be written.
        """
        self._guarded(self._writer.close)

    def _copy(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._copied_bytes)
            added = log.read()
        if not added:
            return
        self._copied_bytes += len(added)
        for text in added.decode("utf-8", "replace").splitlines():
            line = parse_line(text)
            if isinstance(line, LoggedUpdates):
                chars = (line.step - self._step) * self._chars_per_step
                self._scalar("loss/training", line.batch_loss, line.step)
                self._scalar("learning_rate_share", line.lr_factor, line.step)
                self._scalar("chars_per_s", chars / (line.elapsed_s - self._elapsed_s), line.step)
                self._step, self._elapsed_s = line.step, line.elapsed_s
            elif line is not None:
                self._scalar("loss/held-out", line.val_loss, line.step)
        self._writer.flush()

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def _guarded(self, call: Any, *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except OSError as error:
            raise ReportError(f"cannot write {self._log.parent / TENSORBOARD}: {error.strerror or error}") from None
