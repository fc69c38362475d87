"""``minigpt generate``: what goes where, every way to give a prompt, every option, and how it ends."""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minigpt import GPT, Sampling
from minigpt import generate as generate_ids
from minigpt.cli import main
from minigpt.config import DEFAULT_FORMAT
from minigpt.engine import FusedEngine
from minigpt.weights import round_weights
from tests.cli_support import CACHE_BYTES, SMALL, Program, run, trained_checkpoint

PROMPT = "MARGIT: The "
JSON_KEYS = {
    "prompt",
    "texts",
    "characters",
    "prefill_s",
    "decode_s",
    "chars_per_s",
    "loading_s",
    "mode",
    "engine",
    "weights",
    "cache_bytes",
    "seed",
    "checkpoint",
}
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
needs_posix = pytest.mark.skipif(os.name == "nt", reason="pipes and signals as POSIX has them")

pytestmark = pytest.mark.usefixtures("own_run")


@functools.cache
def rounded_model() -> GPT:
    model = copy.deepcopy(trained_checkpoint().model)
    round_weights(model, DEFAULT_FORMAT)
    return model


def expected(
    prompt: str,
    length: int,
    *,
    seed: int,
    sample: int = 0,
    temperature: float = 0.8,
    top_k: int = 0,
    cache: bool = True,
) -> str:
    """What the library writes for these options with weights as the command rounds them."""
    checkpoint = trained_checkpoint()
    ids = generate_ids(
        rounded_model(),
        checkpoint.tokenizer.encode(prompt),
        length,
        sampling=Sampling(temperature=temperature, top_k=top_k),
        seed=seed,
        samples=[sample],
        use_cache=cache,
    )
    return checkpoint.tokenizer.decode(id_ for (id_,) in ids)


# What goes where


def test_text_goes_to_stdout_and_notes_go_to_stderr() -> None:
    done = run("generate", "--prompt", PROMPT, "--length", "60", "--seed", "1")
    assert done.stdout == PROMPT + expected(PROMPT, 60, seed=1) + "\n"
    newest, timing = done.stderr.splitlines()
    assert "harbour" in newest
    for word in ("60 characters", " s ", "a second", "cache", f"{CACHE_BYTES:,} bytes", "seed 1"):
        assert word in timing


def test_json_is_one_object_and_all_there_is_on_stdout() -> None:
    done = run("generate", "-p", PROMPT, "-n", "40", "-s", "3", "--samples", "2", "--json")
    assert done.stdout.count("\n") == 1
    told = done.json
    assert set(told) == JSON_KEYS
    assert told["prompt"] == PROMPT
    assert told["texts"] == [expected(PROMPT, 40, seed=3, sample=sample) for sample in (0, 1)]
    assert told["characters"] == 80
    assert told["mode"] == "cache"
    # Every sample keeps keys and values of its own.
    assert told["cache_bytes"] == 2 * CACHE_BYTES
    assert told["seed"] == 3
    assert Path(told["checkpoint"]).samefile("checkpoints/harbour/best.safetensors")
    assert told["prefill_s"] > 0
    # The first character of each sample comes out of reading the prompt.
    assert told["chars_per_s"] == pytest.approx(2 * 39 / told["decode_s"], rel=1e-2)


def test_json_tells_how_a_text_without_a_cache_was_made() -> None:
    told = run("generate", "-p", PROMPT, "-n", "5", "--no-cache", "--json").json
    assert (told["mode"], told["cache_bytes"]) == ("no-cache", 0)


@pytest.mark.parametrize("options", [(), ("--samples", "3"), ("--json",), ("--no-cache",), ("--skip-unknown",)])
def test_quiet_leaves_stderr_empty_and_stdout_as_it_was(options: tuple[str, ...]) -> None:
    line = ("generate", "-p", PROMPT, "-n", "9", "-s", "2", *options)
    quiet = run(*line, "--quiet")
    assert quiet.stderr == ""
    if "--json" not in options:
        assert quiet.stdout == run(*line).stdout


def test_several_samples_are_printed_apart_after_one_prompt() -> None:
    done = run("generate", "-p", PROMPT, "-n", "50", "-s", "4", "--samples", "3")
    texts = [expected(PROMPT, 50, seed=4, sample=sample) for sample in range(3)]
    assert done.stdout.count(PROMPT) == 1 + "".join(texts).count(PROMPT)
    places = [done.stdout.index(text) for text in texts]
    assert places == sorted(places)
    assert done.stdout.startswith(PROMPT)


