"""How surprising each character of a text was to a model, and where its surprise lies.

The surprise at a character is -log2 of the probability that the model gave it, in bits, from all that came before it in
one stream through the cache. The mean is what `evaluation.stream_losses` gives, in bits. The first character of a text
has nothing before it, is not predicted, and counts nowhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from minigpt.evaluation import stream
from minigpt.model import GPT
from minigpt.tokenizer import CharTokenizer

_Item = TypeVar("_Item", "Place", "CostlyLine")

# What a character can be, in the order of tables.
KINDS = ("word starts", "inside words", "digits", "spaces", "line breaks", "punctuation", "others")
# Most surprising places that a summary keeps, and the characters before each.
PLACES = 10
CONTEXT = 24
# Lines that cost the most a character that it keeps, of those with enough characters for a mean to say something.
COSTLIEST_LINES = 5
FEWEST_IN_LINE = 10
# Of each of them, the characters at its start.
LINE_START = 100


@dataclass(frozen=True)
class Line:
    """A line of a text, with the line break that ends it, as the model saw it; n characters."""

    # From 1.
    number: int
    text: str
    # Bits, (n,); not a number where nothing was predicted, at the first character of the text.
    bits: NDArray[np.float32]
    # What the model held likeliest at each place, the likeliest first, and how likely; (n, K) both.
    likeliest: tuple[str, ...]
    probabilities: NDArray[np.float32]

    @property
    def characters(self) -> int:
        """Those that were predicted."""
        return int(np.count_nonzero(~np.isnan(self.bits)))

    @property
    def total(self) -> float:
        """Bits of all its characters together."""
        return float(np.nansum(self.bits, dtype=np.float64))

    @property
    def bits_per_char(self) -> float | None:
        """Their mean; None of the first line of a text if it has one character."""
        return self.total / self.characters if self.characters else None

    def runners_up(self, column: int, most: int) -> list[tuple[str, float]]:
        """What the model held likeliest at a place, with the probabilities, the likeliest first; columns count from 0.

        Nothing at the first character of the text.
        """
        if math.isnan(self.bits[column]):
            return []
        return list(zip(self.likeliest[column][:most], self.probabilities[column, :most].tolist(), strict=True))


class _Piece(NamedTuple):
    """What is known of some characters in a row."""

    # (n,), (n, K), (n, K): bits, and the likeliest ids with their probabilities.
    bits: NDArray[np.float32]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]


def lines(model: GPT, tokenizer: CharTokenizer, text: str, runners_up: int = 1) -> Iterator[Line]:
    """Reads a text line by line; however many lines it has, they take the memory of the longest one.

    Args:
        text: at least 2 characters.
        runners_up: likeliest characters to keep at each place; no more than there are.

    Raises:
        ValueError: the text has fewer than 2 characters.
        UnknownCharacterError: the text has characters that the vocabulary lacks.
    """
    if len(text) < 2:
        raise ValueError(f"of a text of {len(text)} characters none can be predicted")
    pieces = _pieces(model, tokenizer, text, min(runners_up, len(tokenizer)))
    waiting = [next(pieces)]
    there_are = len(waiting[0].bits)
    start = 0
    for number in count(1):
        if start == len(text):
            return
        stop = text.find("\n", start) + 1 or len(text)
        n = stop - start
        while there_are < n:
            waiting.append(next(pieces))
            there_are += len(waiting[-1].bits)
        bits, ids, probabilities = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        likeliest = tuple(map(tokenizer.decode, ids[:n].tolist()))
        yield Line(number, text[start:stop], bits[:n], likeliest, probabilities[:n])
        waiting = [_Piece(bits[n:], ids[n:], probabilities[n:])]
        there_are -= n
        start = stop


@torch.inference_mode()
def _pieces(model: GPT, tokenizer: CharTokenizer, text: str, most: int) -> Iterator[_Piece]:
    """All characters of a text, a chunk at a time."""
    # Of the first one nothing is predicted.
    nothing = np.full((1, most), np.nan, np.float32)
    yield _Piece(np.full(1, np.nan, np.float32), np.zeros((1, most), np.int64), nothing)
    for logits, nats in stream(model, len(text), lambda start, stop: torch.tensor(tokenizer.encode(text[start:stop]))):
        probabilities, ids = logits.float().softmax(dim=-1).topk(most)
        yield _Piece((nats / math.log(2)).cpu().numpy(), ids.cpu().numpy(), probabilities.cpu().numpy())


@dataclass
class Tally:
    """Characters and their bits."""

    characters: int = 0
    bits: float = 0.0

    @property
    def bits_per_char(self) -> float | None:
        """Mean; None of no characters."""
        return self.bits / self.characters if self.characters else None

    def add(self, bits: float, characters: int = 1) -> None:
        """Counts characters with that many bits together."""
        self.characters += characters
        self.bits += bits


@dataclass(frozen=True, order=True)
class Place:
    """A character that surprised; the more it did, the larger."""

    bits: float
    # Negative, so that of equal ones the first is the largest.
    order: int
    # Both from 1.
    line: int
    column: int
    char: str
    before: str
    runners_up: tuple[tuple[str, float], ...]


@dataclass(frozen=True, order=True)
class CostlyLine:
    """A line that cost much; the more a character, the larger."""

    bits_per_char: float
    # Negative, as in `Place`.
    order: int
    line: int
    start: str


@dataclass
class Summary:
    """What the lines of a text sum to; `add` them one by one. The memory it takes does not grow with the text."""

    whole: Tally = field(default_factory=Tally)
    kinds: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})
    chars: dict[str, Tally] = field(default_factory=dict)
    _places: list[Place] = field(default_factory=list)
    _costliest_lines: list[CostlyLine] = field(default_factory=list)
    # The end of what was added.
    _before: str = ""
    _seen: int = 0

    def add(self, line: Line) -> None:
        """Counts the next line."""
        text = self._before + line.text
        offset = len(self._before)
        for column, bits in enumerate(line.bits.tolist()):
            if math.isnan(bits):
                continue
            at = offset + column
            char = text[at]
            self.kinds[kind_of(text[at - 1], char)].add(bits)
            self.chars.setdefault(char, Tally()).add(bits)
            if len(self._places) < PLACES or bits > self._places[0].bits:
                place = Place(
                    bits,
                    -(self._seen + column),
                    line.number,
                    column + 1,
                    char,
                    text[max(0, at - CONTEXT) : at],
                    tuple(line.runners_up(column, len(line.likeliest[column]))),
                )
                _keep(self._places, place, PLACES)
        mean = line.bits_per_char
        if mean is not None and line.characters >= FEWEST_IN_LINE:
            costly = CostlyLine(mean, -line.number, line.number, line.text[:LINE_START])
            _keep(self._costliest_lines, costly, COSTLIEST_LINES)
        self.whole.add(line.total, line.characters)
        self._before = text[-CONTEXT:]
        self._seen += len(line.text)

    @property
    def places(self) -> list[Place]:
        """The most surprising characters of the text, the most surprising first."""
        return sorted(self._places, reverse=True)

    @property
    def costliest_lines(self) -> list[CostlyLine]:
        """The lines that cost the most bits a character, the costliest first."""
        return sorted(self._costliest_lines, reverse=True)

    @property
    def costliest_chars(self) -> list[tuple[str, Tally]]:
        """Every character that was predicted, those first that cost the most bits in all."""
        return sorted(self.chars.items(), key=lambda item: (-item[1].bits, item[0]))


def _keep(heap: list[_Item], item: _Item, most: int) -> None:
    """Puts one into a heap that keeps the largest."""
    heapq.heappush(heap, item)
    if len(heap) > most:
        heapq.heappop(heap)


def kind_of(before: str, char: str) -> str:
    """Which of `KINDS` a character is, given the one before it; an apostrophe ends a word."""
    if char.isalpha():
        return KINDS[1] if before.isalpha() else KINDS[0]
    if char.isdigit():
        return KINDS[2]
    if char == "\n":
        return KINDS[4]
    if char.isspace():
        return KINDS[3]
    return KINDS[5] if char.isprintable() else KINDS[6]


def binned(tallies: Sequence[Tally], most: int) -> tuple[int, list[float | None]]:
    """Means over runs of neighbours, at most so many of equal length but the last, and that length."""
    size = -(-len(tallies) // most)
    means = []
    for start in range(0, len(tallies), size):
        run = Tally()
        for each in tallies[start : start + size]:
            run.add(each.bits, each.characters)
        means.append(run.bits_per_char)
    return size, means
