"""Characters to ids and back. One character, that is one Unicode code point, is one token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minigpt.errors import UnknownCharacterError


class CharTokenizer:
    """A fixed vocabulary of characters; the id of a character is its place in ``chars``.

    Args:
        chars: the characters, each once. Training sorts them by code point, but any order is kept.

    Raises:
        ValueError: no characters, an entry that is not one character, or one that stands twice.
    """

    def __init__(self, chars: Sequence[str]) -> None:
        if not chars or any(len(char) != 1 for char in chars):
            raise ValueError("a vocabulary is one or more single characters")
        if len(set(chars)) != len(chars):
            raise ValueError("a vocabulary holds each character once")
        self.chars = "".join(chars)
        self._id_of = {char: id_ for id_, char in enumerate(self.chars)}

    def __len__(self) -> int:
        return len(self.chars)

    def __contains__(self, char: str) -> bool:
        return char in self._id_of

    def start(self, most_frequent: str) -> str:
        """The character that a text without a prompt starts from: a line break, or the most frequent one without."""
        return "\n" if "\n" in self else most_frequent

    def encode(self, text: str) -> list[int]:
        """The ids of a text, one a character.

        Raises:
            UnknownCharacterError: the text has characters that the vocabulary lacks; it lists all their places.
        """
        try:
            return [self._id_of[char] for char in text]
        except KeyError:
            raise UnknownCharacterError(self.unknown(text)) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids.

        Raises:
            IndexError: an id is negative, or not below the size of the vocabulary.
        """
        ids = list(ids)
        if ids and min(ids) < 0:
            raise IndexError(f"id {min(ids)} is negative")
        return "".join(self.chars[id_] for id_ in ids)

    def unknown(self, text: str) -> list[tuple[int, str]]:
        """(position, character) of every character in the text that the vocabulary lacks, in order."""
        return [(position, char) for position, char in enumerate(text) if char not in self._id_of]
