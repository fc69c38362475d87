"""Run folders: what a name means, which run is the newest, what is free, and what is said where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minigpt.errors import CheckpointError
from minigpt.runs import (
    BEST,
    LAST,
    find_checkpoint,
    find_run,
    foreign_file,
    free_names,
    is_run,
    locked,
    run_folder,
    runs,
)

pytestmark = pytest.mark.usefixtures("own_folder")


def make_run(name: str, *files: str, age_s: int = 0) -> Path:
    """A run with these files, the last one of which was written that long ago, the others long before."""
    folder = Path(name) if "/" in name else Path("checkpoints") / name
    folder.mkdir(parents=True)
    for i, file in enumerate(files):
        (folder / file).write_bytes(b"")
        written = 1_700_000_000 - (age_s if i == len(files) - 1 else 1_000_000)
        os.utime(folder / file, (written, written))
    return folder


def refusal(name: str | None) -> str:
    """The one sentence with which there is nothing to load."""
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Names


@pytest.mark.parametrize(
    "name",
    [
        "plays",
        "plays-2",
        "two words",
        "...",
        ".hidden",
        "日本😀",
        "-o",
        "--force",
        "a.b",
        "*",
        "~",
        "best.safetensors",
    ],
)
def test_a_plain_name_lives_under_checkpoints(name: str) -> None:
    assert run_folder(name) == Path("checkpoints", name)


@pytest.mark.parametrize("name", ["runs/plays", "./plays", "../plays", "/tmp/plays", "plays/", "checkpoints/plays"])
def test_a_name_with_a_separator_is_a_path(name: str) -> None:
    assert run_folder(name) == Path(name)


@pytest.mark.parametrize("name", ["", " ", "\t\n", ".", "..", "/", "//", "\0", "a\0b"])
def test_what_means_no_folder_of_its_own_is_not_a_name(name: str) -> None:
    for look in (run_folder, find_run, find_checkpoint):
        with pytest.raises(CheckpointError, match=r"not a name for a run|there is no run") as caught:
            look(name)
        assert repr(name) in str(caught.value)


def test_a_name_too_long_for_any_folder_is_one_sentence() -> None:
    with pytest.raises(CheckpointError):
        find_run("m" * 300)
    with pytest.raises(CheckpointError):
        find_checkpoint("m" * 300)


def test_a_name_that_the_system_cannot_spell_is_one_sentence() -> None:
    assert "not a name" in refusal("\ud800")


# What is a run


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((LAST,), True),
        ((BEST,), True),
        ((LAST, BEST), True),
        ((), False),
        (("train.jsonl",), False),
        ((".last.safetensors.partial", "model.safetensors"), False),
    ],
)
def test_a_run_is_a_folder_with_a_checkpoint(files: tuple[str, ...], expected: bool) -> None:
    folder = make_run("plays", *files)
    assert is_run(folder) is expected
    assert runs() == (["plays"] if expected else [])


def test_a_file_or_nothing_or_a_folder_named_like_a_checkpoint_is_no_run() -> None:
    Path("checkpoints", "nested", LAST).mkdir(parents=True)
    Path("checkpoints", "file").write_text("text")
    Path("checkpoints", ".gitkeep").touch()
    assert not is_run(Path("checkpoints", "nested"))
    assert not is_run(Path("checkpoints", "file"))
    assert not is_run(Path("checkpoints", "none"))
    assert runs() == []


# Which is the newest


def test_runs_are_listed_by_their_newest_checkpoint_the_newest_first() -> None:
    make_run("old", BEST, LAST, age_s=300)
    make_run("new", LAST, BEST, age_s=100)
    make_run("middle", BEST, age_s=200)
    # Written just now, but no checkpoint.
    make_run("empty", "train.jsonl")
    (Path("checkpoints") / "old" / "notes.txt").touch()
    assert runs() == ["new", "middle", "old"]


def test_without_a_checkpoints_folder_there_are_no_runs() -> None:
    assert runs() == []
    Path("checkpoints").write_text("a file")
    assert runs() == []


def test_checkpoints_may_be_a_link_and_so_may_a_run(tmp_path: Path) -> None:
    make_run("elsewhere/plays", BEST)
    Path("checkpoints").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "elsewhere" / "plays")
    (tmp_path / "elsewhere" / "broken").symlink_to(tmp_path / "nowhere")
    assert sorted(runs()) == ["again", "plays"]


# What is free


def test_a_name_is_free_until_a_run_has_it() -> None:
    assert next(free_names("plays")) == "plays"
    make_run("plays", LAST)
    assert next(free_names("plays")) == "plays-2"
    make_run("plays-2", BEST)
    make_run("plays-4", LAST)
    assert next(free_names("plays")) == "plays-3"
    make_run("plays-3", LAST)
    assert next(free_names("plays")) == "plays-5"
    assert next(free_names("plays-2")) == "plays-2-2"


def test_a_folder_without_a_checkpoint_is_free_to_be_used() -> None:
    Path("checkpoints/plays").mkdir(parents=True)
    assert next(free_names("plays")) == "plays"
    assert foreign_file(Path("checkpoints/plays")) is None


@pytest.mark.parametrize("name", ["train.jsonl", "samples.txt", "loss.svg", "tensorboard"])
def test_a_folder_with_what_a_run_would_replace_is_not_free(name: str) -> None:
    folder = make_run("plays", name)
    assert next(free_names("plays")) == "plays-2"
    assert foreign_file(folder) == folder / name
    # In a run it is the run's own.
    (folder / LAST).touch()
    assert foreign_file(folder) is None


def test_a_run_is_trained_by_one_at_a_time() -> None:
    folder = Path("checkpoints/plays")
    busy = pytest.raises(CheckpointError, match=r"another process trains checkpoints/plays")
    with locked(folder), busy, locked(folder):
        pass
    with locked(folder):
        pass
    Path("file").touch()
    with pytest.raises(CheckpointError, match="cannot make the run folder"), locked(Path("file/run")):
        pass


# Finding a checkpoint


def test_a_run_is_found_by_its_name_its_folder_and_its_file() -> None:
    folder = make_run("plays", LAST, BEST)
    assert find_checkpoint("plays") == folder / BEST
    assert find_checkpoint("checkpoints/plays") == folder / BEST
    assert find_checkpoint(str(folder.resolve())) == folder.resolve() / BEST
    assert find_checkpoint("checkpoints/plays/") == folder / BEST
    assert find_checkpoint(f"checkpoints/plays/{LAST}") == folder / LAST


def test_the_best_model_is_preferred_and_the_last_taken_where_there_is_none() -> None:
    make_run("both", BEST, LAST)
    make_run("last", LAST)
    make_run("best", BEST)
    assert find_checkpoint("both").name == BEST
    assert find_checkpoint("last").name == LAST
    assert find_checkpoint("best").name == BEST


def test_without_a_name_the_newest_run_is_taken() -> None:
    make_run("old", BEST, age_s=200)
    new = make_run("new", LAST, age_s=100)
    assert find_checkpoint() == new / LAST
    assert find_checkpoint(None) == new / LAST


def test_any_file_is_taken_as_it_is_named() -> None:
    make_run("plays", BEST)
    Path("plays").write_text("a file that happens to have the name of a run")
    assert find_checkpoint("plays") == Path("plays")
    Path("model.bin").touch()
    assert find_checkpoint("./model.bin") == Path("model.bin")


def test_a_folder_in_the_working_directory_is_found_and_one_under_checkpoints_comes_first() -> None:
    elsewhere = make_run("./plays", BEST)
    assert find_checkpoint("plays") == elsewhere / BEST
    inside = make_run("plays", LAST)
    assert find_checkpoint("plays") == inside / LAST
    assert find_checkpoint("./plays") == elsewhere / BEST


def test_an_unknown_name_is_told_the_runs_there_are_the_newest_first(tmp_path: Path) -> None:
    assert refusal("plays") == f"there is no run or checkpoint 'plays': there are no runs in {tmp_path / 'checkpoints'}"
    make_run("old", BEST, age_s=200)
    make_run("new", LAST, age_s=100)
    make_run("empty")
    assert refusal("plays") == "there is no run or checkpoint 'plays': the runs here are new, old"
    assert "new, old" in refusal("empty")
    assert "new, old" in refusal(f"checkpoints/old/{LAST}")


def test_of_many_runs_the_newest_are_named() -> None:
    for i in range(11):
        make_run(f"run-{i}", BEST, age_s=i)
    named = ", ".join(f"run-{i}" for i in range(8))
    assert refusal("plays").endswith(f"the runs here are {named}, and 3 more")


def test_without_any_run_the_newest_cannot_be_taken(tmp_path: Path) -> None:
    assert str(tmp_path / "checkpoints") in refusal(None)
    assert "minigpt train" in refusal(None)


# Finding a run to go on with


def test_a_run_can_be_resumed_by_name_and_folder_where_it_has_a_last_checkpoint() -> None:
    folder = make_run("plays", BEST, LAST)
    assert find_run("plays") == folder
    assert find_run("checkpoints/plays") == folder
    elsewhere = make_run("./other", LAST)
    assert find_run("other") == elsewhere
    assert find_run("./other") == elsewhere


def test_a_run_without_a_last_checkpoint_cannot_be_resumed() -> None:
    make_run("plays", BEST)
    make_run("other", LAST)
    with pytest.raises(CheckpointError) as caught:
        find_run("plays")
    assert str(caught.value).startswith("there is no run 'plays' to resume: the runs here are ")
    with pytest.raises(CheckpointError, match="to resume"):
        find_run("none")
    # By its newest model, too, but not by another.
    assert find_run(f"checkpoints/other/{LAST}") == Path("checkpoints/other")
    with pytest.raises(CheckpointError, match="to resume"):
        find_run(f"checkpoints/plays/{BEST}")


def test_the_working_directory_may_be_a_run_folder_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run("plays", "last.safetensors", "best.safetensors")
    monkeypatch.chdir(folder)
    assert find_checkpoint(".") == Path("best.safetensors")
    assert find_run(".") == Path()