# The one promise


@pytest.mark.parametrize(
    ("prompt", "seed"),
    [
        ("", 0),
        ("O", 1),
        ("OLE: Then", 2),
        (PROMPT, 3),
        ("OLE: Then who shall mind the lamp at the café tonight?\n" * 3, 4),
    ],
)
def test_the_text_is_the_same_with_and_without_the_cache(prompt: str, seed: int) -> None:
    # Far past the window of 16, the receptive field of 31 and the block of 64. A float32 tie would differ about once
    # in a million characters, but for a seed always or never.
    line = ("generate", "-p", prompt, "-n", "150", "-s", str(seed), "-t", "1.3", "-q")
    assert run(*line, "--cache").stdout == run(*line, "--no-cache").stdout


@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
def test_the_text_is_the_same_with_each_engine(weights: str) -> None:
    line = ("generate", "-p", PROMPT, "-n", "150", "-s", "9", "-t", "1.3", "--weights", weights, "-q")
    told = run(*line, "--engine", "torch").stdout
    assert len(told) == len(PROMPT) + 151
    assert run(*line, "--no-cache").stdout == told
    if importlib.util.find_spec("numba") is not None:
        assert run(*line, "--engine", "fused").stdout == told


@pytest.mark.parametrize(
    ("options", "engine", "weights"),
    [
        (("--engine", "torch"), "torch", "int8"),
        (("--engine", "torch", "--weights", "float32"), "torch", "float32"),
        (("--no-cache", "--weights", "float16"), "torch", "float16"),
        pytest.param((), "fused", "int8", marks=needs_numba),
        pytest.param(("--weights", "float16"), "fused", "float16", marks=needs_numba),
        pytest.param(("--samples", "9"), "fused", "int8", marks=needs_numba),
    ],
)
def test_the_engine_and_the_weights_are_told(options: tuple[str, ...], engine: str, weights: str) -> None:
    told = run("generate", "-n", "3", *options, "--json")
    assert (told.json["engine"], told.json["weights"]) == (engine, weights)
    assert f", {engine} engine, {weights} weights, " in told.stderr.splitlines()[-1]


def test_the_fused_engine_without_a_cache_is_a_wrong_command_line() -> None:
    assert "--no-cache" in run("generate", "--engine", "fused", "--no-cache", code=2).usage
    assert "'steam'" in run("generate", "-n", "3", "--engine", "steam", "--no-cache", code=1).stderr


@needs_numba
def test_loading_the_engine_is_told_apart_from_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(engine: FusedEngine, compiling: Callable[[], None]) -> None:
        time.sleep(0.5)
        ordinary(engine, compiling)

    ordinary = FusedEngine._compile
    monkeypatch.setattr(FusedEngine, "_compile", compile_)
    done = run("generate", "-n", "9", "--json")
    told = done.json
    assert told["loading_s"] > 0.5
    assert 0 < told["decode_s"] < 0.5
    assert f"; loading the engine took {told['loading_s']:.1f} s" in done.stderr
    told = run("generate", "-n", "9", "--engine", "torch", "--json")
    assert told.json["loading_s"] == 0
    assert "loading" not in told.stderr


def test_an_unknown_engine_and_unknown_weights_are_told_those_there_are() -> None:
    error = run("generate", "-n", "3", "--engine", "steam", code=1).stderr.splitlines()[-1]
    assert error == "minigpt: there is no engine 'steam': choose one of auto, torch, fused"
    error = run("generate", "-n", "3", "--weights", "int4", code=1).stderr.splitlines()[-1]
    assert error == "minigpt: there are no weights 'int4': choose one of float32, float16, int8"


def test_without_numba_torch_writes_the_same_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("generate", "-p", PROMPT, "-n", "40", "-s", "2")
    expected_text = run(*line).stdout
    monkeypatch.setattr("minigpt.engine.importlib.util.find_spec", lambda _: None)
    done = run(*line)
    assert done.stdout == expected_text
    assert done.stderr.count("numba is not installed (pip install 'minigpt[fast]')") == 1
    assert "numba" not in run(*line, "--engine", "torch").stderr
    error = run(*line, "--engine", "fused", "--checkpoint", "harbour", code=1).error
    assert error == "the fused engine cannot run here: numba is not installed (pip install 'minigpt[fast]')"


