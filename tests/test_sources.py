"""Every way a text can come, and every way it can be wrong."""

from __future__ import annotations

import codecs
import io
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt import sources
from minigpt.errors import CorpusError
from minigpt.sources import bundled_text, open_text, read_text
from tests.source_support import PLAY, digest, feed_stdin, refusal_of, write

pytestmark = pytest.mark.usefixtures("own_folder")


def text_of(*names: str, encoding: str = "utf-8", sha256: str | None = None) -> str:
    """All that is read of the sources."""
    return "".join(read_text(names, encoding=encoding, sha256=sha256))


def name_of(*names: str) -> str:
    """What the sources are called together."""
    with open_text(names) as text:
        return text.name


def refusal(*names: str, encoding: str = "utf-8", sha256: str | None = None) -> str:
    """The one sentence with which the sources are refused."""
    return refusal_of(lambda: text_of(*names, encoding=encoding, sha256=sha256))


# Files and folders


def test_the_bundled_text_is_read_when_no_source_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "__file__", str(Path("checkout/minigpt/sources.py").absolute()))
    with pytest.raises(CorpusError, match=r"aldersea\.txt"):
        bundled_text()
    write("checkout/data/aldersea.txt", PLAY)
    assert bundled_text() == Path("checkout/data/aldersea.txt").absolute()
    write("checkout/minigpt/data/aldersea.txt", PLAY * 2)
    assert bundled_text() == Path("checkout/minigpt/data/aldersea.txt").absolute()
    assert (name_of(), text_of()) == ("the bundled plays", PLAY * 2)


def test_sources_are_joined_in_the_order_given_with_a_newline_where_one_is_missing() -> None:
    names = [write("b.txt", "one"), write("empty.txt", ""), write("a.txt", "two\n"), write("c.txt", "\rthree")]
    assert text_of(*names) == "one\ntwo\n\nthree"
    assert text_of("empty.txt", "b.txt", "b.txt", "empty.txt") == "one\none"
    assert name_of(*names) == "b.txt, empty.txt, a.txt, c.txt"
    assert name_of(*names, "b.txt") == "b.txt, empty.txt, a.txt and 2 more"


def test_a_folder_is_its_visible_txt_files_sorted_by_name() -> None:
    for name in ("b.txt", "a.txt", "B.txt", "notes.md", "._a.txt", "deep.txt/c.txt"):
        write(f"books/{name}", name)
    assert text_of("books") == "B.txt\na.txt\nb.txt"
    assert name_of("books") == "B.txt, a.txt, b.txt"


def test_a_folder_without_txt_files_says_so() -> None:
    write("books/notes.md", "no")
    assert "the folder 'books' has no *.txt" in refusal("books")


@pytest.mark.parametrize("content", [b"", codecs.BOM_UTF8])
def test_an_empty_text_is_refused(content: bytes) -> None:
    assert "a.txt is empty" in refusal(write("a.txt", content))


@pytest.mark.parametrize("name", ["missing.txt", "", "a.txt/b.txt", "link.txt", "a\0b", "x" * 5000])
def test_a_name_that_leads_nowhere_is_refused(name: str) -> None:
    write("a.txt", PLAY)
    Path("link.txt").symlink_to("nowhere")
    assert repr(name) in refusal(name)


