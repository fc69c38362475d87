"""Signs for the characters of a text that have no picture of their own, or that a terminal cannot show."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

# The sign, the one for terminals that know only ASCII, and what they mean.
_SIGNS = {"\n": ("↵", "$", "a line break"), "\t": ("→", ">", "a tab"), " ": ("␣", "_", "a space")}
_OTHER = ("�", "?", "what cannot be shown")


@lru_cache(maxsize=4096)
def sign(char: str, encoding: str = "utf-8", *, spaces: bool = True) -> str:
    """What stands for a character: itself, if it has a picture.

    Args:
        encoding: of the terminal.
        spaces: whether a space is to be seen.
    """
    if char == " " and not spaces:
        return char
    if char in _SIGNS:
        choices = _SIGNS[char][:2]
    elif _stands_alone(char):
        choices = char, _OTHER[1]
    else:
        choices = _OTHER[:2]
    try:
        choices[0].encode(encoding)
    except UnicodeEncodeError:
        return choices[1]
    return choices[0]


def other_sign(encoding: str = "utf-8") -> str:
    """What stands for a character that cannot be shown."""
    return sign("\0", encoding)


def legend(text: Iterable[str], encoding: str = "utf-8", *, spaces: bool = True) -> str:
    """What the signs in a text mean, as a part of a sentence; empty where it has none. Arguments as of `sign`."""
    chars = set(text)
    meanings = [
        f"{sign(char, encoding)} is {meaning}"
        for char, (_, _, meaning) in _SIGNS.items()
        if char in chars and (spaces or char != " ")
    ]
    other = other_sign(encoding)
    if any(sign(char, encoding) == other != char for char in chars):
        meanings.append(f"{other} is {_OTHER[2]}")
    return ", ".join(meanings)


class Signs:
    """Signs for the characters of a text where each must take the same number of columns.

    Args:
        text: the text.
        encoding: of the terminal.
    """

    def __init__(self, text: str, encoding: str) -> None:
        from rich.cells import cell_len

        self._encoding = encoding
        # Where one character is wide, all others get a column more.
        self.width = max((cell_len(sign(char, encoding)) for char in text), default=1)

    def of(self, char: str) -> str:
        """What stands for the character, filled up with spaces."""
        from rich.cells import cell_len

        shown = sign(char, self._encoding)
        return shown + " " * (self.width - cell_len(shown))

    def legend(self, text: Iterable[str]) -> str:
        """`legend` of a part of the text."""
        return legend(text, self._encoding)


def _stands_alone(char: str) -> bool:
    """Whether it can be printed and takes columns of its own, unlike an accent that joins the character before it."""
    from rich.cells import cell_len

    return char.isprintable() and cell_len(char) > 0
