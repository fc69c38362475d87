"""What the cache buys, in numbers: the ways of writing the same text, checked to be the same, then timed.

Measures through `generate`, the code that users run. Nothing here prints; results are yielded as they are known.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from minigpt.config import GPTConfig
from minigpt.engine import choose_engine, fused_reason
from minigpt.generation import generate
from minigpt.model import GPT
from minigpt.sampling import Sampling
from minigpt.weights import FORMATS, round_weights

SEED = 1
# Measurements of which the median is taken, after one that is thrown away.
REPEATS = 9
# Rounds over all engines.
REPEATS_OF_ENGINES = 5
# The whole text that is written both ways, and what engines are timed with.
TEXT_CHARS = 256
# That every engine writes before it is timed, to see whether they are the same.
CHECKED_CHARS = 64
# Of a recompute, in a comparison of engines: each takes as long as the one before.
RECOMPUTED_CHARS = 16
# How often memory is read to find out how fast that goes; the fastest counts.
READS = 50
# Bytes of a weight.
BYTES = {"float32": 4, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class Agreement:
    """Whether both modes write the same, checked before anything is timed."""

    characters: int
    same_ids: bool
    # Largest difference of any logit at any position.
    logit_gap: float


@dataclass(frozen=True)
class PositionTimes:
    """Taking in the character at a position (from 0) and drawing the next; medians, milliseconds.

    Without the cache that is a pass over position + 1 characters, or over the receptive field.
    """

    position: int
    # Reading the characters before the position and drawing the one at it.
    prefill_ms: float
    cached_ms: float
    recomputed_ms: float
    # Multiply-adds of that character.
    cached_work: int
    recomputed_work: int


@dataclass(frozen=True)
class EngineSpeed:
    """Characters written, one after the other from a full cache, in one of the ways there are."""

    engine: str
    weights: str
    threads: int
    cached: bool
    # Whether it writes what torch writes with the cache and these weights.
    same_ids: bool
    chars_per_s: float
    # Weights and cache that one character has to read; None for a recompute, which is limited by its arithmetic.
    bytes_per_char: int | None
    # Of the speed at which so many bytes could be read and nothing done with them.
    share_of_limit: float | None


@dataclass(frozen=True)
class TextTimes:
    """Writing a whole text from one character, in seconds; medians."""

    characters: int
    cached_s: float
    recomputed_s: float


def random_model(config: GPTConfig, seed: int = 0) -> GPT:
    """A model whose every matrix is random: speed depends on shapes alone, and zeros would make checks trivial."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config, generator)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                module.weight.uniform_(-bound, bound, generator=generator)
    return model.eval()


def work_per_character(config: GPTConfig, position: int, *, cached: bool) -> int:
    """Multiply-adds of taking in the character at a position (from 0) and drawing the next.

    With the cache one position goes through the matrices and attends to at most ``window`` keys: constant. By
    recompute all positions that can matter do, up to the receptive field: linear until there, constant after.
    """
    F, C = config.n_inner, config.n_embd
    matrices = config.n_layer * (4 * C * C + 3 * C * F) + config.vocab_size * C
    # A query and a key, a weight and a value: 2 C multiply-adds for every pair of positions, over all heads.
    pair = 2 * C * config.n_layer
    if cached:
        return matrices + pair * min(position + 1, config.window)
    n = min(position + 1, config.receptive_field)
    full = min(n, config.window)
    pairs = full * (full + 1) // 2 + (n - full) * config.window
    return n * matrices + pair * pairs


@torch.inference_mode()
def agreement(model: GPT, characters: int) -> Agreement:
    """Writes one text both ways and compares ids, and the logits of every position of it.

    Args:
        characters: how many; the text starts from id 0.
    """
    texts = [
        [id_ for (id_,) in generate(model, [0], characters, seed=SEED, use_cache=use_cache)]
        for use_cache in (True, False)
    ]
    idx = torch.tensor([[0, *texts[0]]], device=model.lm_head.weight.device)
    kv_cache = model.new_cache()
    cached = torch.cat([model(column, kv_cache) for column in torch.split(idx, 1, dim=1)], dim=1)
    gap = (cached - model(idx)).abs().max().item()
    return Agreement(characters, texts[0] == texts[1], gap)


def positions(config: GPTConfig) -> list[int]:
    """Powers of two from 1 to the first that is at least four windows and past the receptive field."""
    end = max(4 * config.window, config.receptive_field)
    return [1 << power for power in range(math.ceil(math.log2(end)) + 1)]


def measure_positions(model: GPT, at: list[int], repeats: int = REPEATS) -> Iterator[PositionTimes]:
    """Times one character at each position, the modes in turn, so that a machine that slows down slows both."""
    for position in at:
        cached, recomputed, prefill = [], [], []
        for _ in range(repeats + 1):
            prefill_s, step_s = _two_steps(model, position, use_cache=True)
            prefill.append(prefill_s)
            cached.append(step_s)
            recomputed.append(_two_steps(model, position, use_cache=False)[1])
        yield PositionTimes(
            position,
            _median_ms(prefill),
            _median_ms(cached),
            _median_ms(recomputed),
            work_per_character(model.config, position, cached=True),
            work_per_character(model.config, position, cached=False),
        )


