"""Writing text: the prompt is read once, then one character a step, with a cache or by recomputing the prefix.

Yields ids; what to do with them (decode, print, time, stop early) is the caller's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from minigpt.kv_cache import KVCache
from minigpt.model import GPT, evaluating
from minigpt.sampling import Sampling, sample, sample_and_doubt, uniform

# Prompt positions read in one call: enough to keep the processor busy, few enough to keep memory flat.
PREFILL_CHUNK = 512


# Two float32 computations of the same logits were seen to differ by 1.2e-6 (root mean square; 9e-6 at most among
# 100,000). Where a difference of this much could change a draw, float64 decides, with the cache and without alike.
LOGIT_TOLERANCE = 2e-5


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
    kv_cache: KVCache | None = None
    for position in range(len(prompt), len(prompt) + max_new_tokens):
        with evaluating(model):
            if not use_cache:
                logits = model(_ids(model, texts))[:, -1]  # (B, V)
            elif kv_cache is None:
                kv_cache = model.new_cache()
                logits = prefill(model, _ids(model, texts[:1]), kv_cache).expand(len(samples), -1)
                kv_cache = kv_cache.repeat(len(samples))
            else:
                logits = model(_ids(model, [[text[-1]] for text in texts]), kv_cache)[:, -1]
            uniforms = torch.tensor([uniform(seed, s, position) for s in samples], dtype=torch.float64)
            drawn = referee.sample(logits, uniforms, sampling, texts)
        for text, id_ in zip(texts, drawn, strict=True):
            text.append(id_)
        yield drawn


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
        self._tolerance = 0.0 if model.lm_head.weight.dtype == torch.float64 else LOGIT_TOLERANCE
        # Made when it is needed first; on the CPU, since not every GPU has float64.
        self._exact: GPT | None = None

    def sample(self, logits: Tensor, uniforms: Tensor, sampling: Sampling, texts: Sequence[Sequence[int]]) -> list[int]:
        """Ids drawn from logits, (B, V), of what follows the texts, whose receptive fields are given in full."""
        drawn, doubts = sample_and_doubt(logits, uniforms, sampling, self._tolerance)
        ids: list[int] = drawn.tolist()
        for row in doubts.nonzero()[:, 0].tolist() if self._tolerance else ():
            if self._exact is None:
                self._exact = copy.deepcopy(self._model).to("cpu", torch.float64)
            exact_logits = prefill(self._exact, _ids(self._exact, [texts[row]]), self._exact.new_cache())
            ids[row] = int(sample(exact_logits, uniforms[row : row + 1], sampling))
        return ids


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
