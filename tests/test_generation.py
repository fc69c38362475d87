"""Writing: the cache changes nothing, a text can be stopped and gone on with, and stop texts are cut in time.

Models are float64 unless the referee is tested: the modes differ by 1e-14, which moves an id once in 10^13 characters.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from minigpt import generation
from minigpt.config import GPTConfig
from minigpt.generation import StopFilter, generate, prefill
from minigpt.model import GPT
from minigpt.sampling import Sampling

FIELD = 10  # of the tiny model
MODES = pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])


def write(model: GPT, prompt: Sequence[int], n: int, **options: Any) -> list[int]:
    """The ids of one sample."""
    return [id_ for (id_,) in generate(model, prompt, n, **options)]


@contextmanager
def forwards(model: GPT) -> Iterator[list[tuple[int, int]]]:
    """The shapes (B, T) of the ids that the model is fed while this lasts."""
    shapes: list[tuple[int, int]] = []
    handle = model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    try:
        yield shapes
    finally:
        handle.remove()


def is_double(module: torch.nn.Module) -> bool:
    return next(module.parameters()).dtype is torch.float64


@pytest.fixture
def dropping_model(tiny_model: GPT) -> GPT:
    """The tiny model, in training and with dropout."""
    model = GPT(replace(tiny_model.config, dropout=0.5)).double()
    model.load_state_dict(tiny_model.state_dict())
    return model.train()


# The cache


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0),
        Sampling(0.5),
        Sampling(),
        Sampling(3.0),
        Sampling(top_k=3),
        Sampling(top_p=0.8),
        Sampling(min_p=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_cache_changes_no_id(sampling: Sampling, seed: int, tiny_model: GPT) -> None:
    options: dict[str, Any] = {"sampling": sampling, "seed": seed, "samples": (0, 4)}
    cached = list(generate(tiny_model, [1, 2], 3 * FIELD, use_cache=True, **options))
    assert cached == list(generate(tiny_model, [1, 2], 3 * FIELD, use_cache=False, **options))
    assert len(cached) == 3 * FIELD


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 10, 11, 16, 17, 700])
def test_the_cache_changes_no_id_whatever_the_length_of_the_prompt(
    length: int, tiny_model: GPT, draw_ids: Callable[..., Tensor]
) -> None:
    prompt = draw_ids(length)[0].tolist()
    assert write(tiny_model, prompt, 25) == write(tiny_model, prompt, 25, use_cache=False)


@pytest.mark.parametrize("window", [1, 16])
def test_the_cache_changes_no_id_for_the_narrowest_and_the_widest_window(
    window: int, tiny_config: GPTConfig, model_of: Callable[[GPTConfig], GPT]
) -> None:
    model = model_of(replace(tiny_config, window=window))
    length = model.config.receptive_field + 20
    assert write(model, [3], length) == write(model, [3], length, use_cache=False)


@MODES
def test_the_ids_are_those_of_the_most_probable_path_of_the_whole_text(use_cache: bool, tiny_model: GPT) -> None:
    ids = [5]
    for _ in range(25):
        ids.append(int(tiny_model(torch.tensor([ids]))[0, -1].argmax()))
    assert write(tiny_model, [5], 25, sampling=Sampling(0), use_cache=use_cache) == ids[1:]


def test_a_prompt_is_read_in_chunks_and_gives_the_logits_of_one_reading(
    tiny_model: GPT, draw_ids: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 7)
    prompt, kv_cache = draw_ids(24, 2), tiny_model.new_cache(2)
    with forwards(tiny_model) as shapes:
        logits = prefill(tiny_model, prompt, kv_cache)
    assert shapes == [(2, 7), (2, 7), (2, 7), (2, 3)] and kv_cache.length == 24
    torch.testing.assert_close(logits, tiny_model(prompt)[:, -1], rtol=0, atol=1e-9)


# The referee


@pytest.fixture
def single_model(tiny_model: GPT) -> GPT:
    """The tiny model in float32, the type of every trained one."""
    return copy.deepcopy(tiny_model).float()


@MODES
@pytest.mark.parametrize("length", [2, 50])
def test_in_float32_a_draw_in_doubt_is_decided_in_float64(
    length: int, use_cache: bool, single_model: GPT, draw_ids: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a tolerance this wide every draw is in doubt, so the text is that of the float64 model to the letter.
    monkeypatch.setattr(generation, "LOGIT_TOLERANCE", 10.0)
    prompt = draw_ids(length)[0].tolist()
    options: dict[str, Any] = {"samples": (0, 4), "use_cache": use_cache}
    expected = list(generate(copy.deepcopy(single_model).double(), prompt, 25, **options))
    # The float32 logits themselves are nonsense here, and do not matter.
    single_model.lm_head.register_forward_hook(lambda module, _, logits: None if is_double(module) else -logits)
    assert list(generate(single_model, prompt, 25, **options)) == expected


@pytest.mark.parametrize(
    ("sampling", "tolerance"),
    [(Sampling(0), 0.5), (Sampling(), 0.2), (Sampling(0.5, top_k=4, top_p=0.9, min_p=0.05), 0.2)],
)
def test_rounding_within_the_tolerance_changes_no_id(
    sampling: Sampling, tolerance: float, single_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(single_model, [1], 60, sampling=sampling)
    generator = torch.Generator().manual_seed(0)

    def disturb(module: torch.nn.Module, _: Any, logits: Tensor) -> Tensor:
        noise = (2 * torch.rand(logits.shape, generator=generator) - 1) * 0.8 * tolerance
        return logits if is_double(module) else logits + noise

    single_model.lm_head.register_forward_hook(disturb)
    # Without a referee the noise changes the text, or this test would show nothing.
    monkeypatch.setattr(generation, "LOGIT_TOLERANCE", 0.0)
    different = sum(write(single_model, [1], 60, sampling=sampling) != expected for _ in range(2))
    monkeypatch.setattr(generation, "LOGIT_TOLERANCE", tolerance)
    same = sum(write(single_model, [1], 60, sampling=sampling) == expected for _ in range(2))
    assert different > 0 and same == 2


def test_a_clear_draw_and_a_float64_model_need_no_referee(
    single_model: GPT, tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigpt.generation.copy.deepcopy", lambda _: pytest.fail("the model was copied"))
    write(single_model, [1], 10)
    monkeypatch.setattr(generation, "LOGIT_TOLERANCE", 10.0)
    write(tiny_model, [1], 10)


def test_the_referee_leaves_the_model_as_it_was(single_model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "LOGIT_TOLERANCE", 10.0)
    before = copy.deepcopy(single_model.state_dict())
    write(single_model, [1], 5)
    for name, weight in single_model.state_dict().items():
        assert weight.dtype is torch.float32 and torch.equal(weight, before[name])


# Seeds and samples


def test_the_same_seed_writes_the_same_text_and_another_seed_another(tiny_model: GPT) -> None:
    assert write(tiny_model, [1], 30, seed=3) == write(tiny_model, [1], 30, seed=3)
    # Seven ids of similar odds: 30 equal ones by chance have odds below 1e-15.
    assert write(tiny_model, [1], 30, seed=3) != write(tiny_model, [1], 30, seed=4)


@MODES
def test_a_sample_is_the_same_alone_as_among_others(use_cache: bool, tiny_model: GPT) -> None:
    samples = [4, 0, 2]
    together = list(generate(tiny_model, [1, 2, 3], 25, seed=9, samples=samples, use_cache=use_cache))
    texts = [list(column) for column in zip(*together, strict=True)]
    assert texts == [write(tiny_model, [1, 2, 3], 25, seed=9, samples=[s], use_cache=use_cache) for s in samples]
    assert len(set(map(tuple, texts))) == 3


@MODES
@pytest.mark.parametrize("stopped_after", [1, 2, 9, 24])
def test_going_on_from_a_generated_text_goes_on_as_if_it_had_not_stopped(
    stopped_after: int, use_cache: bool, tiny_model: GPT
) -> None:
    text = write(tiny_model, [1, 2], 25, seed=5)
    prompt = [1, 2, *text[:stopped_after]]
    assert write(tiny_model, prompt, 25 - stopped_after, seed=5, use_cache=use_cache) == text[stopped_after:]


def test_the_place_in_the_text_draws_the_id_not_the_count_of_new_ones(
    tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, list[int], int, int]] = []

    def numbers(seed: int, samples: Sequence[int], start: int, n: int) -> NDArray[np.float64]:
        asked.append((seed, list(samples), start, n))
        return np.full((n, len(samples)), 0.5)

    monkeypatch.setattr(generation, "uniforms", numbers)
    list(generate(tiny_model, [0] * 15, 2, seed=8, samples=(3, 1)))
    assert asked == [(8, [3, 1], 15, 2)]


# The work that is done


@MODES
def test_no_forward_pass_follows_the_last_id(use_cache: bool, tiny_model: GPT) -> None:
    with forwards(tiny_model) as shapes:
        assert len(write(tiny_model, [1], 6, use_cache=use_cache)) == 6
    assert len(shapes) == 6


@MODES
def test_an_id_is_yielded_as_soon_as_it_is_drawn(use_cache: bool, tiny_model: GPT) -> None:
    ids = generate(tiny_model, [1], 5, use_cache=use_cache)
    with forwards(tiny_model) as shapes:
        for count in range(1, 6):
            next(ids)
            assert len(shapes) == count


def test_with_the_cache_the_prompt_is_read_once_for_all_samples_and_then_one_position_a_step(tiny_model: GPT) -> None:
    with forwards(tiny_model) as shapes:
        list(generate(tiny_model, [1] * 8, 4, samples=range(3)))
    assert shapes == [(1, 8), (3, 1), (3, 1), (3, 1)]


def test_without_the_cache_the_prefix_grows_up_to_the_receptive_field(tiny_model: GPT) -> None:
    with forwards(tiny_model) as shapes:
        list(generate(tiny_model, [1] * 8, 5, samples=range(3), use_cache=False))
    assert shapes == [(3, 8), (3, 9), (3, 10), (3, 10), (3, 10)]


@MODES
def test_of_a_long_prompt_only_the_receptive_field_is_read(use_cache: bool, tiny_model: GPT) -> None:
    with forwards(tiny_model) as shapes:
        list(generate(tiny_model, [1] * 1000, 3, use_cache=use_cache))
    assert shapes == [(1, FIELD), *[(1, 1 if use_cache else FIELD)] * 2]


@MODES
def test_nothing_to_write_is_nothing_computed(use_cache: bool, tiny_model: GPT) -> None:
    with forwards(tiny_model) as shapes:
        assert list(generate(tiny_model, [1], 0, use_cache=use_cache)) == []
    assert shapes == []


@pytest.mark.parametrize(("prompt", "samples", "message"), [([], (0,), "prompt"), ([1], (), "samples")])
def test_an_empty_prompt_or_no_samples_is_a_mistake_in_code(
    prompt: list[int], samples: tuple[int, ...], message: str, tiny_model: GPT
) -> None:
    with pytest.raises(ValueError, match=message):
        next(generate(tiny_model, prompt, 5, samples=samples))


# What it leaves behind


@MODES
def test_dropout_is_off_while_writing(use_cache: bool, dropping_model: GPT, tiny_model: GPT) -> None:
    assert write(dropping_model, [1], 25, use_cache=use_cache) == write(tiny_model, [1], 25)


@MODES
@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_put_back_at_the_end(training: bool, use_cache: bool, dropping_model: GPT) -> None:
    dropping_model.train(training)
    write(dropping_model, [1], 3, use_cache=use_cache)
    assert dropping_model.training is dropping_model.blocks[0].training is training


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flag_is_put_back_when_writing_is_left_early(training: bool, dropping_model: GPT) -> None:
    dropping_model.train(training)
    ids = generate(dropping_model, [1], 50)
    next(ids)
    ids.close()  # type: ignore[attr-defined]
    assert dropping_model.training is training
    for _ in generate(dropping_model, [1], 50):
        break
    assert dropping_model.training is training


def test_the_training_flag_is_put_back_when_a_step_fails(dropping_model: GPT) -> None:
    ids = generate(dropping_model, [1], 50)
    next(ids)
    handle = dropping_model.norm_f.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(ids)
    handle.remove()
    assert dropping_model.training


def test_two_generations_of_a_model_in_training_run_side_by_side(dropping_model: GPT, tiny_model: GPT) -> None:
    short, long = generate(dropping_model, [1], 5), generate(dropping_model, [2], 30)
    next(short)
    text = next(long)
    list(short)
    text += [id_ for (id_,) in long]
    assert text == write(tiny_model, [2], 30)


@MODES
def test_two_generations_in_turn_write_what_each_writes_alone(use_cache: bool, tiny_model: GPT) -> None:
    one = generate(tiny_model, [1], 25, seed=1, use_cache=use_cache)
    two = generate(tiny_model, [2, 3], 25, seed=2, use_cache=not use_cache)
    pairs = list(zip(one, two, strict=True))
    assert [id_ for (id_,), _ in pairs] == write(tiny_model, [1], 25, seed=1)
    assert [id_ for _, (id_,) in pairs] == write(tiny_model, [2, 3], 25, seed=2)


@MODES
def test_writing_keeps_nothing_for_gradients(use_cache: bool, tiny_model: GPT) -> None:
    modes: list[bool] = []
    handle = tiny_model.register_forward_pre_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    write(tiny_model, [1], 5, use_cache=use_cache)
    handle.remove()
    assert modes == [True] * 5


def test_inference_mode_does_not_leak_into_the_caller(tiny_model: GPT) -> None:
    model = copy.deepcopy(tiny_model)
    ids = generate(model, [1], 5)
    for _ in ids:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        # Between two ids the caller may even train.
        model(torch.tensor([[1, 2]])).sum().backward()
    assert not torch.is_inference_mode_enabled()


def test_writing_draws_nothing_from_the_generators_of_others(tiny_model: GPT) -> None:
    before = torch.get_rng_state(), random.getstate()
    write(tiny_model, [1], 5)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


# Stop texts


def shown(text: str, stops: Sequence[str]) -> str:
    """What the filter lets through of a whole text."""
    stop_filter = StopFilter(stops)
    return "".join(map(stop_filter.feed, text)) + stop_filter.flush()


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcde", ["cd"], "ab"),
        ("abcde", ["x"], "abcde"),
        ("abcde", [], "abcde"),
        ("abcde", [""], "abcde"),
        ("abcde", ["a"], ""),
        ("abcde", ["e"], "abcd"),
        # What looked like the stop text was not, but its end begins one.
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("mississippi", ["issip"], "miss"),
        # The start of a stop text at the very end is text.
        ("abab", ["babx"], "abab"),
        # The one that is complete first counts, not the one that started first.
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabc", ["abd", "bc"], "xa"),
        ("a\n\nb", ["\n\n"], "a"),
    ],
)
def test_a_text_is_cut_before_the_first_stop_text(text: str, stops: list[str], expected: str) -> None:
    assert shown(text, stops) == expected


@pytest.mark.parametrize("stops", [["ab", "b"], ["b", "ab"]])
def test_of_two_stop_texts_that_end_together_the_longer_one_is_cut_in_any_order(stops: list[str]) -> None:
    assert shown("xab", stops) == "x"


def test_characters_are_held_back_only_while_they_may_belong_to_a_stop_text() -> None:
    stop_filter = StopFilter(["aab"])
    assert [stop_filter.feed(char) for char in "xaaacaa"] == ["x", "", "", "a", "aac", "", ""]
    assert stop_filter.flush() == "aa"
    assert stop_filter.flush() == ""
    assert not stop_filter.stopped


def test_after_a_stop_nothing_more_is_shown() -> None:
    stop_filter = StopFilter(["bc"])
    assert [stop_filter.feed(char) for char in "abcab"] == ["a", "", "", "", ""]
    assert stop_filter.stopped and stop_filter.flush() == ""


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.text("abc", max_size=30), STOPS)
def test_the_filter_agrees_with_a_search_of_the_whole_text(text: str, stops: list[str]) -> None:
    end = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    stop_filter = StopFilter(stops)
    result = "".join(map(stop_filter.feed, text)) + stop_filter.flush()
    assert stop_filter.stopped is (end is not None)
    if end is None:
        assert result == text
    else:
        assert result in {text[: end - len(stop)] for stop in stops if text[:end].endswith(stop)}
    if len(stops) == 1:
        assert result == text.partition(stops[0])[0]


@given(st.text("abc", max_size=30), STOPS)
def test_the_filter_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    handed_out = ""
    for n, char in enumerate(text, 1):
        handed_out += stop_filter.feed(char)
        if stop_filter.stopped:
            break
        starts = {stop[:i] for stop in stops for i in range(len(stop))} | {""}
        must_hold = max(len(start) for start in starts if text[:n].endswith(start))
        assert handed_out == text[: n - must_hold]
