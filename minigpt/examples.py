"""Ids -> batches: the windows of a text, in random order, that training learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minigpt.corpus import Ids

# Of a shuffle: fewer leave patterns.
ROUNDS = 6


@dataclass(frozen=True)
class Batch:
    """Windows of a text."""

    # Ids and, for each, the id that follows, (B, T), int64, on the CPU.
    x: torch.Tensor
    y: torch.Tensor
    # Where the ids of y stand in the text, (B, T).
    positions: npt.NDArray[np.int64]


class Examples:
    """A text as an endless sequence of windows in random order: pass after pass, each cut at other places.

    A pass reads every part of the text once, but for one to two windows' length at its ends. In a short text that is
    read many times, windows drawn independently would leave some parts out for long and repeat others.

    Args:
        ids: (N,), of any integer type, N > block_size.
        block_size: T, characters of a window.
        seed: decides on the order.
    """

    def __init__(self, ids: Ids, block_size: int, seed: int) -> None:
        if len(ids) <= block_size:
            raise ValueError(f"{len(ids)} ids hold no window of block_size={block_size} and the id after it")
        self._ids = ids
        self._block_size = block_size
        self._seed = seed
        # One window less than there is room for, so that there is room to move the cuts.
        self._per_pass = max(1, len(ids) // block_size - 1)

    def batch(self, first: int, count: int) -> Batch:
        """The windows first ... first + count - 1 of the sequence: a function of the numbers and the seed alone."""
        passes, places = np.divmod(np.arange(first, first + count), self._per_pass)
        starts = np.empty(count, np.int64)
        for pass_ in np.unique(passes):
            offset, *keys = np.random.SeedSequence((self._seed, int(pass_))).generate_state(1 + ROUNDS, np.uint64)
            of_pass = passes == pass_
            spare = len(self._ids) - self._per_pass * self._block_size
            shuffled = _shuffled(places[of_pass], self._per_pass, keys)
            starts[of_pass] = shuffled * self._block_size + int(offset) % spare
        positions = starts[:, None] + np.arange(self._block_size + 1)  # (B, T + 1)
        windows = torch.from_numpy(self._ids[positions].astype(np.int64))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), positions[:, 1:])


def _shuffled(places: npt.NDArray[np.int64], n: int, keys: Sequence[np.uint64]) -> npt.NDArray[np.int64]:
    """What stands at some places of a random order of 0 ... n - 1, without making the order: it could be long.

    Args:
        places: from 0 to n - 1.
        keys: decide on the order.

    Source:
        A Feistel network permutes the numbers of an even number of bits; one that it takes to n or above goes through
        it again until it is below (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 4).
    """
    half_bits = np.uint64(-(-(n - 1).bit_length() // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    numbers = places.astype(np.uint64)
    out = np.ones(len(numbers), np.bool_)
    while out.any():
        left, right = numbers[out] >> half_bits, numbers[out] & mask
        for key in keys:
            # The product's high bits depend on all bits of the factors' low ones.
            mixed = ((right + key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
            left, right = right, left ^ (mixed & mask)
        numbers[out] = (left << half_bits) | right
        out = numbers >= n
    return numbers.astype(np.int64)
