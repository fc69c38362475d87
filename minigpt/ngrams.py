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
# held-out part of tiny Shakespeare the best constant gave 1.72 nats a character, this power 1.55.
DISCOUNT = 0.85
# Counts in the table of one context length; longer contexts are left out where theirs would be larger.
MOST_CELLS = 20 << 20
# In larger vocabularies the targets would cost more than they give.
MOST_CHARS = 512
# Of a longer text this many characters are counted, in CHUNKS pieces spread evenly.
MOST_COUNTED = 4 << 20
CHUNKS = 64


class NGrams:
    """Counts of a text, interpolated from short contexts to long ones.

    Args:
        ids: the text, (N,), more than `MAX_ORDER` characters of it.
        vocab_size: V, at most `MOST_CHARS`.
    """

    def __init__(self, ids: Ids, vocab_size: int) -> None:
        self._ids = ids
        self._vocab_size = vocab_size
        # The positions MAX_ORDER + i with i % stride < length are counted: those that have a whole context before them.
        self._stride = self._length = len(ids) - MAX_ORDER
        if self._length > MOST_COUNTED:
            self._stride, self._length = self._stride // CHUNKS, MOST_COUNTED // CHUNKS
        starts = np.arange(MAX_ORDER, len(ids) - self._length + 1, self._stride)
        positions = (starts[:, None] + np.arange(self._length)).reshape(-1)
        self._tables: list[_Table] = []
        for order in range(MAX_ORDER + 1):
            contexts, rows = np.unique(self._contexts(positions, order), return_inverse=True)
            if (len(contexts) + 1) * vocab_size > MOST_CELLS:
                break
            cells, times = np.unique(rows.reshape(-1) * vocab_size + ids[positions], return_counts=True)
            counts = np.zeros((len(contexts) + 1, vocab_size), np.float32)
            counts.reshape(-1)[cells] = times
            self._tables.append(_Table(torch.from_numpy(contexts), torch.from_numpy(counts)))

    def distribution(self, positions: npt.NDArray[np.int64]) -> Tensor:
        """What may stand at positions of the text, judged by all other places in it.

        The character that does stand there is not counted, or it would be most of the answer after a rare context.

        Args:
            positions: (N,), each at least 0.

        Returns:
            Probabilities, (N, V), float32; every row sums to 1.
        """
        rows = torch.arange(len(positions))
        targets = torch.from_numpy(self._ids[positions].astype(np.int64))
        offsets = positions - MAX_ORDER
        counted = torch.from_numpy(((offsets >= 0) & (offsets % self._stride < self._length)).astype(np.float32))
        probabilities = torch.full((len(positions), self._vocab_size), 1 / self._vocab_size)
        for order, table in enumerate(self._tables):
            found = table.rows(torch.from_numpy(self._contexts(positions, order)))
            kept, total, left = table.kept[found], table.total[found], table.left[found]
            own = table.counts[found, targets]
            others = own - counted
            kept[rows, targets] = others - _discount(others)
            total -= counted
            left += _discount(others) - _discount(own)
            # A context that occurs nowhere else leaves the answer to the shorter ones.
            nowhere = total == 0
            total[nowhere], left[nowhere] = 1.0, 1.0
            probabilities.mul_(left[:, None]).add_(kept).div_(total[:, None])
        return probabilities

    def _contexts(self, positions: npt.NDArray[np.int64], order: int) -> npt.NDArray[np.int64]:
        """The ``order`` characters before each position, as one number, (N,)."""
        numbers = np.zeros(len(positions), np.int64)
        for back in range(order, 0, -1):
            numbers = numbers * self._vocab_size + self._ids[np.maximum(positions - back, 0)]
        return numbers


class _Table:
    """What followed the contexts of one length: U rows, sorted by context, and one of zeros for all others."""

    def __init__(self, contexts: Tensor, counts: Tensor) -> None:
        # (U,), (U + 1, V).
        self._contexts, self.counts = contexts, counts
        self.total = counts.sum(dim=1)
        # The counts less their discounts, (U + 1, V), and the discounts of each row together, (U + 1,).
        self.kept = counts - _discount(counts)
        self.left = self.total - self.kept.sum(dim=1)

    def rows(self, contexts: Tensor) -> Tensor:
        """The row of each context, (N,)."""
        rows = torch.searchsorted(self._contexts, contexts).clamp_(max=len(self._contexts) - 1)
        return rows.where(self._contexts[rows] == contexts, len(self._contexts))


def _discount(counts: Tensor) -> Tensor:
    return DISCOUNT * counts**0.75
