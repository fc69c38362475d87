"""``python -m minigpt``."""

from minigpt.cli import main

if __name__ == "__main__":
    main()
