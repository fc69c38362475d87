"""Settings: the shape of a model, how it is trained, and the presets that name good pairs of both.

Owns the defaults of both. Standard library only, so that ``--help`` can name the presets without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from minigpt.errors import ConfigError

# The feed-forward width is rounded up to a multiple of this, so that matrix kernels meet no ragged edge.
INNER_MULTIPLE = 32
PRECISIONS = ("float32", "bfloat16")

# Rates that rise faster learn a little more in a run of minutes, but make so much of rounding that two processes no
# longer learn as one does.
WARMUP_STEPS = 50

# Dropout keeps a model from learning its text by heart, but slows learning where there is no danger of that: where a
# text is read fewer times than this, or where epochs times parameters a character are fewer than the first of each
# pair (the README's section on training has what was measured).
FEWEST_EPOCHS = 4
DROPOUTS = ((40, 0.2), (20, 0.1))

# A year. A run that is to take longer is a mistake, and its steps could not be counted.
MOST_MINUTES = 366 * 24 * 60.0

# Of the sample of its writing that a run keeps at each evaluation, in characters.
SAMPLE_CHARS = 200

# What weights are rounded to for writing, unless it is said otherwise: the fastest of `weights.FORMATS`, and the
# held-out loss of three trained models changed by 0.0002 at most.
DEFAULT_FORMAT = "int8"

# Near the largest number of float32, with room to multiply.
MOST_FLOAT = 1e30

Settings = TypeVar("Settings", "GPTConfig", "TrainConfig")


@dataclass(frozen=True)
class GPTConfig:
    """What a model is built from.

    Raises:
        ConfigError: a field has the wrong type or is out of range, or two fields do not fit.
    """

    # Different characters.
    vocab_size: int
    n_layer: int = 4
    # Attention heads a layer.
    n_head: int = 4
    # Channels of the stream that the layers add to.
    n_embd: int = 128
    # Characters in one training example. Generation is not limited by it.
    block_size: int = 256
    # Position i attends to positions i - window + 1 ... i, in training and in generation.
    window: int = 64
    # Share of what each layer adds that is dropped while training.
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "n_head", "n_embd", "block_size", "window"):
            _require_count(name, getattr(self, name))
        _require_range("dropout", self.dropout, 0.0, 1.0, upper_open=True)
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: choose a multiple of {self.n_head}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim={self.head_dim} (n_embd={self.n_embd} / n_head={self.n_head}) is odd, and rotary positions"
                " turn pairs of channels: choose an even one"
            )
        if self.window > self.block_size:
            raise ConfigError(
                f"window={self.window} is larger than block_size={self.block_size}, so training would never fill it:"
                " lower the window or raise the block size"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.n_embd // self.n_head

    @property
    def n_inner(self) -> int:
        """Width of the gated feed-forward layer: 8/3 of n_embd, which gives its three matrices the parameters of
        the usual two of width 4 n_embd (Shazeer 2020, "GLU Variants Improve Transformer", section 2)."""
        return math.ceil(8 * self.n_embd / 3 / INNER_MULTIPLE) * INNER_MULTIPLE

    @property
    def receptive_field(self) -> int:
        """Characters that can influence one prediction: every layer looks window - 1 further back."""
        return self.n_layer * (self.window - 1) + 1


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. Learning rates are the peaks of a schedule (see ``optim.learning_rate_factor``).

    Raises:
        ConfigError: a field has the wrong type or is out of range.
    """

    # Updates of the weights.
    steps: int = 1000
    # Examples an update, of ``block_size`` characters each.
    batch_size: int = 8
    # Of Muon, for the matrices inside the blocks.
    muon_lr: float = 0.02
    # Of AdamW, for embeddings, norms and the output layer.
    adamw_lr: float = 0.005
    # Of the matrices: what an update takes from each weight, times the rate of Muon.
    weight_decay: float = 0.0
    # Share of the target that comes from what follows the same last characters elsewhere in the text (see ``ngrams``);
    # the rest is the one character that followed here. The peak of a schedule, too (see ``optim.ngram_factor``).
    ngram_weight: float = 0.0
    # Steps over which the rates rise linearly.
    warmup_steps: int = WARMUP_STEPS
    # Share of the steps, at the end, over which the rates fall linearly to zero.
    decay_fraction: float = 0.6
    # Largest norm of the whole gradient; 0 turns clipping off.
    grad_clip: float = 1.0
    # Steps between two evaluations.
    eval_every: int = 250
    # Characters of the held-out part read at each evaluation, in evenly spaced blocks; 0 reads all of it.
    eval_chars: int = 32768
    # Evaluations in a row without a lower held-out loss that end the run; 0 never does.
    patience: int = 0
    # Share of the text, at its end, that is held out.
    val_fraction: float = 0.1
    # Of the initial weights, the order of examples and what is dropped.
    seed: int = 0
    # What matrices are multiplied in while training: float32, or bfloat16 where the processor is faster with it.
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        for name in ("steps", "batch_size", "eval_every"):
            _require_count(name, getattr(self, name))
        for name in ("warmup_steps", "eval_chars", "patience", "seed"):
            _require_count(name, getattr(self, name), least=0)
        for name in ("muon_lr", "adamw_lr", "weight_decay", "grad_clip"):
            _require_range(name, getattr(self, name), 0.0, MOST_FLOAT)
        _require_range("decay_fraction", self.decay_fraction, 0.0, 1.0)
        _require_range("ngram_weight", self.ngram_weight, 0.0, 1.0)
        _require_range("val_fraction", self.val_fraction, 0.0, 1.0, lower_open=True, upper_open=True)


