"""The parts of the network that training spends its time in besides matrix products, each in few passes over memory.

Each computes a function of `model` and its gradient in place, where the plain formula would make a temporary tensor for
every operator. They serve the CPU; elsewhere the plain formulas do, compiled on CUDA.

Shape letters as in `model`: B, T, C, H, D, S, F.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

# Queries that share one slice of keys: with more, more of the scores that are computed lie outside of the window; with
# fewer, matrix products become too small for the processor.
QUERY_BLOCK = 64


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, (..., C) with a weight of (C,), without gradients of any
    shape that fits."""
    if not torch.is_grad_enabled():
        # As many operators as it needs, a third of what torch's own takes on the CPU.
        return (x * _inverse_rms(x, eps)).mul_(weight)
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of gate and up side by side, (..., 2 F) to (..., F)."""
    return cast(Tensor, _SwiGLU.apply(gate_up))  # type: ignore[no-untyped-call]


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Norms the heads of queries or keys and turns them by their positions, (B, T, H, D) to (B, H, T, D).

    Args:
        x: of any strides.
        weight: gains of the norm, (D,).
        cos, sin: (T, D), of `model.rotary_angles`.
        eps: of the norm.
    """
    return cast(Tensor, _NormRotate.apply(x, weight, cos, sin, eps))  # type: ignore[no-untyped-call]


def banded_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of the last T of S positions, each to the ``window`` positions that end with it.

    Its cost follows the window: a block of queries meets only the slice of keys that any of them may read.

    Args:
        q: (B, H, T, D).
        k, v: (B, H, S, D), S >= T.

    Returns:
        (B, H, T, D).
    """
    return cast(Tensor, _BandedAttention.apply(q, k, v, window))  # type: ignore[no-untyped-call]


def sliding_window_mask(T: int, S: int, window: int, device: torch.device | str = "cpu") -> Tensor:
    """Which keys the last T of S positions may read: themselves and the window - 1 positions before them.

    Returns:
        (T, S), true where query i, at position S - T + i, may read key j: S - T + i - window < j <= S - T + i.
    """
    query = torch.arange(S - T, S, device=device)[:, None]
    key = torch.arange(S, device=device)
    return (key <= query) & (key > query - window)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse_rms = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse_rms, weight)
        return (x * inverse_rms).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse_rms, weight = ctx.saved_tensors
        weight = weight.to(x.dtype)
        normed = x * inverse_rms
        return *_norm_backward(grads[0] * weight, grads[0] * normed, normed, inverse_rms, weight), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = functional.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(grads[0], activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        B, T, H, D = x.shape
        inverse_rms = _inverse_rms(x, eps)  # (B, T, H, 1)
        normed = x * inverse_rms
        turned = x.new_empty(B, H, T, D)
        first, second = normed.transpose(1, 2).chunk(2, dim=-1)  # (B, H, T, D / 2)
        turned_first, turned_second = turned.chunk(2, dim=-1)
        # The gains go into the angles' small tables instead of one more pass.
        gain_first, gain_second = weight.chunk(2)
        cos, sin = cos.chunk(2, dim=-1)[1], sin.chunk(2, dim=-1)[1]  # (T, D / 2)
        torch.mul(first, (cos * gain_first).to(x.dtype), out=turned_first)
        turned_first.addcmul_(second, (sin * gain_second).to(x.dtype), value=-1)
        torch.mul(first, (sin * gain_first).to(x.dtype), out=turned_second)
        turned_second.addcmul_(second, (cos * gain_second).to(x.dtype))
        ctx.save_for_backward(normed, inverse_rms, weight, cos, sin)
        return turned

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse_rms, weight, cos, sin = ctx.saved_tensors
        grad_first, grad_second = grads[0].transpose(1, 2).chunk(2, dim=-1)  # (B, T, H, D / 2)
        cos, sin = cos[:, None].to(normed.dtype), sin[:, None].to(normed.dtype)  # (T, 1, D / 2)
        # Turned back by the same angle.
        grad = torch.empty_like(normed)
        first, second = grad.chunk(2, dim=-1)
        torch.mul(grad_first, cos, out=first).addcmul_(grad_second, sin)
        torch.mul(grad_second, cos, out=second).addcmul_(grad_first, sin, value=-1)
        products = grad * normed
        weight = weight.to(normed.dtype)
        return *_norm_backward(grad.mul_(weight), products, normed, inverse_rms, weight), None, None, None


class _BandedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        B, H, T, D = q.shape
        S = k.shape[2]
        q, k, v = q.reshape(B * H, T, D), k.reshape(B * H, S, D), v.reshape(B * H, S, D)
        y = torch.empty_like(q)
        weights = []
        for rows, columns in _blocks(T, S, window):
            mask = _mask(rows.stop - rows.start, columns.stop - columns.start, window, q.dtype)
            scores = torch.baddbmm(mask, q[:, rows], k[:, columns].mT, alpha=1 / math.sqrt(D))
            weights.append(scores.softmax(dim=-1))
            y[:, rows] = weights[-1] @ v[:, columns]
        ctx.save_for_backward(q, k, v, *weights)
        ctx.window = window
        return y.view(B, H, T, D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *all_weights = ctx.saved_tensors
        B, H, T, D = grads[0].shape
        S = k.shape[1]
        grad_y = grads[0].reshape(B * H, T, D)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for weights, (rows, columns) in zip(all_weights, _blocks(T, S, ctx.window), strict=True):
            grad_v[:, columns] += weights.mT @ grad_y[:, rows]
            grad_weights = grad_y[:, rows] @ v[:, columns].mT
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            torch.mul(grad_scores @ k[:, columns], 1 / math.sqrt(D), out=grad_q[:, rows])
            grad_k[:, columns].add_(grad_scores.mT @ q[:, rows], alpha=1 / math.sqrt(D))
        return grad_q.view(B, H, T, D), grad_k.view(B, H, S, D), grad_v.view(B, H, S, D), None


def _blocks(T: int, S: int, window: int) -> Iterator[tuple[slice, slice]]:
    """For each block of the last T of S positions: its queries, and the keys that any of them may read."""
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        # Positions of the queries.
        first, last = S - T + start, S - T + stop
        yield slice(start, stop), slice(max(0, first - window + 1), last)


@lru_cache(maxsize=64)
def _mask(T: int, S: int, window: int, dtype: torch.dtype) -> Tensor:
    """0 where one of the last T of S positions may read a key, -inf elsewhere, (T, S)."""
    return torch.zeros(T, S, dtype=dtype).masked_fill(~sliding_window_mask(T, S, window), -math.inf)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept as one of length 1."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_scalar(eps, norm.dtype), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@lru_cache
@torch.inference_mode(False)
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor, kept: operators make one of every number that they are given."""
    return torch.tensor(value, dtype=dtype)


def _norm_backward(
    grad: Tensor, products: Tensor, normed: Tensor, inverse_rms: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight in y = weight * normed, where normed = x * inverse_rms.

    Args:
        grad: dL/dy * weight; overwritten.
        products: dL/dy * normed.
    """
    grad_weight = products.flatten(0, -2).sum(0)
    # What would only lengthen x is lost: the part along the normed x.
    along = (products @ weight).div_(normed.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(normed, along, value=-1).mul_(inverse_rms), grad_weight
