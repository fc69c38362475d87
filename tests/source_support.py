"""What the tests of texts share."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minigpt.errors import CorpusError

PLAY = "MARGIT: The tide, the tide!\nOLE: It comes.\n"


def bytes_of(content: str | bytes) -> bytes:
    """Text as UTF-8, with its line ends left alone; bytes as they are."""
    return content.encode() if isinstance(content, str) else content


def write(name: str, content: str | bytes) -> str:
    """Writes a file, and the folders above it; returns its name as a source."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes_of(content))
    return name


def feed_stdin(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> None:
    """Makes standard input a pipe that holds this."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes_of(content))))


def digest(content: str | bytes) -> str:
    """The SHA-256 of a file with that content."""
    return hashlib.sha256(bytes_of(content)).hexdigest()


def refusal_of(read: Callable[[], object]) -> str:
    """The one sentence with which sources are refused by what reads them."""
    with pytest.raises(CorpusError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)
