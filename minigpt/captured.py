"""One step of writing on a GPU, captured as a CUDA graph: one launch instead of some hundred, each of which takes the
CPU longer to ask for than the GPU to do.

A graph repeats the same operations on the same memory. So all that changes from step to step is kept in tensors: ids,
the slot of the ring, the angles of the position. It begins when the ring is full: from there on all shapes stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minigpt.kv_cache import KVCache, RingSlot
from minigpt.model import GPT, rotary_angles

# Steps before a capture, which let libraries choose their kernels and take their memory (as torch's notes on CUDA
# graphs ask for).
WARM_UP = 3


class StaticStep:
    """A step of a model on a cache, on memory that stays where it is.

    Args:
        kv_cache: of the model, with at least ``window - 1`` positions; used in place.
    """

    @torch.inference_mode()
    def __init__(self, model: GPT, kv_cache: KVCache) -> None:
        if kv_cache.length < kv_cache.window - 1:
            raise ValueError(f"a static step needs a full ring, not {kv_cache.length} of {kv_cache.window} positions")
        weight = model.lm_head.weight
        self._model = model
        self.kv_cache = kv_cache
        self._ids = torch.zeros(kv_cache.keys.shape[1], 1, dtype=torch.int64, device=weight.device)
        self._ring = RingSlot(kv_cache)
        cos, sin = self._angles()
        self._angle = cos.clone(), sin.clone()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor

    @torch.inference_mode()
    def __call__(self, last: Sequence[int]) -> Tensor:
        """Puts the newest ids, (B,), into the cache.

        Returns:
            The logits of those that follow, (B, V), until the next call.
        """
        self._ids.copy_(torch.tensor(last)[:, None])
        self._ring.slot.fill_(self.kv_cache.length % self.kv_cache.window)
        for kept, angle in zip(self._angle, self._angles(), strict=True):
            kept.copy_(angle)
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()
        self.kv_cache.advance(1)
        return self._logits

    def run(self) -> None:
        """What a step does on the device; doing it once more changes nothing."""
        self._logits = self._model.with_angles(self._ids, self._angle, self._ring)[:, -1]

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures the step; calls then replay it. On a CUDA device only."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        # The slot that they write is written again by the step itself.
        self._ring.slot.fill_(self.kv_cache.length % self.kv_cache.window)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self.run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        self._graph = graph

    def _angles(self) -> tuple[Tensor, Tensor]:
        keys = self.kv_cache.keys
        return rotary_angles(self.kv_cache.length, 1, keys.shape[-1], keys.dtype, keys.device)