def test_files_and_folders_that_may_not_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is played."""
    write("books/a.txt", PLAY)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "'books/a.txt': Permission denied" in refusal("books/a.txt")
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


def test_what_is_neither_a_file_nor_a_pipe_is_refused_and_not_waited_for() -> None:
    assert repr(os.devnull) in refusal(os.devnull)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        assert "'s.txt'" in refusal("s.txt")


def test_one_string_for_a_list_of_sources_is_a_mistake_in_code() -> None:
    with pytest.raises(ValueError, match="list"):
        list(read_text("a.txt"))


# Pipes


def test_what_comes_through_a_pipe_can_be_read_again_and_is_in_no_file() -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_text, args=(PLAY,))
    writer.start()
    with open_text([write("a.txt", PLAY), "pipe"]) as text:
        writer.join()
        assert text.name == "a.txt, pipe"
        assert ["".join(text.chunks()) for _ in range(2)] == [PLAY + PLAY] * 2
        assert not text.in_files
        assert [Path(path).name for path, _, _ in text.state()] == ["a.txt"]


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="the shell's <(command) needs /dev/fd")
def test_what_a_shell_substitutes_for_a_command_is_read() -> None:
    receiver, sender = os.pipe()
    os.write(sender, PLAY.encode())
    os.close(sender)
    try:
        assert text_of(f"/dev/fd/{receiver}") == PLAY
    finally:
        os.close(receiver)


def test_a_dash_is_the_bytes_of_stdin_among_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, "größer\r\n".encode("latin-1"))
    assert text_of(write("1.txt", "one"), "-", write("3.txt", "three"), encoding="latin-1") == "one\ngrößer\nthree"
    feed_stdin(monkeypatch, b"two")
    assert name_of("-") == "stdin"


def test_stdin_twice_closed_or_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2 times" in refusal("-", "-")
    feed_stdin(monkeypatch, b"")
    assert "stdin is empty" in refusal("-")
    sys.stdin.close()
    assert "stdin is closed" in refusal("-")
    monkeypatch.setattr(sys, "stdin", None)
    assert "stdin is closed" in refusal("-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk is Linux's /dev/full")
def test_a_full_disk_while_stdin_is_copied_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, PLAY.encode())
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "r+"))
    assert "cannot copy stdin to a temporary file" in refusal("-")


# Addresses; for the downloading itself see test_download.py


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The address and the digest of every download, which is PLAY each time."""
    calls: list[tuple[str, str | None]] = []

    def fetch(url: str, folder: Path, *, sha256: str | None, progress: object) -> Path:
        assert (folder, progress) == (Path("data"), None)
        calls.append((url, sha256))
        return Path(write("data/kept.txt", PLAY))

    monkeypatch.setattr(sources, "fetch", fetch)
    return calls


@pytest.mark.parametrize("sha256", [None, "0" * 64])
def test_an_address_is_fetched_and_goes_by_its_file_name(
    sha256: str | None, fetched: list[tuple[str, str | None]]
) -> None:
    url = "HTTPS://a.org/play.txt?v=2"
    assert text_of(url, sha256=sha256) == PLAY
    assert fetched == [(url, sha256)]
    assert name_of(url) == "play.txt"


def test_shakespeare_is_a_download_with_a_known_digest_unless_a_file_has_that_name(
    fetched: list[tuple[str, str | None]],
) -> None:
    assert (name_of("shakespeare"), text_of("shakespeare")) == ("shakespeare", PLAY)
    text_of("shakespeare", sha256="0" * 64)
    assert [sha256 for _, sha256 in fetched] == [sources.SHAKESPEARE_SHA256] * 2 + ["0" * 64]
    assert {url for url, _ in fetched} == {sources.SHAKESPEARE_URL}
    assert text_of(write("shakespeare", "a file of my own")) == "a file of my own"


def test_a_missing_file_is_noticed_before_anything_is_downloaded(fetched: list[tuple[str, str | None]]) -> None:
    assert "'missing.txt'" in refusal("http://a.org/a.txt", "missing.txt")
    assert fetched == []


def test_an_address_of_another_kind_is_refused_as_such() -> None:
    assert "http://" in refusal("ftp://example.org/a.txt")


# Digests


def test_the_digest_of_a_file_is_that_of_its_bytes_in_either_case() -> None:
    content = b"a\r\nb"
    write("a.txt", content)
    assert text_of("a.txt", sha256=digest(content).upper()) == "a\nb"
    message = refusal("a.txt", sha256=digest(b"a\nb"))
    assert digest(content) in message
    assert digest(b"a\nb") in message


def test_the_digest_of_stdin_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, PLAY.encode())
    assert text_of("-", sha256=digest(PLAY.encode())) == PLAY
    feed_stdin(monkeypatch, PLAY.encode())
    assert digest(PLAY.encode()) in refusal("-", sha256="0" * 64)


def test_a_digest_goes_with_one_text_only() -> None:
    write("books/a.txt", PLAY)
    assert "2 are given" in refusal("books/a.txt", "books/a.txt", sha256="0" * 64)
    assert "folder" in refusal("books", sha256="0" * 64)


@pytest.mark.parametrize("sha256", ["", "abc", "g" * 64, "0" * 65])
def test_a_digest_is_64_hexadecimal_digits(sha256: str) -> None:
    assert "64 hexadecimal digits" in refusal(write("a.txt", PLAY), sha256=sha256)


# Decoding


