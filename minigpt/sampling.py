"""From logits to ids. Pure: the only randomness is the uniform number that is passed in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import ConfigError

# More would overflow at a temperature near zero, where being greedy is what counts.
MOST_SLACK = 10.0

# A row of V logits for each of B texts, float32 or float64.
Logits = NDArray[np.floating[Any]]

_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class Sampling:
    """How the next character is drawn from the model's distribution.

    Temperature is applied first; then each filter in turn, in the order of the fields, drops characters from what
    the one before it left. The most probable character always stays.

    Raises:
        ConfigError: a value is out of range.
    """

    # Divides the logits: below 1 safer, above 1 wilder, 0 always takes the most probable character.
    temperature: float = 1.0
    # Draw among the k most probable characters; 0 is off.
    top_k: int = 0
    # Draw among the fewest characters whose probabilities sum to at least p; 1 is off.
    top_p: float = 1.0
    # Draw among characters at least p times as probable as the most probable one; 0 is off.
    min_p: float = 0.0

    def __post_init__(self) -> None:
        # Comparisons are written so that NaN is refused.
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 (greedy) or a finite number above it")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be a number of characters, or 0 for all of them")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1 (1 is off)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p} must be from 0 (off) to 1")

    @property
    def filters(self) -> bool:
        """Whether any character can be dropped."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


def uniforms(seed: int, samples: Sequence[int], start: int, n: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) that draw the characters at positions start ... start + n - 1 of B samples, (n, B): each a
    fixed function of seed, sample and position.

    Nothing else enters, so a text does not depend on how many others are written beside it, nor on how it is computed.

    Source:
        The output function of SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators",
        figure 17, with its increment), chained over the three words.
    """
    words = (
        np.array([[seed & _MASK_64]], np.uint64),
        np.array([[sample & _MASK_64 for sample in samples]], np.uint64),
        np.arange(start, start + n, dtype=np.uint64)[:, None],
    )
    state = np.zeros((n, len(samples)), np.uint64)
    for word in words:
        state = _mix((state ^ word) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)) / (1 << 53)


def probabilities(logits: Logits, sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that is drawn from: temperature and filters applied, summing to 1.

    Args:
        logits: (B, V), not changed.
        sampling: with a temperature above 0.

    Returns:
        (B, V), zero where a character was dropped.
    """
    weights = _weights(logits, sampling.temperature)
    if sampling.filters:
        weights[~_kept(logits, weights, sampling.top_k, sampling.top_p, sampling.min_p)] = 0
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def sample(logits: Logits, uniforms: NDArray[np.float64], sampling: Sampling) -> NDArray[np.int64]:
    """Draws one id a row by inverting the cumulative distribution over ids at a uniform number.

    Args:
        logits: (B, V), not changed.
        uniforms: (B,), in [0, 1); not used at temperature 0.
        sampling: how to draw.

    Returns:
        ids, (B,). At temperature 0 the most probable; of equal ones, the first.
    """
    return sample_and_doubt(logits, uniforms, sampling, tolerance=0.0)[0]