@dataclass(frozen=True)
class Preset:
    """A shape and a training recipe that go together, as field values without the vocabulary size."""

    about: str
    model: Mapping[str, Any]
    training: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        about="0.8 M parameters, about a minute on two CPU cores (held-out loss 1.61 on tiny Shakespeare, 1.32 on the"
        " bundled plays)",
        model={"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 256, "window": 64},
        training={"steps": 500, "batch_size": 4, "eval_every": 125, "eval_chars": 16384, "ngram_weight": 0.8},
    ),
    "small": Preset(
        about="1.8 M parameters, about ten minutes (1.46, 1.25)",
        model={"n_layer": 4, "n_head": 6, "n_embd": 192, "block_size": 512, "window": 128},
        training={"steps": 3000, "batch_size": 2, "eval_every": 600, "weight_decay": 0.1, "ngram_weight": 0.8},
    ),
    "base": Preset(
        about="4.9 M parameters, about an hour (1.42, 1.24)",
        model={"n_layer": 6, "n_head": 8, "n_embd": 256, "block_size": 512, "window": 128},
        training={"steps": 7000, "batch_size": 2, "eval_every": 1000, "weight_decay": 0.1, "ngram_weight": 0.8},
    ),
}
DEFAULT_PRESET = "tiny"


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}") from None


def require_minutes(minutes: float) -> None:
    """Checks that a run may take so long.

    Raises:
        ConfigError: it may not.
    """
    if not 0 < minutes <= MOST_MINUTES:
        raise ConfigError(f"minutes={minutes:g} must be more than 0 and at most a year ({MOST_MINUTES:,.0f})")


def settings_from_json(kind: type[Settings], values: Any) -> Settings:
    """Settings of that kind from a parsed JSON object; fields it lacks get their defaults.

    Raises:
        ConfigError: not an object, a field that this version does not know, a missing one without a default, or a
            bad value.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"settings must be a JSON object, not {type(values).__name__}")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"unknown setting {unknown[0]!r}: it was written by another version of minigpt")
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"settings are incomplete: {error}") from None


def settings_to_json(settings: GPTConfig | TrainConfig) -> dict[str, Any]:
    """All fields of the settings as a JSON object."""
    return asdict(settings)


def _require_count(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be a whole number")
    if value < least:
        raise ConfigError(f"{name}={value} must be at least {least}")


def _require_range(
    name: str, value: object, low: float, high: float, *, lower_open: bool = False, upper_open: bool = False
) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be a number")
    # Written so that NaN, which compares false with everything, is refused.
    above = value > low if lower_open else value >= low
    below = value < high if upper_open else value <= high
    if not (above and below):
        least, most = ("more than" if lower_open else "at least"), ("below" if upper_open else "at most")
        raise ConfigError(f"{name}={value} must be {least} {low:g} and {most} {high:g}")
