"""What each head reads, beside the uniform average, and the way from a query to what its position gathers.

Shape letters as in `model`, without B: one text of T positions is read at once, so S = T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minigpt.errors import ConfigError, PromptError
from minigpt.explain.recording import LayerRecording, record
from minigpt.model import GPT, attention, attention_weights, window_attention

# Every head keeps a square of weights, and nobody looks at more.
MOST_CHARS = 1000
# Batch, positions and channels of the chapter's example, and its head size.
TOY_SHAPE = (2, 4, 6)
TOY_HEAD_SIZE = 16


@dataclass(frozen=True)
class Head:
    """What one head reads in a text; layer and head count from 1."""

    layer: int
    head: int
    # How much each position reads of each, (T, T), rows that sum to 1.
    weights: Tensor
    # Of each row, in bits, (T,): 0 where one character is read alone, log2(n) where n are read alike.
    entropy: Tensor
    # How far back each position reads in the mean, in characters, (T,).
    distance: Tensor


@dataclass(frozen=True)
class Attention:
    """What the heads of a model read in a text."""

    window: int
    head_dim: int
    # Which keys each position may read, (T, T).
    mask: Tensor
    # The average of all that a position may read, which the chapter starts from, as a head.
    uniform: Head
    # Those asked for, layer by layer.
    heads: tuple[Head, ...]
    layers: tuple[LayerRecording, ...]

    @property
    def readable(self) -> Tensor:
        """How many keys each position may read, (T,)."""
        return self.mask.sum(dim=-1)

    def departure(self, head: Head) -> Tensor:
        """How far each row is from the uniform average, in bits, (T,).

        The Kullback-Leibler divergence of the weights from 1 / n for each of the n readable keys, which is what their
        entropy lacks to log2(n) (Cover and Thomas 2006, "Elements of Information Theory", equation 2.94).
        """
        return self.uniform.entropy - head.entropy


@torch.inference_mode()
def explain_attention(model: GPT, ids: Sequence[int], layer: int | None = None, head: int | None = None) -> Attention:
    """Reads a text and takes down what its heads read.

    Args:
        ids: of the text, from 1 to `MOST_CHARS`.
        layer, head: the only ones to look at, from 1; None takes them all.

    Raises:
        ConfigError: there is no such layer or head.
        PromptError: the text is too long.
    """
    config = model.config
    chosen_layers = _chosen("layer", layer, config.n_layer)
    chosen_heads = _chosen("head", head, config.n_head)
    if len(ids) > MOST_CHARS:
        raise PromptError(
            f"the prompt has {len(ids):,} characters, and the weights of at most {MOST_CHARS:,} can be shown:"
            " give a part of it"
        )
    layers = record(model, ids).layers
    heads = []
    for number in chosen_layers:
        weights = layers[number - 1].weights
        heads += [_head(number, each, weights[each - 1]) for each in chosen_heads]
    # Queries of nothing but zeros prefer no key to another.
    first = layers[0]
    uniform = attention_weights(torch.zeros_like(first.q[0]), first.k[0], first.mask)
    return Attention(config.window, config.head_dim, first.mask, _head(0, 0, uniform), tuple(heads), layers)


def furthest(seen: Attention, position: int | None = None) -> Head:
    """The head that departs most from the uniform average: in the mean, or at one position.

    Raises:
        ConfigError: there is no such position.
    """
    if position is None:
        return max(seen.heads, key=lambda head: float(seen.departure(head).mean()))
    _check_position(seen, position)
    return max(seen.heads, key=lambda head: float(seen.departure(head)[position]))


@dataclass(frozen=True)
class Stages:
    """What `attention_weights` computes on its way, each of one shape."""

    # q k^T.
    scores: Tensor
    # The same, divided by sqrt(D).
    scaled: Tensor
    # Minus infinity for the keys that may not be read.
    masked: Tensor
    # The softmax of that.
    weights: Tensor


def stages(q: Tensor, k: Tensor, mask: Tensor) -> Stages:
    """Runs `attention_weights` and takes down the result of each of its operators; arguments and shapes as there."""
    taken = _Taken()
    with taken:
        attention_weights(q, k, mask)
    return Stages(*(taken.results[name] for name in ("matmul", "div", "masked_fill", "softmax")))


class _Taken(TorchFunctionMode):
    """Keeps what each function of torch gives, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.results[func.__name__] = func(*args, **(kwargs or {}))
        return result


