"""Rounded weights: which numbers they are, and that packing them loses nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from minigpt.bench import random_model
from minigpt.config import DEFAULT_FORMAT, GPTConfig
from minigpt.errors import ConfigError
from minigpt.weights import FORMATS, int8_scales, packed, round_weights

SHAPE = GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=8, block_size=8, window=4)


def matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def test_int8_is_the_nearest_of_255_multiples_of_a_127th_of_the_largest_weight_of_a_row() -> None:
    weight = matrix([127.0, -126.4, 0.6, 0.4], [0.0, 0.0, 0.0, 0.0], [-2.54, 0.0, 0.011, -0.009])
    assert int8_scales(weight).tolist() == [1.0, 1.0, pytest.approx(0.02)]
    numbers, scales = packed(weight, "int8")
    assert numbers.tolist() == [[127, -126, 1, 0], [0, 0, 0, 0], [-127, 0, 1, 0]]
    assert numbers.dtype == np.int8
    assert scales.tolist() == [1.0, 1.0, pytest.approx(0.02)]


def test_float16_is_packed_by_its_bits() -> None:
    numbers, scales = packed(matrix([1.0, -2.0, 65504.0]), "float16")
    assert numbers.tolist() == [[0x3C00, 0xC000, 0x7BFF]]
    assert scales.tolist() == [1.0]


def test_float32_is_read_where_it_lies() -> None:
    weight = matrix([1.0, 2.0])
    numbers, _ = packed(weight, "float32")
    assert numbers.ctypes.data == weight.data_ptr()


@pytest.mark.parametrize("format", FORMATS)
def test_packed_numbers_times_their_scales_are_the_rounded_weights(format: str) -> None:
    model = random_model(SHAPE)
    round_weights(model, format)
    for name, param in model.named_parameters():
        if param.ndim == 2:
            numbers, scales = packed(param, format)
            values = numbers.view(np.float16) if format == "float16" else numbers
            unpacked = values.astype(np.float32) * scales[:, None]
            assert np.array_equal(unpacked, param.detach().numpy()), name


@pytest.mark.parametrize(("format", "most"), [("float32", 0.0), ("float16", 2.0**-11), ("int8", 0.5 / 127)])
def test_a_rounded_matrix_is_off_by_half_a_step_at_most_and_vectors_stay(format: str, most: float) -> None:
    model = random_model(SHAPE)
    before = copy.deepcopy(model.state_dict())
    round_weights(model, format)
    for name, weight in model.state_dict().items():
        off = (weight - before[name]).abs()
        if weight.ndim == 2:
            assert (off <= before[name].abs().amax(dim=1, keepdim=True) * most * 1.0001).all(), name
            assert bool(off.amax() > 0) is (format != "float32")
        else:
            assert off.amax() == 0, name
    # Rounding what is rounded changes nothing, to the bit: the cache and the recompute read the same numbers.
    once = copy.deepcopy(model.state_dict())
    round_weights(model, format)
    assert all(torch.equal(weight, once[name]) for name, weight in model.state_dict().items())


def test_what_float16_cannot_hold_is_refused_with_what_to_do() -> None:
    model = random_model(SHAPE)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 70_000
    with pytest.raises(ConfigError, match="too large for float16: choose --weights int8 or float32"):
        round_weights(model, "float16")


def test_an_unknown_format_is_told_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no weights 'int4': choose one of float32, float16, int8"):
        round_weights(random_model(SHAPE), "int4")


def test_the_default_is_a_format() -> None:
    assert DEFAULT_FORMAT in FORMATS