@pytest.mark.parametrize("encoding", ["utf-99", "", "rot13", "base64", "idna", "punycode", "undefined", "a\0b"])
def test_an_unknown_encoding_is_refused(encoding: str) -> None:
    assert repr(encoding) in refusal(write("a.txt", PLAY), encoding=encoding)


def test_what_is_changed_on_reading_is_noted_once_with_the_first_file() -> None:
    names = [
        write("1.txt", "a\n"),
        write("2.txt", codecs.BOM_UTF8 + b"b\n"),
        write("3.txt", codecs.BOM_UTF8 + "c\ufeff\r\n\r\rd".encode()),
        write("4.txt", "\ne\r"),
    ]
    with open_text(names) as text:
        assert text.notes == {}
        for _ in range(2):
            assert "".join(text.chunks()) == "a\nb\nc\ufeff\n\n\nd\n\ne\n"
    mark, line_ends = text.notes.values()
    assert "byte-order mark" in mark
    assert "'2.txt'" in mark
    assert "CRLF" in line_ends
    assert "'3.txt'" in line_ends


@settings(max_examples=60)
@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=3),
    chunk_bytes=st.integers(1, 9),
)
@example(texts=["\ufeff\ufeffa\r", "\n\rb\r\n"], chunk_bytes=1)
@example(texts=["a", "\ufeff", "b"], chunk_bytes=4)
@example(texts=["\u2028\x0b\x1c\x85 日本語 👩\u200d👩\u200d👧 e\u0301 \U0010ffff\x01"], chunk_bytes=3)
def test_reading_in_chunks_equals_reading_in_one_piece(texts: list[str], chunk_bytes: int) -> None:
    expected = ""
    for text in texts:
        one_piece = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        if one_piece:
            expected += "\n" if expected and not expected.endswith("\n") else ""
            expected += one_piece
    names = [write(f"{number}.txt", text) for number, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        if expected:
            chunks = list(read_text(names))
            assert "".join(chunks) == expected
            assert all(chunks)
        else:
            assert "empty" in refusal(*names)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-7", "gb18030", "hz"])
def test_characters_split_across_chunks_are_put_together(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "日本 a\r\n" if encoding == "hz" else "日本 👩 ä\r\n"
    write("a.txt", text.encode(encoding))
    for chunk_bytes in (1, 2, 3, 5, 1 << 20):
        monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        assert text_of("a.txt", encoding=encoding) == text.replace("\r", "")


@settings(max_examples=60)
@given(
    start=st.text("aé日👩", max_size=6),
    fault=st.binary(min_size=1, max_size=4).filter(lambda raw: 0 not in raw),
    end=st.text("aé日👩", max_size=6),
    chunk_bytes=st.integers(1, 9),
)
@example(start="a", fault=b"\xe6\x97", end="", chunk_bytes=9)
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        assert f"0x{content[offset]:02x} at byte {offset} means" in refusal(write("a.txt", content))


def test_bad_bytes_name_the_file_and_a_way_out() -> None:
    message = refusal(write("ok.txt", PLAY), write("b/a.txt", "größer".encode("latin-1")))
    assert "'b/a.txt'" in message
    assert "0xf6 at byte 2" in message
    assert "--encoding latin-1" in message
    assert "--encoding utf-8" in refusal("b/a.txt", encoding="ascii")


def test_a_utf_16_file_is_told_from_others_by_its_mark() -> None:
    assert "--encoding utf-16" in refusal(write("a.txt", PLAY.encode("utf-16")))
    assert "utf-16-le" in refusal(write("a.txt", PLAY.encode("utf-16-le")))
    assert "utf-16-le" in refusal("a.txt", encoding="utf-16")
    assert "0x41 at byte 4" in refusal(write("a.txt", b"\xff\xfeB\0A"), encoding="utf-16")


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
    encoding: str, content: bytes, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a.txt", content)
    for chunk_bytes in (1, 2, 3, 4, 7, 1 << 20):
        monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        message = refusal("a.txt", encoding=encoding)
        assert "'a.txt'" in message
        assert f"NUL at byte {offset}," in message
        assert "binary" in message


def test_a_fault_before_a_nul_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk_bytes in (1, 2, 100):
        monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
        assert "0xff at byte 2" in refusal(write("a.txt", b"ab\xff\0"))
        # The NUL is what makes the byte before it, the first of a pair, a fault.
        assert "0xc3 at byte 2" in refusal(write("a.txt", b"ab\xc3\0"))
        assert "NUL at byte 0" in refusal(write("a.txt", b"\0\xff"))
