"""The one promise, in float64: what is read through the cache is what a reading without it gives, at every edge.

Tolerance 1e-9 on logits of order one: rounding stays near 1e-14, and a wrong key or a wrong angle moves them by far
more than 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minigpt.config import GPTConfig
from minigpt.kv_cache import KVCache
from minigpt.model import GPT

SHAPES = {
    "three layers": GPTConfig(vocab_size=7, n_layer=3, n_head=2, n_embd=12, block_size=16, window=4),
    "one layer": GPTConfig(vocab_size=7, n_layer=1, n_head=1, n_embd=8, block_size=8, window=5),
    "window of one": GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=8, block_size=8, window=1),
    "window of a block": GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=8, block_size=16, window=16),
}
TOLERANCE = 1e-9


def edges(config: GPTConfig) -> list[int]:
    """Text lengths around everything that could go wrong."""
    window, field, block = config.window, config.receptive_field, config.block_size
    lengths = {1, window - 1, window, window + 1, block, field - 1, field, field + 1, 10 * block}
    return sorted(lengths - {0})


CASES = [pytest.param(config, T, id=f"{name}-{T}") for name, config in SHAPES.items() for T in edges(config)]


@torch.inference_mode()
def read(model: GPT, idx: Tensor, pieces: Sequence[int], kv_cache: KVCache | None = None) -> Tensor:
    """Logits of all positions, read through a cache piece by piece."""
    kv_cache = model.new_cache(idx.shape[0]) if kv_cache is None else kv_cache
    return torch.cat([model(piece, kv_cache) for piece in torch.split(idx, list(pieces), dim=1)], dim=1)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


# The promise


@pytest.mark.parametrize(("config", "T"), CASES)
def test_a_text_read_in_one_piece_gives_the_logits_of_no_cache(
    config: GPTConfig, T: int, model_of: Callable[[GPTConfig], GPT], draw_ids: Callable[..., Tensor]
) -> None:
    model, idx = model_of(config), draw_ids(T)
    assert_equal(read(model, idx, [T]), model(idx))


@pytest.mark.parametrize(("config", "T"), CASES)
def test_a_text_read_one_by_one_gives_the_logits_of_no_cache(
    config: GPTConfig, T: int, model_of: Callable[[GPTConfig], GPT], draw_ids: Callable[..., Tensor]
) -> None:
    model, idx = model_of(config), draw_ids(T)
    assert_equal(read(model, idx, [1] * T), model(idx))


@pytest.mark.parametrize(("config", "T"), CASES)
def test_a_text_read_in_two_pieces_gives_the_logits_of_no_cache_wherever_it_is_cut(
    config: GPTConfig, T: int, model_of: Callable[[GPTConfig], GPT], draw_ids: Callable[..., Tensor]
) -> None:
    model, idx = model_of(config), draw_ids(T)
    expected = model(idx)
    near_edges = {cut for edge in edges(config) for cut in (edge, T - edge)}
    for cut in range(1, T) if T <= 40 else sorted(near_edges & set(range(1, T))):
        assert_equal(read(model, idx, [cut, T - cut]), expected)


@settings(max_examples=50)
@given(data=st.data(), config=st.sampled_from(list(SHAPES.values())))
def test_a_text_read_in_any_pieces_gives_the_logits_of_no_cache(
    data: st.DataObject,
    config: GPTConfig,
    model_of: Callable[[GPTConfig], GPT],
    draw_ids: Callable[..., Tensor],
) -> None:
    pieces = data.draw(st.lists(st.integers(1, config.window + 2), min_size=1, max_size=20))
    model, idx = model_of(config), draw_ids(sum(pieces))
    assert_equal(read(model, idx, pieces), model(idx))


def test_texts_side_by_side_are_read_as_each_would_be_alone(tiny_model: GPT, draw_ids: Callable[..., Tensor]) -> None:
    idx = draw_ids(50, 3)
    together = read(tiny_model, idx, [7, 1, 1, 20, 1, 20])
    for row, alone in zip(together, idx, strict=True):
        assert_equal(row, tiny_model(alone[None])[0])


def test_two_texts_read_in_turn_through_two_caches_do_not_mix(tiny_model: GPT, draw_ids: Callable[..., Tensor]) -> None:
    texts = [draw_ids(48, seed=seed) for seed in (1, 2)]
    caches, pieces = [tiny_model.new_cache(), tiny_model.new_cache()], [5, 1, 1, 9, 1, 30, 1]
    read_so_far: list[list[Tensor]] = [[], []]
    for start, stop in pairwise([0, *torch.tensor(pieces).cumsum(0).tolist()]):
        for text, kv_cache, logits in zip(texts, caches, read_so_far, strict=True):
            logits.append(tiny_model(text[:, start:stop], kv_cache))
    for text, logits in zip(texts, read_so_far, strict=True):
        assert_equal(torch.cat(logits, dim=1), tiny_model(text))


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 30])
def test_a_prompt_read_once_serves_many_continuations(
    prompt: int, tiny_model: GPT, draw_ids: Callable[..., Tensor]
) -> None:
    idx = draw_ids(prompt + 25, 3)
    idx[:, :prompt] = idx[:1, :prompt]
    one = tiny_model.new_cache()
    first = read(tiny_model, idx[:1, :prompt], [prompt], one)
    many = one.repeat(3)
    rest = read(tiny_model, idx[:, prompt:], [1, 1, 6, *[1] * 17], many)
    assert_equal(torch.cat((first.expand(3, -1, -1), rest), dim=1), tiny_model(idx))
    # The cache that was copied has not moved: it can go on by itself.
    assert one.length == prompt
    assert_equal(read(tiny_model, idx[2:, prompt:], [25], one), tiny_model(idx[2:])[:, prompt:])


# The ring

RING = GPTConfig(vocab_size=7, n_layer=2, n_head=1, n_embd=2, block_size=8, window=4)


def marked(start: int, stop: int) -> Tensor:
    """Keys that say which position they belong to, (1, 1, T, 2)."""
    return torch.arange(start, stop, dtype=torch.float32).view(1, 1, -1, 1).expand(-1, -1, -1, 2)


def extend(kv_cache: KVCache, n: int, layer: int = 0) -> list[int]:
    """Adds n marked positions to one layer; returns the positions that these may read."""
    start = kv_cache.length
    k, v = kv_cache.extend(layer, marked(start, start + n), -marked(start, start + n))
    assert torch.equal(k, -v)
    return [int(position) for position in k[0, 0, :, 0].tolist()]


def test_a_single_position_reads_itself_and_the_window_before_it_in_any_order() -> None:
    kv_cache = KVCache(RING)
    seen = []
    for _ in range(7):
        seen.append(sorted(extend(kv_cache, 1)))
        kv_cache.advance(1)
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


def test_a_chunk_reads_the_positions_before_it_that_its_first_one_may_and_itself_in_order() -> None:
    kv_cache = KVCache(RING)
    seen = []
    for n in (2, 3, 6, 2):
        seen.append(extend(kv_cache, n))
        kv_cache.advance(n)
    assert seen == [[0, 1], [0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 7, 8, 9, 10], [8, 9, 10, 11, 12]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_whatever_the_pieces_nothing_readable_is_ever_lost(pieces: list[int]) -> None:
    kv_cache = KVCache(RING)
    for n in pieces:
        start = kv_cache.length
        assert sorted(extend(kv_cache, n)) == list(range(max(0, start - 3), start + n))
        kv_cache.advance(n)
    assert kv_cache.length == sum(pieces)


def test_a_position_lives_in_its_slot() -> None:
    kv_cache = KVCache(RING)
    for n in (3, 1, 2):
        extend(kv_cache, n)
        kv_cache.advance(n)
    assert kv_cache.keys[0, 0, 0, :, 0].tolist() == [4, 5, 2, 3]


def test_layers_keep_to_themselves_and_share_one_position() -> None:
    kv_cache = KVCache(RING)
    extend(kv_cache, 3, layer=1)
    assert kv_cache.keys[0].count_nonzero() == 0 and kv_cache.keys[1].count_nonzero() == 4
    # All layers see the same start until the one call to `advance`.
    assert kv_cache.length == 0
    assert extend(kv_cache, 3, layer=0) == [0, 1, 2]
    kv_cache.advance(3)
    assert kv_cache.length == 3


def test_a_forward_pass_moves_the_position_once_by_what_it_read(
    tiny_model: GPT, draw_ids: Callable[..., Tensor]
) -> None:
    kv_cache = tiny_model.new_cache()
    lengths = []
    for n in (5, 1, 20):
        read(tiny_model, draw_ids(n), [n], kv_cache)
        lengths.append(kv_cache.length)
    assert lengths == [5, 6, 26]


def test_memory_is_known_before_the_first_character_and_never_grows(
    tiny_model: GPT, draw_ids: Callable[..., Tensor]
) -> None:
    kv_cache = tiny_model.new_cache(5)
    # Keys and values, layers, texts, window, channels, bytes of a float64.
    assert kv_cache.nbytes == 2 * 3 * 5 * 4 * 12 * 8
    storage = kv_cache.keys.data_ptr()
    read(tiny_model, draw_ids(100, 5), [50, *[1] * 50], kv_cache)
    assert kv_cache.nbytes == 2 * 3 * 5 * 4 * 12 * 8 and kv_cache.keys.data_ptr() == storage


def test_a_new_cache_has_the_dtype_of_the_weights(tiny_config: GPTConfig, tiny_model: GPT) -> None:
    assert tiny_model.new_cache().keys.dtype is torch.float64
    assert GPT(tiny_config).bfloat16().new_cache().values.dtype is torch.bfloat16


def test_a_repeated_cache_is_a_copy_even_when_repeated_once() -> None:
    kv_cache = KVCache(RING)
    extend(kv_cache, 3)
    kv_cache.advance(3)
    before = kv_cache.keys.clone()
    copy = kv_cache.repeat(1)
    extend(copy, 1)
    copy.advance(1)
    assert (kv_cache.length, copy.length) == (3, 4)
    assert torch.equal(kv_cache.keys, before) and not torch.equal(copy.keys, before)


def test_only_a_cache_of_one_text_can_be_repeated() -> None:
    with pytest.raises(ValueError, match="not one of 2"):
        KVCache(RING, 2).repeat(3)
