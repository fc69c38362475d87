"""Characters in, ids out: what a corpus is, what is kept of a long one, and its parts."""

from __future__ import annotations

import codecs
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt import corpus, sources
from minigpt.atomic import replacing
from minigpt.corpus import Corpus, load_corpus
from minigpt.errors import CorpusError
from minigpt.tokenizer import CharTokenizer
from tests.source_support import PLAY, digest, feed_stdin, refusal_of, write

pytestmark = pytest.mark.usefixtures("own_folder")


def corpus_of(text: str) -> Corpus:
    """What a file with that text becomes."""
    return load_corpus([write("text.txt", text)])


def decoded(loaded: Corpus) -> str:
    """The text whose ids a corpus holds."""
    return loaded.tokenizer.decode(loaded.ids.tolist())


def refusal(*names: str, encoding: str = "utf-8") -> str:
    """The one sentence with which the sources are refused."""
    return refusal_of(lambda: load_corpus(names, encoding=encoding))


# What a corpus is


@settings(max_examples=60)
@given(
    text=st.text(st.characters(exclude_characters="\0\r\ufeff", exclude_categories=["Cs"]), min_size=1),
    chunk_bytes=st.integers(1, 9),
)
@example(text=PLAY, chunk_bytes=1 << 20)
# Of two that are equally frequent, the first by code point counts.
@example(text="bbaac", chunk_bytes=2)
def test_a_corpus_is_the_sorted_characters_of_a_text_and_their_ids(text: str, chunk_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        if len(set(text)) == 1:
            assert repr(text[0]) in refusal(write("text.txt", text))
            return
        loaded = corpus_of(text)
    assert loaded.name == "text.txt"
    assert loaded.tokenizer.chars == "".join(sorted(set(text)))
    assert loaded.ids.tolist() == CharTokenizer(sorted(set(text))).encode(text)
    assert loaded.sha256 == digest(text)
    assert loaded.most_frequent == min(text, key=lambda char: (-text.count(char), char))
    assert loaded.notes == ()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_ids_have_the_smallest_unsigned_type(vocab_size: int, dtype: type[np.unsignedinteger[Any]]) -> None:
    # From U+10000 on there are neither surrogates nor line ends in the way.
    loaded = corpus_of("".join(map(chr, range(0x10000, 0x10000 + vocab_size))))
    assert loaded.ids.dtype == dtype
    assert loaded.ids.tolist() == list(range(vocab_size))


def test_ids_cannot_be_written_to() -> None:
    loaded = corpus_of(PLAY)
    with pytest.raises(ValueError, match="read-only"):
        loaded.ids[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        loaded.split(0.1, 4)[0][0] = 1


def test_the_encoding_and_the_digest_are_those_of_the_bytes() -> None:
    content = "größer\n".encode("latin-1")
    write("a.txt", content)
    assert decoded(load_corpus(["a.txt"], encoding="latin-1", sha256=digest(content))) == "größer\n"
    with pytest.raises(CorpusError, match="sha256"):
        load_corpus(["a.txt"], encoding="latin-1", sha256=digest("größer\n"))


def test_progress_goes_to_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_args: object, progress: Any, **_kwargs: object) -> Path:
        progress(1, 2)
        return Path(write("a.txt", PLAY))

    monkeypatch.setattr(sources, "fetch", fetch)
    told: list[tuple[int, int | None]] = []
    load_corpus(["http://a.org/a.txt"], progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2)]


def test_half_a_character_from_a_lenient_codec_is_refused() -> None:
    assert "U+D800" in refusal(write("a.txt", rb"ab\ud800"), encoding="unicode_escape")


