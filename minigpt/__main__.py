"""``minigpt`` and ``python -m minigpt``."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# Compiled code that these run while they are imported calls Python, and drops the KeyboardInterrupt that may come out.
DEAF = ("numpy", "torch")
INTERRUPTED = 130


def main() -> None:
    """Runs the command line; Ctrl-C also ends it quietly where its modules are still being loaded."""
    try:
        # Not where it is ignored, as in a background job.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        from minigpt.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if any(_is_being_imported(name) for name in DEAF):
        # Nothing was begun that would have to be ended.
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def _is_being_imported(name: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


if __name__ == "__main__":
    main()
