"""What a user can get wrong, each answered by one sentence; and the help, which answers before anything is imported."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

from minigpt import __main__
from minigpt.cli import app, main
from tests.cli_support import SHAPE, SMALL, TEXT, as_in_a_shell, place, run

COMMANDS = ("train", "generate", "bench", "eval", "info", "explain", "race")
EXPLANATIONS = [("explain", name) for name in ("attention", "scale", "cache", "text")]
# What is read of a checkpoint is the same in all of them.
READERS = [
    pytest.param(("generate", "-n", "5"), id="generate"),
    pytest.param(("eval", "harbour.txt"), id="eval"),
    pytest.param(("bench",), id="bench"),
    pytest.param(("info",), id="info"),
]
QUICK = (*SMALL, "--steps", "1", "-q")
# Names that would break a line, colour a terminal, turn the text round or be taken for markup.
ODD_NAMES = ["two\nlines", "\x1b[31mred", "return\rline", "[bold]x[red]", "\u202eright", "a b", "\x9b31m"]

pytestmark = pytest.mark.usefixtures("own_text")


def shown(name: str) -> str:
    """A name as it is to be found in a message: as it is if it can be printed, with escapes where it cannot."""
    return repr(name)[1:-1]


# Texts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", ["empty"], id="empty"),
        pytest.param(b"x", ["'x'"], id="one character"),
        pytest.param(b"\n" * 5000, [r"'\n'"], id="one character over and over"),
        pytest.param(
            b"short, but long enough for a while", ["34", "64", "73", "--block-size"], id="shorter than a block"
        ),
        pytest.param(b"\x89PNG\r\n\x1a\n\x00\x00" * 50, ["binary", "byte 0"], id="binary"),
        pytest.param(b"plain text, then \x00 a zero" * 50, ["byte 17", "NUL"], id="a NUL"),
        pytest.param("für immer\n".encode("latin-1") * 50, ["0xfc", "byte 1", "--encoding"], id="wrong encoding"),
        pytest.param("für immer\n".encode("utf-16") * 50, ["byte 0", "utf-16"], id="another wrong encoding"),
    ],
)
def test_a_text_that_cannot_be_learnt_is_refused_by_its_name(content: bytes, words: list[str]) -> None:
    Path("some text.txt").write_bytes(content)
    error = run("train", "some text.txt", *QUICK, code=1).error
    for word in ("some text.txt", *words):
        assert word in error
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nowhere.txt"], ["nowhere.txt"]),
        (["harbour.txt", "nowhere.txt"], ["nowhere.txt"]),
        (["harbour.txt/deeper.txt"], ["harbour.txt/deeper.txt"]),
        ([""], ["''"]),
        (["ftp://example.org/x.txt"], ["ftp://example.org/x.txt", "https://"]),
        (["http://"], ["http://"]),
        (["folder"], ["folder", "*.txt"]),
        ([os.devnull], [os.devnull]),
        (["harbour.txt", "--encoding", "klingon"], ["--encoding", "klingon", "utf-8"]),
        (["-", "-"], ["stdin", "2"]),
        (["nul\0name"], [r"nul\x00name"]),
    ],
)
def test_a_text_that_cannot_be_had_is_refused_by_its_name(command: str, options: list[str], words: list[str]) -> None:
    if command == "eval":
        place("a")
        options = [*options, "--checkpoint", "a"]
    else:
        options = [*options, *QUICK]
    Path("folder").mkdir()
    Path("folder/note.md").write_text("not a text", encoding="utf-8")
    error = run(command, *options, code=1).error
    for word in words:
        assert word in error


def test_an_address_that_does_not_answer_is_named() -> None:
    # Nobody listens on port 9 of this machine; if somebody does, it is no web server.
    error = run("train", "http://127.0.0.1:9/play.txt", *QUICK, code=1).error
    assert "http://127.0.0.1:9/play.txt" in error


@pytest.mark.parametrize("digest", ["abc", "0" * 64])
def test_a_digest_that_is_wrong_is_named(digest: str) -> None:
    assert digest in run("train", "harbour.txt", "--sha256", digest, *QUICK, code=1).error


@pytest.mark.parametrize("source", ["nowhere.txt", "", "nul\0name", "harbour.txt/deeper"])
def test_a_prompt_file_that_cannot_be_read_is_named(source: str) -> None:
    place("a")
    assert shown(source) in run("generate", "--prompt-file", source, code=1).error


def test_a_folder_is_no_prompt_file() -> None:
    place("a")
    assert "." in run("generate", "--prompt-file", ".", "-n", "1", code=1).error


@pytest.mark.parametrize("options", [("-",), ("--prompt-file", "empty.txt")])
def test_an_empty_prompt_file_is_named(options: tuple[str, ...]) -> None:
    place("a")
    Path("empty.txt").touch()
    error = run("generate", *options, "-n", "1", stdin="", code=1).error
    assert ("stdin" if options == ("-",) else "empty.txt") in error


# Settings

COUNTS = ("n-layer", "n-head", "n-embd", "block-size", "window", "steps", "batch-size", "eval-every")
NUMBERS_FROM_ZERO = ("muon-lr", "adamw-lr", "weight-decay", "grad-clip")
BAD_SETTINGS = [
    *((name, value) for name in COUNTS for value in ("0", "-3")),
    *((name, "-3") for name in ("warmup-steps", "eval-chars", "seed")),
    *((name, value) for name in NUMBERS_FROM_ZERO for value in ("-0.5", "nan", "inf", "-inf")),
    *(("dropout", value) for value in ("-0.1", "1", "nan", "inf")),
    *(("decay-fraction", value) for value in ("-0.1", "1.1", "nan", "inf")),
    *(("val-fraction", value) for value in ("0", "1", "-0.1", "nan", "inf")),
]
BAD_SAMPLING = [
    *(("temperature", value) for value in ("-1", "nan", "inf", "-inf")),
    *(("top-k", value) for value in ("-1",)),
    *(("top-p", value) for value in ("0", "-0.1", "1.1", "nan", "inf")),
    *(("min-p", value) for value in ("-0.1", "1.1", "nan", "inf")),
]


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        *(("train", name, value) for name, value in BAD_SETTINGS),
        *(("generate", name, value) for name, value in BAD_SAMPLING),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_value(command: str, name: str, value: str) -> None:
    place("a")
    words = ("harbour.txt", *QUICK, "--out", "b") if command == "train" else ("--checkpoint", "a", "-n", "1")
    error = run(command, *words, f"--{name}={value}", code=1).error
    number = float(value)
    assert (
        f"{name.replace('-', '_')}={int(number) if value.lstrip('-').isdigit() and '.' not in value else number}"
        in (error.replace(".0 ", " ") if number.is_integer() else error)
    )
    assert not Path("checkpoints/b").exists()


WRONG_WORDS = [
    *(("train", name, value) for name in (*COUNTS, "warmup-steps", "seed") for value in ("x", "1.5", "nan", "")),
    *(("train", name, "x") for name in (*NUMBERS_FROM_ZERO, "dropout", "decay-fraction", "val-fraction")),
    *(("train", "threads", value) for value in ("0", "-1", "x")),
    *(("generate", name, value) for name in ("length", "samples", "threads") for value in ("0", "-1", "x", "1.5")),
    *(("generate", "seed", value) for value in ("-1", "x", "1.5")),
    *(("generate", name, "x") for name in ("temperature", "top-k", "top-p", "min-p")),
    *((command, "threads", "0") for command in ("bench", "eval")),
]


@pytest.mark.parametrize(("command", "name", "value"), WRONG_WORDS)
def test_what_is_no_such_number_is_a_wrong_command_line(command: str, name: str, value: str) -> None:
    assert f"--{name}" in run(command, f"--{name}={value}", code=2).usage


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--n-embd", "33"), ["n_embd=33", "n_head=2"]),
        (("--n-embd", "6"), ["head_dim=3"]),
        (("--window", "65"), ["window=65", "block_size=64"]),
        (("--preset", "enormous"), ["'enormous'", "tiny", "small", "base"]),
        (("--device", "abacus"), ["'abacus'", "cpu"]),
        (("--device", ""), ["''", "cpu"]),
        (("--device", "meta"), ["'meta'", "cpu"]),
        (("--block-size", "100000"), ["100000", f"{len(TEXT):,}"]),
        (("--val-fraction", "0.0001"), ["0.0001", f"{len(TEXT):,}"]),
        (("--out", ""), ["''"]),
        (("--out", "."), ["'.'"]),
        (("--out", ".."), ["'..'"]),
        (("--out", " "), ["' '"]),
        (("--out", "nul\0name"), [r"nul\x00name"]),
        (("--out", "nul/\0name"), [r"nul/\x00name"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(
    options: tuple[str, ...], words: list[str]
) -> None:
    before = sorted(Path().iterdir())
    error = run("train", "harbour.txt", *QUICK, *options, code=1).error
    for word in words:
        assert word in error
    assert sorted(Path().iterdir()) == before


def test_a_model_too_large_for_any_machine_is_refused() -> None:
    # More bytes than an address can name.
    error = run("train", "harbour.txt", *QUICK, "--n-embd", str(10**12), code=1).error
    assert "n_embd" in error or "memory" in error


def test_more_threads_than_any_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place("a")
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    done = run("generate", "-n", "1", "--threads", "100000", code=None)
    assert done.code in (1, 2)
    assert "100000" in done.stderr


@pytest.mark.parametrize("words", [*((command,) for command in COMMANDS), *EXPLANATIONS], ids=" ".join)
def test_an_unknown_option_is_a_wrong_command_line(words: tuple[str, ...]) -> None:
    assert "--lenght" in run(*words, "--lenght", "5", code=2).usage


def test_an_unknown_command_is_a_wrong_command_line() -> None:
    assert "'trian'" in run("trian", code=2).usage


def test_nothing_at_all_shows_the_help() -> None:
    result = run(code=None)
    assert result.code in (0, 2)
    for command in COMMANDS:
        assert command in result.stdout + result.stderr


# Checkpoints


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, which holds the metadata, and all that follows."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_metadata(content: bytes, **changes: str | None) -> bytes:
    """The file with some of its metadata changed, or with None taken out."""
    header, tensors = header_of(content)
    header["__metadata__"] = {k: v for k, v in (header["__metadata__"] | changes).items() if v is not None}
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + tensors


def with_config(content: bytes, **changes: Any) -> bytes:
    config = json.loads(header_of(content)[0]["__metadata__"]["config"])
    return with_metadata(content, config=json.dumps(config | changes))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "whole"),
    "cut in its header": (lambda good: good[:100], "whole"),
    "cut in its last tensor": (lambda good: good[:-1], "whole"),
    "a text": (lambda _: TEXT.encode(), "whole"),
    "a pickle": (lambda _: pickle.dumps({"weights": [1.0] * 100}), "whole"),
    "of a later version": (lambda good: with_metadata(good, minigpt="99"), "99"),
    "of no version": (lambda good: with_metadata(good, minigpt=None), "not of minigpt"),
    "without a config": (lambda good: with_metadata(good, config=None), "config"),
    "with half a config": (lambda good: with_metadata(good, config='{"n_layer": 2'), "damaged"),
    "with fewer channels than told": (lambda good: with_config(good, n_embd=64), "64"),
    "with fewer layers than told": (lambda good: with_config(good, n_layer=3), "n_layer=3"),
    "with other heads than told": (lambda good: with_config(good, n_head=4), "expected"),
    "with other characters than told": (lambda good: with_config(good, vocab_size=3), "vocab_size=3"),
    "with a window above its block": (lambda good: with_config(good, window=65), "window=65"),
    "with a setting of no number": (lambda good: with_config(good, n_layer="two"), "'two'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_one_is_refused_by_its_name(damage: str) -> None:
    change, word = DAMAGES[damage]
    file = place("a") / "best.safetensors"
    file.write_bytes(change(file.read_bytes()))
    error = run("generate", "--checkpoint", "a", "-n", "5", code=1).error
    assert str(file) in error
    assert word in error


@pytest.mark.parametrize("command", READERS)
def test_every_command_refuses_a_checkpoint_that_is_cut_short(command: tuple[str, ...]) -> None:
    file = place("a") / "best.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file) in run(*command, "--checkpoint", "a", code=1).error


@pytest.mark.parametrize("command", READERS)
def test_every_command_refuses_a_checkpoint_of_another_program(command: tuple[str, ...]) -> None:
    save_file({"weight": torch.ones(3)}, "other.safetensors")
    assert "other.safetensors" in run(*command, "--checkpoint", "other.safetensors", code=1).error


@pytest.mark.parametrize("command", READERS)
def test_every_command_tells_an_unknown_run_those_there_are(command: tuple[str, ...]) -> None:
    place("a")
    place("b")
    error = run(*command, "--checkpoint", "c", code=1).error
    assert "'c'" in error
    assert "a, b" in error or "b, a" in error


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("name", ["", ".", "..", "nul\0name", "checkpoints", "harbour.txt"])
def test_what_can_be_no_checkpoint_is_named(command: tuple[str, ...], name: str) -> None:
    place("a")
    assert shown(name) in run(*command, "--checkpoint", name, code=1).error


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("generate", "--checkpoint"), id="generate"),
        pytest.param(("train", "--resume"), id="resume"),
        pytest.param(("train", "harbour.txt", *QUICK, "--out"), id="out"),
    ],
)
def test_a_name_longer_than_any_file_may_have_is_one_sentence(command: tuple[str, ...]) -> None:
    assert run(*command, "n" * 5000, code=1).error


def test_without_any_run_every_command_but_bench_says_how_to_get_one() -> None:
    for command in (("generate",), ("eval", "harbour.txt"), ("info",)):
        assert "minigpt train" in run(*command, code=1).error
    Path("checkpoints").write_text("a file", encoding="utf-8")
    assert "minigpt train" in run("info", code=1).error


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
@pytest.mark.parametrize("command", [param.values[0] for param in READERS[:3]])
def test_a_device_that_is_not_there_is_named(command: tuple[str, ...], device: str) -> None:
    place("a")
    assert repr(device) in run(*command, "--checkpoint", "a", "--device", device, code=1).error


# Places to write


@pytest.mark.parametrize("out", ["harbour.txt/a", f"{os.devnull}/a"])
def test_a_folder_that_cannot_be_made_is_named(out: str) -> None:
    assert out in run("train", "harbour.txt", *QUICK, "--out", out, code=1).error


def test_a_file_where_all_runs_go_is_named() -> None:
    Path("checkpoints").write_text("a file", encoding="utf-8")
    assert "checkpoints" in run("train", "harbour.txt", *QUICK, code=1).error


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_a_folder_that_may_not_be_written_is_named() -> None:
    Path("checkpoints").mkdir(mode=0o500)
    assert "checkpoints" in run("train", "harbour.txt", *QUICK, code=1).error


@pytest.mark.skipif(os.name == "nt", reason="sets a limit as POSIX has it")
def test_a_disk_that_is_full_is_said_and_the_run_that_was_there_survives() -> None:
    import resource

    folder = place("a")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files may not grow beyond this, which is less than a checkpoint.
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        done = run("train", "harbour.txt", *QUICK, "--out", "a", "--force", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "checkpoints/a" in done.error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_text_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    place("a")
    monkeypatch.setattr(sys, "argv", ["minigpt", "generate", "-n", "5", "-q"])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            # What could not be written is not tried again by the end of the block.
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert ended.value.code == 1


# Odd names


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize(
    "command",
    [
        ("train",),
        ("train", "harbour.txt", "--preset"),
        ("train", "harbour.txt", "--device"),
        ("train", "harbour.txt", "--encoding"),
        ("train", "harbour.txt", "--sha256"),
        ("train", "--resume"),
        ("generate", "--checkpoint"),
        ("generate", "--prompt-file"),
        ("info", "--checkpoint"),
        ("eval", "--checkpoint", "a"),
    ],
)
def test_a_name_that_is_not_known_is_shown_on_one_line(command: tuple[str, ...], name: str) -> None:
    place("a")
    assert shown(name) in run(*command, name, code=1).error


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("content", ["", "x", "too short"])
def test_a_text_of_an_odd_name_is_refused_on_one_line(name: str, content: str) -> None:
    Path(name).write_text(content, encoding="utf-8")
    assert shown(name) in run("train", name, *QUICK, code=1).error


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_checkpoint_of_an_odd_name_is_refused_on_one_line(name: str) -> None:
    Path(name).write_text("no checkpoint", encoding="utf-8")
    assert shown(name) in run("info", "--checkpoint", name, code=1).error


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_run_of_an_odd_name_is_refused_or_told_on_one_line(name: str) -> None:
    made = run("train", "harbour.txt", *QUICK, "--out", name, code=None)
    if made.code == 1:
        assert shown(name) in made.error
        return
    assert shown(name) in run("train", "harbour.txt", *QUICK, "--out", name, code=1).error
    assert shown(name) in run("info", "--checkpoint", "unknown", code=1).error


@pytest.mark.parametrize("name", ODD_NAMES)
def test_notes_of_odd_names_keep_to_their_lines(name: str) -> None:
    lines = []
    for text in (Path("plain.txt"), Path(f"{name}.txt")):
        text.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
        lines.append(run("train", text, *SHAPE, "--steps", "1", "--out", "a", "--force").stderr.split("\n"))
    assert all(line.isprintable() for line in lines[1])
    assert len(lines[0]) == len(lines[1])
    told = run("info", "--checkpoint", "a")
    assert all(line.isprintable() for line in told.stdout.split("\n"))


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_word_is_shown_harmlessly_in_a_wrong_command_line(name: str) -> None:
    place("a")
    for words in (("generate", name), ("generate", f"--{name}"), (name,), ("info", name)):
        usage = run(*words, code=2).usage
        assert "\x1b" not in usage
        assert "\x9b" not in usage
        assert "two\nlines" not in usage


def test_ctrl_c_while_modules_are_loaded_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "minigpt.cli", Interrupted())
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


# Help

HELPS = [[], *([command] for command in COMMANDS), *map(list, EXPLANATIONS)]
HELP_SCRIPT = """
import sys
from minigpt.cli import main
for words in {helps!r}:
    sys.argv[1:] = [*words, "--help"]
    try:
        main()
    except SystemExit as end:
        print("exit", end.code)
    print("loaded", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


@pytest.fixture(scope="module")
def helps() -> list[str]:
    """What each help printed, the exit code, and the modules loaded by then."""
    done = subprocess.run(
        [sys.executable, "-c", HELP_SCRIPT.format(helps=HELPS)],
        capture_output=True,
        text=True,
        **as_in_a_shell(),
    )
    assert done.stderr == ""
    assert done.returncode == 0
    parts: list[str] = done.stdout.split("Usage: ")[1:]
    assert len(parts) == len(HELPS)
    return parts


def test_help_is_there_without_what_takes_long_to_import(helps: list[str]) -> None:
    for words, part in zip(HELPS, helps, strict=True):
        assert part.startswith(" ".join(["minigpt", *words]))
        assert "exit 0\n" in part
        loaded = part.rpartition("loaded ")[2].split()
        assert "minigpt" in loaded
        assert not {"torch", "numpy", "rich", "safetensors"} & set(loaded)


def test_help_fits_a_terminal_of_80_columns(helps: list[str]) -> None:
    for part in helps:
        assert all(len(line) <= 80 for line in part.rpartition("exit ")[0].splitlines())


def test_the_root_help_names_every_command(helps: list[str]) -> None:
    for command in COMMANDS:
        assert f"  {command} " in helps[0]


def test_every_option_says_what_it_is_for() -> None:
    group: Any = typer.main.get_command(app)
    assert set(group.commands) == set(COMMANDS)
    explain = group.commands["explain"]
    assert [("explain", name) for name in explain.commands] == EXPLANATIONS
    for command in [*group.commands.values(), *explain.commands.values()]:
        assert command.help
        for param in command.params:
            assert param.help, (command.name, param.name)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_short_name_too(command: str) -> None:
    assert run(command, "-h").stdout == run(command, "--help").stdout
