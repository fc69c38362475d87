"""What attention computes while a model reads a text, taken down by hooks on the model's own modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minigpt.kernels import sliding_window_mask
from minigpt.kv_cache import KVCache
from minigpt.model import GPT, attention_weights, evaluating


@dataclass(frozen=True)
class LayerRecording:
    """What one layer's attention was given and what it gave; shape letters as in `model`, without B.

    Queries and keys are normed and rotated, as scores take them.
    """

    # (H, T, D).
    q: Tensor
    # (H, S, D).
    k: Tensor
    v: Tensor
    # What the attention of the model gave, (H, T, D).
    y: Tensor
    # Which of the S keys each query may read, (T, S).
    mask: Tensor

    @property
    def scores(self) -> Tensor:
        """q k^T, before the scale and the mask, (H, T, S)."""
        return self.q @ self.k.mT

    @property
    def weights(self) -> Tensor:
        """How much each position reads of each other, by the reference formula, (H, T, S): weights @ v is y."""
        return attention_weights(self.q, self.k, self.mask)


@dataclass(frozen=True)
class Recording:
    """A pass over some positions of one text."""

    layers: tuple[LayerRecording, ...]
    # (T, V).
    logits: Tensor


@torch.inference_mode()
def record(model: GPT, ids: Sequence[int], kv_cache: KVCache | None = None) -> Recording:
    """Reads ids, at least one, and takes down the attention of every layer.

    Args:
        kv_cache: of one text, of the positions before; moved on as by `GPT.forward`. None starts at position 0.
    """
    taken: list[tuple[Tensor, ...]] = []
    with evaluating(model), _hooks(model, taken):
        logits = model(torch.tensor([list(ids)], device=model.lm_head.weight.device), kv_cache)
    layers = []
    for q, k, v, y in taken:
        T, S = q.shape[1], k.shape[1]
        # A single query is given only keys that it may read, in any order.
        mask = sliding_window_mask(T, S, model.config.window) if T > 1 else torch.ones(1, S, dtype=torch.bool)
        layers.append(LayerRecording(q, k, v, y, mask))
    return Recording(tuple(layers), logits[0].cpu())


@contextmanager
def _hooks(model: GPT, taken: list[tuple[Tensor, ...]]) -> Iterator[None]:
    def take(_: Any, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        # Copies: what a cache gives is a view of what later positions write over.
        taken.append(tuple(each[0].cpu().clone() for each in (*inputs, y)))

    handles = [block.attn.read.register_forward_hook(take) for block in model.blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
