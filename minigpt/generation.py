"""Writing text: the prompt is read once, then one character a step, with a cache or by recomputing the prefix.

Yields ids; what to do with them (decode, print, time, stop early) is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minigpt.kv_cache import KVCache
from minigpt.model import GPT
from minigpt.sampling import Sampling, sample, uniform

# Prompt positions read in one call: enough to keep the processor busy, few enough to keep memory flat.
PREFILL_CHUNK = 512


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
        model: switched to evaluation while this runs, and back afterwards.
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
    if max_new_tokens < 1:
        return
    device = model.lm_head.weight.device
    was_training = model.training
    model.eval()
    try:
        # Nothing before the receptive field can reach the next prediction, so leaving it out changes nothing.
        prefix = torch.tensor([prompt[-model.config.receptive_field :]], device=device)  # (1, T)
        kv_cache = model.new_cache() if use_cache else None
        if kv_cache is not None:
            logits = prefill(model, prefix, kv_cache)
            kv_cache = kv_cache.repeat(len(samples))
        else:
            logits = model(prefix)[:, -1]
        logits = logits.expand(len(samples), -1)  # (B, V)
        prefix = prefix.expand(len(samples), -1)  # (B, T)
        last = len(prompt) + max_new_tokens - 1
        for position in range(len(prompt), last + 1):
            uniforms = torch.tensor([uniform(seed, s, position) for s in samples], dtype=torch.float64)
            drawn = sample(logits, uniforms, sampling)  # (B,)
            yield drawn.tolist()
            if position == last:
                return
            new = drawn[:, None].to(device)  # (B, 1)
            if kv_cache is not None:
                logits = model(new, kv_cache)[:, -1]
            else:
                prefix = torch.cat((prefix, new), dim=1)[:, -model.config.receptive_field :]
                logits = model(prefix)[:, -1]
    finally:
        model.train(was_training)


def prefill(model: GPT, prompt: Tensor, kv_cache: KVCache) -> Tensor:
    """Reads a prompt, (B, T), into a cache, chunk by chunk; returns the logits of the next id, (B, V)."""
    logits: Tensor
    for chunk in torch.split(prompt, PREFILL_CHUNK, dim=1):
        logits = model(chunk, kv_cache)
    return logits[:, -1]


class StopFilter:
    """Cuts a text before the first of some stop texts, while it is still being written.

    A character is held back as long as it might belong to a stop text, so nothing that was handed out has to be
    taken back. Stop texts are looked for in what was generated, never in the prompt.

    Args:
        stops: texts to stop at; none never stops.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
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
