"""The errors that a user can cause, each a sentence: what is wrong, the value, and what to do next.

A caller's mistake in code is a plain ``ValueError`` elsewhere; bugs keep their traceback.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line that colours nothing: file names may hold line breaks and escape codes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


class MinigptError(Exception):
    """Something a user can cause and mend. The command line prints it as one line and exits 1."""


class ConfigError(MinigptError, ValueError):
    """A setting is out of range or does not fit another one; the message names the field and the value."""


class CorpusError(MinigptError):
    """A text cannot be found, read, decoded or used."""


class CheckpointError(MinigptError):
    """A checkpoint cannot be found, read or written, or is not one of ours."""


class LockedError(CheckpointError):
    """Another process trains the run."""


class PromptError(MinigptError):
    """A prompt cannot be read, or the model cannot go on from it."""


class DeviceError(MinigptError):
    """The device asked for does not exist on this machine."""


class OutputError(MinigptError):
    """Standard output cannot be written."""


class TrainingError(MinigptError):
    """Training cannot go on; what was saved before is intact."""


class LostProcessError(TrainingError):
    """Another process of the run has ended or does not answer: nothing is wrong with the run, which can go on."""


class RaceError(MinigptError):
    """One of the two that race cannot start, or has ended before its text did."""


class ReportError(MinigptError):
    """What shows a training (curves, samples) cannot be made, read or written; the training itself is untouched."""


class MissingPackageError(ReportError):
    """An extra that was asked for is not installed; the message names the command that does it."""


class UnknownCharacterError(MinigptError):
    """A text holds characters that the vocabulary does not.

    Attributes:
        places: (position, character) for each of them, in order; positions count from 0.
    """

    # More than this many places say nothing that the first ones do not.
    SHOWN = 8

    def __init__(self, places: list[tuple[int, str]]) -> None:
        self.places = places
        shown = ", ".join(f"{char!r} at {position}" for position, char in places[: self.SHOWN])
        more = len(places) - self.SHOWN
        tail = f" and {more} more" if more > 0 else ""
        super().__init__(f"the model has never seen these characters: {shown}{tail} (positions count from 0)")
