"""The one way to write a file: in one step, so that its name never stands for half of it.

At every moment, also after a kill or a power cut, the target is the old file or the new one, whole.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(target: Path, *, shared: bool = False) -> Iterator[IO[bytes]]:
    """A file to write to that takes the target's place when the block ends well.

    Otherwise, whatever the exception, it is deleted and the target is as before. All that a kill can leave is a hidden
    file whose name ends in ``.partial``; the next writing reuses it, unless it is a shared one.

    Args:
        shared: other processes may write the same target at the same time, so this one takes a name of its own.

    Raises:
        OSError: writing or replacing failed.
    """
    own = f".{secrets.token_hex(4)}" if shared else ""
    # Not tempfile: its files are private to the user, and would stay so.
    partial = target.with_name(f".{target.name}{own}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        _sync_folder(target.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Makes a new name in it survive a power cut, where the system can: Windows cannot, some network folders neither.

    Not worth an error: the new file is in place, and after a power cut the old one would be.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