def test_of_a_long_prompt_it_is_told_what_is_read() -> None:
    long = "OLE: Then who shall mind the lamp at the cafe tonight?\n" * 3
    done = run("generate", "-p", long, "-n", "9", "-s", "1")
    assert done.stderr.count(f"of the prompt's {len(long):,} characters the last 31 are read") == 1
    assert "are read" not in run("generate", "-p", long[-31:], "-n", "9", "-s", "1").stderr


def test_without_the_cache_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        pass

    def new_cache(*_: object) -> None:
        raise Made

    monkeypatch.setattr(GPT, "new_cache", new_cache)
    line = ("generate", "-p", PROMPT, "-n", "5", "-s", "1", "-q")
    run(*line, "--no-cache")
    with pytest.raises(Made):
        run(*line, "--cache")


def test_samples_and_stops_are_the_same_with_and_without_the_cache() -> None:
    line = ("generate", "-p", PROMPT, "-n", "120", "-s", "7", "-t", "1.3", "--samples", "4", "--stop", "th", "--json")
    with_cache, without = (run(*line, mode).json["texts"] for mode in ("--cache", "--no-cache"))
    assert with_cache == without
    assert len(set(with_cache)) == 4


def test_the_first_of_many_samples_is_the_only_one_of_one() -> None:
    line = ("generate", "-p", PROMPT, "-n", "80", "-s", "5", "--json")
    (alone,) = run(*line, "--samples", "1").json["texts"]
    together = run(*line, "--samples", "4").json["texts"]
    assert together[0] == alone
    assert len(set(together)) == 4


# Stopping


def test_the_text_ends_before_a_stop_text() -> None:
    whole = expected(PROMPT, 80, seed=1)
    stop = whole[30:34]
    done = run("generate", "-p", PROMPT, "-n", "80", "-s", "1", "--stop", stop)
    kept = whole[: whole.index(stop)]
    assert done.stdout == PROMPT + kept + "\n"
    assert f"{len(kept)} characters" in done.stderr


def test_of_several_stop_texts_the_one_that_comes_first_ends_the_text() -> None:
    whole = expected(PROMPT, 80, seed=1)
    late, early = whole[50:56], whole[20:26]
    told = run("generate", "-p", PROMPT, "-n", "80", "-s", "1", "--stop", late, "--stop", early, "--json").json
    assert told["texts"] == [whole[: min(whole.index(late), whole.index(early))]]
    assert told["characters"] == len(told["texts"][0])


def test_what_only_began_like_a_stop_text_is_printed_all_the_same() -> None:
    whole = expected(PROMPT, 40, seed=1)
    # Its beginning is the end of the text, so that the text ends while it may still come.
    stop = whole[-5:] + "\0"
    assert run("generate", "-p", PROMPT, "-n", "40", "-s", "1", "--stop", stop, "-q").stdout == PROMPT + whole + "\n"


def test_each_sample_stops_for_itself() -> None:
    line = ("generate", "-p", PROMPT, "-n", "80", "-s", "6", "--samples", "3", "--json")
    whole = run(*line).json["texts"]
    stop = whole[1][10:14]
    cut = run(*line, "--stop", stop).json
    assert cut["texts"] == [text[: text.find(stop)] if stop in text else text for text in whole]
    assert cut["characters"] == sum(map(len, cut["texts"]))
    assert cut["texts"] != whole


def test_a_stop_text_in_the_prompt_stops_nothing() -> None:
    stop = "MARGIT: The Z"
    text = expected(stop.replace("Z", ""), 20, seed=1)
    assert stop[:-1] not in text
    done = run("generate", "-p", stop[:-1], "-n", "20", "-s", "1", "--stop", stop[:-1], "-q")
    assert done.stdout == stop[:-1] + text + "\n"


def test_a_text_may_stop_before_its_first_character() -> None:
    first = expected(PROMPT, 1, seed=1)
    told = run("generate", "-p", PROMPT, "-s", "1", "--stop", first, "--json").json
    assert (told["texts"], told["characters"]) == ([""], 0)


def test_an_empty_stop_text_is_a_wrong_command_line() -> None:
    assert "--stop" in run("generate", "-p", PROMPT, "--stop", "", code=2).usage


# Prompts


