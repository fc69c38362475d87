"""Model files: what goes in comes out, what is not one of ours is one sentence, and a write is whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from minigpt.checkpoint import Checkpoint, Facts, TrainingState, load, save_checkpoint
from minigpt.config import GPTConfig
from minigpt.errors import CheckpointError
from minigpt.model import GPT
from minigpt.tokenizer import CharTokenizer
from tests.model_support import random_model
from tests.run_support import metadata_of, names_in

CHARS = "\n abc"
SHAPE = GPTConfig(vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=8, block_size=8, window=4, dropout=0.25)
FACTS = Facts(
    corpus='plays "of" Märgit\n\u2028😀',
    corpus_sha256="ab" * 32,
    corpus_chars=12345,
    val_fraction=0.1,
    most_frequent="c",
    preset="tiny",
    steps=17,
    train_loss=1.25,
    val_loss=1.1 + 2.2,
    elapsed_s=0.1,
    minigpt_version="0.1.0",
    torch_version="2.9",
)
STATE = TrainingState(
    {"step": 17, "losses": [0.1, 1 / 3], "best": None, "extra": {"é": [True]}},
    {"wte.weight/exp_avg": torch.linspace(0, 1, 7), "wte.weight/step": torch.tensor(17.0)},
)
IDX = torch.tensor([[0, 1, 2, 3, 4, 3, 2, 1, 0, 4, 4, 4]])


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A whole checkpoint with a training state."""
    path = tmp_path / "good.safetensors"
    save_checkpoint(path, random_model(SHAPE), CharTokenizer(CHARS), FACTS, STATE)
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def write_bad(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> Path:
    bad = path.with_name("bad.safetensors")
    bad.write_bytes(save(tensors, metadata))
    return bad


def with_metadata(path: Path, **changes: str | None) -> Path:
    """A copy with other metadata; None removes a part."""
    metadata = {**metadata_of(path), **changes}
    return write_bad(path, tensors_of(path), {key: value for key, value in metadata.items() if value is not None})


def with_json(path: Path, part: str, **changes: Any) -> Path:
    """A copy with other values in one JSON object of the metadata; ... removes one."""
    values = {**json.loads(metadata_of(path)[part]), **changes}
    return with_metadata(path, **{part: json.dumps({key: value for key, value in values.items() if value is not ...})})


def with_tensors(path: Path, **changes: Tensor | None) -> Path:
    """A copy with other tensors; None removes one."""
    tensors = {**tensors_of(path), **changes}
    return write_bad(path, {name: tensor for name, tensor in tensors.items() if tensor is not None}, metadata_of(path))


def in_fixed_order(path: Path) -> bytearray:
    """The same file with a sorted header: safetensors writes the metadata in another order every time."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return bytearray(len(header).to_bytes(8, "little") + header + content[8 + length :])


def refusal(path: Path, *, with_state: bool = True) -> str:
    """The one sentence with which a file is refused, naming the file."""
    with pytest.raises(CheckpointError) as caught:
        load(path, with_state=with_state)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    assert sentence.strip() == sentence
    # Not a cause that a person would have to read as well.
    assert caught.value.__cause__ is None
    return sentence


def assert_loads_as(path: Path, model: GPT) -> None:
    loaded = load(path).model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


# What goes in comes out


def test_a_loaded_model_gives_the_same_logits_to_the_last_bit(good: Path) -> None:
    checkpoint = load(good)
    with torch.inference_mode():
        assert torch.equal(checkpoint.model(IDX), random_model(SHAPE)(IDX))
    assert checkpoint.model.config == SHAPE
    assert checkpoint.path == good


def test_a_loaded_model_is_ready_to_generate_and_to_be_trained(good: Path) -> None:
    model = load(good).model
    assert not any(module.training for module in model.modules())
    assert all(param.requires_grad and param.dtype == torch.float32 for param in model.parameters())
    assert list(model.state_dict()) == list(random_model(SHAPE).state_dict())


def test_bits_that_are_hard_to_print_survive(good: Path) -> None:
    model = random_model(SHAPE)
    special = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, 1 / 3, -1e-38, torch.pi, 0.1])
    with torch.no_grad():
        model.norm_f.weight.copy_(special)
    save_checkpoint(good, model, CharTokenizer(CHARS), FACTS)
    found = load(good).model.norm_f.weight
    assert torch.equal(found.view(torch.int32), special.view(torch.int32))


@pytest.mark.parametrize(
    "chars",
    [
        "a",
        "\n",
        "\0\t\r\n\x1b\x7f\x85",
        "'\"\\/{}[]:,",
        "\u2028\u2029\ufeff\u200d\u0301",
        "é́日本😀👍🏽\U0010ffff",
        "zyxab",
        "\ud83d!\ude00",
    ],
    ids=ascii,
)
def test_any_characters_come_back_in_their_order(tmp_path: Path, chars: str) -> None:
    path = tmp_path / "m.safetensors"
    config = GPTConfig(vocab_size=len(chars), n_layer=1, n_head=1, n_embd=2, block_size=2, window=1)
    save_checkpoint(path, random_model(config), CharTokenizer(chars), FACTS)
    tokenizer = load(path).tokenizer
    assert tokenizer.chars == chars
    assert tokenizer.decode(tokenizer.encode(chars)) == chars


def test_facts_come_back_as_they_were(good: Path) -> None:
    assert load(good).facts == FACTS
    unmeasured = Facts("c", "0" * 64, 2, 0.5, "a")
    save_checkpoint(good, random_model(SHAPE), CharTokenizer(CHARS), unmeasured)
    assert load(good).facts == unmeasured


def test_a_fact_that_this_version_does_not_know_is_passed_over(good: Path) -> None:
    assert load(with_json(good, "facts", weather="fine")).facts == FACTS


def test_the_training_state_comes_back_where_it_is_asked_for(good: Path) -> None:
    state = load(good, with_state=True).state
    assert state is not None
    assert state.values == STATE.values
    assert state.tensors.keys() == STATE.tensors.keys()
    for name, tensor in STATE.tensors.items():
        assert torch.equal(state.tensors[name], tensor)
    assert load(good).state is None


def test_a_file_without_a_training_state_says_so_by_none(good: Path) -> None:
    save_checkpoint(good, random_model(SHAPE), CharTokenizer(CHARS), FACTS)
    assert load(good, with_state=True).state is None


def test_an_empty_training_state_is_not_none(good: Path) -> None:
    save_checkpoint(good, random_model(SHAPE), CharTokenizer(CHARS), FACTS, TrainingState({}))
    assert load(good, with_state=True).state == TrainingState({}, {})


@pytest.mark.parametrize(("chars", "start"), [("a\nb", "\n"), ("abc", "c")])
def test_a_text_without_a_prompt_starts_at_a_line_or_from_the_most_frequent_character(
    tmp_path: Path, chars: str, start: str
) -> None:
    checkpoint = Checkpoint(tmp_path, random_model(SHAPE), CharTokenizer(chars), FACTS)
    assert checkpoint.start == start


def test_a_checkpoint_is_an_ordinary_safetensors_file_with_the_documented_parts(good: Path) -> None:
    metadata = metadata_of(good)
    assert sorted(metadata) == ["chars", "config", "facts", "minigpt", "state"]
    assert metadata["minigpt"] == "1"
    assert json.loads(metadata["config"]) == asdict(SHAPE)
    assert json.loads(metadata["chars"]) == CHARS
    assert json.loads(metadata["facts"]) == asdict(FACTS)
    names = set(random_model(SHAPE).state_dict()) | {"state/wte.weight/exp_avg", "state/wte.weight/step"}
    assert set(tensors_of(good)) == names


def test_a_loaded_model_does_not_care_what_becomes_of_its_file(good: Path) -> None:
    checkpoint = load(good, with_state=True)
    size = good.stat().st_size
    with good.open("r+b") as file:
        file.write(b"\xff" * size)
    good.unlink()
    assert all(
        torch.equal(found, expected)
        for found, expected in zip(checkpoint.model.parameters(), random_model(SHAPE).parameters(), strict=True)
    )
    assert checkpoint.state is not None
    assert torch.equal(checkpoint.state.tensors["wte.weight/exp_avg"], STATE.tensors["wte.weight/exp_avg"])


def test_a_model_may_be_saved_over_the_file_that_it_was_loaded_from(good: Path) -> None:
    checkpoint = load(good)
    save_checkpoint(good, checkpoint.model, checkpoint.tokenizer, checkpoint.facts)
    assert_loads_as(good, random_model(SHAPE))


def test_saving_leaves_the_model_alone(tmp_path: Path) -> None:
    model = random_model(SHAPE).train()
    save_checkpoint(tmp_path / "m.safetensors", model, CharTokenizer(CHARS), FACTS)
    assert model.training
    for found, expected in zip(model.parameters(), random_model(SHAPE).parameters(), strict=True):
        assert torch.equal(found, expected)


# What is not a checkpoint


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no checkpoint file" in refusal(tmp_path / "none.safetensors")
    assert "no checkpoint file" in refusal(tmp_path / "no" / "folder" / "m.safetensors")
    assert "is not a checkpoint file" in refusal(tmp_path)


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path / ("m" * 300))


class _Planted:
    """Unpickling one of these would make a folder."""

    def __init__(self, victim: Path) -> None:
        self._victim = victim

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.mkdir, (self._victim,)


def zip_of_torch() -> bytes:
    stream = io.BytesIO()
    torch.save(random_model(SHAPE).state_dict(), stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"\0" * 8,
        b"\0" * 1000,
        b"\xff" * 1000,
        b"To be, or not to be, that is the question:\n" * 50,
        b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (10**18).to_bytes(8, "little") + b"{}",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        pickle.dumps({"model": [1, 2, 3]}),
        zip_of_torch(),
    ],
    ids=lambda content: f"{content[:12]!r}-{len(content)}",
)
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    refusal(path)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    path, victim = tmp_path / "m.safetensors", tmp_path / "victim"
    path.write_bytes(pickle.dumps(_Planted(victim)))
    refusal(path)
    torch.save(_Planted(victim), path)
    refusal(path)
    assert not victim.exists()


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    path, generator = tmp_path / "m.safetensors", random.Random(1)
    for _ in range(100):
        path.write_bytes(generator.randbytes(generator.randrange(1, 3000)))
        refusal(path)


def test_a_file_cut_short_anywhere_is_refused(good: Path) -> None:
    content, path = good.read_bytes(), good.with_name("cut.safetensors")
    lengths = {*range(0, len(content), 97), *range(64), *range(len(content) - 64, len(content))}
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        assert "not a whole safetensors file" in refusal(path)


def test_bytes_behind_the_end_are_refused(good: Path) -> None:
    good.write_bytes(good.read_bytes() + b"\0")
    refusal(good)


def test_a_flipped_bit_in_the_header_gives_a_model_or_one_sentence(good: Path) -> None:
    content, path = in_fixed_order(good), good.with_name("flipped.safetensors")
    header = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(2)
    refused = 0
    # All of the length and of the brackets at its start, and a seeded choice of the rest.
    places = [(i, bit) for i in range(12) for bit in range(8)]
    places += [(generator.randrange(12, header), generator.randrange(8)) for _ in range(400)]
    for i, bit in places:
        content[i] ^= 1 << bit
        path.write_bytes(content)
        content[i] ^= 1 << bit
        try:
            load(path, with_state=True)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    # The rest were changes of a number or of a letter that still make sense.
    assert len(places) // 2 < refused < len(places)


def test_a_replaced_byte_in_the_header_gives_a_model_or_one_sentence(good: Path) -> None:
    content, path = in_fixed_order(good), good.with_name("replaced.safetensors")
    header = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(3)
    for _ in range(400):
        i, byte = generator.randrange(8, header), generator.choice(b'0123456789"{}[],:\\ NaeEFIUB-./\0\xff')
        content[i], before = byte, content[i]
        path.write_bytes(content)
        content[i] = before
        try:
            load(path, with_state=True)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_a_safetensors_file_of_another_program_is_refused(good: Path) -> None:
    assert "not of minigpt" in refusal(write_bad(good, tensors_of(good), None))
    assert "not of minigpt" in refusal(write_bad(good, tensors_of(good), {"format": "pt"}))
    assert "not of minigpt" in refusal(write_bad(good, {}, {"format": "pt"}))


@pytest.mark.parametrize("version", ["2", "0", "", "1.0", "99999999999999999999", "one"])
def test_another_format_version_is_refused_by_its_name(good: Path, version: str) -> None:
    assert f"version {version}," in refusal(with_metadata(good, minigpt=version))


@pytest.mark.parametrize("part", ["config", "chars", "facts"])
def test_a_file_that_lacks_a_part_of_its_metadata_is_refused_by_its_name(good: Path, part: str) -> None:
    assert f"lacks '{part}'" in refusal(with_metadata(good, **{part: None}), with_state=False)


@pytest.mark.parametrize("part", ["config", "chars", "facts", "state"])
@pytest.mark.parametrize(
    "text",
    ["", "not json", "null", "1", "NaN", "[]", "[1", '"', '{"a":', "{'a': 1}", "1" * 5000, "\0", "😀"],
    ids=ascii,
)
def test_metadata_that_is_not_the_right_json_is_refused(good: Path, part: str, text: str) -> None:
    refusal(with_metadata(good, **{part: text}))


@pytest.mark.parametrize("part", ["config", "chars", "facts", "state"])
def test_metadata_nested_without_end_is_refused(good: Path, part: str) -> None:
    refusal(with_metadata(good, **{part: "[" * 100_000}))


@pytest.mark.parametrize("chars", ['"abc"', '"\\n abcd"', '""', '"\\n aab"', "{}", '["\\n", " ", "a", "b", "c"]'])
def test_characters_that_do_not_fit_are_refused(good: Path, chars: str) -> None:
    refusal(with_metadata(good, chars=chars))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layer": 1}, "holds 2 layers"),
        ({"n_layer": 3}, "holds 2 layers"),
        ({"n_embd": 16}, "does not fit its config"),
        ({"n_embd": 10}, "odd"),
        ({"n_head": 1}, "does not fit its config"),
        ({"n_head": 3}, "not divisible"),
        ({"vocab_size": 6}, "5 characters for vocab_size=6"),
        ({"vocab_size": 4}, "5 characters for vocab_size=4"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"n_embd": -8}, "n_embd=-8"),
        ({"n_layer": 2.0}, "whole number"),
        ({"n_layer": "2"}, "whole number"),
        ({"n_layer": None}, "whole number"),
        ({"n_layer": True}, "whole number"),
        ({"n_layer": [2]}, "whole number"),
        ({"window": 9}, "window=9 is larger"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": float("nan")}, "dropout=nan"),
        ({"dropout": float("inf")}, "dropout=inf"),
        ({"n_experts": 2}, "'n_experts'"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_or_does_not_fit_the_tensors_is_refused(
    good: Path, changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(with_json(good, "config", **changes))


def answers_at_once(path: Path) -> None:
    """The file is refused in a moment and in next to no memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    refusal(path)
    assert time.process_time() - started < 1
    # In KiB: far above noise and far below what such sizes would take.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(
    "changes", [{"n_layer": 10**9}, {"n_layer": 10**400}, {"vocab_size": 10**9}, {"n_embd": 10**6}], ids=str
)
def test_huge_sizes_in_a_config_are_refused_at_once(good: Path, changes: dict[str, int]) -> None:
    answers_at_once(with_json(good, "config", **changes))


