"""Writing text: the prompt is read once, then one character a step, with a cache or by recomputing the prefix.

Yields ids; what to do with them (decode, print, time, stop early) is the caller's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.engine import RUN, Drawn, Engine, TorchEngine, draw
from minigpt.kv_cache import KVCache
from minigpt.model import GPT, evaluating
from minigpt.sampling import Sampling, uniforms

# Prompt positions read in one call: enough to keep the processor busy, few enough to keep memory flat.
PREFILL_CHUNK = 512


# Two float32 computations of the same logits were seen to differ by 1.2e-6 (root mean square; 9e-6 at most among
# 100,000). Where a difference of this much could change a draw, float64 decides, with the cache and without alike.
LOGIT_TOLERANCE = 2e-5

# Texts side by side, each with all that can influence what follows.
Texts = Sequence[deque[int]]


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),  # noqa: B008  (immutable)
    seed: int = 0,
    samples: Sequence[int] = (0,),
    use_cache: bool = True,
    engine: Engine | None = None,
) -> Iterator[list[int]]:
    """Continues a prompt, for several samples side by side.

    The id at position n of sample s depends on (seed, s, n) and on the text before it, not on the other samples, the
    cache, or where the prompt ended: going on from a text that was generated goes on as if it had not stopped.

    Args:
        model: dropout is off while it computes; its training flag is as before at every yield.
        prompt: ids, at least one, of any number.
        max_new_tokens: steps to take; the prompt does not count.
        sampling: how an id is drawn from the logits.
        seed: names the sequence of uniform numbers.
        samples: which samples to write; `range(n)` for the first n.
        use_cache: keep keys and values and compute one position a step, or recompute every position of the prefix
            that can influence the next one (the last ``receptive_field``). Same ids either way.
        engine: what goes on from the cache, made for this model; None takes torch. Same ids with each.

    Yields:
        One id a sample, as soon as it is drawn.

    Raises:
        ValueError: the prompt is empty, or no samples are asked for.
    """
    if not prompt:
        raise ValueError("the prompt needs at least one id")
    if not samples:
        raise ValueError("samples is empty")
    # Nothing before the receptive field can reach the next prediction, so leaving it out changes nothing.
    texts = [deque(prompt, maxlen=model.config.receptive_field) for _ in samples]
    referee = _Referee(model)
    writer = _Cached(model, engine or TorchEngine(model)) if use_cache else _Recomputed(model)
    position, end = len(prompt), len(prompt) + max_new_tokens
    numbers = np.empty((0, len(samples)))
    while position < end:
        if not len(numbers):
            numbers = uniforms(seed, samples, position, min(RUN, end - position))
        with evaluating(model):
            drawn, doubts = writer.write(texts, numbers, sampling, referee.tolerance)
            steps: list[list[int]] = drawn.tolist()
            for step, ids in enumerate(steps):
                if step == len(steps) - 1:
                    for row in doubts.nonzero()[0]:
                        ids[row] = referee.decide(texts[row], numbers[step, row], sampling)
                for text, id_ in zip(texts, ids, strict=True):
                    text.append(id_)
        position += len(steps)
        numbers = numbers[len(steps) :]
        yield from steps


class _Recomputed:
    """Computes all of the texts that matters, for one step a call."""

    def __init__(self, model: GPT) -> None:
        self._model = model

    def write(self, texts: Texts, numbers: NDArray[np.float64], sampling: Sampling, tolerance: float) -> Drawn:
        logits = self._model(_ids(self._model, texts))[:, -1]  # (B, V)
        return draw(logits, numbers[0], sampling, tolerance)


class _Cached:
    """Reads the texts, which start alike, once, then goes on from the cache."""

    def __init__(self, model: GPT, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._kv_cache: KVCache | None = None

    def write(self, texts: Texts, numbers: NDArray[np.float64], sampling: Sampling, tolerance: float) -> Drawn:
        if self._kv_cache is None:
            kv_cache = self._model.new_cache()
            logits = prefill(self._model, _ids(self._model, texts[:1]), kv_cache).expand(len(texts), -1)
            self._kv_cache = kv_cache.repeat(len(texts))
            return draw(logits, numbers[0], sampling, tolerance)
        return self._engine.decode(self._kv_cache, [text[-1] for text in texts], numbers, sampling, tolerance)


def prefill(model: GPT, prompt: Tensor, kv_cache: KVCache) -> Tensor:
    """Reads a prompt, (B, T), into a cache, chunk by chunk; returns the logits of the next id, (B, V)."""
    logits: Tensor
    for chunk in torch.split(prompt, PREFILL_CHUNK, dim=1):
        logits = model(chunk, kv_cache)
    return logits[:, -1]


class _Referee:
    """Draws ids, and decides in float64 where the rounding of float32 could decide.

    One character in a few thousand is that close at temperature 0.8, more where it is colder. Without a referee about
    one in a million would differ between two ways of computing the same logits: with the cache and without, alone and
    in a batch, on one machine and another.
    """

    def __init__(self, model: GPT) -> None:
        self._model = model
        self.tolerance = 0.0 if model.lm_head.weight.dtype == torch.float64 else LOGIT_TOLERANCE
        # Made when it is needed first; on the CPU, since not every GPU has float64.
        self._exact: GPT | None = None

    def decide(self, text: Iterable[int], number: float, sampling: Sampling) -> int:
        """The id that follows a text, whose receptive field is given in full."""
        if self._exact is None:
            self._exact = copy.deepcopy(self._model).to("cpu", torch.float64)
        logits = self._exact.last_logits(_ids(self._exact, [text]))
        ids, _ = draw(logits, np.array([number]), sampling, tolerance=0.0)
        return int(ids[0, 0])


def _ids(model: GPT, texts: Iterable[Iterable[int]]) -> Tensor:
    """Texts of equal length as ids on the model's device, (B, T)."""
    return torch.tensor([list(text) for text in texts], device=model.lm_head.weight.device)


class StopFilter:
    """Cuts a text before the first of some stop texts, while it is still being written.

    A character is held back as long as it might belong to a stop text, so nothing that was handed out has to be
    taken back. Stop texts are looked for in what was generated, never in the prompt.

    Args:
        stops: texts to stop at; none never stops.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        # The longest first: of two that end together, the longer one starts earlier.
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._held = ""
        self.stopped = False

    def feed(self, char: str) -> str:
        """Takes the next character; returns what may be shown now. Once stopped, always the empty text."""
        if self.stopped:
            return ""
        text = self._held + char
        for stop in self._stops:
            # Earlier characters were checked when they came, so a stop text can only have ended just now.
            if text.endswith(stop):
                self.stopped = True
                self._held = ""
                return text[: len(text) - len(stop)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held back, once no more characters come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a start of the stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
