"""What each step of writing computes, reads, stores and gives up: with the cache, and by recompute.

Both ways are taken down from passes of the model itself; only multiply-adds, which no pass tells of, are reckoned, by
the formula of `bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.bench import work_per_character
from minigpt.explain.recording import Recording, record
from minigpt.generation import generate
from minigpt.kv_cache import KVCache
from minigpt.model import GPT
from minigpt.sampling import Sampling


@dataclass(frozen=True)
class RingMoves:
    """What the ring of one layer did in one step; positions count from 0."""

    # Positions whose keys and values attention was given, in the order in which it was given them.
    read: tuple[int, ...]
    # (slot, position) of those that were stored, and of those that lay there until then.
    written: tuple[tuple[int, int], ...]
    evicted: tuple[tuple[int, int], ...]
    # The position in each slot after the step, None where nothing was stored yet.
    held: tuple[int | None, ...]


@dataclass(frozen=True)
class Pass:
    """One pass of the model; shape letters as in `model`."""

    # Positions that went through the model; each made a query, a key and a value in every layer.
    computed: range
    # Positions whose keys and values attention was given, sorted.
    read: tuple[int, ...]
    # Of each layer, (B, H, T, D) and (B, H, S, D).
    q_shape: tuple[int, ...]
    kv_shape: tuple[int, ...]
    # Rows of logits that it gave, T, of which the last one is used.
    logit_rows: int
    # Multiply-adds of this pass, and of all so far.
    work: int
    work_so_far: int
    # Bytes of the keys and values of all layers: of those that were made, and of those that were read, counted once for
    # each query that reads them (a kernel may fetch them once for several). Of this pass, and of all so far. Weights,
    # of which both ways read all in every pass, are left out.
    made_bytes: int
    made_bytes_so_far: int
    read_bytes: int
    read_bytes_so_far: int


@dataclass(frozen=True)
class Step:
    """The writing of one character, both ways."""

    cached: Pass
    recomputed: Pass
    # Of each layer, with the cache.
    rings: tuple[RingMoves, ...]
    # The id that `generate` writes with the cache and by recompute.
    cached_id: int
    recomputed_id: int
    # Largest difference of any two logits after the last position.
    logit_gap: float


class WatchedCache(KVCache):
    """A cache that tells which positions its rings take, hold, give to attention and give up.

    Positions are recognised by their keys and values, bit for bit, where they really are: in the ring before and after,
    and in what attention is given. So what it tells is what happened, and not what should have.

    Args:
        model: that it serves, with one text.
    """

    def __init__(self, model: GPT) -> None:
        weight = model.lm_head.weight
        super().__init__(model.config, dtype=weight.dtype, device=weight.device)
        # Of the last call of the model, one a layer.
        self.moves: list[RingMoves] = []
        self._position_of: list[dict[bytes, int]] = [{} for _ in range(model.config.n_layer)]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == 0:
            self.moves = []
        known = self._position_of[layer]
        before = self._held(layer)
        known.update((row, self.length + i) for i, row in enumerate(_rows(k, v)))
        given = super().extend(layer, k, v)
        after = self._held(layer)
        changed = [slot for slot, position in enumerate(after) if position != before[slot]]
        self.moves.append(
            RingMoves(
                read=tuple(known[row] for row in _rows(*given)),
                written=tuple((slot, position) for slot in changed if (position := after[slot]) is not None),
                evicted=tuple((slot, position) for slot in changed if (position := before[slot]) is not None),
                held=after,
            )
        )
        return given

    def _held(self, layer: int) -> tuple[int | None, ...]:
        known = self._position_of[layer]
        return tuple(known.get(row) for row in _rows(self.keys[layer], self.values[layer]))


def steps(model: GPT, prompt: Sequence[int], length: int) -> Iterator[Step]:
    """Writes the likeliest characters after a prompt both ways, as `generate` does, and takes down every step.

    The first step reads the prompt. From then on each takes in the character that was written last, and writes one.

    Args:
        prompt: ids, at least one. Positions count from its first one, or from the first that can influence the next
            character: those before it are not read.
        length: steps, at least one.

    Yields:
        Each step as soon as it is taken.
    """
    ids = list(prompt[-model.config.receptive_field :])
    written = [
        generate(model, ids, length, sampling=Sampling(temperature=0.0), use_cache=use_cache)
        for use_cache in (True, False)
    ]
    kv_cache = WatchedCache(model)
    last: Step | None = None
    for (cached_id,), (recomputed_id,) in zip(*written, strict=True):
        end = len(ids)
        once = record(model, ids[kv_cache.length : end], kv_cache)
        again = record(model, ids[max(0, end - model.config.receptive_field) : end])
        last = Step(
            _pass(model, once, end, last.cached if last else None, kv_cache.moves[0].read),
            _pass(model, again, end, last.recomputed if last else None),
            tuple(kv_cache.moves),
            cached_id,
            recomputed_id,
            (once.logits[-1] - again.logits[-1]).abs().max().item(),
        )
        ids.append(cached_id)
        yield last


def _pass(model: GPT, recording: Recording, end: int, before: Pass | None, read: tuple[int, ...] | None = None) -> Pass:
    """What a pass over the positions up to ``end`` did.

    Args:
        before: the pass of the same way in the step before.
        read: positions that attention was given; None for those that went through the model and no others.
    """
    layer = recording.layers[0]
    T = layer.q.shape[1]
    computed = range(end - T, end)
    # As many multiply-adds as the recompute of a text of T characters needs, unless it goes on from a cache.
    work = work_per_character(model.config, end - 1 if T == 1 else T - 1, cached=T == 1)
    row_bytes = sum((each.k.nbytes + each.v.nbytes) // each.k.shape[1] for each in recording.layers)
    read_bytes = sum(
        int(each.mask.sum()) * (each.k.nbytes + each.v.nbytes) // each.k.shape[1] for each in recording.layers
    )
    return Pass(
        computed,
        tuple(sorted(read)) if read is not None else tuple(computed),
        (1, *layer.q.shape),
        (1, *layer.k.shape),
        len(recording.logits),
        work,
        work + (before.work_so_far if before else 0),
        T * row_bytes,
        T * row_bytes + (before.made_bytes_so_far if before else 0),
        read_bytes,
        read_bytes + (before.read_bytes_so_far if before else 0),
    )


def _rows(k: Tensor, v: Tensor) -> list[bytes]:
    """The key and the value of each position as bytes; k and v of one text, (1, H, S, D)."""
    rows = torch.cat((k[0], v[0]), dim=-1).transpose(0, 1).cpu().contiguous()  # (S, H, 2 D)
    return [row.tobytes() for row in rows.numpy()]
