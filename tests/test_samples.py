"""Samples: what the model writes at each evaluation, the same file whatever happened in between."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from minigpt.errors import ReportError
from minigpt.generation import generate
from minigpt.model import GPT
from minigpt.runs import SAMPLES
from minigpt.samples import forget_samples, keep_sample, sample
from minigpt.sampling import Sampling
from minigpt.tokenizer import CharTokenizer

CHARS = "\n abcde"
# Lines that look like headings, blank ones, and letters of several bytes.
TEXTS = {3: "a b\n\nstep 9: held-out loss 1.0\n", 6: "\n\ncafé 漢字", 9: "   \n  z", 12: "end"}
LOSSES = {3: 2.5, 6: 2.25, 9: 2.375, 12: 2.0}
BEST = (3, 6, 12)


def keep(folder: Path, *steps: int) -> bytes:
    """Adds the samples of these steps; returns what the file holds then."""
    for step in steps:
        keep_sample(folder, step, LOSSES[step], step in BEST, TEXTS[step])
    return (folder / SAMPLES).read_bytes()


# Writing them


def test_a_sample_is_as_long_as_asked_and_always_the_same(tiny_model: GPT) -> None:
    text = sample(tiny_model, CharTokenizer(CHARS), "a", 50)
    assert len(text) == 50
    assert set(text) <= set(CHARS)
    assert sample(tiny_model, CharTokenizer(CHARS), "a", 50) == text
    # What a screen shows is the beginning of what the file has.
    assert sample(tiny_model, CharTokenizer(CHARS), "a", 20) == text[:20]


def test_a_sample_follows_a_line_break_or_the_character_given(tiny_model: GPT) -> None:
    def after(id_: int) -> list[int]:
        return [id_ for (id_,) in generate(tiny_model, [id_], 30, sampling=Sampling(temperature=0.8))]

    with_break, without = CharTokenizer(CHARS), CharTokenizer(" abcdef")
    assert sample(tiny_model, with_break, "e", 30) == with_break.decode(after(0))
    assert sample(tiny_model, without, "e", 30) == without.decode(after(5))
    assert after(0) != after(5)


def test_a_sample_moves_no_cursor(tiny_model: GPT) -> None:
    text = sample(tiny_model, CharTokenizer("\n\x1b\r\t\x07\u2028e"), "e", 200)
    assert set(text) == {"\n", " ", "e"}


def test_a_sample_leaves_the_random_numbers_and_the_mode_of_training_alone(tiny_model: GPT) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    tiny_model.train()
    try:
        sample(tiny_model, CharTokenizer(CHARS), "a", 10)
        assert tiny_model.training
    finally:
        tiny_model.eval()
    assert torch.equal(torch.get_rng_state(), state)


# Keeping them


def test_the_file_has_each_sample_in_full_under_a_heading(tmp_path: Path) -> None:
    found = keep(tmp_path, 3, 6, 9).decode()
    headings = [line for line in found.splitlines() if line and not line.startswith(" ")]
    assert headings == [
        "step 3: held-out loss 2.5000, the best so far",
        "step 6: held-out loss 2.2500, the best so far",
        "step 9: held-out loss 2.3750",
    ]
    for step in (3, 6):
        part = re.split(r"^step \d+: .*\n\n", found, flags=re.MULTILINE)[step // 3]
        lines = [line.removeprefix("    ") for line in part.split("\n")]
        assert "\n".join(lines).rstrip() == TEXTS[step].rstrip()


def test_samples_of_a_step_and_after_it_are_forgotten(tmp_path: Path) -> None:
    first = keep(tmp_path, 3, 6)
    whole = keep(tmp_path, 9, 12)
    for step in (13, 100):
        forget_samples(tmp_path, step)
        assert (tmp_path / SAMPLES).read_bytes() == whole
    forget_samples(tmp_path, 9)
    assert (tmp_path / SAMPLES).read_bytes() == first
    forget_samples(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
    forget_samples(tmp_path, 0)


def test_a_file_that_was_cut_anywhere_in_the_last_sample_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    before = keep(tmp_path, 3)
    whole = keep(tmp_path, 6)
    for end in range(len(before), len(whole) + 1):
        (tmp_path / SAMPLES).write_bytes(whole[:end])
        forget_samples(tmp_path, 6)
        assert (tmp_path / SAMPLES).read_bytes() == before
        assert keep(tmp_path, 6) == whole


def test_a_file_that_is_none_of_ours_any_more_begins_anew(tmp_path: Path) -> None:
    for damage in (b"\0\0\0", b"\xff\xfe\n", b"step nine: \n"):
        (tmp_path / SAMPLES).write_bytes(damage)
        forget_samples(tmp_path, 6)
        assert not (tmp_path / SAMPLES).exists()


def test_a_disk_that_fills_up_leaves_no_half_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keep(tmp_path, 3)
    ordinary = Path.open

    class Full:
        """A file on a disk with room for ten more bytes."""

        def __init__(self, file: IO[Any]) -> None:
            self._file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            self._file.write(data[:10])
            self._file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(ordinary(path, mode)))
        with pytest.raises(ReportError, match=r"samples\.txt: No space left") as caught:
            keep_sample(tmp_path, 6, 2.25, True, TEXTS[6])
    assert "\n" not in str(caught.value)
    assert (tmp_path / SAMPLES).read_bytes() == before


def test_a_file_that_cannot_be_written_or_tidied_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).mkdir()
    for act in (lambda: keep(tmp_path, 3), lambda: forget_samples(tmp_path, 3)):
        with pytest.raises(ReportError, match=r"cannot (write|tidy) .*samples\.txt"):
            act()
