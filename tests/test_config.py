"""Settings refuse what cannot work, by name, and survive a trip through JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from minigpt.config import (
    DEFAULT_PRESET,
    PRESETS,
    GPTConfig,
    TrainConfig,
    find_preset,
    settings_from_json,
    settings_to_json,
)
from minigpt.errors import ConfigError

MODEL = GPTConfig(vocab_size=65)
TRAINING = TrainConfig()

MODEL_COUNTS = ["vocab_size", "n_layer", "n_head", "n_embd", "block_size", "window"]
TRAINING_COUNTS = ["steps", "batch_size", "eval_every"]
TRAINING_COUNTS_FROM_ZERO = ["warmup_steps", "eval_chars", "patience", "seed"]
TRAINING_NUMBERS_FROM_ZERO = ["muon_lr", "adamw_lr", "weight_decay", "grad_clip"]


def test_head_width_inner_width_and_receptive_field_follow_from_the_fields() -> None:
    config = GPTConfig(vocab_size=65, n_layer=4, n_head=4, n_embd=128, block_size=256, window=64)
    assert (config.head_dim, config.n_inner, config.receptive_field) == (32, 352, 4 * 63 + 1)


@pytest.mark.parametrize(("n_embd", "n_inner"), [(12, 32), (24, 64), (26, 96), (96, 256), (384, 1024)])
def test_the_inner_width_is_eight_thirds_rounded_up_to_a_multiple_of_32(n_embd: int, n_inner: int) -> None:
    assert GPTConfig(vocab_size=7, n_head=1, n_embd=n_embd).n_inner == n_inner


def test_a_window_of_one_sees_one_character_however_many_layers() -> None:
    assert GPTConfig(vocab_size=7, n_layer=9, window=1).receptive_field == 1


@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True])
@pytest.mark.parametrize("field", MODEL_COUNTS)
def test_a_model_count_that_is_no_count_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}={value!r} must be"):
        replace(MODEL, **{field: value})


@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True])
@pytest.mark.parametrize("field", TRAINING_COUNTS)
def test_a_training_count_that_is_no_count_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}={value!r} must be"):
        replace(TRAINING, **{field: value})


@pytest.mark.parametrize("field", TRAINING_COUNTS_FROM_ZERO)
def test_some_training_counts_may_be_zero_but_not_less(field: str) -> None:
    values: dict[str, Any] = {field: 0}
    assert getattr(replace(TRAINING, **values), field) == 0
    refused: list[Any] = [-1, 0.5]
    for value in refused:
        with pytest.raises(ConfigError, match=f"^{field}={value}"):
            replace(TRAINING, **{field: value})


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "0.1", None, False])
@pytest.mark.parametrize("field", TRAINING_NUMBERS_FROM_ZERO)
def test_a_rate_that_is_no_finite_number_from_zero_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}="):
        replace(TRAINING, **{field: value})


@pytest.mark.parametrize("field", TRAINING_NUMBERS_FROM_ZERO)
def test_a_rate_may_be_zero_or_a_whole_number(field: str) -> None:
    values: dict[str, Any] = {field: 0}
    assert getattr(replace(TRAINING, **values), field) == 0


@pytest.mark.parametrize("value", ["float16", "", None, 32])
def test_a_precision_that_is_none_is_refused_by_name(value: Any) -> None:
    assert replace(TRAINING, precision="bfloat16").precision == "bfloat16"
    with pytest.raises(ConfigError, match=f"^precision={value!r} must be one of float32, bfloat16"):
        replace(TRAINING, precision=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "0.8"])
def test_the_share_of_counts_in_the_targets_is_from_zero_to_one(value: Any) -> None:
    for fitting in (0, 0.5, 1.0):
        assert replace(TRAINING, ngram_weight=fitting).ngram_weight == fitting
    with pytest.raises(ConfigError, match=r"^ngram_weight="):
        replace(TRAINING, ngram_weight=value)


def test_dropout_is_from_zero_to_below_one() -> None:
    for value in (0, 0.0, 0.999):
        assert replace(MODEL, dropout=value).dropout == value
    for value in (-0.1, 1.0, math.nan):
        with pytest.raises(ConfigError, match=r"dropout=.* must be at least 0 and below 1"):
            replace(MODEL, dropout=value)


def test_the_held_out_share_is_strictly_between_zero_and_one() -> None:
    assert replace(TRAINING, val_fraction=0.5).val_fraction == 0.5
    for value in (0.0, 1.0, math.nan):
        with pytest.raises(ConfigError, match=r"val_fraction=.* must be more than 0 and below 1"):
            replace(TRAINING, val_fraction=value)


def test_the_share_of_decay_is_from_zero_to_one() -> None:
    for value in (0.0, 1.0):
        assert replace(TRAINING, decay_fraction=value).decay_fraction == value
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match=r"decay_fraction=.* must be at least 0 and at most 1"):
            replace(TRAINING, decay_fraction=value)


def test_channels_that_heads_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_embd=130 is not divisible by n_head=4"):
        GPTConfig(vocab_size=65, n_embd=130, n_head=4)


def test_an_odd_head_is_refused_because_channels_turn_in_pairs() -> None:
    with pytest.raises(ConfigError, match=r"head_dim=3 \(n_embd=12 / n_head=4\) is odd"):
        GPTConfig(vocab_size=65, n_embd=12, n_head=4)


def test_a_window_may_fill_the_block_but_not_exceed_it() -> None:
    assert GPTConfig(vocab_size=65, block_size=32, window=32).window == 32
    with pytest.raises(ConfigError, match="window=33 is larger than block_size=32"):
        GPTConfig(vocab_size=65, block_size=32, window=33)


@pytest.mark.parametrize("settings", [replace(MODEL, dropout=0.25), replace(TRAINING, muon_lr=0.5, seed=2**63)])
def test_settings_survive_a_trip_through_json(settings: Any) -> None:
    text = json.dumps(settings_to_json(settings))
    assert settings_from_json(type(settings), json.loads(text)) == settings


def test_fields_that_json_lacks_get_their_defaults() -> None:
    assert settings_from_json(GPTConfig, {"vocab_size": 7, "window": 8}) == GPTConfig(vocab_size=7, window=8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 7, "n_layers": 2}, "unknown setting 'n_layers'"),
        ({"n_layer": 2}, "incomplete: .*vocab_size"),
        ({"vocab_size": 7, "window": "8"}, "window='8' must be a whole number"),
        ([7], "must be a JSON object, not list"),
        (None, "must be a JSON object, not NoneType"),
    ],
)
def test_json_that_is_no_model_config_is_refused_with_the_reason(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from_json(GPTConfig, values)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_shape_and_recipe(name: str) -> None:
    preset = find_preset(name)
    config, training = GPTConfig(vocab_size=65, **preset.model), TrainConfig(**preset.training)
    assert config.window < config.block_size
    assert training.warmup_steps < training.steps and training.steps % training.eval_every == 0


def test_the_default_preset_is_one_of_the_presets() -> None:
    assert find_preset(DEFAULT_PRESET) is PRESETS["tiny"]


def test_an_unknown_preset_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no preset 'huge': choose one of tiny, small, base"):
        find_preset("huge")


def test_settings_and_vocabulary_do_not_import_torch() -> None:
    code = "import sys, minigpt.config, minigpt.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
