"""What is taken down of attention is what the model computes, for every layer and head."""

from __future__ import annotations

import pytest
import torch

from minigpt.bench import random_model
from minigpt.config import GPTConfig
from minigpt.explain.recording import record
from minigpt.kernels import sliding_window_mask
from tests.cli_support import trained_checkpoint


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 100])
def test_the_weights_times_the_values_are_what_attention_gave(length: int) -> None:
    model = trained_checkpoint().model
    recording = record(model, [i % model.config.vocab_size for i in range(length)])
    assert len(recording.layers) == model.config.n_layer
    for layer in recording.layers:
        assert layer.weights.shape == (model.config.n_head, length, length)
        for head in range(model.config.n_head):
            torch.testing.assert_close(layer.weights[head] @ layer.v[head], layer.y[head], rtol=0, atol=1e-6)
        torch.testing.assert_close(layer.weights.sum(dim=-1), torch.ones(model.config.n_head, length))
        assert (layer.weights[:, ~layer.mask] == 0).all()


def test_recording_changes_nothing_and_leaves_no_hook() -> None:
    model = random_model(GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=8, block_size=8, window=4))
    model.train()
    idx = torch.tensor([[1, 2, 3, 4, 5, 6]])
    with torch.inference_mode():
        expected = model(idx)[0]
    recording = record(model, idx[0].tolist())
    torch.testing.assert_close(recording.logits, expected, rtol=0, atol=0)
    assert model.training
    assert all(not block.attn.read._forward_hooks for block in model.blocks)


def test_one_position_after_a_cache_is_recorded_with_the_keys_that_it_reads() -> None:
    model = random_model(GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=8, block_size=8, window=4))
    kv_cache = model.new_cache()
    ids = [1, 2, 3, 4, 5, 6]
    whole = record(model, ids)
    record(model, ids[:5], kv_cache)
    one = record(model, ids[5:], kv_cache)
    assert kv_cache.length == 6
    torch.testing.assert_close(one.logits, whole.logits[-1:], rtol=0, atol=1e-5)
    for layer, reference in zip(one.layers, whole.layers, strict=True):
        assert layer.k.shape == (2, 4, 4)
        torch.testing.assert_close(layer.y, reference.y[:, -1:], rtol=0, atol=1e-5)
        torch.testing.assert_close(layer.weights @ layer.v, layer.y, rtol=0, atol=1e-6)
    # What was taken down stays when the ring moves on.
    before = one.layers[0].k.clone()
    record(model, [0], kv_cache)
    assert torch.equal(one.layers[0].k, before)


def test_the_mask_is_the_models_window() -> None:
    model = random_model(GPTConfig(vocab_size=7, n_layer=1, n_head=1, n_embd=8, block_size=8, window=3))
    assert torch.equal(record(model, [1] * 6).layers[0].mask, sliding_window_mask(6, 6, 3))
