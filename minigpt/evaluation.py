"""How well a model predicts a text, in nats a character: in training-sized windows, as one stream, by position.

Nothing here samples or learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from minigpt.corpus import Ids
from minigpt.model import GPT, evaluating
from minigpt.parallel import ALONE, World

# Characters computed in one call: enough to keep the processor busy, few enough for a laptop's memory.
CHARS_PER_CALL = 8192
# Positions of one stream read in one call.
STREAM_CHUNK = 512


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target), in nats a character; logits (B, T, V), targets (B, T)."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.inference_mode()
def window_loss(model: GPT, ids: Ids, max_chars: int = 0, world: World = ALONE) -> float:
    """Mean loss over consecutive windows of the block size, each read from an empty context, as in training.

    Args:
        ids: a text of at least 2 characters, (N,). What does not fill a window at its end is left out; a text shorter
            than one window is read as one.
        max_chars: read only as many windows as hold this many characters (at least one), evenly spaced over the
            text; 0 reads all.
        world: processes that share the windows among them; each returns the mean over all of them.

    Raises:
        ValueError: the text is shorter than 2 characters.
    """
    if len(ids) < 2:
        raise ValueError("a loss needs at least 2 characters")
    T = min(model.config.block_size, len(ids) - 1)
    there_are, n_read = n_windows(len(ids), T), n_windows(len(ids), T, max_chars)
    starts = np.arange(n_read) * there_are // n_read * T
    # Of more processes than windows some have none.
    own = starts[world.share(n_read)]
    total = 0.0
    with evaluating(model):
        for batch in np.array_split(own, min(len(own), -(-len(own) * T // CHARS_PER_CALL))) if len(own) else []:
            windows = torch.from_numpy(ids[batch[:, None] + np.arange(T + 1)].astype(np.int64))
            windows = windows.to(model.lm_head.weight.device)
            total += cross_entropy(model(windows[:, :-1]), windows[:, 1:]).item() * len(batch)
    return world.sum(total) / n_read


def n_windows(n_ids: int, block_size: int, max_chars: int = 0) -> int:
    """How many windows `window_loss` reads of a text: at least one; ``max_chars`` of 0 is all there are."""
    there_are = max(1, (n_ids - 1) // block_size)
    return min(there_are, max(1, max_chars // block_size)) if max_chars else there_are


@torch.inference_mode()
def stream_losses(model: GPT, ids: Ids) -> Iterator[NDArray[np.float32]]:
    """The loss of every character but the first, each predicted from all that came before it, in one stream.

    The text goes through the cache in chunks, so any length takes the same memory.

    Yields:
        Losses in nats, a chunk at a time, (n,); len(ids) - 1 in all.
    """
    for _, losses in stream(model, len(ids), lambda start, stop: torch.from_numpy(ids[start:stop].astype(np.int64))):
        yield losses.cpu().numpy()


@torch.inference_mode()
def stream(model: GPT, n: int, ids: Callable[[int, int], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Reads a text of n characters in one stream, through the cache in chunks.

    Args:
        ids: gives those from a start to a stop, (stop - start,); the stop may lie past the end.

    Yields:
        Of the characters of a chunk, n - 1 in all: the logits they were predicted with, (n, V), and their losses in
        nats, (n,), float32.
    """
    kv_cache = model.new_cache()
    for start in range(0, n - 1, STREAM_CHUNK):
        chunk = ids(start, start + STREAM_CHUNK + 1).to(model.lm_head.weight.device)
        with evaluating(model):
            logits = model(chunk[None, :-1], kv_cache)[0]
        yield logits, functional.cross_entropy(logits, chunk[1:], reduction="none").float()


@torch.inference_mode()
def loss_by_position(model: GPT, ids: Ids, length: int, max_streams: int = 32) -> NDArray[np.float64]:
    """Mean loss at each position of a stream that starts from an empty context.

    Args:
        ids: the text, cut into consecutive streams.
        length: predictions a stream.
        max_streams: use at most this many, evenly spaced.

    Returns:
        Losses in nats, (length,): entry i is that of predicting a character from the i + 1 before it.

    Raises:
        ValueError: the text is too short for one stream.
    """
    if len(ids) <= length:
        raise ValueError(f"a stream of {length} predictions needs {length + 1} characters, not {len(ids)}")
    starts = np.arange(0, len(ids) - length, length)
    if len(starts) > max_streams:
        starts = starts[np.arange(max_streams) * len(starts) // max_streams]
    streams = torch.from_numpy(ids[starts[:, None] + np.arange(length + 1)].astype(np.int64))
    streams = streams.to(model.lm_head.weight.device)
    kv_cache = model.new_cache(len(starts))
    losses = np.empty(length)
    chunk = max(1, CHARS_PER_CALL // len(starts))
    with evaluating(model):
        for start in range(0, length, chunk):
            x = streams[:, start : min(start + chunk, length)]
            y = streams[:, start + 1 : start + 1 + x.shape[1]]
            logits = model(x, kv_cache)  # (B, T, V)
            loss = functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")  # (B, T)
            losses[start : start + x.shape[1]] = loss.double().mean(dim=0).cpu().numpy()
    return losses
