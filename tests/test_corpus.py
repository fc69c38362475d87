"""Text in, ids out: every way a text can come, every way it can be wrong."""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt import corpus, download
from minigpt.corpus import Corpus, batch, bundled_text, load_corpus, read_text
from minigpt.errors import CorpusError
from minigpt.tokenizer import CharTokenizer

PLAY = "MARGIT: The tide, the tide!\nOLE: It comes.\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test keeps in `data` lands in its own folder; no proxy stands before 127.0.0.1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")


def write(name: str, content: str | bytes) -> str:
    """Writes a file, text as UTF-8 with its line ends left alone, and returns its name as a source."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def text_of(*sources: str, encoding: str = "utf-8") -> str:
    return "".join(read_text(sources, encoding=encoding))


def refusal(*sources: str, encoding: str = "utf-8", sha256: str | None = None) -> str:
    """The one sentence with which the sources are refused."""
    with pytest.raises(CorpusError) as caught:
        load_corpus(sources, encoding=encoding, sha256=sha256)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def corpus_of(text: str) -> Corpus:
    return load_corpus([write("text.txt", text)])


# What a corpus is


def test_a_file_becomes_its_sorted_characters_and_their_ids() -> None:
    loaded = corpus_of(PLAY)
    assert loaded.name == "text.txt"
    assert loaded.tokenizer.chars == "".join(sorted(set(PLAY)))
    assert loaded.ids.tolist() == CharTokenizer(sorted(set(PLAY))).encode(PLAY)
    assert loaded.sha256 == digest(PLAY)
    assert loaded.most_frequent == Counter(PLAY).most_common(1)[0][0]
    assert loaded.notes == ()


def test_the_most_frequent_of_equals_is_the_first_by_code_point() -> None:
    assert corpus_of("bbaac").most_frequent == "a"


def test_ids_cannot_be_written_to() -> None:
    loaded = corpus_of(PLAY)
    with pytest.raises(ValueError, match="read-only"):
        loaded.ids[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        loaded.split(0.1, 4)[0][0] = 1


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(2, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_ids_have_the_smallest_unsigned_type(vocab_size: int, dtype: type[np.unsignedinteger[Any]]) -> None:
    # From U+10000 on there are neither surrogates nor line ends in the way.
    text = "".join(map(chr, range(0x10000, 0x10000 + vocab_size)))
    loaded = corpus_of(text)
    assert loaded.ids.dtype == dtype
    assert loaded.ids.tolist() == list(range(vocab_size))


def test_any_unicode_is_kept_code_point_by_code_point() -> None:
    text = "zwölf Boxkämpfer\u2028\x0b\x1c\x85 日本語 👩\u200d👩\u200d👧 e\u0301 \U0010ffff\x01"
    loaded = corpus_of(text)
    assert loaded.tokenizer.decode(loaded.ids.tolist()) == text


def test_a_text_of_one_character_teaches_nothing() -> None:
    assert "'a'" in refusal(write("a.txt", "aaaa"))


@pytest.mark.parametrize("content", [b"", codecs.BOM_UTF8])
def test_an_empty_text_is_refused(content: bytes) -> None:
    assert "a.txt is empty" in refusal(write("a.txt", content))
    with pytest.raises(CorpusError, match="empty"):
        text_of("a.txt")


# Sources


def test_the_bundled_text_is_read_when_no_source_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "__file__", str(Path("checkout/minigpt/corpus.py").absolute()))
    with pytest.raises(CorpusError, match=r"aldersea\.txt"):
        bundled_text()
    write("checkout/data/aldersea.txt", PLAY)
    assert bundled_text() == Path("checkout/data/aldersea.txt").absolute()
    write("checkout/minigpt/data/aldersea.txt", PLAY * 2)
    assert bundled_text() == Path("checkout/minigpt/data/aldersea.txt").absolute()
    loaded = load_corpus([])
    assert (loaded.name, loaded.sha256) == ("the bundled plays", digest(PLAY * 2))


def test_sources_are_joined_in_the_order_given_with_a_newline_where_one_is_missing() -> None:
    sources = [write("b.txt", "one"), write("empty.txt", ""), write("a.txt", "two\n"), write("c.txt", "\rthree")]
    assert text_of(*sources) == "one\ntwo\n\nthree"
    assert text_of("empty.txt", "b.txt", "b.txt", "empty.txt") == "one\none"
    assert load_corpus(sources).name == "b.txt, empty.txt, a.txt, c.txt"
    assert load_corpus([*sources, "b.txt"]).name == "b.txt, empty.txt, a.txt and 2 more"


def test_a_folder_is_its_visible_txt_files_sorted_by_name() -> None:
    for name in ("b.txt", "a.txt", "B.txt", "notes.md", "._a.txt", "deep.txt/c.txt"):
        write(f"books/{name}", name)
    assert text_of("books") == "B.txt\na.txt\nb.txt"
    assert load_corpus(["books"]).name == "B.txt, a.txt, b.txt"


def test_a_folder_without_txt_files_says_so() -> None:
    write("books/notes.md", "no")
    assert "*.txt" in refusal("books")
    assert "'books'" in refusal("books")


@pytest.mark.parametrize("source", ["missing.txt", "", "a.txt/b.txt", "link.txt", "a\0b", "x" * 5000])
def test_a_name_that_leads_nowhere_is_refused(source: str) -> None:
    write("a.txt", PLAY)
    Path("link.txt").symlink_to("nowhere")
    assert repr(source) in refusal(source)


def test_an_address_of_another_kind_is_refused_as_such() -> None:
    assert "http://" in refusal("ftp://example.org/a.txt")


def test_files_and_folders_that_may_not_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is played."""
    write("books/a.txt", PLAY)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in refusal("books/a.txt")
    monkeypatch.setattr(os, "scandir", refuse)
    assert "'books': Permission denied" in refusal("books")


