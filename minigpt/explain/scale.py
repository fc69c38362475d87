"""Why scores are divided by sqrt(head size): their variance, and what it does to the softmax and to its gradient.

For q and k of independent components with mean 0 and variance 1 a score q . k is a sum of head_size products, each of
variance 1, and so has variance head_size; the division brings it back to 1 (Vaswani et al. 2017, "Attention Is All You
Need", section 3.2.1, footnote 4). Shape letters as in `model`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.explain.recording import Recording
from minigpt.model import attention_weights

HEAD_SIZES = (4, 8, 16, 32, 64, 128, 256)
# Keys that each query of the experiment reads. With many more, rows that have lost their gradient hide behind those in
# which two keys happen to tie.
KEYS = 8
# Sets of as many queries as keys; sets share nothing, so 16,384 queries are drawn and as many keys.
SETS = 2048
# A row lets less than this through: hardly a fiftieth of what it could.
STARVED = 0.01

# Of the chapter: how a softmax sharpens when what goes into it grows.
LOGITS = (0.1, -0.2, 0.3, -0.2, 0.5)
LOGITS_FACTOR = 6


@dataclass(frozen=True)
class Softmaxes:
    """What many softmaxes have in common, means over rows."""

    # The largest weight of a row.
    largest: float
    # See `gradient`.
    gradient: float
    # Share of rows with a gradient below `STARVED`.
    starved: float


@dataclass(frozen=True)
class Measured:
    """What some queries and keys make of the scale."""

    head_size: int
    # Softmaxes: rows that read at least two keys, for those that read one have nothing to choose.
    rows: int
    # That a row reads, on average.
    keys: float
    # Variances over everything of a kind: components of q and of k, and scores that the mask lets through.
    var_q: float
    var_k: float
    # Of q k^T, and of the same divided by sqrt(head_size).
    var_scores: float
    var_scaled: float
    with_scale: Softmaxes
    without_scale: Softmaxes

    @property
    def var_independent(self) -> float:
        """The variance that the scores would have if all components were independent, with mean 0."""
        return self.head_size * self.var_q * self.var_k


def gradient(weights: Tensor) -> Tensor:
    """How much of a gradient gets through a softmax, from its weights to what goes into it, (..., S) to (...).

    It is the Frobenius norm of the softmax's Jacobian, diag(p) - p p^T: if the gradient that arrives at the weights has
    independent components of variance 1, this is the root mean square length of what reaches the scores. It lies
    between 0, where one weight is 1, and 0.5, where two weights are a half.

    From there it goes on to q by way of k, and on the way the division makes it sqrt(head_size) times smaller: that is
    the same for every row, and no row that gets nothing here gets anything there.
    """
    p = weights.double()
    squares = p * p
    # On the diagonal of row i stands p_i (1 - p_i), off it -p_i p_j.
    others = squares.sum(dim=-1, keepdim=True) - squares
    return (squares * ((1 - p) ** 2 + others)).sum(dim=-1).clamp(min=0).sqrt()


def measure(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Measured:
    """Measures scores and softmaxes, with the scale and without, by the model's own `attention_weights`.

    Args:
        q: queries, (..., T, D).
        k: keys, (..., S, D).
        mask: (T, S), true where a query may read a key; None lets every query read every key.

    Raises:
        ValueError: no query may read two keys.
    """
    T, S, D = q.shape[-2], k.shape[-2], q.shape[-1]
    if mask is None:
        mask = torch.ones(T, S, dtype=torch.bool)
    reads = mask.sum(dim=-1)
    chooses = reads > 1
    if not chooses.any():
        raise ValueError("no query reads two keys, so that no softmax has anything to choose")
    scores = q @ k.mT  # (..., T, S)
    read = scores[..., mask]
    weights = attention_weights(q, k, mask)[..., chooses, :]
    # Queries so much longer undo the division.
    unscaled = attention_weights(q * math.sqrt(D), k, mask)[..., chooses, :]
    return Measured(
        head_size=D,
        rows=weights[..., 0].numel(),
        keys=reads[chooses].double().mean().item(),
        var_q=_variance(q),
        var_k=_variance(k),
        var_scores=_variance(read),
        var_scaled=_variance(read / math.sqrt(D)),
        with_scale=_softmaxes(weights),
        without_scale=_softmaxes(unscaled),
    )


def experiment(seed: int = 0, head_sizes: Sequence[int] = HEAD_SIZES) -> list[Measured]:
    """The experiment of the chapter: normally distributed q and k of variance 1, `SETS` times `KEYS` of each."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for head_size in head_sizes:
        q, k = torch.randn(2, SETS, KEYS, head_size, generator=generator)
        rows.append(measure(q, k))
    return rows


def measure_layers(recording: Recording) -> list[Measured]:
    """The same of the queries and keys of each layer of a model, over all heads, under its mask.

    Raises:
        ValueError: no position reads two keys.
    """
    return [measure(layer.q, layer.k, layer.mask) for layer in recording.layers]


def sharpened(factor: float) -> list[float]:
    """The softmax of the chapter's five logits times a factor, as the model computes it: one query of head size 1."""
    q = torch.tensor([[factor]], dtype=torch.float64)
    weights: list[float] = attention_weights(q, torch.tensor(LOGITS, dtype=torch.float64)[:, None])[0].tolist()
    return weights


def _variance(values: Tensor) -> float:
    return values.double().var(correction=0).item()


def _softmaxes(weights: Tensor) -> Softmaxes:
    through = gradient(weights)
    return Softmaxes(
        largest=weights.amax(dim=-1).double().mean().item(),
        gradient=through.mean().item(),
        starved=(through < STARVED).double().mean().item(),
    )