@dataclass(frozen=True)
class Step:
    """How one position of one head gathers what it gathers. Layers and heads count from 1, positions from 0."""

    layer: int
    head: int
    position: int
    # Normed and turned by its position, (D,).
    query: Tensor
    # Of all positions, (T, D).
    keys: Tensor
    values: Tensor
    # Which keys it may read, (T,).
    readable: Tensor
    # Each (T,).
    stages: Stages
    # weights @ values by the reference formula, (D,).
    output: Tensor
    # What the attention of the model gave while it read the text, (D,).
    model_output: Tensor

    @property
    def parts(self) -> Tensor:
        """What each key's value adds to the sum, (T, D)."""
        return self.stages.weights[:, None] * self.values

    @property
    def entropy(self) -> float:
        """Of the weights, in bits."""
        return float(_entropy(self.stages.weights))

    @property
    def gap(self) -> float:
        """The largest difference between the two outputs."""
        return float((self.output - self.model_output).abs().max())


@torch.inference_mode()
def explain_step(seen: Attention, head: Head, position: int) -> Step:
    """Takes one position, from 0, of a head apart.

    Raises:
        ConfigError: there is no such position.
    """
    _check_position(seen, position)
    layer, h, row = seen.layers[head.layer - 1], head.head - 1, slice(position, position + 1)
    q, k, v, mask = layer.q[h, row], layer.k[h], layer.v[h], layer.mask[row]
    way = stages(q, k, mask)
    return Step(
        head.layer,
        head.head,
        position,
        q[0],
        k,
        v,
        mask[0],
        Stages(way.scores[0], way.scaled[0], way.masked[0], way.weights[0]),
        attention(q, k, v, mask)[0],
        layer.y[h, position],
    )


@dataclass(frozen=True)
class Toy:
    """The chapter's example: self-attention of random vectors, before anything has learnt."""

    # (B, T, C).
    x: Tensor
    # x through a linear layer each, (B, T, D).
    q: Tensor
    k: Tensor
    v: Tensor
    # The lower triangle, (T, T).
    mask: Tensor
    # Each (B, T, T).
    stages: Stages
    # (B, T, D).
    out: Tensor
    # The same by `window_attention`, which models run, (B, T, D).
    fused: Tensor
    # Weights of the uniform average, (T, T).
    uniform: Tensor
    # Of each row of the weights and of the uniform ones, in bits, (B, T) and (T,).
    entropy: Tensor
    uniform_entropy: Tensor

    @property
    def gap(self) -> float:
        """The largest difference between the formula and what models run."""
        return float((self.out - self.fused).abs().max())


@torch.inference_mode()
def explain_toy(seed: int) -> Toy:
    """Computes the chapter's example with the model's functions.

    The numbers are those that the chapter's lines give after ``torch.manual_seed(seed)``: x from ``torch.randn``, then
    the linear layers without bias in the order key, query, value. The state of torch's generator stays as it was.
    """
    B, T, C = TOY_SHAPE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(B, T, C)
        key, query, value = (nn.Linear(C, TOY_HEAD_SIZE, bias=False) for _ in range(3))
    q, k, v = query(x), key(x), value(x)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    way = stages(q, k, mask)
    # As many heads as the model's function wants: one.
    fused = window_attention(q[:, None], k[:, None], v[:, None], window=T)[:, 0]
    uniform = attention_weights(torch.zeros_like(q[0]), k[0], mask)
    return Toy(
        x, q, k, v, mask, way, attention(q, k, v, mask), fused, uniform, _entropy(way.weights), _entropy(uniform)
    )


def _check_position(seen: Attention, position: int) -> None:
    T = seen.mask.shape[0]
    if not 0 <= position < T:
        raise ConfigError(f"position {position} does not exist: this text has positions 0 to {T - 1}")


def _chosen(name: str, number: int | None, count: int) -> Sequence[int]:
    if number is None:
        return range(1, count + 1)
    if not 1 <= number <= count:
        there_are = f"{name}s 1 to {count}" if count > 1 else f"one {name}"
        raise ConfigError(f"{name} {number} does not exist: this model has {there_are}")
    return [number]


def _head(layer: int, head: int, weights: Tensor) -> Head:
    position = torch.arange(weights.shape[0], dtype=torch.float64)
    back = position[:, None] - position
    return Head(layer, head, weights, _entropy(weights), (weights.double() * back).sum(dim=-1))


def _entropy(weights: Tensor) -> Tensor:
    """-sum(p log2 p) of each row, in float64; what is not read adds nothing."""
    bits: Tensor = torch.special.entr(weights.double()).sum(dim=-1) / math.log(2)
    return bits