def measure_text(model: GPT, characters: int = TEXT_CHARS, repeats: int = 3) -> TextTimes:
    """Times one whole text both ways, in turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats + 1):
        for use_cache, measured in times.items():
            started = time.perf_counter()
            for _ in generate(model, [0], characters, seed=SEED, use_cache=use_cache):
                pass
            measured.append(time.perf_counter() - started)
    return TextTimes(characters, _median_ms(times[True]) / 1e3, _median_ms(times[False]) / 1e3)


class Way:
    """One way of writing: a model rounded to a format, an engine, a number of threads, with or without the cache.

    Args:
        model: stays as it is.
        engine: "torch" or "fused".
        weights: a format of `weights`.
        threads: of the engine.
        cached: False recomputes the prefix for every character.
    """

    def __init__(self, model: GPT, engine: str, weights: str, threads: int, *, cached: bool = True) -> None:
        self.engine = engine
        self.weights = weights
        self.threads = threads
        self.cached = cached
        self._model = copy.deepcopy(model)
        round_weights(self._model, weights)
        self._engine = choose_engine(engine, self._model, weights, threads=threads)

    @property
    def bytes_per_char(self) -> int:
        """Weights and cache that one character reads: of the embeddings one row, of all else everything; scales and
        gains, a hundredth, are taken for weights."""
        wte = self._model.wte.weight
        n_weights = self._model.n_params - wte.numel() + wte.shape[1]
        width = BYTES[self.weights] if self.engine == "fused" else wte.itemsize
        return width * n_weights + self._model.new_cache().nbytes

    def ids(self, prompt: list[int], characters: int) -> list[int]:
        """What it writes after a prompt."""
        steps = generate(self._model, prompt, characters, seed=SEED, use_cache=self.cached, engine=self._engine)
        return [id_ for (id_,) in steps]

    def character_s(self, prompt: list[int], characters: int) -> float:
        """Seconds a character, of so many that follow a prompt and its first one."""
        with limited_threads(self.threads):
            steps = generate(self._model, prompt, 1 + characters, seed=SEED, use_cache=self.cached, engine=self._engine)
            next(steps)
            started = time.perf_counter()
            for _ in steps:
                pass
            return (time.perf_counter() - started) / characters


def ways(model: GPT, max_threads: int) -> list[Way]:
    """Every engine that can run here with every format of the weights, on one thread and on all; and the recompute."""
    counts = sorted({1, max_threads})
    found = [Way(model, "torch", "float32", max_threads, cached=False)]
    found += [Way(model, "torch", "float32", threads) for threads in counts]
    if fused_reason(model) is None:
        found += [Way(model, "fused", weights, threads) for weights in FORMATS for threads in counts]
    return found


def measure_engines(model: GPT, max_threads: int, repeats: int = REPEATS_OF_ENGINES) -> Iterator[EngineSpeed | None]:
    """Times all ways in turn, each from a window of characters on, after checking that they write the same.

    Yields:
        None after each of ``repeats + 1`` rounds, of which the first warms up; then what was found.
    """
    measured = ways(model, max_threads)
    times: list[list[float]] = [[] for _ in measured]
    prompt = [i % model.config.vocab_size for i in range(model.config.window)]
    texts = {}
    for weights in dict.fromkeys(way.weights for way in measured):
        texts[weights] = Way(model, "torch", weights, 1).ids(prompt, CHECKED_CHARS)
    same = [way.ids(prompt, CHECKED_CHARS) == texts[way.weights] for way in measured]
    for _ in range(repeats + 1):
        for way, seconds in zip(measured, times, strict=True):
            seconds.append(way.character_s(prompt, TEXT_CHARS if way.cached else RECOMPUTED_CHARS))
        yield None
    for way, is_same, seconds in zip(measured, same, times, strict=True):
        median_s = statistics.median(seconds[1:])
        yield EngineSpeed(
            way.engine,
            way.weights,
            way.threads,
            way.cached,
            is_same,
            1 / median_s,
            way.bytes_per_char if way.cached else None,
            _read_s(way.bytes_per_char, way.threads) / median_s if way.cached else None,
        )


def _read_s(n_bytes: int, threads: int) -> float:
    """Seconds in which a plain sum reads so many bytes again and again, from whatever cache or memory they sit in."""
    numbers = torch.ones(n_bytes // 4)
    times = []
    with limited_threads(threads):
        for _ in range(READS):
            started = time.perf_counter()
            numbers.sum()
            times.append(time.perf_counter() - started)
    return min(times)


@contextmanager
def limited_threads(n: int) -> Iterator[None]:
    """Lets torch use so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _two_steps(model: GPT, position: int, *, use_cache: bool) -> tuple[float, float]:
    """Seconds for reading a prompt of ``position`` characters and drawing one, and for the character after that."""
    prompt = [i % model.config.vocab_size for i in range(position)]
    steps = generate(model, prompt, 2, sampling=Sampling(), seed=SEED, use_cache=use_cache)
    started = time.perf_counter()
    next(steps)
    between = time.perf_counter()
    next(steps)
    return between - started, time.perf_counter() - between


def _median_ms(measured: list[float]) -> float:
    """The median in milliseconds, without the first, which warms up."""
    return statistics.median(measured[1:]) * 1e3