def test_an_error_in_the_middle_of_reading_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

    write("a.txt", PLAY)
    monkeypatch.setattr(Path, "open", lambda *_: Broken())
    assert "'a.txt': Input/output error" in refusal("a.txt")
    assert "'a.txt': Input/output error" in refusal("a.txt", sha256="0" * 64)


def test_a_device_is_refused_and_not_waited_for() -> None:
    assert repr(os.devnull) in refusal(os.devnull)


def test_a_socket_is_refused() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        assert "'s.txt'" in refusal("s.txt")


def test_a_pipe_with_a_name_is_read_to_its_end() -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_text, args=(PLAY,))
    writer.start()
    loaded = load_corpus(["pipe"])
    writer.join()
    assert (loaded.name, loaded.sha256) == ("pipe", digest(PLAY))


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="the shell's <(command) needs /dev/fd")
def test_what_a_shell_substitutes_for_a_command_is_read() -> None:
    receiver, sender = os.pipe()
    os.write(sender, PLAY.encode())
    os.close(sender)
    try:
        assert text_of(f"/dev/fd/{receiver}") == PLAY
    finally:
        os.close(receiver)


def feed_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_dash_is_the_bytes_of_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, "größer\r\n".encode("latin-1"))
    loaded = load_corpus(["-"], encoding="latin-1")
    assert (loaded.name, loaded.sha256) == ("stdin", digest("größer\n"))


def test_stdin_stands_among_files(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b"two")
    assert text_of(write("1.txt", "one"), "-", write("3.txt", "three")) == "one\ntwo\nthree"


def test_stdin_twice_closed_or_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 times" in refusal("-", "-")
    feed_stdin(monkeypatch, b"")
    assert "stdin is empty" in refusal("-")
    sys.stdin.close()
    assert "stdin is closed" in refusal("-")
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin is closed" in refusal("-")


