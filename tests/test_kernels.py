"""The kernels of training against the plain formulas: values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minigpt.bench import random_model
from minigpt.config import GPTConfig
from minigpt.evaluation import cross_entropy
from minigpt.kernels import sliding_window_mask
from minigpt.model import (
    GPT,
    RMSNorm,
    attention,
    norm_rotate,
    rotary_angles,
    rotate,
    swiglu,
    window_attention,
)
from tests.model_support import normal


def assert_same_function(fused: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Equal values, and equal gradients of every input for a random direction, in float64."""
    found, expected = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    y, y_plain = fused(*found), plain(*expected)
    torch.testing.assert_close(y, y_plain, rtol=0, atol=1e-12)
    direction = normal(*y.shape, seed=9)
    y.backward(direction)  # type: ignore[no-untyped-call]
    y_plain.backward(direction)  # type: ignore[no-untyped-call]
    for x, x_plain in zip(found, expected, strict=True):
        torch.testing.assert_close(x.grad, x_plain.grad, rtol=0, atol=1e-12)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()


def with_weight(norm: RMSNorm, weight: Tensor) -> RMSNorm:
    # The tensor itself, so that its gradient arrives where the test looks for it.
    norm.weight = weight  # type: ignore[assignment]
    return norm


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_norm_of_training_is_the_formula(scale: float) -> None:
    norm = RMSNorm(6).double()
    del norm.weight
    x, weight = normal(2, 3, 6, seed=1) * scale, normal(6, seed=2)
    assert_same_function(lambda x, weight: with_weight(norm, weight)(x), rms_norm, x, weight)


def test_the_gated_feed_forward_layer_of_training_is_the_formula() -> None:
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., :5], gate_up[..., 5:]
        return gate * gate.sigmoid() * up

    assert_same_function(swiglu, plain, normal(2, 3, 10, seed=1))


def test_the_normed_and_turned_heads_of_training_are_the_formulas() -> None:
    angles = rotary_angles(3, 5, 8, torch.float64)

    def plain(qk: Tensor, *gains: Tensor) -> Tensor:
        both = [rms_norm(x, gain).transpose(1, 2) for x, gain in zip(qk.unbind(2), gains, strict=True)]
        return torch.stack([rotate(x, *angles) for x in both])

    def fused(qk: Tensor, q_gain: Tensor, k_gain: Tensor) -> Tensor:
        return torch.stack(norm_rotate(qk, q_gain, k_gain, *angles))

    inputs = normal(2, 5, 2, 3, 8, seed=1), normal(8, seed=2), normal(8, seed=3)
    assert_same_function(fused, plain, *inputs)
    with torch.inference_mode():
        torch.testing.assert_close(fused(*inputs), plain(*inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("T", "S", "window"), [(9, 9, 4), (70, 70, 5), (130, 130, 64), (6, 9, 4), (130, 200, 300)])
def test_the_gradients_of_attention_in_bands_are_those_of_the_formula(T: int, S: int, window: int) -> None:
    mask = sliding_window_mask(T, S, window)
    q, k, v = normal(2, 2, T, 4, seed=1), normal(2, 2, S, 4, seed=2), normal(2, 2, S, 4, seed=3)
    assert_same_function(
        lambda q, k, v: window_attention(q, k, v, window), lambda q, k, v: attention(q, k, v, mask), q, k, v
    )


def test_training_in_bfloat16_goes_nearly_the_same_way(draw_ids: Callable[..., Tensor]) -> None:
    model = random_model(GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=32, block_size=64, window=16))
    idx = draw_ids(65, 4)
    gradients = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(idx[:, :-1])
        assert logits.dtype is (torch.bfloat16 if enabled else torch.float32)
        cross_entropy(logits.float(), idx[:, 1:]).backward()  # type: ignore[no-untyped-call]
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in gradients[0].items():
        other = gradients[1][name]
        assert grad is not None and other is not None and other.dtype is torch.float32
        # Eight bits of mantissa leave about a hundredth of what went through a few layers.
        assert (grad - other).norm() < 0.02 * grad.norm(), name


def test_the_gradients_of_a_whole_model_are_those_of_the_plain_formulas(
    tiny_model: GPT, draw_ids: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    idx = draw_ids(40, 2)
    gradients = []
    for plain in (False, True):
        model = copy.deepcopy(tiny_model)
        if plain:
            monkeypatch.setattr("minigpt.model._trains_on_cpu", lambda x: False)
        cross_entropy(model(idx[:, :-1]), idx[:, 1:]).backward()  # type: ignore[no-untyped-call]
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(grad, gradients[1][name], rtol=0, atol=1e-12)
        assert grad is not None and grad.abs().max() > 0
