"""Texts that a person gives to a command: read from where they are, and of characters that the model knows."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minigpt.console import Note
    from minigpt.tokenizer import CharTokenizer


def read_given(file: str, encoding: str, what: str) -> str:
    """The text of a file, of an address, or of standard input.

    Args:
        what: the text is called in messages.

    Raises:
        PromptError: it is a folder.
        CorpusError: it cannot be read.
    """
    from minigpt import console
    from minigpt.errors import PromptError
    from minigpt.sources import STDIN, read_text

    if file != STDIN and os.path.isdir(file):  # noqa: PTH112  (Path.is_dir raises for names that are too long)
        raise PromptError(f"the {what} {file!r} is a folder: give a file")
    if file == STDIN and sys.stdin.isatty():
        console.note(f"reading the {what} from the terminal; end it with Ctrl-D")
    return "".join(read_text([file], encoding=encoding))


def check_known(text: str, tokenizer: CharTokenizer, way_out: str = "leave them out") -> None:
    """Refuses a text with characters that the model has never seen.

    Args:
        way_out: what to do about them.

    Raises:
        PromptError: it has some.
    """
    from minigpt.errors import PromptError, UnknownCharacterError

    if unknown := tokenizer.unknown(text):
        error = UnknownCharacterError(unknown)
        raise PromptError(f"{error}: {way_out}") from error


def known_part(text: str, tokenizer: CharTokenizer, skip_unknown: bool, note: Note, what: str, hence: str = "") -> str:
    """The text, without the characters that the model does not know if the person wants to go on without them.

    Args:
        note: told what was dropped.
        what: the text is called in messages.
        hence: follows what was dropped.

    Raises:
        PromptError: it has some, and they are not to be skipped.
    """
    from minigpt.errors import UnknownCharacterError

    if not skip_unknown:
        check_known(text, tokenizer, "leave them out, or use --skip-unknown")
    unknown = tokenizer.unknown(text)
    if not unknown:
        return text
    note(f"dropped from the {what}, since {UnknownCharacterError(unknown)}{hence}")
    return "".join(char for char in text if char in tokenizer)
