"""The network: a decoder-only transformer with rotary positions and sliding-window causal attention.

`GPT` is a pure function of weights, ids and an optional cache. It keeps no state between calls; the loss lives with
the trainer, sampling with the generator, positions with the cache.

Shape letters, used in all comments:
    B  batch                    T  new positions in this call        S  key positions visible, cached + new (S >= T)
    C  n_embd                   H  n_head                            D  head_dim = C / H
    V  vocab_size               F  n_inner
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from minigpt import kernels
from minigpt.config import GPTConfig
from minigpt.kv_cache import KVCache, RingSlot

# Base of the rotary frequencies (Su et al. 2021, "RoFormer", section 3.2.2, after Vaswani et al. 2017, section 3.5).
ROPE_BASE = 10_000.0
# Positions whose angles are made at once and kept.
TABLE = 1024
# Keeps the norm of an all-zero row finite; the value of Qwen3, whose network this is.
NORM_EPS = 1e-6


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention, as the formula has it: softmax(q k^T / sqrt(D)) v.

    The reference for `window_attention`, which the model runs; the two agree to rounding.

    Args:
        q: queries, (B, H, T, D).
        k, v: keys and values, (B, H, S, D).
        mask: (T, S), true where a query may read a key; None lets every query read every key.

    Returns:
        For each query the mean of the values, weighted by how well their keys match it, (B, H, T, D).

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", equation 1.
    """
    return attention_weights(q, k, mask) @ v


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """How much each query reads of each key, (B, H, T, S): rows that sum to 1. Arguments as of `attention`.

    For q and k of unit variance a product q k^T has variance D; the division brings it back to 1 and keeps the softmax
    from saturating (the source's section 3.2.1).
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(dim=-1)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The same function as `attention` for the last T of S positions, each of which reads the window that ends with it.

    Args:
        q: queries, (B, H, T, D).
        k, v: keys and values, (B, H, S, D), of the positions up to the last query's. For a single query no more than
            those it may read, in any order.
        window: keys that a query may read, its own position's included.

    Returns:
        (B, H, T, D).
    """
    T, S = q.shape[2], k.shape[2]
    if T == 1:
        return functional.scaled_dot_product_attention(q, k, v)
    if q.is_cpu:
        return kernels.banded_attention(q, k, v, window)
    mask = kernels.sliding_window_mask(T, S, window, q.device)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def rotary_angles(
    start: int, T: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles by which positions start ... start + T - 1 turn their pairs of channels.

    Computed in float64 and cast at the end: in float32 the angle of position 10^6 would be off by up to 0.03.

    Returns:
        cos, sin, each (T, D), as `rotate` takes them: those of pair i stand at channels i and i + D / 2, the sine
        negative at the first. Do not write to them.

    Source:
        Su et al. 2021, "RoFormer", equation 15: pair i of position p turns by p * base^(-2 i / D).
    """
    first = start - start % TABLE
    if start + T <= first + TABLE:
        # Writing takes one position at a time.
        cos, sin = _table(first, TABLE, head_dim, dtype, device)
        return cos[start - first : start - first + T], sin[start - first : start - first + T]
    return _table.__wrapped__(start, T, head_dim, dtype, device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _table(start: int, T: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    # MPS has no float64, so the angles are made on the CPU there.
    exact = torch.device("cpu") if torch.device(device).type == "mps" else device
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device=exact)
    position = torch.arange(start, start + T, dtype=torch.float64, device=exact)
    angle = position[:, None] * ROPE_BASE ** (-pair / head_dim)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=1).to(dtype).to(device), torch.cat((-sin, sin), dim=1).to(dtype).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i + D/2}) of the last axis by its angle, so that q . k depends on distance alone.

    RoFormer pairs neighbours instead of halves; only the order of channels differs. Halves are what Llama and Qwen do.

    Args:
        x: (..., T, D).
        cos, sin: (T, D), of `rotary_angles`.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin)


def norm_rotate(qk: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys as scores take them: each head normed, then turned by its position.

    Args:
        qk: both, (B, T, 2, H, D).
        q_gain, k_gain: weights of the norms, (D,).
        cos, sin: (T, D), of `rotary_angles`.

    Returns:
        q, k, each (B, H, T, D).
    """
    if _trains_on_cpu(qk):
        pairs = zip(qk.unbind(2), (q_gain, k_gain), strict=True)
        return tuple(kernels.norm_rotate(x, gain, cos, sin, NORM_EPS) for x, gain in pairs)
    # Both at once: for a single position it is the number of calls that takes the time.
    gains = torch.stack((q_gain, k_gain))[:, None]  # (2, 1, D)
    if qk.is_cpu and not torch.is_grad_enabled():
        normed = kernels.rms_norm(qk, gains, NORM_EPS)
    else:
        normed = functional.rms_norm(qk, qk.shape[-1:], eps=NORM_EPS) * gains
    return rotate(normed.permute(2, 0, 3, 1, 4), cos, sin).unbind(0)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of both side by side, (..., 2 F) to (..., F) (Shazeer 2020, "GLU Variants", section 2)."""
    if _trains_on_cpu(gate_up):
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _trains_on_cpu(x: Tensor) -> bool:
    """Whether the kernels with gradients of their own pay."""
    return x.is_cpu and torch.is_grad_enabled()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off for a while. Not to be held over a ``yield``, where others may switch the model too."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


class RMSNorm(nn.RMSNorm):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, NORM_EPS) if x.is_cpu else super().forward(x)


class WindowAttention(nn.Module):
    """`window_attention` with the model's window. A module without weights, so that hooks can see what it reads."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(q, k, v, self.window)


def _dropped(y: Tensor, module: SelfAttention | MLP) -> Tensor:
    """What a layer adds, in training without the share that is dropped."""
    return functional.dropout(y, module.dropout) if module.dropout and module.training else y


class SelfAttention(nn.Module):
    """Every position asks (query), offers (key) and tells (value); it gathers what the positions it may see tell."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        # A norm on queries and keys bounds the scores, which large Muon steps would let grow without end
        # (Henry et al. 2020, "Query-Key Normalization for Transformers").
        self.q_norm = RMSNorm(config.head_dim)
        self.k_norm = RMSNorm(config.head_dim)
        self.read = WindowAttention(config.window)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        layer: int,
        kv_cache: KVCache | RingSlot | None,
    ) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, H, D)
        q, k = norm_rotate(qkv[:, :, :2], self.q_norm.weight, self.k_norm.weight, *angles)  # (B, H, T, D)
        v = qkv[:, :, 2].transpose(1, 2)  # (B, H, T, D)
        if kv_cache is not None:
            k, v = kv_cache.extend(layer, k, v)  # (B, H, S, D)
        y = self.read(q, k, v).transpose(1, 2).reshape(B, T, C)
        return _dropped(self.proj(y), self)


class MLP(nn.Module):
    """A gated feed-forward layer, SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants", section 2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.gate_up = nn.Linear(config.n_embd, 2 * config.n_inner, bias=False)
        self.down = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _dropped(self.down(swiglu(self.gate_up(x))), self)


class Block(nn.Module):
    """One layer: attention, then the feed-forward network, each on a normed copy and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd)
        self.attn = SelfAttention(config)
        self.norm_2 = RMSNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        layer: int,
        kv_cache: KVCache | RingSlot | None,
    ) -> Tensor:
        x = x + self.attn(self.norm_1(x), angles, layer, kv_cache)
        x = x + self.mlp(self.norm_2(x))
        return x


class GPT(nn.Module):
    """The language model: ids in, logits of the next id out, for every position.

    Args:
        config: its shape.
        generator: draws the initial weights; None takes torch's global one.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        # A ModuleList, told to the type checker as what it holds.
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(config) for _ in range(config.n_layer)))
        self.norm_f = RMSNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._initialise(generator)

    def forward(self, idx: Tensor, kv_cache: KVCache | None = None) -> Tensor:
        """Logits of the id that follows each position.

        Args:
            idx: ids, (B, T), of any T >= 1: the context is limited by the window alone.
            kv_cache: what earlier calls left of the positions before ``idx``. It takes in the new ones, and the logits
                are those that the whole sequence without a cache would give. None starts at position 0 and keeps
                nothing.

        Returns:
            Logits, (B, T, V).
        """
        T = idx.shape[1]
        weight = self.wte.weight
        start = kv_cache.length if kv_cache is not None else 0
        angles = rotary_angles(start, T, self.config.head_dim, weight.dtype, weight.device)
        logits = self.with_angles(idx, angles, kv_cache)
        if kv_cache is not None:
            kv_cache.advance(T)
        return logits

    def with_angles(
        self, idx: Tensor, angles: tuple[Tensor, Tensor], kv_cache: KVCache | RingSlot | None = None
    ) -> Tensor:
        """`forward` for positions that are given by their `rotary_angles`; a cache takes them in uncounted."""
        x = self.wte(idx)  # (B, T, C)
        for layer, block in enumerate(self.blocks):
            x = block(x, angles, layer, kv_cache)
        logits: Tensor = self.lm_head(self.norm_f(x))  # (B, T, V)
        return logits

    @property
    def n_params(self) -> int:
        """Number of all weights."""
        return sum(param.numel() for param in self.parameters())

    def last_logits(self, idx: Tensor) -> Tensor:
        """The logits after the last position alone, as `forward` computes them, with about half of its work.

        In each layer only positions are computed that the last one can still see by way of the layers above.

        Args:
            idx: ids, (B, T).

        Returns:
            Logits, (B, V).
        """
        x = self.wte(idx)  # (B, T, C)
        cos, sin = rotary_angles(0, idx.shape[1], self.config.head_dim, x.dtype, x.device)
        for layer, block in enumerate(self.blocks):
            T = x.shape[1]
            x = block(x, (cos[-T:], sin[-T:]), layer, None)
            layers_above = self.config.n_layer - 1 - layer
            x = x[:, -(layers_above * (self.config.window - 1) + 1) :]
        logits: Tensor = self.lm_head(self.norm_f(x[:, -1]))
        return logits

    def set_dropout(self, share: float) -> None:
        """Drops that share of what each layer adds, in training, from here on."""
        self.config = replace(self.config, dropout=share)
        for block in self.blocks:
            block.attn.dropout = block.mlp.dropout = share

    def new_cache(self, batch_size: int = 1) -> KVCache:
        """An empty cache that fits these weights."""
        weight = self.lm_head.weight
        return KVCache(self.config, batch_size, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator | None) -> None:
        # As torch draws them by default: uniform in +-1 / sqrt(fan_in). The scale matters little, for what goes into
        # most of them is normed.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                module.weight.uniform_(-bound, bound, generator=generator)
        self.wte.weight.normal_(generator=generator)
        # Every layer starts as the identity and every prediction as uniform, so all that is added is learnt (Yang et
        # al. 2021, "Tensor Programs V", appendix D.2, for the output layer).
        for block in self.blocks:
            block.attn.proj.weight.zero_()
            block.mlp.down.weight.zero_()
        self.lm_head.weight.zero_()
