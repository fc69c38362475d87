"""The step that a GPU repeats: the same numbers as the model's own pass, from memory that stays where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from minigpt.bench import random_model
from minigpt.captured import StaticStep
from minigpt.config import GPTConfig
from minigpt.engine import TorchEngine
from minigpt.generation import generate
from minigpt.kv_cache import KVCache
from minigpt.model import GPT, TABLE

SHAPE = GPTConfig(vocab_size=11, n_layer=3, n_head=2, n_embd=16, block_size=16, window=6)


def model_and_caches(length: int, texts: int = 2) -> tuple[GPT, KVCache, KVCache]:
    model = random_model(SHAPE).double().requires_grad_(False)
    caches = [model.new_cache(texts) for _ in range(2)]
    ids = torch.arange(texts * length).reshape(texts, length) * 5 % SHAPE.vocab_size
    for kv_cache in caches:
        model(ids, kv_cache)
    return model, caches[0], caches[1]


@pytest.mark.parametrize("length", [5, 6, 7, 40, TABLE - 3])
def test_a_static_step_is_the_models_own(length: int) -> None:
    model, static, plain = model_and_caches(length)
    step = StaticStep(model, static)
    for position in range(20):
        last = [position % 11, (3 * position + 1) % 11]
        expected = model(torch.tensor(last)[:, None], plain)[:, -1]
        torch.testing.assert_close(step(last), expected, rtol=0, atol=1e-12)
    assert static.length == plain.length == length + 20
    torch.testing.assert_close(static.keys, plain.keys, rtol=0, atol=1e-12)
    torch.testing.assert_close(static.values, plain.values, rtol=0, atol=1e-12)


def test_what_is_recorded_at_one_position_holds_at_all_others() -> None:
    # A graph of CUDA repeats what it saw once. Here the operators are recorded on the CPU, and repeated.
    model, static, plain = model_and_caches(9)
    step = StaticStep(model, static)

    memory = (step._ids, *step._angle, step._ring.slot, static.keys, static.values)

    def place(ids: Tensor, cos: Tensor, sin: Tensor, slot: Tensor, keys: Tensor, values: Tensor) -> None:
        step._ids, step._angle, step._ring.slot, static.keys, static.values = ids, (cos, sin), slot, keys, values

    def traced(*tensors: Tensor) -> Tensor:
        place(*tensors)
        step.run()
        return step._logits

    with torch.no_grad():
        operators = make_fx(traced)(*(each.clone() for each in memory))
    place(*memory)
    step.run = lambda: setattr(step, "_logits", operators(*memory))  # type: ignore[method-assign]
    for position in range(2 * SHAPE.window + 1):
        last = [position % 11, (7 * position + 2) % 11]
        expected = model(torch.tensor(last)[:, None], plain)[:, -1]
        torch.testing.assert_close(step(last), expected, rtol=0, atol=1e-12)


def test_a_ring_that_is_not_full_is_refused() -> None:
    model, static, _ = model_and_caches(4)
    with pytest.raises(ValueError, match="full ring, not 4 of 6 positions"):
        StaticStep(model, static)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_captured_step_writes_what_the_cpu_writes() -> None:
    model = random_model(SHAPE)
    expected = list(generate(model, [1, 2], 100, samples=range(3), seed=4))
    model.to("cuda")
    engine = TorchEngine(model)
    assert list(generate(model, [1, 2], 100, samples=range(3), seed=4, engine=engine)) == expected
    assert engine._step is not None
    # And on another cache.
    assert list(generate(model, [1, 2], 100, samples=range(3), seed=4, engine=engine)) == expected