@pytest.mark.parametrize("n_embd", [10**9, 10**18, 10**30])
def test_a_width_that_no_machine_can_count_is_refused_at_once(good: Path, n_embd: int) -> None:
    answers_at_once(with_json(good, "config", n_embd=n_embd))


@pytest.mark.parametrize("fact", ["corpus", "corpus_sha256", "corpus_chars", "val_fraction", "most_frequent"])
def test_facts_that_lack_one_without_a_default_are_refused_by_its_name(good: Path, fact: str) -> None:
    assert fact in refusal(with_json(good, "facts", **{fact: ...}))


@pytest.mark.parametrize(
    "changes",
    [{"corpus_chars": "many"}, {"val_loss": "low"}, {"val_fraction": None}, {"most_frequent": 7}, {"corpus": []}],
    ids=str,
)
def test_facts_of_a_wrong_type_are_refused(good: Path, changes: dict[str, Any]) -> None:
    refusal(with_json(good, "facts", **changes))


NAMES = sorted(random_model(SHAPE).state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_refused_by_its_name(good: Path, name: str) -> None:
    assert f"{name} is missing" in refusal(with_tensors(good, **{name: None}))


def test_a_missing_layer_is_refused(good: Path) -> None:
    layer = {name: None for name in tensors_of(good) if name.startswith("blocks.1.")}
    assert "holds 1 layers" in refusal(with_tensors(good, **layer))
    # The right number of them, but not those that the model has.
    renamed = {name.replace("blocks.1.", "blocks.7."): tensors_of(good)[name] for name in layer}
    assert "does not fit" in refusal(with_tensors(good, **layer, **renamed))


@pytest.mark.parametrize(
    "name", ["extra", "blocks.0.attn.qkv.bias", "blocks.1.norm_3.weight", "blocks.", "", "State/x"]
)
def test_an_extra_tensor_is_refused(good: Path, name: str) -> None:
    refusal(with_tensors(good, **{name: torch.zeros(2)}))


SHAPES = [(8, 5), (5, 8, 1), (40,), (5, 9), (0, 8), (7,), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_of_another_shape_is_refused_by_its_name(good: Path, shape: tuple[int, ...]) -> None:
    assert "wte.weight is" in refusal(with_tensors(good, **{"wte.weight": torch.zeros(shape)}))


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_may_have_another_shape(good: Path, name: str) -> None:
    for shape in SHAPES:
        refusal(with_tensors(good, **{name: torch.zeros(shape)}))


@pytest.mark.parametrize("name", NAMES)
def test_a_huge_width_is_not_believed_even_if_an_empty_tensor_has_it_too(good: Path, name: str) -> None:
    bad = with_json(good, "config", n_embd=10**9)
    answers_at_once(with_tensors(bad, **{name: torch.zeros(0, 10**9)}))


NOT_FLOATS = [torch.int32, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", NOT_FLOATS, ids=str)
def test_weights_that_are_not_floats_are_refused(good: Path, dtype: torch.dtype) -> None:
    refusal(with_tensors(good, **{"wte.weight": torch.ones(5, 8, dtype=dtype)}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_one_weight_in_another_precision_than_the_rest_is_refused(good: Path, dtype: torch.dtype) -> None:
    refusal(with_tensors(good, **{"wte.weight": tensors_of(good)["wte.weight"].to(dtype)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(good: Path, value: float) -> None:
    weight = tensors_of(good)["blocks.0.mlp.down.weight"]
    weight[3, 3] = value
    refusal(with_tensors(good, **{"blocks.0.mlp.down.weight": weight}))


# Writing


class _Interrupted:
    """Replaces a function: its n-th call raises what it is given, the others go through."""

    def __init__(self, function: Callable[..., Any], error: BaseException, n: int = 1) -> None:
        self._function, self._error, self._n = function, error, n
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self._n:
            raise self._error
        return self._function(*args, **kwargs)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_other(path: Path) -> None:
    save_checkpoint(path, random_model(SHAPE, 1), CharTokenizer(CHARS), FACTS)


class _HalfWritten(io.BufferedWriter):
    """Stands for an open file: half of what is written gets there, then the disk is full or the user impatient."""

    error: BaseException = no_space()

    def write(self, content: Any) -> int:
        super().write(bytes(content)[: len(content) // 2])
        self.flush()
        raise self.error


def open_half(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "wb":
            return ordinary(path, mode, *args, **kwargs)
        file = _HalfWritten(io.FileIO(path, "w"))
        file.error = error
        return file

    ordinary = Path.open
    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("place", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("error", [no_space(), PermissionError(13, "Permission denied"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_anywhere_leaves_the_old_file_and_nothing_else(
    good: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    before = good.read_bytes()
    if place == "write":
        open_half(monkeypatch, error)
    else:
        owner: Any = os if place == "fsync" else Path
        monkeypatch.setattr(owner, place, _Interrupted(getattr(owner, place), error))
    # An interruption goes on to whoever waits for it; what a user can mend is said in a sentence.
    if isinstance(error, OSError):
        with pytest.raises(CheckpointError, match=f"cannot write .*{error.strerror}; .* intact"):
            save_other(good)
    else:
        with pytest.raises(KeyboardInterrupt):
            save_other(good)
    monkeypatch.undo()
    assert good.read_bytes() == before
    assert names_in(good.parent) == ["good.safetensors"]


@pytest.mark.parametrize("error", [no_space(), KeyboardInterrupt()], ids=repr)
def test_a_failure_after_the_file_was_replaced_leaves_the_new_one_whole(
    good: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    # The second flush is that of the folder.
    monkeypatch.setattr(os, "fsync", _Interrupted(os.fsync, error, n=2))
    if isinstance(error, OSError):
        # Some network folders cannot be flushed, which is no reason to give up.
        save_other(good)
    else:
        with pytest.raises(KeyboardInterrupt):
            save_other(good)
    monkeypatch.undo()
    assert_loads_as(good, random_model(SHAPE, 1))
    assert names_in(good.parent) == ["good.safetensors"]


def test_a_file_is_flushed_to_disk_before_it_takes_the_place_of_the_old_one(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = good.read_bytes()
    events: list[str] = []

    def fsync(descriptor: int) -> None:
        is_folder = os.fstat(descriptor).st_ino == good.parent.stat().st_ino
        # All bytes have left Python's buffers by then.
        whole = os.fstat(descriptor).st_size > len(before) // 2
        events.append("folder" if is_folder else f"file, {'whole' if whole else 'in part'}")
        assert is_folder == (good.read_bytes() != before)
        ordinary(descriptor)

    ordinary = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    save_other(good)
    assert events == ["file, whole", "folder"]


def test_what_a_killed_write_left_behind_is_no_hindrance(good: Path) -> None:
    # A name of its own beside the target: a rename across file systems would not be one step.
    good.with_name(".good.safetensors.partial").write_bytes(b"half a mod")
    save_other(good)
    assert_loads_as(good, random_model(SHAPE, 1))
    assert names_in(good.parent) == ["good.safetensors"]


def test_a_folder_that_is_not_there_or_is_a_file_cannot_be_written(good: Path) -> None:
    for path in (good.parent / "none" / "m.safetensors", good / "m.safetensors"):
        with pytest.raises(CheckpointError, match="cannot write") as caught:
            save_other(path)
        assert str(path) in str(caught.value)
    assert names_in(good.parent) == ["good.safetensors"]
    assert_loads_as(good, random_model(SHAPE))


def test_a_folder_in_the_place_of_the_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot write"):
        save_other(tmp_path / "m.safetensors")
    assert names_in(tmp_path) == ["m.safetensors"]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts something on a new folder for the length of a test; where that is not allowed, the test is left out."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    # Counted, since a folder bound to one of the same disk does not look mounted.
    mounts = 0

    def mount(*options: str) -> Path:
        nonlocal mounts
        done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        mounts += "remount" not in options[1]
        return folder

    try:
        yield mount
    finally:
        for _ in range(mounts):
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux does")
def test_a_full_disk_leaves_the_old_file_and_nothing_else(mounted: Callable[..., Path], good: Path) -> None:
    # Room for one file and a half.
    size = good.stat().st_size
    folder = mounted("-t", "tmpfs", "-o", f"size={-(-size * 3 // 2 // 4096) * 4096}", "tmpfs")
    path = folder / "m.safetensors"
    path.write_bytes(good.read_bytes())
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(path, random_model(SHAPE, 1), CharTokenizer(CHARS), FACTS, STATE)
    assert path.read_bytes() == good.read_bytes()
    assert names_in(folder) == ["m.safetensors"]
    # And the room is not lost.
    path.unlink()
    save_other(path)
    assert_loads_as(path, random_model(SHAPE, 1))


@pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux does")
def test_a_folder_that_may_only_be_read_can_be_loaded_from_and_not_written(
    mounted: Callable[..., Path], good: Path
) -> None:
    source = good.parent / "source"
    source.mkdir()
    (source / "m.safetensors").write_bytes(good.read_bytes())
    folder = mounted("--bind", str(source))
    mounted("-o", "remount,ro,bind")
    assert_loads_as(folder / "m.safetensors", random_model(SHAPE))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save_other(folder / "m.safetensors")
    assert_loads_as(folder / "m.safetensors", random_model(SHAPE))
    assert names_in(folder) == ["m.safetensors"]
