"""``minigpt`` and ``python -m minigpt``."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C also ends it quietly where its modules are still being loaded."""
    try:
        from minigpt.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