def test_unknown_characters_are_named_with_their_places() -> None:
    error = run("generate", "--checkpoint", "harbour", "-p", "The 漢 x\x1b!", code=1).error
    for word in (repr("漢") + " at 4", r"'\x1b' at 7", "--skip-unknown"):
        assert word in error


def test_very_many_unknown_characters_are_counted_not_listed() -> None:
    error = run("generate", "--checkpoint", "harbour", "-p", "漢" * 10_000, code=1).error
    assert len(error) < 500
    assert "9992 more" in error.replace(",", "")


def test_skipped_characters_are_left_out_and_said() -> None:
    done = run("generate", "-p", "漢MARGIT: 字The ", "-n", "30", "-s", "1", "--skip-unknown")
    assert done.stdout == PROMPT + expected(PROMPT, 30, seed=1) + "\n"
    for word in (repr("漢") + " at 0", repr("字") + " at 9", "dropped"):
        assert word in done.stderr


def test_a_prompt_of_which_nothing_is_left_is_no_prompt() -> None:
    line = ("generate", "-n", "30", "-s", "1", "-q")
    assert run(*line, "-p", "漢", "--skip-unknown").stdout == run(*line).stdout


@pytest.mark.parametrize(
    ("options", "stdin"),
    [
        (("--prompt", PROMPT), None),
        (("-p", PROMPT), None),
        (("--prompt", "-"), PROMPT),
        (("--prompt-file", "prompt.txt"), None),
        (("--prompt-file", "-"), PROMPT),
        (("-",), PROMPT),
        # Not read when the prompt is given.
        (("--prompt", PROMPT), "something else"),
    ],
)
def test_a_prompt_is_the_same_wherever_it_comes_from(options: tuple[str, ...], stdin: str | None) -> None:
    Path("prompt.txt").write_text(PROMPT, encoding="utf-8")
    done = run("generate", *options, "-n", "20", "-s", "1", "-q", stdin=stdin)
    assert done.stdout == PROMPT + expected(PROMPT, 20, seed=1) + "\n"


@pytest.mark.parametrize(
    "options",
    [
        *itertools.combinations(("--prompt=x", "--prompt-file=x", "-"), 2),
        ("--prompt=-", "--prompt-file=-"),
        ("--prompt=-", "-"),
    ],
)
def test_two_prompts_are_a_wrong_command_line(options: tuple[str, ...]) -> None:
    usage = run("generate", *options, code=2, stdin=PROMPT).usage
    assert "--prompt" in usage
    assert "one" in usage


def test_a_word_that_was_meant_as_a_prompt_is_told_the_option() -> None:
    usage = run("generate", "Hello [bold] there", code=2).usage
    assert "'Hello [bold] there'" in usage
    assert "--prompt" in usage


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_windows_line_ends_in_a_prompt_are_line_ends(source: str) -> None:
    prompt = "OLE: Then\nMARGIT: The "
    Path("prompt.txt").write_bytes(prompt.replace("\n", "\r\n").encode())
    from_file = source == "file"
    done = run(
        "generate",
        *("--prompt-file", "prompt.txt" if from_file else "-"),
        *("-n", "20", "-s", "1", "-q"),
        stdin=None if from_file else prompt.replace("\n", "\r\n"),
    )
    assert done.stdout == prompt + expected(prompt, 20, seed=1) + "\n"


def test_a_prompt_file_may_be_in_another_encoding() -> None:
    prompt = "the café "
    Path("prompt.txt").write_bytes(prompt.encode("latin-1"))
    done = run("generate", "--prompt-file", "prompt.txt", "--encoding", "latin-1", "-n", "20", "-s", "1", "-q")
    assert done.stdout == prompt + expected(prompt, 20, seed=1) + "\n"
    assert "utf-8" in run("generate", "--prompt-file", "prompt.txt", code=1).error


def test_a_line_end_at_the_end_of_a_prompt_file_belongs_to_it() -> None:
    Path("prompt.txt").write_text("OLE:\n", encoding="utf-8")
    done = run("generate", "--prompt-file", "prompt.txt", "-n", "20", "-s", "1", "-q")
    assert done.stdout == "OLE:\n" + expected("OLE:\n", 20, seed=1) + "\n"


