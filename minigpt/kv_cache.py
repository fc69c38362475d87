"""Keys and values of the positions that attention can still read, and the one count of positions seen.

Owns memory and position; knows nothing of how keys are made or read (``model.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt.config import GPTConfig


class KVCache:
    """A ring of ``window`` slots a layer: position p lives in slot p % window.

    Attention reads the last ``window`` positions and no others (it is so defined, and so trained), hence a slot that
    is written over held a position which nothing can read any more. Keys are stored as they are read, that is after
    rotation; queries are not stored, since no later position ever needs them.

    Args:
        config: shape of the model it serves.
        batch_size: texts written side by side.
        dtype, device: those of the model's weights.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self.window = config.window
        shape = (config.n_layer, batch_size, config.n_head, config.window, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        # Positions seen so far. Whoever stores new ones moves it, once, after the last layer.
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Memory of all layers, in bytes; it never grows."""
        return self.keys.nbytes + self.values.nbytes

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the keys and values of new positions and returns all that these positions may read.

        Args:
            layer: index of the layer, from 0.
            k, v: of the T positions that follow the ``length`` ones seen, (B, H, T, D).

        Returns:
            Keys and values, (B, H, S, D). For one new position they are a view of the ring, in slot order (attention
            does not care about the order of keys), with S <= window; do not write to it. For more, up to window - 1
            earlier positions come before the T new ones, all in order.
        """
        T = k.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        if T == 1:
            slot = self.length % self.window
            keys.select(2, slot).copy_(k.select(2, 0))
            values.select(2, slot).copy_(v.select(2, 0))
            if self.length + 1 >= self.window:
                return keys, values
            return keys[:, :, : self.length + 1], values[:, :, : self.length + 1]

        # The earlier positions are gathered (copied) before the ring is written: new ones may take their slots.
        earlier = self._slots(self.length - min(self.length, self.window - 1), self.length)
        visible_k = torch.cat((keys[:, :, earlier], k), dim=2)  # (B, H, S, D)
        visible_v = torch.cat((values[:, :, earlier], v), dim=2)  # (B, H, S, D)
        kept = min(T, self.window)
        slots = self._slots(self.length + T - kept, self.length + T)
        keys[:, :, slots] = k[:, :, T - kept :]
        values[:, :, slots] = v[:, :, T - kept :]
        return visible_k, visible_v

    def advance(self, n: int) -> None:
        """Counts n new positions, once all layers have stored them."""
        self.length += n

    def repeat(self, n: int) -> KVCache:
        """A cache for n copies of this one text, so that a common prompt is read once.

        Raises:
            ValueError: this cache serves more than one text.
        """
        if self.keys.shape[1] != 1:
            raise ValueError(f"only a cache of one text can be repeated, not one of {self.keys.shape[1]}")
        copy = KVCache(self._config, n, dtype=self.keys.dtype, device=self.keys.device)
        copy.length = self.length
        copy.keys.copy_(self.keys.expand_as(copy.keys))
        copy.values.copy_(self.values.expand_as(copy.values))
        return copy

    def _slots(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.keys.device) % self.window


class RingSlot:
    """A full ring with the slot of the next position as a number in the device's own memory, for steps that are
    captured once and repeated (`captured`)."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        # To be set before each step, (1,).
        self.slot = torch.zeros(1, dtype=torch.int64, device=kv_cache.keys.device)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the key and value of one new position, (B, H, 1, D); returns those of all slots, (B, H, W, D)."""
        keys, values = self._kv_cache.keys[layer], self._kv_cache.values[layer]
        return keys.index_copy_(2, self.slot, k), values.index_copy_(2, self.slot, v)
