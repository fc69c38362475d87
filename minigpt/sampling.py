"""From logits to ids. Pure: the only randomness is the uniform number that is passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.errors import ConfigError

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
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be a number of characters, or 0 for all of them")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1 (1 is off)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p} must be from 0 (off) to 1")


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
    probs = (logits.to("cpu", torch.float64) / sampling.temperature).softmax(dim=-1)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        # Stable, so that equal logits are ranked by id and top-k keeps exactly k.
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
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

    A logit that moves by rounding moves the boundaries between ids by as little, so two computations of the same
    logits almost never part: for a gap of 1e-6, about once in a million characters.

    Args:
        logits: (B, V), any float dtype; not changed.
        uniforms: (B,), in [0, 1), float64 on the CPU; not used at temperature 0.
        sampling: how to draw.

    Returns:
        ids, (B,), int64 on the CPU. At temperature 0 the most probable; of equal ones, the first.
    """
    if sampling.temperature == 0:
        return logits.to("cpu").argmax(dim=-1)
    cumulative = probabilities(logits, sampling).cumsum(dim=-1)  # (B, V)
    # The first id whose cumulative probability exceeds u; a dropped character adds nothing, so it is never the first.
    # The last entry is 1 only to rounding: u is scaled by it, and kept below it where the product rounds up.
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK_64
    return z ^ z >> 31