@pytest.mark.parametrize("options", [(), ("-p", "")])
def test_without_a_prompt_the_text_starts_at_a_line_that_is_not_echoed(options: tuple[str, ...]) -> None:
    told = run("generate", *options, "-n", "40", "-s", "2", "--json").json
    assert told["prompt"] == ""
    assert told["texts"] == [expected("\n", 40, seed=2)]
    assert run("generate", *options, "-n", "40", "-s", "2", "-q").stdout == expected("\n", 40, seed=2) + "\n"


def test_where_there_are_no_lines_the_text_starts_from_the_most_frequent_character() -> None:
    Path("lines.txt").write_text("xyzzy" * 60, encoding="utf-8")
    run("train", "lines.txt", *SMALL, "--steps", "2", "--out", "lines", "-q")
    line = ("generate", "--checkpoint", "lines", "-n", "20", "-s", "1", "-q")
    # Both y and z come twice in five: the first of them in the alphabet.
    assert run(*line, "-p", "y").stdout == "y" + run(*line).stdout


# Seeds and sampling


def test_a_seed_that_was_not_given_is_printed_and_gives_the_text_again() -> None:
    done = run("generate", "-p", PROMPT, "-n", "50")
    (seed,) = re.findall(r"seed (\d+)", done.stderr)
    assert run("generate", "-p", PROMPT, "-n", "50", "--seed", seed).stdout == done.stdout
    # The clock gives the next one. That it gives the same one has odds of one in 4 * 10^9.
    assert re.findall(r"seed (\d+)", run("generate", "-n", "1").stderr) != [seed]


def test_another_seed_is_another_text() -> None:
    texts = {run("generate", "-p", PROMPT, "-n", "50", "-t", "1.2", "-s", str(seed), "-q").stdout for seed in range(4)}
    assert len(texts) == 4


def test_values_that_are_off_change_nothing() -> None:
    line = ("generate", "-p", PROMPT, "-n", "60", "-s", "1", "-q", "-t", "1.5")
    assert run(*line, "--top-k", "0", "--top-p", "1", "--min-p", "0").stdout == run(*line).stdout
    # More characters than there are leaves all of them.
    assert run(*line, "--top-k", "100000").stdout == run(*line).stdout


def test_greedy_has_three_names() -> None:
    line = ("generate", "-p", PROMPT, "-n", "30", "-q")
    greedy = run(*line, "-t", "0", "-s", "1").stdout
    assert greedy == PROMPT + expected(PROMPT, 30, seed=0, temperature=0) + "\n"
    for options in (("-t", "0", "-s", "2"), ("--top-k", "1"), ("--min-p", "1"), ("--top-p", "1e-9")):
        assert run(*line, *options).stdout == greedy


def test_every_option_reaches_the_sampler() -> None:
    line = ("generate", "-p", PROMPT, "-n", "30", "-s", "1", "-q", "-t", "2")
    plain = run(*line).stdout
    assert plain == PROMPT + expected(PROMPT, 30, seed=1, temperature=2) + "\n"
    assert run(*line, "--top-k", "5").stdout == PROMPT + expected(PROMPT, 30, seed=1, temperature=2, top_k=5) + "\n"
    changed = [run(*line, *options).stdout for options in (("--top-k", "5"), ("--top-p", "0.5"), ("--min-p", "0.3"))]
    assert plain not in changed


# Checkpoints


def test_a_checkpoint_goes_by_the_name_of_its_run_its_folder_or_its_file() -> None:
    shutil.move("checkpoints/harbour", "elsewhere")
    place_other()
    wanted = expected("\n", 20, seed=1) + "\n"
    shutil.copytree("elsewhere", "checkpoints/harbour")
    # The newest, so that an option that is not heard gives another text.
    os.utime("checkpoints/other/best.safetensors", (4e9, 4e9))
    for name in ("harbour", "elsewhere", "./elsewhere", "elsewhere/", "elsewhere/best.safetensors"):
        done = run("generate", "--checkpoint", name, "-n", "20", "-s", "1")
        assert done.stdout == wanted
        assert "newest" not in done.stderr
    assert run("generate", "-n", "20", "-s", "1", "-q").stdout != wanted


def test_without_a_checkpoint_the_newest_run_is_taken_and_named() -> None:
    place_other()
    for name in ("harbour", "other"):
        for each in Path("checkpoints").glob("*/*.safetensors"):
            os.utime(each, (4e9 if each.parent.name == name else 1e9,) * 2)
        done = run("generate", "-n", "5", "-s", "1")
        assert name in done.stderr.splitlines()[0]
        assert done.stdout == run("generate", "--checkpoint", name, "-n", "5", "-s", "1").stdout


