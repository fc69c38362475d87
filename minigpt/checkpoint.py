"""Model files: one self-contained safetensors file with all that generation needs, written in one step.

The metadata of the file holds, as JSON strings: ``minigpt`` (the format version), ``config``, ``chars``, ``facts`` and,
where training can go on from the file, ``state``. Tensors of the model go by their names in the model; those of the
training state have the prefix ``state/``. No pickle anywhere.
"""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from minigpt.atomic import replacing
from minigpt.config import GPTConfig, settings_from_json, settings_to_json
from minigpt.errors import CheckpointError, ConfigError
from minigpt.model import GPT
from minigpt.tokenizer import CharTokenizer

FORMAT_VERSION = 1
STATE_PREFIX = "state/"

# What JSON may hold for the annotations of `Facts`.
_KINDS: Mapping[Any, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "str | None": (str, type(None)),
    "float | None": (float, int, type(None)),
}


@dataclass(frozen=True)
class Facts:
    """Where the weights of a checkpoint come from: for people, and to know the text and its held-out part again."""

    corpus: str
    corpus_sha256: str
    corpus_chars: int
    # Share of the text, at its end, that was held out.
    val_fraction: float
    # What a text without a prompt starts from if the vocabulary has no newline.
    most_frequent: str
    preset: str | None = None
    steps: int = 0
    # Nats a character; None where it was not measured yet.
    train_loss: float | None = None
    val_loss: float | None = None
    elapsed_s: float = 0.0
    minigpt_version: str = ""
    torch_version: str = ""


@dataclass(frozen=True)
class TrainingState:
    """What resuming needs besides the model: numbers as JSON and tensors by name."""

    values: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A model that was read from a file, ready to generate."""

    path: Path
    model: GPT
    tokenizer: CharTokenizer
    facts: Facts
    # Only where it was asked for and the file has one.
    state: TrainingState | None = None

    def require_state(self) -> TrainingState:
        """The training state.

        Raises:
            CheckpointError: it has none.
        """
        if self.state is None:
            raise CheckpointError(f"{self.path} holds a model but no training state to resume from: train a new run")
        return self.state

    @property
    def start(self) -> str:
        """The character that a text without a prompt starts from."""
        return self.tokenizer.start(self.facts.most_frequent)


def save_checkpoint(
    path: Path, model: GPT, tokenizer: CharTokenizer, facts: Facts, state: TrainingState | None = None
) -> None:
    """Writes a model file in one step: at every moment the path holds the old file or the new one, whole.

    Raises:
        CheckpointError: it cannot be written (a full disk, no permission); the old file is intact.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {
        "minigpt": str(FORMAT_VERSION),
        "config": json.dumps(settings_to_json(model.config)),
        "chars": json.dumps(tokenizer.chars),
        "facts": json.dumps(asdict(facts)),
    }
    if state is not None:
        tensors |= {STATE_PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
        metadata["state"] = json.dumps(state.values)
    content = save(tensors, metadata)
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; what was saved there before is intact:"
            f" {'free some space' if error.errno == errno.ENOSPC else 'make it writable'}, then go on from it"
        ) from None