@pytest.mark.parametrize("large_chars", [10, 1 << 20])
@pytest.mark.parametrize("second", [PLAY.upper(), PLAY + "more", PLAY[:-5]])
def test_a_text_that_changes_between_the_passes_is_refused(
    second: str, large_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = corpus._survey

    def survey_then_change(text: sources.Text) -> object:
        found = survey(text)
        write("a.txt", second)
        return found

    write("a.txt", PLAY)
    os.utime("a.txt", ns=(1, 1))
    monkeypatch.setattr(corpus, "LARGE_CHARS", large_chars)
    monkeypatch.setattr(corpus, "_survey", survey_then_change)
    assert "changed" in refusal("a.txt")
    assert kept_files() == []


# Long texts


@pytest.fixture
def _long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of more than ten characters count as long."""
    monkeypatch.setattr(corpus, "LARGE_CHARS", 10)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)


def kept_files() -> list[Path]:
    """Hidden ones too."""
    return sorted(Path("data/encoded").glob("*"))


def replace_unnoticed(source: str, content: str) -> None:
    """Changes a file, keeping its length and its time, so that only reading it would tell."""
    before = Path(source).stat()
    assert len(content.encode()) == before.st_size
    write(source, content)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))


def assert_same(one: Corpus, other: Corpus) -> None:
    for field in ("name", "sha256", "most_frequent", "notes"):
        assert getattr(one, field) == getattr(other, field)
    assert one.tokenizer.chars == other.tokenizer.chars
    assert one.ids.dtype == other.ids.dtype
    assert one.ids.tolist() == other.ids.tolist()


@pytest.mark.usefixtures("_long_texts")
def test_the_ids_of_a_long_text_are_mapped_from_a_file_and_equal_those_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = codecs.BOM_UTF8 + (PLAY + "日本語" * 100).replace("\n", "\r\n").encode()
    long = load_corpus([write("a.txt", text)])
    assert isinstance(long.ids.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        long.ids[0] = 1
    monkeypatch.setattr(corpus, "LARGE_CHARS", 1 << 20)
    monkeypatch.setattr(corpus, "ENCODED_VERSION", corpus.ENCODED_VERSION + 1)
    short = load_corpus(["a.txt"])
    assert not isinstance(short.ids.base, np.memmap)
    assert_same(long, short)
    assert len(long.notes) == 2
    assert [path.suffix for path in kept_files()] == [".ids", ".json"]


@pytest.mark.usefixtures("_long_texts")
def test_a_long_text_is_not_read_again() -> None:
    first = load_corpus([write("a.txt", PLAY)])
    replace_unnoticed("a.txt", PLAY.upper())
    assert_same(load_corpus(["a.txt"]), first)
    # Another way to the same file.
    assert_same(load_corpus([str(Path("a.txt").absolute())]), first)


@pytest.mark.usefixtures("_long_texts")
def test_a_long_text_that_changed_is_encoded_anew_and_the_old_ids_go() -> None:
    load_corpus([write("a.txt", PLAY)])
    load_corpus([write("b.txt", PLAY)])
    old = kept_files()
    write("a.txt", PLAY.upper() + "!")
    assert load_corpus(["a.txt"]).sha256 == digest(PLAY.upper() + "!")
    assert len(kept_files()) == 4
    assert len(set(kept_files()) & set(old)) == 2


@pytest.mark.usefixtures("_long_texts")
def test_what_is_kept_belongs_to_one_encoding_and_one_order_of_sources() -> None:
    text = write("a.txt", "größer als zehn")
    assert load_corpus([text]).sha256 != load_corpus([text], encoding="latin-1").sha256
    write("b.txt", PLAY)
    assert load_corpus(["a.txt", "b.txt"]).sha256 != load_corpus(["b.txt", "a.txt"]).sha256


@pytest.mark.usefixtures("_long_texts")
@pytest.mark.parametrize(
    ("suffix", "damage", "later_ns"),
    [
        pytest.param(".ids", lambda content: content[:-1], 0, id="shorter ids"),
        pytest.param(".ids", lambda content: b"\xff" * len(content), 1, id="other ids"),
        pytest.param(".ids", None, 0, id="no ids"),
        pytest.param(".json", lambda content: content[: len(content) // 2], 0, id="half the facts"),
        pytest.param(".json", lambda content: content.replace(digest(PLAY).encode(), b""), 0, id="other facts"),
        pytest.param(".json", lambda _: b"[1]", 0, id="foreign facts"),
        pytest.param(".json", None, 0, id="no facts"),
    ],
)
def test_damaged_ids_and_facts_are_silently_rebuilt(
    suffix: str, damage: Callable[[bytes], bytes] | None, later_ns: int
) -> None:
    first = load_corpus([write("a.txt", PLAY)])
    (path,) = Path("data/encoded").glob(f"*{suffix}")
    content, time_ns = path.read_bytes(), path.stat().st_mtime_ns + later_ns
    # Not written to, for the ids are mapped.
    path.unlink()
    if damage:
        path.write_bytes(damage(content))
        os.utime(path, ns=(time_ns, time_ns))
    assert_same(load_corpus(["a.txt"]), first)
    # And what was rebuilt is used.
    replace_unnoticed("a.txt", PLAY.upper())
    assert_same(load_corpus(["a.txt"]), first)


@pytest.mark.usefixtures("_long_texts")
def test_a_long_stdin_is_mapped_but_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (PLAY, PLAY.upper()):
        feed_stdin(monkeypatch, text)
        loaded = load_corpus(["-"])
        assert isinstance(loaded.ids.base, np.memmap)
        assert decoded(loaded) == text
    assert not Path("data").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk is Linux's /dev/full")
@pytest.mark.usefixtures("_long_texts")
def test_a_full_disk_while_the_ids_of_stdin_are_written_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, PLAY)
    places = [io.BytesIO(), io.FileIO("/dev/full", "r+")]
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: places.pop(0))
    assert "cannot write the encoded text to a temporary file" in refusal("-")


@pytest.mark.usefixtures("_long_texts")
@pytest.mark.parametrize("suffix", [".ids", ".json"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_while_ids_are_kept_leaves_nothing(
    suffix: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def broken(target: Path, *, shared: bool) -> Iterator[IO[bytes]]:
        with replacing(target, shared=shared) as file:
            yield file
            if target.suffix == suffix:
                raise error

    monkeypatch.setattr(corpus, "replacing", broken)
    with pytest.raises((CorpusError, KeyboardInterrupt)) as caught:
        load_corpus([write("a.txt", PLAY)])
    if isinstance(error, OSError):
        assert "'data/encoded': No space left" in str(caught.value)
    assert kept_files() == []


@pytest.mark.usefixtures("_long_texts")
def test_a_folder_that_cannot_be_made_is_a_sentence() -> None:
    write("data", "a file where the folder should be")
    assert "'data/encoded'" in refusal(write("a.txt", PLAY))


# Split


def test_the_end_of_the_text_is_held_out() -> None:
    loaded = corpus_of("abcdefghij" * 10)
    train, val = loaded.split(0.1, 8)
    assert (len(train), len(val)) == (90, 10)
    assert np.array_equal(np.concatenate([train, val]), loaded.ids)
    assert np.shares_memory(train, loaded.ids)
    assert np.shares_memory(val, loaded.ids)


@settings(max_examples=60)
@given(val_fraction=st.floats(0.001, 0.99), block_size=st.integers(1, 50))
@example(val_fraction=0.1, block_size=8)
@example(val_fraction=0.5, block_size=1)
def test_the_length_that_a_split_asks_for_is_the_shortest_that_will_do(val_fraction: float, block_size: int) -> None:
    def sized(length: int) -> Corpus:
        return Corpus("a.txt", "", CharTokenizer("ab"), np.zeros(length, np.uint8), "a", ())

    with pytest.raises(CorpusError) as caught:
        sized(2).split(val_fraction, block_size)
    needed = int(str(caught.value).partition("at least ")[2].partition(":")[0].replace(",", ""))
    with pytest.raises(CorpusError):
        sized(needed - 1).split(val_fraction, block_size)
    train, val = sized(needed).split(val_fraction, block_size)
    assert len(train) >= block_size + 1
    assert len(val) >= 2


def test_a_split_of_too_little_says_how_much_there_is_and_what_to_change() -> None:
    loaded = corpus_of("ab" * 50)
    with pytest.raises(CorpusError, match=r"100 characters.*256.*286.*more text.*--block-size.*--val-fraction"):
        loaded.split(0.1, 256)
    with pytest.raises(CorpusError, match=r"100 characters.*1,001.*larger --val-fraction"):
        loaded.split(0.001, 8)
    # What helps one part would harm the other.
    with pytest.raises(CorpusError, match=r"10 characters.*286: use more text$"):
        corpus_of("ab" * 5).split(0.1, 256)


@pytest.mark.parametrize(("val_fraction", "block_size"), [(0.0, 8), (1.0, 8), (float("nan"), 8), (0.1, 0)])
def test_a_split_that_makes_no_sense_is_a_mistake_in_code(val_fraction: float, block_size: int) -> None:
    with pytest.raises(ValueError, match="val_fraction"):
        corpus_of(PLAY).split(val_fraction, block_size)