def test_an_unknown_run_is_told_the_runs_there_are() -> None:
    place_other()
    error = run("generate", "--checkpoint", "harbor", code=1).error
    for name in ("'harbor'", "harbour", "other"):
        assert name in error


def test_without_any_run_one_is_told_to_train() -> None:
    shutil.rmtree("checkpoints")
    assert "minigpt train" in run("generate", code=1).error


def place_other() -> None:
    """A second run, of a model that has learnt nothing."""
    run("train", "harbour.txt", *SMALL, "--steps", "1", "--out", "other", "-q")


# Text that looks like something else


@pytest.mark.parametrize("prompt", ["[bold]tide[/bold]", "[red]", ":smile: ", "[/]", "[", "a\n\n\n"])
def test_what_looks_like_markup_is_written_as_it_is(prompt: str) -> None:
    done = run("generate", "-p", prompt, "-n", "60", "-s", "1")
    assert done.stdout == prompt + expected(prompt, 60, seed=1) + "\n"
    assert "\x1b" not in done.stdout + done.stderr


def test_the_model_does_write_markup() -> None:
    # Or the test above would only show that prompts are safe.
    written = run("generate", "-p", "MARGIT: The ", "-t", "0", "-n", "60", "-q").stdout
    assert "[bold]" in written


# As a program of its own


def start(*options: str) -> tuple[Program, int, int]:
    """Starts to write a hundred million characters; returns what reads stdout and stderr."""
    stdout, their_stdout = os.pipe()
    stderr, their_stderr = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    program = Program(
        *("generate", "--checkpoint", "harbour", "-p", PROMPT, "-n", "100000000", "-s", "1", *options),
        stdin=nothing,
        stdout=their_stdout,
        stderr=their_stderr,
    )
    for descriptor in (nothing, their_stdout, their_stderr):
        os.close(descriptor)
    return program, stdout, stderr


def rest_of(descriptor: int) -> str:
    with os.fdopen(descriptor, encoding="utf-8") as stream:
        return stream.read()


@needs_posix
def test_a_reader_that_has_enough_ends_it_in_silence() -> None:
    program, stdout, stderr = start()
    # What `head -c 12` does.
    assert os.read(stdout, 12).decode() == PROMPT
    os.close(stdout)
    # Long before the last character.
    assert program.wait() == 1
    assert rest_of(stderr) == ""


@needs_posix
def test_ctrl_c_ends_the_line_and_nothing_more() -> None:
    program, stdout, stderr = start()
    # Characters come as they are written, not in blocks of some thousand.
    written = os.read(stdout, 1 << 16).decode()
    assert len(written) < 2000
    while len(written) < len(PROMPT) + 100:
        written += os.read(stdout, 1 << 16).decode()
    program.interrupt()
    assert program.wait() == 130
    text = written + rest_of(stdout)
    assert text.endswith("\n")
    assert text[:-1] == PROMPT + expected(PROMPT, len(text) - 1 - len(PROMPT), seed=1)
    assert rest_of(stderr).strip() == ""


def on_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program where both streams can only carry ASCII."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["minigpt", *arguments])
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        with pytest.raises(SystemExit) as ended:
            main()
    streams = [stream.detach().getvalue().decode("ascii") for stream in (stdout, stderr)]
    assert isinstance(ended.value.code, int)
    return ended.value.code, streams[0], streams[1]


def test_a_terminal_of_few_characters_gets_escapes_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "the café "
    code, stdout, _ = on_an_ascii_terminal(monkeypatch, "generate", "-p", prompt, "-n", "80", "-s", "1")
    assert code == 0
    assert stdout == (prompt + expected(prompt, 80, seed=1) + "\n").replace("é", r"\xe9")


def test_an_error_on_a_terminal_of_few_characters_is_a_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code, stdout, stderr = on_an_ascii_terminal(monkeypatch, "generate", "--checkpoint", "harbour", "-p", "漢")
    assert (code, stdout) == (1, "")
    assert r"'\u6f22' at 0" in stderr


def test_json_is_plain_ascii_whatever_the_text() -> None:
    line = run("generate", "-p", "café", "-n", "5", "--json").stdout
    assert line.isascii()
    assert json.loads(line)["prompt"] == "café"