def sample_and_doubt(
    logits: Logits, uniforms: NDArray[np.float64], sampling: Sampling, tolerance: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """`sample`, and for each row whether logits that differ by up to ``tolerance`` might have drawn another id.

    Two ways of computing the same logits differ by rounding. Where that cannot matter, and it hardly ever can, the id
    is the same for both; where it might, the caller can compute the logits more exactly.

    Returns:
        ids, (B,), and doubts, (B,).
    """
    if sampling.temperature == 0:
        return logits.argmax(axis=-1), _lead(logits) <= 2 * tolerance
    probs = probabilities(logits, sampling)
    # A cumulative probability c changes by at most slack * c * (1 - c); near a boundary c is u.
    slack = ratio_slack(sampling.temperature, tolerance)
    cumulative = probs.cumsum(axis=-1)  # (B, V)
    # The first id whose cumulative probability exceeds u; a dropped character adds nothing, so it is never the first.
    # The last entry is 1 only to rounding: u is scaled by it, and kept below it where the product rounds up.
    total = cumulative[:, -1:]
    u = uniforms[:, None]
    targets = np.maximum(u + u * (1 - u) * np.array([0.0, -slack, slack]), 0.0) * total  # (B, 3)
    targets = np.minimum(targets, np.nextafter(total, 0.0))
    drawn = (cumulative[:, None] <= targets[:, :, None]).sum(axis=-1)  # (B, 3)
    doubts = (drawn != drawn[:, :1]).any(axis=-1)
    if sampling.temperature < tolerance:
        # So cold that it is all but greedy.
        doubts |= _lead(logits) <= 2 * tolerance
    if sampling.filters and tolerance:
        doubts |= _filters_in_doubt(logits, sampling, slack)
    return drawn[:, 0], doubts


def ratio_slack(temperature: float, tolerance: float) -> float:
    """By what share a ratio of two probabilities may change if logits may differ by a tolerance; 0 at temperature 0."""
    return math.expm1(min(2 * tolerance / temperature, MOST_SLACK)) if temperature else 0.0


def _weights(logits: Logits, temperature: float) -> NDArray[np.float64]:
    """What unfiltered probabilities are proportional to, (B, V): 1 for the largest logit."""
    # Few numbers, so exactness is free: float64 keeps sums from hiding a character.
    logits = logits.astype(np.float64)
    # Shifted first, so that a temperature near zero divides nothing positive; what overflows to minus infinity is 0.
    with np.errstate(over="ignore"):
        weights: NDArray[np.float64] = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weights


def _kept(logits: Logits, weights: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """Which characters pass the filters, (B, V); the most probable one always does."""
    # Ranked by logits, which a high temperature cannot make equal; stable, so that top-k keeps exactly k.
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=-1)
    # What is zero to rounding is never drawn.
    passes = (ranked > 0) & (ranked >= min_p * ranked[:, :1])
    if top_k:
        passes[:, top_k:] = False
        ranked[:, top_k:] = 0
    if top_p < 1:
        before = ranked.cumsum(axis=-1) - ranked
        passes &= before < top_p * ranked.sum(axis=-1, keepdims=True)
    passes[:, 0] = True
    kept = np.empty_like(passes)
    np.put_along_axis(kept, order, passes, axis=-1)
    return kept


def _lead(logits: Logits) -> NDArray[np.float64]:
    """By how much the largest logit of each row exceeds the second largest; infinity where there is only one."""
    if logits.shape[-1] == 1:
        return np.full(len(logits), math.inf)
    ranked: NDArray[np.float64] = np.sort(logits.astype(np.float64), axis=-1)
    return ranked[:, -1] - ranked[:, -2]


def _filters_in_doubt(logits: Logits, sampling: Sampling, slack: float) -> NDArray[np.bool_]:
    """Whether another set of characters might have passed the filters, (B,)."""
    weights = _weights(logits, sampling.temperature)
    kept = _kept(logits, weights, sampling.top_k, sampling.top_p, sampling.min_p)
    least_kept = np.where(kept, weights, math.inf).min(axis=-1)
    most_dropped = np.where(kept, 0.0, weights).max(axis=-1)
    # Two characters on either side of a cut might change places ...
    doubts: NDArray[np.bool_] = least_kept <= most_dropped * (1 + slack)
    # ... or the cut itself might move: a share of all by a quarter of the slack at most, a ratio by all of it.
    for sign in (-1, 1):
        top_p = sampling.top_p + sign * slack / 4 if sampling.top_p < 1 else 1.0
        moved = _kept(logits, weights, sampling.top_k, top_p, sampling.min_p * (1 + sign * slack))
        doubts |= (moved != kept).any(axis=-1)
    return doubts


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Products that do not fit lose their high bits, as they are meant to.
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
