"""Losses against loops that say what they mean: one context, one character at a time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from minigpt import evaluation
from minigpt.config import GPTConfig
from minigpt.corpus import Ids
from minigpt.evaluation import cross_entropy, loss_by_position, stream_losses, window_loss
from minigpt.model import GPT
from tests.model_support import random_model

SHAPE = GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=8, block_size=8, window=3, dropout=0.5)


@pytest.fixture
def model() -> GPT:
    """A random model in float64, in training mode with dropout on: an evaluation must turn that off itself."""
    return random_model(SHAPE, seed=1).double().train()


def text(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, n, dtype=np.uint8)


def losses_from(model: GPT, ids: Ids, start: int, stop: int) -> list[float]:
    """-log p of the characters start + 1 ... stop, each given those from start on; the whole context every time."""
    was_training = model.training
    model.eval()
    losses = []
    with torch.no_grad():
        for i in range(start + 1, stop + 1):
            logits = model(torch.from_numpy(ids[None, start:i].astype(np.int64)))[0, -1].tolist()
            log_total = math.log(sum(math.exp(logit) for logit in logits))
            losses.append(log_total - logits[ids[i]])
    model.train(was_training)
    return losses


def in_one_stream(model: GPT, ids: Ids) -> NDArray[np.float32]:
    return np.concatenate(list(stream_losses(model, ids)))


def test_cross_entropy_is_the_mean_of_minus_log_p() -> None:
    logits = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]], [[0.0, math.log(9.0)], [0.0, 0.0]]], dtype=torch.float64)
    targets = torch.tensor([[0, 0], [0, 1]])
    expected = (math.log(2) + math.log(4 / 3) + math.log(10) + math.log(2)) / 4
    assert cross_entropy(logits, targets).item() == pytest.approx(expected, abs=1e-12)


# In windows


@pytest.mark.parametrize("n", [9, 10, 16, 17, 24, 25, 40])
def test_window_loss_is_the_mean_over_all_whole_windows(model: GPT, n: int) -> None:
    ids = text(n)
    # What is left over at the end is less than a window: n - 1 predictions, 8 a window.
    naive = [loss for k in range((n - 1) // 8) for loss in losses_from(model, ids, 8 * k, 8 * k + 8)]
    assert len(naive) == (n - 1) // 8 * 8
    assert window_loss(model, ids) == pytest.approx(np.mean(naive), abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_text_shorter_than_a_window_is_read_as_one(model: GPT, n: int) -> None:
    ids = text(n)
    assert window_loss(model, ids) == pytest.approx(np.mean(losses_from(model, ids, 0, n - 1)), abs=1e-12)


@pytest.mark.parametrize("n", [0, 1])
def test_a_text_without_a_prediction_is_a_mistake_in_code(model: GPT, n: int) -> None:
    with pytest.raises(ValueError, match="2 characters"):
        window_loss(model, text(n))


@pytest.mark.parametrize(
    ("max_chars", "windows"),
    [
        (0, range(10)),
        (80, range(10)),
        (1000, range(10)),
        (79, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (40, [0, 2, 4, 6, 8]),
        (24, [0, 3, 6]),
        (31, [0, 3, 6]),
        (16, [0, 5]),
        (8, [0]),
        (1, [0]),
    ],
)
def test_a_share_of_the_text_is_read_in_evenly_spaced_windows(model: GPT, max_chars: int, windows: list[int]) -> None:
    ids = text(83)
    naive = [loss for k in windows for loss in losses_from(model, ids, 8 * k, 8 * k + 8)]
    assert window_loss(model, ids, max_chars) == pytest.approx(np.mean(naive), abs=1e-12)


@pytest.mark.parametrize("chars", [8, 20, 24, 56, 72])
def test_window_loss_does_not_depend_on_how_many_windows_are_computed_at_once(
    model: GPT, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = text(60)
    expected = window_loss(model, ids)
    monkeypatch.setattr(evaluation, "CHARS_PER_CALL", chars)
    assert window_loss(model, ids) == pytest.approx(expected, abs=1e-12)


def test_no_call_holds_many_more_characters_than_allowed(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CHARS_PER_CALL", 16)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].numel()))
    window_loss(model, text(60))
    assert sum(sizes) == 56
    assert max(sizes) <= 16


def test_a_window_longer_than_one_call_holds_is_read_all_the_same(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(17)
    expected = window_loss(model, ids)
    monkeypatch.setattr(evaluation, "CHARS_PER_CALL", 7)
    assert window_loss(model, ids) == pytest.approx(expected, abs=1e-12)


# In one stream


@pytest.mark.parametrize("n", [2, 3, 4, 9, 81])
def test_a_stream_predicts_every_character_but_the_first_from_all_before_it(model: GPT, n: int) -> None:
    ids = text(n)
    losses = in_one_stream(model, ids)
    assert losses.shape == (n - 1,)
    np.testing.assert_allclose(losses, losses_from(model, ids, 0, n - 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [0, 1])
def test_a_stream_without_a_prediction_is_empty(model: GPT, n: int) -> None:
    assert list(stream_losses(model, text(n))) == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 80, 81, 512])
def test_a_stream_does_not_depend_on_the_size_of_its_chunks(
    model: GPT, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ten times the block size and more: far beyond what training ever sees.
    ids = text(10 * SHAPE.block_size + 1)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(ids[None, :-1].astype(np.int64)))[0]
    expected = -logits.log_softmax(dim=-1)[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:].astype(np.int64))]
    monkeypatch.setattr(evaluation, "STREAM_CHUNK", chunk)
    parts = list(stream_losses(model, ids))
    assert [len(part) for part in parts[:-1]] == [chunk] * (len(parts) - 1)
    np.testing.assert_allclose(np.concatenate(parts), expected.numpy(), rtol=1e-6, atol=0)


def test_a_text_longer_than_a_chunk_as_shipped_is_one_stream(model: GPT) -> None:
    ids = text(evaluation.STREAM_CHUNK + 40)
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(ids[None, :-1].astype(np.int64)))[0]
    expected = -logits.log_softmax(dim=-1)[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:].astype(np.int64))]
    np.testing.assert_allclose(in_one_stream(model, ids), expected.numpy(), rtol=1e-6, atol=0)


# By position


@pytest.mark.parametrize(("n", "length", "starts"), [(31, 10, [0, 10, 20]), (30, 10, [0, 10]), (11, 10, [0])])
def test_loss_by_position_is_the_mean_over_streams_that_start_from_nothing(
    model: GPT, n: int, length: int, starts: list[int]
) -> None:
    ids = text(n)
    naive = [losses_from(model, ids, start, start + length) for start in starts]
    np.testing.assert_allclose(loss_by_position(model, ids, length), np.mean(naive, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("max_streams", "streams"), [(10, range(10)), (9, range(9)), (4, [0, 2, 5, 7]), (1, [0])])
def test_streams_that_are_left_out_are_evenly_spaced(model: GPT, max_streams: int, streams: list[int]) -> None:
    ids = text(44)
    naive = [losses_from(model, ids, 4 * k, 4 * k + 4) for k in streams]
    found = loss_by_position(model, ids, 4, max_streams)
    np.testing.assert_allclose(found, np.mean(naive, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chars", [1, 7, 9, 30, 81])
def test_loss_by_position_does_not_depend_on_how_much_is_computed_at_once(
    model: GPT, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = text(200)
    expected = loss_by_position(model, ids, 60)
    monkeypatch.setattr(evaluation, "CHARS_PER_CALL", chars)
    np.testing.assert_allclose(loss_by_position(model, ids, 60), expected, rtol=0, atol=1e-12)


def test_loss_by_position_of_one_stream_is_that_of_the_stream_far_beyond_the_block(model: GPT) -> None:
    ids = text(10 * SHAPE.block_size + 1)
    found = loss_by_position(model, ids, 10 * SHAPE.block_size)
    np.testing.assert_allclose(found, in_one_stream(model, ids), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [0, 1, 10])
def test_a_text_too_short_for_one_stream_is_a_mistake_in_code(model: GPT, n: int) -> None:
    with pytest.raises(ValueError, match="needs 11 characters"):
        loss_by_position(model, text(n), 10)


# What an evaluation leaves behind


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_puts_the_training_flag_back_as_it_was(model: GPT, training: bool) -> None:
    model.train(training)
    ids = text(40)
    window_loss(model, ids)
    assert all(module.training is training for module in model.modules())
    list(stream_losses(model, ids))
    assert all(module.training is training for module in model.modules())
    loss_by_position(model, ids, 10)
    assert all(module.training is training for module in model.modules())


def test_the_training_flag_comes_back_also_after_an_error_and_from_a_stream_that_is_left(model: GPT) -> None:
    with pytest.raises(IndexError):
        window_loss(model, np.full(20, SHAPE.vocab_size, dtype=np.uint8))
    assert model.training
    stream = stream_losses(model, text(40))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert model.training


def test_an_evaluation_draws_nothing_learns_nothing_and_leaves_no_mode_on(model: GPT) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    ids = text(40)
    window_loss(model, ids)
    loss_by_position(model, ids, 10)
    for _ in stream_losses(model, ids):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert param.grad is None