def test_a_full_disk_while_stdin_is_copied_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b"x" * 100_000)
    with small_files(4096):
        assert "temporary file" in refusal("-")


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """Writing beyond so many bytes of any one file fails, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_one_string_for_a_list_of_sources_is_a_mistake_in_code() -> None:
    with pytest.raises(ValueError, match="list"):
        load_corpus("a.txt")


# Digests


def test_the_digest_of_a_file_is_that_of_its_bytes_in_either_case() -> None:
    content = b"a\r\nb"
    write("a.txt", content)
    assert load_corpus(["a.txt"], sha256=digest(content).upper()).sha256 == digest("a\nb")
    message = refusal("a.txt", sha256=digest("a\nb"))
    assert digest(content) in message
    assert digest("a\nb") in message


def test_the_digest_of_stdin_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, PLAY.encode())
    assert load_corpus(["-"], sha256=digest(PLAY)).sha256 == digest(PLAY)
    feed_stdin(monkeypatch, PLAY.encode())
    assert digest(PLAY) in refusal("-", sha256="0" * 64)


def test_a_digest_goes_with_one_text_only() -> None:
    write("books/a.txt", PLAY)
    assert "2 are given" in refusal("books/a.txt", "books/a.txt", sha256=digest(PLAY))
    assert "folder" in refusal("books", sha256=digest(PLAY))


@pytest.mark.parametrize("sha256", ["", "abc", "g" * 64, "0" * 65])
def test_a_digest_is_64_hexadecimal_digits(sha256: str) -> None:
    assert "64 hexadecimal digits" in refusal(write("a.txt", PLAY), sha256=sha256)


# Decoding


def test_an_unknown_encoding_is_refused() -> None:
    write("a.txt", PLAY)
    for encoding in ("utf-99", "", "rot13", "base64", "idna", "punycode", "undefined", "a\0b"):
        assert repr(encoding) in refusal("a.txt", encoding=encoding)


def test_a_byte_order_mark_is_dropped_from_each_file_and_noted_once() -> None:
    sources = [
        write("1.txt", "one"),
        write("2.txt", codecs.BOM_UTF8 + b"two\n"),
        write("3.txt", codecs.BOM_UTF8 + "th\ufeffree".encode()),
    ]
    loaded = load_corpus(sources)
    assert loaded.tokenizer.decode(loaded.ids.tolist()) == "one\ntwo\nth\ufeffree"
    (note,) = loaded.notes
    assert "'2.txt'" in note
    assert "byte-order mark" in note


def test_line_ends_become_lf_and_are_noted_once() -> None:
    sources = [write("1.txt", "a\n"), write("2.txt", "b\r\n\r\rc\n\r"), write("3.txt", "\nd\re")]
    loaded = load_corpus(sources)
    assert loaded.tokenizer.decode(loaded.ids.tolist()) == "a\nb\n\n\nc\n\n\nd\ne"
    (note,) = loaded.notes
    assert "'2.txt'" in note
    assert "CRLF" in note


def test_crlf_split_across_two_chunks_becomes_one_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.txt", b"ab\r\ncd")
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 3)
    assert text_of("a.txt") == "ab\ncd"


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 1 << 20])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-7", "gb18030", "hz"])
def test_characters_split_across_chunks_are_put_together(
    encoding: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "日本 a\r\n" if encoding == "hz" else "日本 👩 ä\r\n"
    monkeypatch.setattr(corpus, "CHUNK_BYTES", chunk_bytes)
    assert text_of(write("a.txt", text.encode(encoding)), encoding=encoding) == text.replace("\r", "")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=3),
    chunk_bytes=st.integers(1, 9),
)
@example(texts=["\ufeff\ufeffa\r", "\n\rb\r\n"], chunk_bytes=1)
@example(texts=["a", "\ufeff", "b"], chunk_bytes=4)
def test_reading_in_chunks_equals_reading_in_one_piece(texts: list[str], chunk_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK_BYTES", chunk_bytes)
        expected = ""
        sources = []
        for number, text in enumerate(texts):
            sources.append(write(f"{folder}/{number}.txt", text))
            one_piece = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
            if one_piece:
                expected += "\n" if expected and not expected.endswith("\n") else ""
                expected += one_piece
        if len(set(expected)) < 2:
            refusal(*sources)
            return
        loaded = load_corpus(sources)
        assert text_of(*sources) == expected
        assert loaded.tokenizer.chars == "".join(sorted(set(expected)))
        assert loaded.tokenizer.decode(loaded.ids.tolist()) == expected
        assert loaded.sha256 == digest(expected)
        assert loaded.most_frequent == min(expected, key=lambda char: (-expected.count(char), char))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    start=st.text("aé日👩", max_size=6),
    fault=st.binary(min_size=1, max_size=4).filter(lambda raw: 0 not in raw),
    end=st.text("aé日👩", max_size=6),
    chunk_bytes=st.integers(1, 9),
)
def test_the_offset_of_a_bad_byte_does_not_depend_on_chunks(
    start: str, fault: bytes, end: str, chunk_bytes: int
) -> None:
    content = start.encode() + fault + end.encode()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        offset = error.start
    else:
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK_BYTES", chunk_bytes)
        assert f"0x{content[offset]:02x} at byte {offset} means" in refusal(write(f"{folder}/a.txt", content))


def test_bad_bytes_name_the_file_and_a_way_out() -> None:
    message = refusal(write("ok.txt", PLAY), write("b/a.txt", "größer".encode("latin-1")))
    assert "'b/a.txt'" in message
    assert "0xf6 at byte 2" in message
    assert "--encoding latin-1" in message
    assert text_of("b/a.txt", encoding="latin-1") == "größer"


def test_a_utf_16_file_is_told_from_others_by_its_mark() -> None:
    assert "--encoding utf-16" in refusal(write("a.txt", PLAY.encode("utf-16")))
    assert text_of("a.txt", encoding="utf-16") == PLAY
    assert "utf-16-le" in refusal(write("a.txt", PLAY.encode("utf-16-le")))
    assert "utf-16-le" in refusal("a.txt", encoding="utf-16")


def test_a_file_that_ends_within_a_character_is_refused() -> None:
    assert "0xe6 at byte 1" in refusal(write("a.txt", b"a\xe6\x97"))
    assert "0x41 at byte 4" in refusal(write("a.txt", b"\xff\xfeB\0A"), encoding="utf-16")


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 4, 7, 1 << 20])
@pytest.mark.parametrize(
    ("encoding", "content", "offset"),
    [
        ("utf-8", "aé日\0b\0".encode(), 6),
        ("latin-1", b"ab\xe9\0", 3),
        ("utf-16", "a👩\0b".encode("utf-16"), 8),
        # The bytes 00 of two neighbours are not a NUL.
        ("utf-16-be", "\u0100a\0b".encode("utf-16-be"), 4),
        ("utf-32-le", "a👩\0b\0".encode("utf-32-le"), 8),
        ("unicode_escape", rb"a\x00b", 1),
    ],
)
def test_a_nul_is_refused_with_its_exact_place(
    encoding: str, content: bytes, offset: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHUNK_BYTES", chunk_bytes)
    message = refusal(write("a.txt", content), encoding=encoding)
    assert "'a.txt'" in message
    assert f"NUL at byte {offset}," in message
    assert "binary" in message


def test_a_fault_before_a_nul_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk_bytes in (1, 2, 100):
        monkeypatch.setattr(corpus, "CHUNK_BYTES", chunk_bytes)
        assert "0xff at byte 2" in refusal(write("a.txt", b"ab\xff\0"))
        # The NUL is what makes the byte before it, the first of a pair, a fault.
        assert "0xc3 at byte 2" in refusal(write("a.txt", b"ab\xc3\0"))
        assert "NUL at byte 0" in refusal(write("a.txt", b"\0\xff"))


def test_half_a_character_from_a_lenient_codec_is_refused() -> None:
    assert "U+D800" in refusal(write("a.txt", rb"ab\ud800"), encoding="unicode_escape")


# Long texts


@pytest.fixture
def _long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of more than ten characters count as long."""
    monkeypatch.setattr(corpus, "LARGE_CHARS", 10)
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 7)


