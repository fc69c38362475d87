"""From logits to ids. Pure: the only randomness is the uniform number that is passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minigpt.errors import ConfigError

# More would overflow at a temperature near zero, where being greedy is what counts.
MOST_SLACK = 10.0

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


def uniform(seed: int, sample: int, position: int) -> float:
    """The number in [0, 1) that draws the character at a position of a sample: a fixed function of the three.

    Nothing else enters, so a text does not depend on how many others are written beside it, nor on how it is computed.

    Source:
        The output function of SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators",
        figure 17, with its increment), chained over the three words.
    """
    state = 0
    for word in (seed, sample, position):
        state = _mix((state ^ (word & _MASK_64)) + 0x9E3779B97F4A7C15 & _MASK_64)
    return (state >> 11) / (1 << 53)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is drawn from: temperature and filters applied, summing to 1.

    Args:
        logits: (B, V), any float dtype; not changed.
        sampling: with a temperature above 0.

    Returns:
        (B, V), float64 on the CPU, zero where a character was dropped.
    """
    # Few numbers, so exactness is free: float64 keeps the sums below from hiding a character.
    logits = logits.to("cpu", torch.float64)
    # Shifted first, so that a temperature near zero divides nothing positive, which could overflow.
    probs = ((logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature).softmax(dim=-1)
    if sampling.filters:
        # Ranked by logits, which a high temperature cannot make equal; stable, so that top-k keeps exactly k.
        order = logits.argsort(dim=-1, descending=True, stable=True)
        ranked = probs.gather(-1, order)
        if 0 < sampling.top_k < ranked.shape[-1]:
            ranked[:, sampling.top_k :] = 0
        if sampling.top_p < 1:
            ranked /= ranked.sum(dim=-1, keepdim=True)
            before = ranked.cumsum(dim=-1) - ranked
            ranked[before >= sampling.top_p] = 0
        ranked[ranked < sampling.min_p * ranked[:, :1]] = 0
        probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
    return probs / probs.sum(dim=-1, keepdim=True)


def sample(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Draws one id a row by inverting the cumulative distribution over ids at a uniform number.

    Args:
        logits: (B, V), any float dtype; not changed.
        uniforms: (B,), in [0, 1), float64 on the CPU; not used at temperature 0.
        sampling: how to draw.

    Returns:
        ids, (B,), int64 on the CPU. At temperature 0 the most probable; of equal ones, the first.
    """
    return sample_and_doubt(logits, uniforms, sampling, tolerance=0.0)[0]


def sample_and_doubt(logits: Tensor, uniforms: Tensor, sampling: Sampling, tolerance: float) -> tuple[Tensor, Tensor]:
    """`sample`, and for each row whether logits that differ by up to ``tolerance`` might have drawn another id.

    Two ways of computing the same logits differ by rounding. Where that cannot matter, and it hardly ever can, the id
    is the same for both; where it might, the caller can compute the logits more exactly.

    Returns:
        ids, (B,), int64, and doubts, (B,), bool, both on the CPU.
    """
    if sampling.temperature == 0:
        return logits.to("cpu").argmax(dim=-1), _lead(logits) <= 2 * tolerance
    probs = probabilities(logits, sampling)
    # A ratio of two probabilities changes by a factor of at most 1 + slack, hence a cumulative probability c by at
    # most slack * c * (1 - c); near a boundary c is u.
    slack = math.expm1(min(2 * tolerance / sampling.temperature, MOST_SLACK))
    cumulative = probs.cumsum(dim=-1)  # (B, V)
    # The first id whose cumulative probability exceeds u; a dropped character adds nothing, so it is never the first.
    # The last entry is 1 only to rounding: u is scaled by it, and kept below it where the product rounds up.
    total = cumulative[:, -1:]
    shifts = torch.tensor([0.0, -slack, slack], dtype=torch.float64)
    u = uniforms[:, None]
    targets = (u + u * (1 - u) * shifts).clamp(min=0) * total  # (B, 3)
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, targets, right=True)  # (B, 3)
    doubts = (drawn != drawn[:, :1]).any(dim=-1)
    if sampling.temperature < tolerance:
        # So cold that it is all but greedy.
        doubts |= _lead(logits) <= 2 * tolerance
    if sampling.filters and tolerance:
        doubts |= _filters_in_doubt(logits, probs, sampling, slack)
    return drawn[:, 0], doubts


def _lead(logits: Tensor) -> Tensor:
    """By how much the largest logit of each row exceeds the second largest; infinity where there is only one."""
    logits = logits.to("cpu", torch.float64)
    if logits.shape[-1] == 1:
        return torch.full(logits.shape[:1], math.inf, dtype=torch.float64)
    first, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


def _filters_in_doubt(logits: Tensor, probs: Tensor, sampling: Sampling, slack: float) -> Tensor:
    """Whether another set of characters might have passed the filters."""
    kept = probs > 0
    unfiltered = probabilities(logits, Sampling(sampling.temperature))
    least_kept = unfiltered.masked_fill(~kept, math.inf).amin(dim=-1)
    most_dropped = unfiltered.masked_fill(kept, 0.0).amax(dim=-1)
    # Two characters on either side of a cut might change places ...
    doubts = least_kept <= most_dropped * (1 + slack)
    # ... or the cut itself might move.
    for sign in (-1, 1):
        moved = replace(
            sampling,
            top_p=sampling.top_p if sampling.top_p == 1 else min(1.0, max(sampling.top_p + sign * slack / 4, 1e-300)),
            min_p=min(1.0, max(0.0, sampling.min_p * (1 + sign * slack))),
        )
        doubts |= ((probabilities(logits, moved) > 0) != kept).any(dim=-1)
    return doubts


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK_64
    return z ^ z >> 31
