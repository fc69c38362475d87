"""The numbers of the bench: its count of work against the kernels, its check against models that deserve to fail."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from minigpt import bench
from minigpt import model as model_module
from minigpt.bench import (
    Way,
    agreement,
    measure_engines,
    measure_positions,
    measure_text,
    positions,
    random_model,
    work_per_character,
)
from minigpt.config import GPTConfig
from minigpt.engine import TorchEngine
from minigpt.generation import generate
from minigpt.kernels import sliding_window_mask
from minigpt.kv_cache import KVCache
from minigpt.model import GPT


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("position", [1, 2, 3, 4, 5, 8, 9, 10, 11, 40])
def test_the_work_of_a_character_is_what_the_kernels_do(
    position: int, use_cache: bool, tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pairs = tiny_model.config, 0

    def counting(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        nonlocal pairs
        T, S = q.shape[2], k.shape[2]
        mask = sliding_window_mask(T, S, window) if T > 1 else None
        pairs += q.shape[1] * (S if mask is None else int(mask.sum()))
        # In a kernel that the counter does not know.
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    steps = generate(tiny_model, [1] * position, 2, use_cache=use_cache)
    next(steps)
    monkeypatch.setattr(model_module, "window_attention", counting)
    with FlopCounterMode(display=False) as counter:
        next(steps)
    # Multiplications by matrices, counted as two operations a multiply-add, plus a product of queries and keys and
    # one of weights and values for every pair that the mask lets through.
    multiply_adds = counter.get_total_flops() // 2 + pairs * 2 * config.head_dim
    assert work_per_character(config, position, cached=use_cache) == multiply_adds


def test_the_work_of_a_character_counted_by_hand() -> None:
    config = GPTConfig(vocab_size=5, n_layer=2, n_head=1, n_embd=4, block_size=4, window=3)
    # A layer: qkv and projection 4 x 4 x 4, feed-forward 3 x 4 x 32; then the output 5 x 4.
    matrices = 2 * (64 + 384) + 20
    # A pair costs 4 for its score and 4 for its value, in each of two layers.
    assert work_per_character(config, 0, cached=True) == matrices + 16
    assert work_per_character(config, 2, cached=True) == matrices + 3 * 16
    assert work_per_character(config, 1000, cached=True) == matrices + 3 * 16
    assert work_per_character(config, 0, cached=False) == matrices + 16
    assert work_per_character(config, 3, cached=False) == 4 * matrices + (1 + 2 + 3 + 3) * 16
    # The receptive field is 5.
    assert work_per_character(config, 1000, cached=False) == 5 * matrices + (1 + 2 + 3 + 3 + 3) * 16


@pytest.mark.parametrize(
    ("n_layer", "window", "last"), [(3, 4, 16), (1, 1, 4), (4, 64, 256), (6, 96, 1024), (5, 5, 32), (9, 8, 64)]
)
def test_positions_are_powers_of_two_past_the_window_and_the_receptive_field(
    n_layer: int, window: int, last: int
) -> None:
    at = positions(GPTConfig(vocab_size=7, n_layer=n_layer, window=window))
    assert at == [2**power for power in range(int(math.log2(last)) + 1)]


def test_a_random_model_is_random_everywhere_and_the_same_for_a_seed(tiny_config: GPTConfig) -> None:
    model = random_model(tiny_config, 1)
    assert not model.training
    assert all(weight.std() > 0.05 for weight in model.parameters() if weight.dim() == 2)
    again, other = random_model(tiny_config, 1), random_model(tiny_config, 2)
    for weight, same, different in zip(model.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, same)
        assert weight.dim() == 1 or not torch.equal(weight, different)


def test_both_ways_agree_on_a_random_model(tiny_model: GPT) -> None:
    checked = agreement(tiny_model, 45)
    assert checked.characters == 45 and checked.same_ids
    assert 0 <= checked.logit_gap < 1e-12


def test_a_cache_that_forgets_is_found_out(tiny_model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = KVCache.extend

    def forgetful(self: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        visible_k, visible_v = extend(self, layer, k, v)
        return (visible_k[:, :, -2:], visible_v[:, :, -2:]) if k.shape[2] == 1 else (visible_k, visible_v)

    monkeypatch.setattr(KVCache, "extend", forgetful)
    checked = agreement(tiny_model, 60)
    assert not checked.same_ids and checked.logit_gap > 1e-3


def test_a_last_character_that_differs_is_found_out(tiny_model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    def tampered(model: GPT, prompt: list[int], n: int, *, use_cache: bool, **options: Any) -> Iterator[list[int]]:
        *ids, (last,) = generate(model, prompt, n, use_cache=use_cache, **options)
        yield from ids
        yield [last if use_cache else (last + 1) % 7]

    monkeypatch.setattr(bench, "generate", tampered)
    checked = agreement(tiny_model, 12)
    assert not checked.same_ids and checked.logit_gap < 1e-12


def test_every_position_is_measured_in_order_as_soon_as_it_is_asked_for(tiny_model: GPT) -> None:
    rows = measure_positions(tiny_model, [1, 4, 16], repeats=1)
    for position, row in zip([1, 4, 16], rows, strict=True):
        assert row.position == position
        assert all(0 < ms < math.inf for ms in (row.prefill_ms, row.cached_ms, row.recomputed_ms))
        assert row.cached_work == work_per_character(tiny_model.config, position, cached=True)
        assert row.recomputed_work == work_per_character(tiny_model.config, position, cached=False)


def test_times_are_medians_in_milliseconds_without_the_first_which_warms_up(
    tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds of (reading the prompt, one step), the modes in turn.
    cached = iter([(90, 90), (0.003, 0.030), (0.001, 0.010), (0.002, 0.020)])
    recomputed = iter([(90, 90), (80, 0.5), (80, 0.7), (80, 0.6)])
    monkeypatch.setattr(bench, "_two_steps", lambda *_, use_cache: next(cached if use_cache else recomputed))
    (row,) = measure_positions(tiny_model, [8], repeats=3)
    assert (row.prefill_ms, row.cached_ms, row.recomputed_ms) == pytest.approx((2, 20, 600))


def test_a_whole_text_is_timed_both_ways(tiny_model: GPT) -> None:
    times = measure_text(tiny_model, characters=12, repeats=1)
    assert times.characters == 12
    assert all(0 < seconds < math.inf for seconds in (times.cached_s, times.recomputed_s))


def test_the_bench_measures_a_prompt_longer_than_the_vocabulary(tiny_config: GPTConfig) -> None:
    model = random_model(replace(tiny_config, vocab_size=2))
    assert next(measure_positions(model, [40], repeats=1)).position == 40


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_fused", [True, False])
def test_every_way_of_writing_is_timed(
    has_fused: bool, threads: int, tiny_config: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(tiny_config)
    monkeypatch.setattr(bench, "fused_reason", lambda _: None if has_fused else "there is no numba")
    monkeypatch.setattr(bench, "choose_engine", lambda *_, **__: TorchEngine(model))
    seconds = {("torch", False): 2.0, ("torch", True): 0.5, ("fused", True): 0.125}
    monkeypatch.setattr(Way, "character_s", lambda way, prompt, n: seconds[way.engine, way.cached])
    monkeypatch.setattr(bench, "_read_s", lambda n_bytes, threads: 0.0625)
    # One of them is wrong.
    monkeypatch.setattr(Way, "ids", lambda way, *_: [way.weights == "int8" and way.engine == "fused"])
    found = list(measure_engines(model, threads, repeats=2))
    assert found[:3] == [None] * 3
    speeds = [speed for speed in found if speed is not None]
    counts = [1] if threads == 1 else [1, 2]
    expected: list[tuple[str, str, int, bool, float, float | None]]
    expected = [("torch", "float32", threads, False, 0.5, None)]
    expected += [("torch", "float32", n, True, 2.0, 0.125) for n in counts]
    if has_fused:
        expected += [
            ("fused", weights, n, True, 8.0, 0.5) for weights in ("float32", "float16", "int8") for n in counts
        ]
    assert [(s.engine, s.weights, s.threads, s.cached, s.chars_per_s, s.share_of_limit) for s in speeds] == expected
    assert [s.weights for s in speeds if not s.same_ids] == ["int8"] * len(counts) * has_fused


def test_a_character_reads_all_weights_but_the_other_embeddings_and_the_cache() -> None:
    # 2 layers of 4 * 8 * 8 + 3 * 8 * 32 weights and 2 * 8 + 2 * 4 gains, a last gain, 5 rows of 8 and one of them.
    model = random_model(GPTConfig(vocab_size=5, n_layer=2, n_head=2, n_embd=8, block_size=8, window=4))
    n_weights = 2 * (4 * 64 + 3 * 8 * 32 + 24) + 8 + 5 * 8 + 8
    kv = 2 * 2 * 4 * 8 * 4
    assert Way(model, "torch", "float32", 1).bytes_per_char == 4 * n_weights + kv
    assert Way(model, "torch", "int8", 1).bytes_per_char == 4 * n_weights + kv
    pytest.importorskip("numba", reason="makes the fused engine")
    assert Way(model, "fused", "float16", 1).bytes_per_char == 2 * n_weights + kv
    assert Way(model, "fused", "int8", 1).bytes_per_char == n_weights + kv


def test_a_way_writes_with_its_threads_and_puts_them_back(tiny_model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    used = []

    def counted(*args: Any, **options: Any) -> Iterator[list[int]]:
        used.append(torch.get_num_threads())
        return generate(*args, **options)

    monkeypatch.setattr(bench, "generate", counted)
    for cached in (True, False):
        way = Way(tiny_model, "torch", "float32", before + 1, cached=cached)
        assert 0 < way.character_s([1, 2], 3) < math.inf
    assert used == [before + 1] * 2
    assert torch.get_num_threads() == before


def test_the_read_limit_is_that_of_a_sum() -> None:
    # More bytes take longer, and no machine reads at 10 TB/s.
    small, large = bench._read_s(4_000, 1), bench._read_s(40_000_000, 1)
    assert 0 < small < large
    assert large > 40e6 / 10e12