def kept_files() -> list[Path]:
    return sorted(Path("data/encoded").glob("*"))


def replace_unnoticed(source: str, content: str) -> None:
    """Changes a file, keeping its length and its time, so that only reading it would tell."""
    before = Path(source).stat()
    assert len(content.encode()) == before.st_size
    write(source, content)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))


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
    assert list(Path().rglob("*.part")) == []


def assert_same(one: Corpus, other: Corpus) -> None:
    assert (one.name, one.sha256, one.most_frequent, one.notes) == (
        other.name,
        other.sha256,
        other.most_frequent,
        other.notes,
    )
    assert one.tokenizer.chars == other.tokenizer.chars
    assert one.ids.dtype == other.ids.dtype
    assert one.ids.tolist() == other.ids.tolist()


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
    "damage", ["shorter", "foreign ids", "no ids", "no facts", "foreign facts", "half facts", "other facts", "list"]
)
def test_a_damaged_cache_is_silently_rebuilt(damage: str) -> None:
    first = load_corpus([write("a.txt", PLAY)])
    ids_path, facts_path = kept_files()
    facts = facts_path.read_bytes()
    content = ids_path.read_bytes()
    # A new file in its place, for the one that is there is mapped.
    ids_path.unlink()
    ids_path.write_bytes(content)
    match damage:
        case "shorter":
            ids_path.write_bytes(ids_path.read_bytes()[:-1])
        case "foreign ids":
            ids_path.write_bytes(b"\xff" * ids_path.stat().st_size)
        case "no ids":
            ids_path.unlink()
        case "no facts":
            facts_path.unlink()
        case "foreign facts":
            facts_path.write_bytes(b"\xff\0PNG")
        case "half facts":
            facts_path.write_bytes(facts[: len(facts) // 2])
        case "other facts":
            facts_path.write_bytes(facts.replace(digest(PLAY).encode(), digest("").encode()))
        case "list":
            facts_path.write_bytes(b"[1]")
    assert_same(load_corpus(["a.txt"]), first)
    # And what was rebuilt is used.
    replace_unnoticed("a.txt", PLAY.upper())
    assert_same(load_corpus(["a.txt"]), first)


@pytest.mark.usefixtures("_long_texts")
def test_a_long_stdin_is_mapped_but_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (PLAY, PLAY.upper()):
        feed_stdin(monkeypatch, text.encode())
        loaded = load_corpus(["-"])
        assert isinstance(loaded.ids.base, np.memmap)
        assert loaded.tokenizer.decode(loaded.ids.tolist()) == text
    assert not Path("data").exists()


@pytest.mark.usefixtures("_long_texts")
def test_a_full_disk_while_ids_are_written_is_a_sentence_and_leaves_nothing() -> None:
    write("a.txt", PLAY * 1000)
    with small_files(4096):
        message = refusal("a.txt")
    assert "'data/encoded'" in message
    assert kept_files() == []


@pytest.mark.usefixtures("_long_texts")
def test_a_full_disk_after_the_ids_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_for_json(target: Path) -> Any:
        if target.suffix == ".json":
            raise OSError(28, "No space left on device")
        return download.replacing(target)

    monkeypatch.setattr(corpus, "replacing", full_for_json)
    assert "No space left" in refusal(write("a.txt", PLAY))
    assert kept_files() == []


@pytest.mark.usefixtures("_long_texts")
def test_a_folder_that_cannot_be_made_is_a_sentence() -> None:
    write("data", "a file where the folder should be")
    assert "'data/encoded'" in refusal(write("a.txt", PLAY))


@pytest.mark.parametrize("large_chars", [10, 1 << 20])
@pytest.mark.parametrize("second", [PLAY.upper(), PLAY + "more", PLAY[:-5]])
def test_a_text_that_changes_between_the_passes_is_refused(
    second: str, large_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = corpus._survey

    def survey_then_change(*args: Any) -> object:
        found = survey(*args)
        write("a.txt", second)
        return found

    write("a.txt", PLAY)
    os.utime("a.txt", ns=(1, 1))
    monkeypatch.setattr(corpus, "LARGE_CHARS", large_chars)
    monkeypatch.setattr(corpus, "_survey", survey_then_change)
    assert "changed" in refusal("a.txt")
    assert kept_files() == []


# Addresses


class Server(ThreadingHTTPServer):
    """Answers each path with what the test put there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.contents: dict[str, bytes] = {}
        self.asked: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(self.path)
        kind = self.path.split("/")[1]
        content = self.server.contents.get(self.path)
        if kind == "moved":
            self.send_response(301)
            self.send_header("Location", "/play.txt")
        elif content is None:
            self.send_error(404)
            return
        else:
            self.send_response(200)
        if kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            content = b"%x\r\n%s\r\n" % (len(content or b""), content)
        elif kind == "packed":
            self.send_header("Content-Encoding", "gzip")
        elif kind != "endless":
            self.send_header("Content-Length", str(len(content or b"") + (kind == "short")))
        self.end_headers()
        self.wfile.write(content or b"")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing: the test's own words are enough."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def kept_downloads() -> list[Path]:
    return sorted(Path("data").glob("*"))


def test_an_address_is_downloaded_once_and_kept(server: Server) -> None:
    server.contents["/play.txt"] = PLAY.encode()
    first = load_corpus([server.url("/play.txt")])
    assert (first.name, first.sha256) == ("play.txt", digest(PLAY))
    (kept,) = kept_downloads()
    assert kept.read_text() == PLAY
    del server.contents["/play.txt"]
    assert load_corpus([server.url("/play.txt")]).sha256 == digest(PLAY)
    assert server.asked == ["/play.txt"]


def test_a_kept_download_needs_no_network() -> None:
    with Server() as gone:
        url = gone.url("/play.txt")
    assert "cannot download" in refusal(url)
    assert kept_downloads() == []
    write(f"data/{download.kept_name(url)}", PLAY)
    assert load_corpus([url]).sha256 == digest(PLAY)


def test_progress_of_a_download_is_told_in_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BLOCK_BYTES", 4)
    server.contents |= {"/a.txt": b"0123456789", "/endless/a.txt": b"01234"}
    told: list[tuple[int, int | None]] = []
    load_corpus([server.url("/a.txt")], progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 10), (8, 10), (10, 10)]
    told.clear()
    load_corpus([server.url("/a.txt")], progress=lambda done, total: told.append((done, total)))
    assert told == []
    load_corpus([server.url("/endless/a.txt")], progress=lambda done, total: told.append((done, total)))
    assert told == [(4, None), (5, None)]


def test_a_download_that_breaks_off_is_refused_and_not_kept(server: Server) -> None:
    server.contents["/short/a.txt"] = PLAY.encode()
    message = refusal(server.url("/short/a.txt"))
    assert "broke off" in message
    assert str(len(PLAY)) in message
    assert kept_downloads() == []


def test_a_chunked_download_is_read_and_its_end_awaited(server: Server) -> None:
    server.contents["/chunked/a.txt"] = PLAY.encode()
    # The last chunk, an empty one, is missing.
    assert "broke off" in refusal(server.url("/chunked/a.txt"))
    assert kept_downloads() == []


def test_an_interrupted_download_leaves_nothing(server: Server) -> None:
    server.contents["/a.txt"] = PLAY.encode()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_corpus([server.url("/a.txt")], progress=interrupt)
    assert kept_downloads() == []


@pytest.mark.parametrize(
    ("path", "words"), [("/none.txt", "404 Not Found"), ("/packed/a.txt", "gzip"), ("/empty.txt", "empty")]
)
def test_an_answer_without_a_text_is_refused_and_not_kept(server: Server, path: str, words: str) -> None:
    server.contents |= {"/packed/a.txt": b"\x1f\x8b", "/empty.txt": b""}
    message = refusal(server.url(path))
    assert words in message
    assert server.url(path) in message
    assert kept_downloads() == []


@pytest.mark.parametrize("url", ["http://", "http://[::1/a", "http://a b/", "http://127.0.0.1:port/a", "http://ä..b/"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    assert url in refusal(url)


def test_an_address_may_be_written_as_people_read_it(server: Server) -> None:
    server.contents["/gr%C3%B6%C3%9Fer%20als.txt"] = PLAY.encode()
    assert load_corpus([server.url("/größer als.txt")]).name == "gr_er_als.txt"
    assert load_corpus([server.url("/gr%C3%B6%C3%9Fer%20als.txt")]).sha256 == digest(PLAY)


def test_a_redirect_is_followed(server: Server) -> None:
    server.contents["/play.txt"] = PLAY.encode()
    assert load_corpus([server.url("/moved/a.txt")]).sha256 == digest(PLAY)


def test_a_digest_is_checked_when_downloading_and_each_time_after(server: Server) -> None:
    url = server.url("/a.txt")
    server.contents["/a.txt"] = PLAY.encode()
    message = refusal(url, sha256="0" * 64)
    assert digest(PLAY) in message
    assert "0" * 64 in message
    assert kept_downloads() == []
    load_corpus([url], sha256=digest(PLAY).upper())
    (kept,) = kept_downloads()
    message = refusal(url, sha256="0" * 64)
    assert digest(PLAY) in message
    assert "0" * 64 in message
    assert kept.read_text() == PLAY


def test_a_full_disk_while_downloading_is_a_sentence_and_leaves_nothing(server: Server) -> None:
    server.contents["/a.txt"] = b"ab" * 100_000
    with small_files(4096):
        message = refusal(server.url("/a.txt"))
    assert "'data'" in message
    assert kept_downloads() == []


def test_addresses_with_one_file_name_are_kept_apart() -> None:
    urls = ["http://a.org/input.txt", "http://b.org/input.txt", "http://a.org/input.txt?v=2", "http://a.org/Input.txt"]
    assert len({download.kept_name(url).lower() for url in urls}) == len(urls)
    assert download.kept_name(urls[0]) == download.kept_name(urls[0] + "#chapter")


@pytest.mark.parametrize(
    "path", ["", "/", "/..", "/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/.hidden", "/a%00b.txt", "/con:x.txt", "/a" * 300]
)
def test_the_name_of_a_kept_file_is_safe(path: str) -> None:
    name = download.kept_name(f"http://a.org{path}")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert not name.startswith(".")
    assert len(name) < 120


def test_shakespeare_is_a_download_with_a_known_digest(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "SHAKESPEARE_URL", server.url("/input.txt"))
    server.contents["/input.txt"] = PLAY.encode()
    assert corpus.SHAKESPEARE_SHA256 in refusal("shakespeare")
    monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", digest(PLAY))
    assert load_corpus(["shakespeare"]).name == "shakespeare"
    write("shakespeare", "a file of my own")
    assert text_of("shakespeare") == "a file of my own"


def test_a_missing_file_is_noticed_before_anything_is_downloaded(server: Server) -> None:
    server.contents["/a.txt"] = PLAY.encode()
    assert "'missing.txt'" in refusal(server.url("/a.txt"), "missing.txt")
    assert server.asked == []


# Split


def test_the_end_of_the_text_is_held_out() -> None:
    loaded = corpus_of("abcdefghij" * 10)
    train, val = loaded.split(0.1, 8)
    assert (len(train), len(val)) == (90, 10)
    assert np.array_equal(np.concatenate([train, val]), loaded.ids)
    assert np.shares_memory(train, loaded.ids)
    assert np.shares_memory(val, loaded.ids)


@settings(deadline=None, max_examples=60, derandomize=True)
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


@pytest.mark.parametrize(("val_fraction", "block_size"), [(0.0, 8), (1.0, 8), (float("nan"), 8), (0.1, 0)])
def test_a_split_that_makes_no_sense_is_a_mistake_in_code(val_fraction: float, block_size: int) -> None:
    with pytest.raises(ValueError, match="val_fraction"):
        corpus_of(PLAY).split(val_fraction, block_size)


# Batches


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_batch_is_windows_of_the_text_and_what_follows_each_character(dtype: type[np.unsignedinteger[Any]]) -> None:
    ids = np.arange(50).astype(dtype)
    x, y = batch(ids, 8, 16, torch.Generator().manual_seed(1))
    assert x.shape == y.shape == (16, 8)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(8))


def test_every_start_from_the_first_to_the_last_is_equally_likely() -> None:
    x, y = batch(np.arange(12, dtype=np.uint8), 7, 20_000, torch.Generator().manual_seed(1))
    counts = torch.bincount(x[:, 0])
    assert len(counts) == 5
    assert y.max() == 11
    # Five standard deviations (57 each) of 4,000; seeded, and with another seed a false alarm once in 300,000 runs.
    assert (counts - 4000).abs().max() < 5 * 57


def test_starts_are_equally_likely_in_a_text_of_three_thousand_million_characters() -> None:
    """32 random bits modulo 3 * 10^9 would put 60 % into the first 1.3 * 10^9 instead of 43 %."""
    length = 3_000_000_000
    # Takes no memory: all characters are the same one.
    ids: np.ndarray = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape=(length,), strides=(0,))
    seen: list[np.ndarray] = []

    class Recorder:
        def __len__(self) -> int:
            return len(ids)

        def __getitem__(self, places: np.ndarray) -> Any:
            seen.append(places)
            return ids[places]

    batch(Recorder(), 4, 10_000, torch.Generator().manual_seed(1))  # type: ignore[arg-type]
    share = float((seen[0][:, 0] < 2**32 - length).mean())
    # Five standard deviations of 0.005; seeded, and with another seed a false alarm once in 1,700,000 runs.
    assert abs(share - (2**32 - length) / length) < 5 * 0.005


def test_the_generator_alone_decides_a_batch() -> None:
    ids = np.arange(100, dtype=np.uint8)
    torch.manual_seed(1)
    one = batch(ids, 8, 4, torch.Generator().manual_seed(5))
    torch.manual_seed(2)
    other = batch(ids, 8, 4, torch.Generator().manual_seed(5))
    assert torch.equal(one[0], other[0])


def test_the_only_window_of_a_short_text_is_found_and_a_shorter_text_is_a_mistake_in_code() -> None:
    x, y = batch(np.arange(5, dtype=np.uint8), 4, 3, torch.Generator())
    assert x.tolist() == [[0, 1, 2, 3]] * 3
    assert y.tolist() == [[1, 2, 3, 4]] * 3
    with pytest.raises(ValueError, match="block_size=4"):
        batch(np.arange(4, dtype=np.uint8), 4, 3, torch.Generator())
