"""What followed the same few characters elsewhere in the text, as a distribution to learn from.

The one character that followed is a noisy answer to what may follow. The text itself knows a smoother one: all that
followed where the last one to six characters were the same. Mixed into the targets of training, it says in one step
what would otherwise take many (the README's section on training has what it gives). The model itself knows nothing of
it: counts serve training alone and are in no checkpoint.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minigpt.corpus import Ids

# Characters of the longest context counted; seven predicted no better.
MAX_ORDER = 6
# Of a count c, DISCOUNT * c^(3/4) is left to what shorter contexts say. The usual discount is a constant below one
# (Ney, Essen and Kneser 1994, "On structuring probabilistic dependences in stochastic language modelling"). In stories
# and plays, names and words come in bursts, so that even a large count in one place says less about another: on the
# held-out part of tiny Shakespeare the best constant gave 1.69 nats a character, at contexts of four, this power 1.55.
DISCOUNT = 0.85
# Counts in the table of one context length; longer contexts are left out where theirs would be larger.
MOST_CELLS = 20 << 20
# In larger vocabularies the targets would cost more than they give.
MOST_CHARS = 512
# Of a longer text this many characters are counted, in CHUNKS pieces spread evenly.
MOST_COUNTED = 4 << 20
CHUNKS = 64


def can_count(n_chars: int, vocab_size: int) -> bool:
    """Whether a text has a character with a whole context before it, and not too many different ones."""
    return n_chars > MAX_ORDER and vocab_size <= MOST_CHARS


class NGrams:
    """Counts of a text, interpolated from short contexts to long ones.

    Args:
        ids: the text, (N,).
        vocab_size: V.

    Raises:
        ValueError: it is not one that `can_count` speaks of.
    """

    def __init__(self, ids: Ids, vocab_size: int) -> None:
        if not can_count(len(ids), vocab_size):
            raise ValueError(f"{len(ids)} characters of {vocab_size} different ones cannot be counted")
        self._ids = ids
        self._vocab_size = vocab_size
        # The positions MAX_ORDER + i with i % stride < length are counted, up to an end; all have a whole context.
        self._stride = self._length = len(ids) - MAX_ORDER
        if self._length > MOST_COUNTED:
            self._stride, self._length = self._stride // CHUNKS, MOST_COUNTED // CHUNKS
        starts = np.arange(MAX_ORDER, len(ids) - self._length + 1, self._stride)
        positions = (starts[:, None] + np.arange(self._length)).reshape(-1)
        self._end = int(positions[-1]) + 1
        targets = ids[positions].astype(np.int64)
        # What is kept of a count of 0, 1, 2 ... after its discount. It grows, so the count can be told from it.
        self._kept_of = _kept(torch.arange(len(positions) + 1, dtype=torch.float32))
        # One a context length.
        self._tables: list[_Table] = []
        # The empty context, before every position.
        n_rows, row_of = 1, torch.zeros(1, dtype=torch.int32)
        rows: npt.NDArray[np.int64] = np.zeros(len(positions), np.int64)
        for order in range(MAX_ORDER + 1):
            if order:
                numbers = self._numbers(positions, order, rows)
                occurs = np.zeros((n_rows + 1) * vocab_size, np.bool_)
                occurs[numbers] = True
                n_rows = int(occurs.sum())
                if (n_rows + 1) * vocab_size > MOST_CELLS:
                    break
                row_of = torch.from_numpy(np.where(occurs, occurs.cumsum(dtype=np.int32) - 1, np.int32(n_rows)))
                rows = row_of.numpy()[numbers].astype(np.int64)
            counts = np.bincount(rows * vocab_size + targets, minlength=(n_rows + 1) * vocab_size)
            self._tables.append(_Table(row_of, torch.from_numpy(counts).view(-1, vocab_size), self._kept_of))

    def distribution(self, positions: npt.NDArray[np.int64]) -> Tensor:
        """What may stand at positions of the text, judged by all other places in it.

        The character that does stand there is not counted, or it would be most of the answer after a rare context.

        Args:
            positions: (N,), each at least 0.

        Returns:
            Probabilities, (N, V), float32; every row sums to 1.
        """
        targets = torch.from_numpy(self._ids[positions].astype(np.int64))[:, None]
        offsets = positions - MAX_ORDER
        in_piece = (offsets >= 0) & (offsets % self._stride < self._length) & (positions < self._end)
        counted = torch.from_numpy(in_piece.astype(np.int64))[:, None]
        probabilities = torch.full((len(positions), self._vocab_size), 1 / self._vocab_size)
        rows = torch.zeros(len(positions), dtype=torch.int64)
        for order, table in enumerate(self._tables):
            if order:
                numbers = self._numbers(positions, order, rows.numpy())
                rows = table.row_of.index_select(0, torch.from_numpy(numbers)).long()
            kept, total, left = (values.index_select(0, rows) for values in (table.kept, table.total, table.left))
            own = torch.searchsorted(self._kept_of, kept.gather(1, targets))
            others = own - counted
            kept_of_others = self._kept_of.take(others)
            left += (others - own) - (kept_of_others - self._kept_of.take(own))
            kept.scatter_(1, targets, kept_of_others)
            total -= counted
            # A context that occurs nowhere else leaves the answer to the shorter ones.
            nowhere = total == 0
            total[nowhere], left[nowhere] = 1.0, 1.0
            probabilities.mul_(left).add_(kept).div_(total)
        return probabilities

    def _numbers(
        self, positions: npt.NDArray[np.int64], order: int, rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The contexts of ``order`` characters as numbers, (N,), from the rows of those of one character less."""
        return rows * self._vocab_size + self._ids[np.maximum(positions - order, 0)]


class _Table:
    """What followed the contexts of one length: U rows, one a context, and one of zeros for all that do not occur.

    Args:
        row_of: the row of every context, by its number.
        counts: (U + 1, V).
        kept_of: what is kept of a count.
    """

    def __init__(self, row_of: Tensor, counts: Tensor, kept_of: Tensor) -> None:
        self.row_of = row_of
        # What is kept of the counts, (U + 1, V), and the sums of a row's counts and of their discounts, (U + 1, 1).
        self.kept = kept_of[counts]
        self.total = counts.sum(dim=1, keepdim=True).float()
        self.left = self.total - self.kept.sum(dim=1, keepdim=True)


def _kept(counts: Tensor) -> Tensor:
    return counts - DISCOUNT * counts**0.75