def load(path: Path | str, device: torch.device | str = "cpu", *, with_state: bool = False) -> Checkpoint:
    """Reads a model file.

    Args:
        path: the file; see ``runs.find_checkpoint`` for run names and folders.
        device: where the weights go.
        with_state: also read what training needs to go on.

    Raises:
        CheckpointError: there is no such file, or it is not a whole minigpt checkpoint of this format.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a checkpoint file: give a run name, a run folder or a file")
    except (OSError, ValueError) as error:
        # A ValueError is a name with a NUL byte in it.
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"there is no checkpoint file {path} ({why})") from None
    try:
        with safe_open(path, framework="pt") as file:
            return _read(path, file, device, with_state)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}): train again or use another") from None
    except (KeyError, ValueError, ConfigError, RecursionError) as error:
        # A KeyError's text is the bare key, a missing part of the metadata. A RecursionError is JSON nested too deep.
        what = f"its metadata lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} is a damaged checkpoint: {what}") from None


def _read(path: Path, file: Any, device: torch.device | str, with_state: bool) -> Checkpoint:
    metadata: dict[str, str] = file.metadata() or {}
    version = metadata.get("minigpt")
    if version is None:
        raise CheckpointError(f"{path} is a safetensors file, but not of minigpt")
    if version != str(FORMAT_VERSION):
        raise CheckpointError(
            f"{path} has format version {version}, and this minigpt reads version {FORMAT_VERSION}: update minigpt, or"
            " train again"
        )
    config = settings_from_json(GPTConfig, json.loads(metadata["config"]))
    tokenizer = CharTokenizer(_json_object(metadata["chars"], str, "chars"))
    facts = _facts_from_json(_json_object(metadata["facts"], dict, "facts"))
    if len(tokenizer) != config.vocab_size:
        raise CheckpointError(f"{path} has {len(tokenizer)} characters for vocab_size={config.vocab_size}")

    names = set(file.keys())
    model_names = {name for name in names if not name.startswith(STATE_PREFIX)}
    found = {name: tuple(file.get_slice(name).get_shape()) for name in model_names}
    # Compared before a model is built: a damaged config must not ask for all the memory there is.
    n_layer = len({name.split(".")[1] for name in model_names if name.startswith("blocks.")})
    if n_layer != config.n_layer:
        raise CheckpointError(f"{path} holds {n_layer} layers for n_layer={config.n_layer}")
    _require_shapes(path, found, {"wte.weight": (config.vocab_size, config.n_embd)})
    _require_shapes(path, found, {"blocks.0.mlp.gate_up.weight": (2 * config.n_inner, config.n_embd)})
    # Not on the meta device, where drawing the weights would import two seconds of torch.
    model = GPT(config, torch.Generator())
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _require_shapes(path, found, expected | {name: None for name in found if name not in expected})
    # A copy, since a mapped file may be replaced or removed while the model lives.
    weights = {name: file.get_tensor(name).to(device, copy=True) for name in sorted(model_names)}
    dtype = weights["wte.weight"].dtype
    for name, weight in weights.items():
        if weight.dtype != dtype or dtype not in (torch.float32, torch.float64):
            raise CheckpointError(f"{path} holds {name} as {weight.dtype}, not all weights as float32")
        if not weight.isfinite().all():
            raise CheckpointError(f"{path} holds numbers in {name} that are not finite: resume or train from another")
    model.load_state_dict(weights, strict=True, assign=True)

    state = None
    if with_state and "state" in metadata:
        tensors = {
            name.removeprefix(STATE_PREFIX): file.get_tensor(name).clone()
            for name in names
            if name.startswith(STATE_PREFIX)
        }
        state = TrainingState(_json_object(metadata["state"], dict, "state"), tensors)
    return Checkpoint(path, model.eval(), tokenizer, facts, state)


def _require_shapes(
    path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...] | None]
) -> None:
    for name in sorted(expected):
        if found.get(name) != expected[name]:
            raise CheckpointError(
                f"{path} does not fit its config: {name} is {found.get(name, 'missing')},"
                f" expected {expected[name] or 'nothing of that name'}"
            )


def _json_object(text: str, kind: type, name: str) -> Any:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError(f"{name} in its metadata is not a {kind.__name__}")
    return value


def _facts_from_json(values: dict[str, Any]) -> Facts:
    kinds = {fact.name: _KINDS[fact.type] for fact in fields(Facts)}
    known = {name: value for name, value in values.items() if name in kinds}
    for name, value in known.items():
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise ValueError(f"its facts say {name}={value!r}, which is no {kinds[name][0].__name__}")
    try:
        return Facts(**known)
    except TypeError as error:
        raise ValueError(f"its facts are incomplete: {error}") from None
