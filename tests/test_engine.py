"""The fused engine against torch: the same characters, the same cache, whoever goes on from whom."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minigpt import engine as module
from minigpt.bench import random_model
from minigpt.config import GPTConfig
from minigpt.engine import RUN, Engine, FusedEngine, TorchEngine, choose_engine
from minigpt.errors import ConfigError
from minigpt.generation import LOGIT_TOLERANCE, generate
from minigpt.kv_cache import KVCache
from minigpt.model import GPT, attention
from minigpt.sampling import Sampling, ratio_slack, sample_and_doubt, uniforms
from minigpt.weights import FORMATS, round_weights
from tests.cli_support import as_in_a_shell, trained_checkpoint
from tests.model_support import normal

numba = pytest.importorskip("numba")
fused = pytest.importorskip("minigpt.fused")

# Widths that fill no vector register evenly.
SHAPE = GPTConfig(vocab_size=23, n_layer=3, n_head=3, n_embd=42, block_size=16, window=9)
SAMPLINGS = [
    Sampling(0.8),
    Sampling(0.0),
    Sampling(1.3, top_k=5),
    Sampling(0.8, top_p=0.7),
    Sampling(0.9, min_p=0.1),
    Sampling(0.7, top_k=9, top_p=0.9, min_p=0.01),
]


def model_in(format: str, shape: GPTConfig = SHAPE) -> GPT:
    model = random_model(shape).requires_grad_(False)
    # Sharper than random weights make them, as training does.
    model.lm_head.weight.mul_(6)
    round_weights(model, format)
    return model


def fused_engine(model: GPT, format: str = "float32", threads: int = 1) -> FusedEngine:
    return FusedEngine(model, format, threads, lambda _: None)


def started(model: GPT, length: int, texts: int = 1) -> KVCache:
    """A cache of so many positions, different in each text."""
    kv_cache = model.new_cache(texts)
    ids = torch.arange(length * texts).reshape(texts, length) * 7 % model.config.vocab_size
    model(ids, kv_cache)
    return kv_cache


def write(model: GPT, engine: Any, prompt: list[int], n: int, **options: Any) -> list[list[int]]:
    return list(generate(model, prompt, n, engine=engine, **options))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_both_engines_write_the_same_and_the_recompute_too(format: str, sampling: Sampling) -> None:
    model = model_in(format)
    for length in (1, 8, 9, 10, 30):
        prompt = [i % 23 for i in range(length)]
        options = {"sampling": sampling, "seed": length}
        expected = write(model, TorchEngine(model), prompt, 150, **options)
        assert write(model, fused_engine(model, format), prompt, 150, **options) == expected
        assert write(model, None, prompt, 150, use_cache=False, **options) == expected


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(0.8, top_k=8, top_p=0.95)], ids=str)
def test_a_trained_model_writes_the_same_with_each_engine_for_many_seeds(sampling: Sampling) -> None:
    model = trained_checkpoint().model
    for seed in range(10):
        expected = write(model, TorchEngine(model), [seed], 300, sampling=sampling, seed=seed)
        assert write(model, fused_engine(model), [seed], 300, sampling=sampling, seed=seed) == expected


def test_logits_of_a_trained_model_are_those_of_torch_far_past_the_window() -> None:
    model = trained_checkpoint().model.requires_grad_(False)
    engine = fused_engine(model)
    caches, last = [started(model, 1) for _ in range(2)], 1
    engine.decode(model.new_cache(), [0], np.empty((0, 1)), Sampling(), 0.0)
    compiled = engine._fused
    logits: list[NDArray[np.float32]] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(compiled, name)

        def decode(self, *arguments: Any) -> Any:
            steps = compiled.decode(*arguments)
            logits.append(np.array((ctypes.c_float * model.config.vocab_size).from_address(arguments[4].logits)))
            return steps

    engine._fused = Watched()
    for number in uniforms(5, [0], 1, 5 * model.config.receptive_field):
        ids, _ = engine.decode(caches[0], [last], number[None], Sampling(0.8), 0.0)
        expected = model(torch.tensor([[last]]), caches[1])[0, -1].numpy()
        assert np.abs(logits[-1] - expected).max() < 1e-4
        last = int(ids[0, 0])
    assert np.ptp(expected) > 5


@pytest.mark.parametrize("near_bytes", [0, module.NEAR_BYTES])
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("texts", [1, 3, 4, 9])
def test_threads_and_texts_side_by_side_change_nothing(
    texts: int, threads: int, near_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NEAR_BYTES", near_bytes)
    # Three threads on three heads and 23 characters, and more threads than there may be cores.
    model = model_in("int8")
    options = {"samples": range(texts), "seed": 3, "sampling": Sampling(0.9)}
    expected = write(model, TorchEngine(model), [1, 2], 80, **options)
    assert write(model, fused_engine(model, "int8", threads), [1, 2], 80, **options) == expected


def test_more_threads_than_heads_leave_some_without_work() -> None:
    model = model_in("float32", replace(SHAPE, n_head=1))
    expected = write(model, TorchEngine(model), [1], 30)
    assert write(model, fused_engine(model, threads=4), [1], 30) == expected


@pytest.mark.parametrize("length", [1, 5, 9, 10, 25])
def test_what_an_engine_leaves_in_the_cache_is_what_the_other_one_would(length: int) -> None:
    model = model_in("float32")
    caches = [started(model, length, texts=2) for _ in range(2)]
    numbers = uniforms(1, [0, 1], length, 20)
    last = [3, 4]
    drawn, doubts = fused_engine(model).decode(caches[0], last, numbers, Sampling(), 0.0)
    assert drawn.shape == (20, 2)
    assert not doubts.any()
    for step in range(20):
        ids, _ = TorchEngine(model).decode(caches[1], last, numbers[step : step + 1], Sampling(), 0.0)
        last = ids[0].tolist()
        assert last == drawn[step].tolist()
    assert caches[0].length == caches[1].length == length + 20
    for name in ("keys", "values"):
        torch.testing.assert_close(getattr(caches[0], name), getattr(caches[1], name), rtol=0, atol=1e-5)
    # And the other one goes on from it.
    logits = [model(torch.tensor([[5], [6]]), kv_cache) for kv_cache in caches]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)


def test_engines_that_take_turns_write_the_text_of_one() -> None:
    model = model_in("float32")
    engines: list[Engine] = [TorchEngine(model), fused_engine(model)]
    kv_cache, last = started(model, 4), [2]
    text: list[int] = []
    for turn in range(12):
        numbers = uniforms(9, [0], 5 + len(text), 1 + turn % 4)
        ids, _ = engines[turn % 2].decode(kv_cache, last, numbers, Sampling(0.9), 0.0)
        text += ids[:, 0].tolist()
        last = [text[-1]]
    alone, _ = fused_engine(model).decode(started(model, 4), [2], uniforms(9, [0], 5, len(text)), Sampling(0.9), 0.0)
    assert text == alone[:, 0].tolist()


def test_a_call_ends_with_the_first_character_in_doubt() -> None:
    model = model_in("float32")
    kv_cache = started(model, 4, texts=2)
    drawn, doubts = fused_engine(model).decode(kv_cache, [1, 2], uniforms(1, [0, 1], 4, RUN), Sampling(), 1e3)
    assert len(drawn) == 1
    assert doubts.all()
    assert kv_cache.length == 5
    # The referee decides it, and the text goes on.
    options = {"sampling": Sampling(0.8), "seed": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minigpt.generation.LOGIT_TOLERANCE", 0.02)
        expected = write(model, TorchEngine(model), [1], 60, **options)
        assert write(model, fused_engine(model), [1], 60, **options) == expected


@given(
    logits=st.lists(
        st.floats(-12, 12, width=32) | st.sampled_from([0.0, 1.0, 1.0000001, -math.inf]), min_size=1, max_size=40
    ),
    u=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.25, 0.5]),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1e-9, 0.3, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    tolerance=st.sampled_from([0.0, LOGIT_TOLERANCE, 0.01]),
)
def test_the_compiled_draw_is_that_of_sampling(
    logits: list[float], u: float, temperature: float, top_k: int, top_p: float, min_p: float, tolerance: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p)
    row = np.array([[*logits, 0.0]], np.float32)
    ids, doubts = sample_and_doubt(row, np.array([u]), sampling, tolerance)
    slack = ratio_slack(temperature, tolerance)
    drawing = fused.Drawing(0, 1, temperature, top_k, top_p, min_p, tolerance, slack)
    probs, order = np.empty(row.size), np.empty((2, row.size), np.int64)
    drawn, doubt = fused.draw(row.ctypes.data, row.size, u, drawing, probs.ctypes.data, order.ctypes.data)
    # Sums are taken in another order, which decides where it is as close as their rounding.
    assert drawn == ids or sample_and_doubt(row, np.array([u]), sampling, 1e-12)[1]
    # As to the doubts themselves, where their own bound is as close as that.
    moved = {bool(sample_and_doubt(row, np.array([u]), sampling, tolerance * by)[1]) for by in (1 - 1e-6, 1 + 1e-6)}
    assert doubt == doubts or moved == {False, True}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_of_logits_that_are_no_numbers_an_id_that_there_is_is_drawn(
    value: float, temperature: float, place: int
) -> None:
    row = np.zeros((1, 5), np.float32)
    row[0, place] = value
    drawing = fused.Drawing(0, 1, temperature, 0, 1.0, 0.0, 0.0, 0.0)
    probs, order = np.empty(5), np.empty((2, 5), np.int64)
    drawn, _ = fused.draw(row.ctypes.data, 5, 0.5, drawing, probs.ctypes.data, order.ctypes.data)
    with np.errstate(invalid="ignore"):
        ids, _ = sample_and_doubt(row, np.array([0.5]), Sampling(temperature), 0.0)
    assert drawn == ids[0]


@pytest.mark.parametrize(("n", "D"), [(1, 2), (3, 14), (4, 32), (9, 14), (64, 32)])
def test_the_compiled_attention_is_the_formula(n: int, D: int) -> None:
    q, k, v = normal(1, 1, 1, D, seed=1) * 3, normal(1, 1, n, D, seed=2), normal(1, 1, n, D, seed=3)
    expected = attention(q, k, v).flatten().numpy()
    arrays = [x.numpy().astype(np.float32) for x in (q, k, v)]
    scores, y = np.empty(n, np.float32), np.empty(D, np.float32)
    fused._attend(*(x.ctypes.data for x in arrays), n, D, scores.ctypes.data, y.ctypes.data)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)


def test_the_exponential_is_that_of_float64_and_stays_finite_and_positive() -> None:
    for x in np.linspace(-87, 88, 3001, dtype=np.float32):
        assert fused._exp(x) == pytest.approx(math.exp(x), rel=4e-7)
    for x in (-math.inf, -1e30, -104.0):
        assert 0 < fused._exp(np.float32(x)) < 1.3e-38
    for x in (88.8, 89.1, 200.0, 1e4, 1e30, math.inf):
        assert 1.6e38 < fused._exp(np.float32(x)) < math.inf


def test_large_gates_are_closed_and_opened_as_torch_does() -> None:
    model = model_in("float32")
    for block in model.blocks:
        block.mlp.gate_up.weight[: model.config.n_inner] *= 300
    expected = write(model, TorchEngine(model), [1], 100)
    assert write(model, fused_engine(model), [1], 100) == expected


# What goes wrong


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_thread_that_fails_ends_the_others(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in("float32")
    engine = fused_engine(model, threads=3)
    engine.decode(started(model, 4), [1], uniforms(1, [0], 4, 1), Sampling(), 0.0)
    compiled = engine._fused

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(compiled, name)

        def decode(self, *arguments: Any) -> Any:
            if arguments[5].rank == failing:
                raise MemoryError
            return compiled.decode(*arguments)

    monkeypatch.setattr(engine, "_fused", Failing())
    with pytest.raises(MemoryError):
        engine.decode(started(model, 4), [1], uniforms(1, [0], 4, 20), Sampling(), 0.0)
    # All have stopped, so it can go on.
    monkeypatch.setattr(engine, "_fused", compiled)
    ids, _ = engine.decode(started(model, 4), [1], uniforms(1, [0], 4, 20), Sampling(), 0.0)
    assert len(ids) == 20


def test_what_does_not_fit_is_refused_before_memory_is_touched() -> None:
    model = model_in("float32")
    engine = fused_engine(model)
    with pytest.raises(ValueError, match="2 texts need a cache"):
        engine.decode(started(model, 4), [1, 2], uniforms(1, [0, 1], 4, 3), Sampling(), 0.0)
    for id_ in (-1, 23):
        with pytest.raises(ValueError, match="from 0 to 22"):
            engine.decode(started(model, 4), [id_], uniforms(1, [0], 4, 3), Sampling(), 0.0)


@pytest.mark.parametrize("error", [ImportError("numba needs NumPy 9\nor less"), OSError(28, "No space left on device")])
def test_an_engine_that_cannot_be_loaded_is_said_and_torch_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(*_: object) -> None:
        raise error

    model = model_in("float32")
    expected = write(model, None, [1], 30)
    monkeypatch.setattr(FusedEngine, "_compile", compile_)
    said: list[str] = []
    auto = choose_engine("auto", model, note=said.append)
    assert write(model, auto, [1], 30) == expected
    assert auto.name == "torch"
    (sentence,) = said
    assert type(error).__name__ in sentence
    assert "\n" not in sentence
    with pytest.raises(ConfigError, match="the fused engine cannot run here: numba fails"):
        write(model, choose_engine("fused", model), [1], 3)


# Which engine


def test_the_fused_engine_is_chosen_where_it_can_run_and_is_faster() -> None:
    model = model_in("float32")
    assert choose_engine("auto", model).name == "fused"
    assert choose_engine("fused", model).name == "fused"
    assert choose_engine("torch", model).name == "torch"


@pytest.mark.parametrize(("n_params", "threads", "used"), [(0, None, 1), (10**9, None, 2), (10**9, 1, 1), (0, 3, 3)])
def test_a_second_thread_is_used_where_it_helps(
    n_params: int, threads: int | None, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_in("float32")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(module, "THREADED", 10**6 - n_params)
    chosen = choose_engine("fused", model, threads=threads)
    assert isinstance(chosen, FusedEngine)
    assert chosen.threads == used


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, patch: patch.setattr(importlib.util, "find_spec", lambda _: None), "numba is not installed"),
        (lambda model, patch: model.double(), "the model in float64"),
    ],
)
def test_without_what_it_needs_torch_writes_and_says_so(
    change: Callable[[GPT, pytest.MonkeyPatch], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_in("float32")
    change(model, monkeypatch)
    said: list[str] = []
    assert choose_engine("auto", model, note=said.append).name == "torch"
    assert len(said) == 1
    assert reason in said[0]
    with pytest.raises(ConfigError, match=f"cannot run here: .*{reason}"):
        choose_engine("fused", model)


def test_an_unknown_engine_is_told_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no engine 'steam': choose one of auto, torch, fused"):
        choose_engine("steam", model_in("float32"))


# Compiling


@pytest.mark.parametrize(
    ("compiles", "seconds", "times"),
    [(True, 0.0, 0), (True, 0.3, 1), (False, 0.3, 0)],
    ids=["quick", "long", "found on disk, which takes long"],
)
def test_a_long_compilation_is_announced_and_nothing_else(
    compiles: bool, seconds: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object) -> None:
        with ExitStack() as stack:
            # Of a function and of one that it calls.
            for _ in range(2 * compiles):
                stack.enter_context(numba.core.event.trigger_event("numba:compile"))
            time.sleep(seconds)

    monkeypatch.setattr(module, "SILENT_S", 0.05)
    monkeypatch.setattr(FusedEngine, "decode", run)
    said: list[str] = []
    FusedEngine(model_in("float32"), "float32", 1, said.append)._load()
    assert len(said) == times


def test_where_nothing_can_be_kept_it_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def njit(*, cache: bool = False, **_: Any) -> Callable[[Any], Any]:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", njit)
    assert fused._compile(len, any_order=True) is len
    assert asked == [True, False]


def test_numba_is_loaded_by_the_second_character_and_not_before() -> None:
    code = """
import sys
from minigpt.bench import random_model
from minigpt.config import GPTConfig
from minigpt.engine import choose_engine
from minigpt.generation import generate
model = random_model(GPTConfig(5, n_layer=1, n_head=1, n_embd=8, block_size=8, window=4))
ids = generate(model, [1], 2, engine=choose_engine("auto", model))
next(ids)
assert "numba" not in sys.modules
next(ids)
assert "numba" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **as_in_a_shell())
    assert done.returncode == 0, done.stderr
