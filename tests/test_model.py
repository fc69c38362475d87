"""The network against the formulas: known small numbers, a second implementation, and what it must not see."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.config import PRESETS, GPTConfig
from minigpt.evaluation import cross_entropy
from minigpt.kernels import sliding_window_mask
from minigpt.model import (
    GPT,
    _table,
    attention,
    rotary_angles,
    rotate,
    window_attention,
)
from tests.model_support import normal

Array = NDArray[np.float64]


# Attention


def all_of_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return window_attention(q, k, v, k.shape[2])


@pytest.mark.parametrize("attend", [attention, all_of_it])
def test_attention_is_the_mean_of_the_values_weighted_by_the_softmax_of_scaled_scores(
    attend: Callable[..., Tensor],
) -> None:
    # D = 4, so a product of 2 ln 3 is a score of ln 3: the first key weighs three times as much as the second.
    q = torch.tensor([[[[2.0, 0, 0, 0]]]], dtype=torch.float64)
    k = torch.tensor([[[[math.log(3), 5, 0, 0], [0, 0, 7, 0]]]], dtype=torch.float64)
    v = torch.tensor([[[[4.0, 0, 8, 1], [0, 4, 0, 1]]]], dtype=torch.float64)
    expected = torch.tensor([[[[3.0, 1, 6, 1]]]], dtype=torch.float64)
    torch.testing.assert_close(attend(q, k, v), expected, rtol=0, atol=1e-12)


def test_attention_equals_the_formula_written_out_in_numpy() -> None:
    q, k, v = normal(2, 3, 4, 8, seed=1), normal(2, 3, 6, 8, seed=2), normal(2, 3, 6, 8, seed=3)
    mask = sliding_window_mask(4, 6, 3)
    expected = np.zeros((2, 3, 4, 8))
    for b, h, i in np.ndindex(2, 3, 4):
        keys = [j for j in range(6) if mask[i, j]]
        weights = np.exp([q[b, h, i].numpy() @ k[b, h, j].numpy() / 8**0.5 for j in keys])
        expected[b, h, i] = weights / weights.sum() @ v[b, h, keys].numpy()
    np.testing.assert_allclose(attention(q, k, v, mask).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 5), (4, 8), (9, 9), (64, 64), (65, 69), (130, 130), (130, 200)])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 200])
def test_attention_in_bands_is_the_formula_with_the_windows_mask(T: int, S: int, window: int) -> None:
    if T == 1:
        window = max(window, S)
    q, k, v = normal(2, 3, T, 8, seed=1), normal(2, 3, S, 8, seed=2), normal(2, 3, S, 8, seed=3)
    expected = attention(q, k, v, sliding_window_mask(T, S, window))
    torch.testing.assert_close(window_attention(q, k, v, window), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attend", [attention, all_of_it])
@pytest.mark.parametrize("D", [4, 16, 64, 256])
def test_the_scale_brings_the_variance_of_scores_from_the_head_width_back_to_one(
    D: int, attend: Callable[..., Tensor]
) -> None:
    n = 20_000
    q, key = normal(n, 1, 1, D, seed=1), normal(n, 1, 1, D, seed=2)
    raw = (q * key).sum(dim=-1).flatten()
    # A second key of zeros has score 0, so the score that attention gave the first is the log of their weights' ratio.
    k = torch.cat((key, torch.zeros_like(key)), dim=2)
    weights = attend(q, k, torch.eye(2, D, dtype=torch.float64).expand(n, 1, 2, D))[:, 0, 0, :2]
    scaled = (weights[:, 0] / weights[:, 1]).log()
    # A sum of D products of two normal numbers has kurtosis 3 + 6 / D, so the variance of n of them has a standard
    # deviation of sqrt((2 + 6 / D) / n) relative to its mean: at most 1.3 %. For a new seed, 8 % is over 6 of them:
    # less than one false alarm in a million.
    assert abs(raw.var().item() / D - 1) < 0.08
    assert abs(scaled.var().item() - 1) < 0.08


@pytest.mark.parametrize(
    ("T", "S", "window", "rows"),
    [
        (1, 1, 1, ["x"]),
        (3, 3, 9, ["x..", "xx.", "xxx"]),
        (3, 3, 1, ["x..", ".x.", "..x"]),
        (4, 4, 2, ["x...", "xx..", ".xx.", "..xx"]),
        (2, 5, 3, [".xxx.", "..xxx"]),
        (1, 4, 3, [".xxx"]),
    ],
)
def test_a_query_sees_itself_and_the_window_before_it(T: int, S: int, window: int, rows: list[str]) -> None:
    mask = sliding_window_mask(T, S, window)
    assert mask.dtype is torch.bool
    assert ["".join("x" if seen else "." for seen in row) for row in mask.tolist()] == rows


# Rotary positions


@pytest.mark.parametrize("position", [0, 1, 10, 1_000_000, 2**24 + 1])
def test_angles_at_any_position_are_exact(position: int) -> None:
    D = 64
    cos, sin = rotary_angles(position - 1 if position else 0, 2, D, torch.float64)
    row = 1 if position else 0
    with mpmath.workdps(40):
        angles = [position * mpmath.mpf(10_000) ** (mpmath.mpf(-2 * i) / D) for i in range(D // 2)]
        exact_cos = torch.tensor([float(mpmath.cos(angle)) for angle in angles], dtype=torch.float64)
        exact_sin = torch.tensor([float(mpmath.sin(angle)) for angle in angles], dtype=torch.float64)
    # Half a unit in the last place of a factor, times the position, and as much again for the product.
    tolerance = position * 2.0**-52 + 2.0**-52
    exact_cos, exact_sin = torch.cat((exact_cos, exact_cos)), torch.cat((-exact_sin, exact_sin))
    torch.testing.assert_close(cos[row], exact_cos, rtol=0, atol=tolerance)
    torch.testing.assert_close(sin[row], exact_sin, rtol=0, atol=tolerance)
    # The narrow types hold the exact number, rounded once.
    for dtype in (torch.float32, torch.bfloat16):
        narrow = rotary_angles(position, 1, D, dtype)
        assert narrow[0].dtype is narrow[1].dtype is dtype
        for rounded, exact in zip(narrow, (exact_cos, exact_sin), strict=True):
            torch.testing.assert_close(rounded[0].double(), exact, rtol=0, atol=tolerance + torch.finfo(dtype).eps / 4)


@pytest.mark.parametrize(("start", "T"), [(0, 1), (1023, 1), (1024, 1), (1000, 24), (1000, 25), (5, 3000)])
def test_angles_of_many_positions_are_those_of_each(start: int, T: int) -> None:
    together = rotary_angles(start, T, 8, torch.float64)
    for i in (0, T // 2, T - 1):
        for some, one in zip(together, rotary_angles(start + i, 1, 8, torch.float64), strict=True):
            assert some.shape == (T, 8)
            assert torch.equal(some[i : i + 1], one)


def test_angles_that_were_made_for_writing_serve_training() -> None:
    _table.cache_clear()
    with torch.inference_mode():
        cos, _ = rotary_angles(0, 4, 8, torch.float64)
    x = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((x * cos).sum(), x)
    assert torch.equal(grad, cos)


def test_a_pair_turns_by_its_angle() -> None:
    # Two pairs, (1, 3) and (2, 4) of half-split channels: a quarter turn and a half turn.
    x = torch.tensor([[[[1.0, 2, 3, 4]]]], dtype=torch.float64)
    cos = torch.tensor([[0.0, -1, 0, -1]], dtype=torch.float64)
    sin = torch.tensor([[-1.0, 0, 1, 0]], dtype=torch.float64)
    assert rotate(x, cos, sin).flatten().tolist() == [-3, -2, 1, -4]


@pytest.mark.parametrize("shift", [1, 77, 1_000_000])
def test_products_of_rotated_queries_and_keys_depend_on_distance_only(shift: int) -> None:
    D, q, k = 16, normal(1, 1, 1, 16, seed=1), normal(1, 1, 1, 16, seed=2)

    def product(query_at: int, key_at: int) -> float:
        turned = [
            rotate(x, *rotary_angles(at, 1, D, torch.float64)) for x, at in ((q, query_at), (k, key_at))
        ]  # each (1, 1, 1, D)
        return float((turned[0] * turned[1]).sum())

    for distance in (0, 1, 5):
        assert product(distance + shift, shift) == pytest.approx(product(distance, 0), abs=1e-8)
    assert abs(product(1, 0) - product(0, 0)) > 1e-3
    assert abs(product(1, 0) - product(0, 1)) > 1e-3


# The whole network


def reference_logits(model: GPT, ids: list[int]) -> Array:
    """The forward pass from the description, written for clarity: loops over heads and positions, complex rotation."""
    config = model.config
    w: dict[str, Array] = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    D, window = config.n_embd // config.n_head, config.window

    def norm(x: Array, gain: Array) -> Array:
        scaled: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * gain
        return scaled

    def turned(x: Array) -> Array:
        angle = np.arange(len(x))[:, None] / 10_000 ** (np.arange(D // 2) * 2 / D)
        pairs = (x[:, : D // 2] + 1j * x[:, D // 2 :]) * np.exp(1j * angle)
        return np.concatenate((pairs.real, pairs.imag), axis=1)

    x = w["wte.weight"][ids]
    for layer in range(config.n_layer):
        at = f"blocks.{layer}."
        q, k, v = np.split(norm(x, w[at + "norm_1.weight"]) @ w[at + "attn.qkv.weight"].T, 3, axis=1)
        gathered = np.zeros_like(x)
        for head in range(config.n_head):
            channels = slice(head * D, (head + 1) * D)
            q_h = turned(norm(q[:, channels], w[at + "attn.q_norm.weight"]))
            k_h = turned(norm(k[:, channels], w[at + "attn.k_norm.weight"]))
            for i in range(len(ids)):
                seen = slice(max(0, i - window + 1), i + 1)
                weights = np.exp(k_h[seen] @ q_h[i] / np.sqrt(D))
                gathered[i, channels] = weights / weights.sum() @ v[seen, channels]
        x = x + gathered @ w[at + "attn.proj.weight"].T
        gate, up = np.split(norm(x, w[at + "norm_2.weight"]) @ w[at + "mlp.gate_up.weight"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down.weight"].T
    logits: Array = norm(x, w["norm_f.weight"]) @ w["lm_head.weight"].T
    return logits


@pytest.mark.parametrize("shape", [{}, {"window": 1}, {"window": 16}, {"n_head": 1}, {"n_layer": 1, "n_embd": 28}])
def test_the_network_equals_a_second_implementation_in_numpy(
    shape: dict[str, int],
    tiny_config: GPTConfig,
    model_of: Callable[[GPTConfig], GPT],
    draw_ids: Callable[..., Tensor],
) -> None:
    model = model_of(GPTConfig(**{**vars(tiny_config), **shape}))
    idx = draw_ids(40, 2)
    for row, logits in zip(idx.tolist(), model(idx).detach().numpy(), strict=True):
        np.testing.assert_allclose(logits, reference_logits(model, row), rtol=0, atol=1e-10)
        assert logits.std() > 0.1


@pytest.mark.parametrize("T", [1, 2, 5, 9, 13, 14, 40])
def test_the_last_logits_are_those_of_all_positions(T: int, tiny_model: GPT, draw_ids: Callable[..., Tensor]) -> None:
    idx = draw_ids(T, 2)
    torch.testing.assert_close(tiny_model.last_logits(idx), tiny_model(idx)[:, -1], rtol=0, atol=1e-12)


def test_the_last_logits_take_half_of_the_work(tiny_config: GPTConfig, draw_ids: Callable[..., Tensor]) -> None:
    seen: list[int] = []
    model = GPT(replace(tiny_config, n_layer=4, window=5))
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    model.last_logits(draw_ids(30))
    # Of the receptive field of 17 positions; a last layer that needed one would compute what it reads.
    assert seen == [30, 13, 9, 5]


def test_a_fresh_model_predicts_every_character_alike(tiny_config: GPTConfig, draw_ids: Callable[..., Tensor]) -> None:
    logits = GPT(tiny_config, torch.Generator().manual_seed(0))(draw_ids(20, 2))
    assert logits.shape == (2, 20, 7) and logits.count_nonzero() == 0
    assert cross_entropy(logits, draw_ids(20, 2, seed=1)).item() == pytest.approx(math.log(7), abs=1e-6)


def test_a_fresh_layer_is_the_identity(tiny_config: GPTConfig) -> None:
    model, x = GPT(tiny_config, torch.Generator().manual_seed(0)), torch.ones(1, 5, 12)
    angles = rotary_angles(0, 5, tiny_config.head_dim, torch.float32)
    assert torch.equal(model.blocks[0](x, angles, 0, None), x)


def test_the_generator_alone_decides_the_first_weights(tiny_config: GPTConfig) -> None:
    def weights(seed: int) -> Tensor:
        return torch.cat([w.flatten() for w in GPT(tiny_config, torch.Generator().manual_seed(seed)).parameters()])

    torch.manual_seed(5)
    first = weights(0)
    torch.manual_seed(6)
    assert torch.equal(first, weights(0)) and not torch.equal(first, weights(1))


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 0.8), ("small", 1.8), ("base", 4.8)])
def test_presets_have_the_size_that_they_are_known_by(preset: str, millions: float) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=65, **PRESETS[preset].model))
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.1)


def test_every_weight_takes_part(tiny_model: GPT, draw_ids: Callable[..., Tensor]) -> None:
    model = copy.deepcopy(tiny_model)
    cross_entropy(model(draw_ids(20)), draw_ids(20, seed=1)).backward()  # type: ignore[no-untyped-call]
    unused = [name for name, w in model.named_parameters() if w.grad is None or not w.grad.any()]
    assert unused == []


def test_dropout_acts_in_training_only(tiny_config: GPTConfig, model_of: Callable[[GPTConfig], GPT]) -> None:
    plain = model_of(tiny_config)
    dropping = GPT(GPTConfig(**{**vars(tiny_config), "dropout": 0.5})).double()
    dropping.load_state_dict(plain.state_dict())
    idx = torch.zeros(1, 5, dtype=torch.long)
    assert torch.equal(dropping.eval()(idx), plain(idx))
    assert not torch.equal(dropping.train()(idx), plain(idx))


# What a position can see


def test_a_later_character_leaves_earlier_logits_alone(tiny_model: GPT, draw_ids: Callable[..., Tensor]) -> None:
    idx = draw_ids(40)
    before = tiny_model(idx)
    for at in (0, 1, 17, 39):
        changed = idx.clone()
        changed[0, at] = (idx[0, at] + 1) % 7
        after = tiny_model(changed)
        assert torch.equal(after[:, :at], before[:, :at])
        assert not torch.equal(after[:, at], before[:, at])


@pytest.mark.parametrize("T", [11, 25, 160])
def test_a_character_just_outside_the_receptive_field_changes_nothing_and_the_last_inside_does(
    T: int, tiny_model: GPT, draw_ids: Callable[..., Tensor]
) -> None:
    idx, field = draw_ids(T), tiny_model.config.receptive_field
    before = tiny_model(idx)[:, -1]

    def after_changing(at: int) -> Tensor:
        changed = idx.clone()
        changed[0, at] = (idx[0, at] + 1) % 7
        logits: Tensor = tiny_model(changed)[:, -1]
        return logits

    # To the last bit: what it could reach is multiplied by a weight of zero.
    assert torch.equal(after_changing(T - field - 1), before)
    assert (after_changing(T - field) - before).abs().max() > 1e-6


@pytest.mark.parametrize("T", [9, 10, 11, 25, 160])
def test_a_text_cropped_to_the_receptive_field_predicts_what_the_whole_does(
    T: int, tiny_model: GPT, draw_ids: Callable[..., Tensor]
) -> None:
    idx, field = draw_ids(T), tiny_model.config.receptive_field
    whole = tiny_model(idx)[:, -1]
    torch.testing.assert_close(tiny_model(idx[:, -field:])[:, -1], whole, rtol=0, atol=1e-9)
    if field <= T:
        assert (tiny_model(idx[:, -field + 1 :])[:, -1] - whole).abs().max() > 1e-6


def test_texts_side_by_side_do_not_see_each_other(tiny_model: GPT, draw_ids: Callable[..., Tensor]) -> None:
    idx = draw_ids(20, 2)
    before = tiny_model(idx)
    idx[1] = (idx[1] + 1) % 7
    assert torch.equal(tiny_model(idx)[0], before[0])


def test_the_model_keeps_nothing_between_calls(tiny_model: GPT, draw_ids: Callable[..., Tensor]) -> None:
    idx = draw_ids(20)
    weights = [weight.clone() for weight in tiny_model.state_dict().values()]
    first = tiny_model(idx)
    tiny_model(draw_ids(33, 2, seed=1))
    tiny_model(draw_ids(5), tiny_model.new_cache())
    assert torch.equal(tiny_model(idx), first)
    assert all(torch.equal(*pair) for pair in zip(weights, tiny_model.state_dict().values(), strict=True))


def test_another_dropout_is_part_of_the_config_and_drops_that_much() -> None:
    model = GPT(GPTConfig(vocab_size=5, n_layer=2, n_head=2, n_embd=8, block_size=8, window=4)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    x = torch.zeros(1, 1, dtype=torch.int64)
    assert torch.equal(model(x), model(x))
    model.set_dropout(0.5)
    assert model.config.dropout == 0.5
    torch.manual_seed(0)
    assert not torch.equal(model(x), model(x))
    # All that the layers add is dropped, and what is left is the embedding, normed.
    model.set_dropout(1 - 1e-9)
    torch.testing.assert_close(model(x), model.lm_head(model.norm_f(model.wte(x))))
