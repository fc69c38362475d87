"""The names that a user gives and the text behind them: files, folders, standard input, addresses -> characters.

Owns finding the bytes and decoding them. However long a text is, it is read in chunks, and any number of times: what
came through a pipe is copied first. Downloading is left to `download`, what becomes of the characters to `corpus`.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, NoReturn

from minigpt.download import Progress, fetch, reason, shown_name
from minigpt.errors import CorpusError, printable

STDIN = "-"
# Karpathy 2015, "The Unreasonable Effectiveness of Recurrent Neural Networks": 1,115,394 characters.
SHAKESPEARE = "shakespeare"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# Where downloads are kept, relative to the folder that minigpt is run in.
DATA_FOLDER = Path("data")
# Bytes read at a time; what is made of a chunk takes about fifteen times as much memory.
CHUNK_BYTES = 1 << 20

BYTE_ORDER_MARK = "\ufeff"

# (path, bytes, time of the last change) of each file.
State = list[tuple[str, int, int]]


def read_text(
    sources: Sequence[str], *, encoding: str = "utf-8", sha256: str | None = None, progress: Progress | None = None
) -> Iterator[str]:
    """The text in chunks of about a million characters, none empty.

    For the arguments see `open_text`. All errors come when the first chunk is asked for, or later.
    """
    with open_text(sources, encoding=encoding, sha256=sha256, progress=progress) as text:
        yield from text.chunks()


@contextmanager
def open_text(
    sources: Sequence[str], *, encoding: str = "utf-8", sha256: str | None = None, progress: Progress | None = None
) -> Iterator[Text]:
    """Finds all sources, and fetches or copies what cannot be read twice; the copies go when the block ends.

    Args:
        sources: put together in this order, on lines of their own: files, folders (each ``*.txt`` in one, sorted by
            name), http(s) addresses (kept in ``data``), ``-`` for standard input, ``shakespeare``; none at all is
            the bundled text.
        encoding: of all of them, any that Python knows.
        sha256: digest that the bytes of the only source must have.
        progress: told how a download gets on.

    Raises:
        CorpusError: one cannot be had, or the encoding or the digest does not apply.
    """
    with ExitStack() as copies:
        codec = _require_codec(encoding)
        yield Text(_gather(sources, copies, sha256, progress), codec)


def bundled_text() -> Path:
    """The text that comes with minigpt.

    Raises:
        CorpusError: it is neither in the installed package nor in the checkout around it.
    """
    package = Path(__file__).parent
    places = [folder / "data" / "aldersea.txt" for folder in (package, package.parent)]
    for place in places:
        if place.is_file():
            return place
    raise CorpusError(
        f"the bundled text is missing from {str(places[0])!r} and {str(places[1])!r}: install minigpt again, or name a"
        " text of your own"
    )


@dataclass(frozen=True)
class Text:
    """What the sources hold, one after another, as characters that can be read any number of times."""

    parts: Sequence[_Part]
    # Python's name for the encoding.
    codec: str
    # What was changed on reading so far: a sentence for each kind of change.
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For humans: file names, "shakespeare", "stdin" or "the bundled plays"."""
        names = [part.name for part in self.parts]
        return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"

    @property
    def in_files(self) -> bool:
        """Whether all of it lies in files; what came through a pipe cannot be recognised the next time."""
        return all(isinstance(part.origin, Path) for part in self.parts)

    def state(self) -> State:
        """What a change of the files between two readings would change.

        Raises:
            CorpusError: one of them is no longer there.
        """
        state = []
        for part in self.parts:
            if isinstance(part.origin, Path):
                try:
                    found = part.origin.stat()
                except OSError as error:
                    raise CorpusError(f"cannot read {part.place}: {reason(error)}") from None
                state.append((os.path.realpath(part.origin), found.st_size, found.st_mtime_ns))
        return state

    def chunks(self) -> Iterator[str]:
        """All of it, none empty, with a newline between two parts where the earlier does not end in one.

        Raises:
            CorpusError: a part cannot be read or decoded, or all are empty.
        """
        # The last character so far; before the first one no newline is due.
        last = None
        for part in self.parts:
            between = "" if last in (None, "\n") else "\n"
            for text in self._decoded(part):
                yield between + text
                between, last = "", text[-1]
        if last is None:
            raise CorpusError(f"{self.name} is empty: give a text with something in it")

    def _decoded(self, part: _Part) -> Iterator[str]:
        """One part, without a byte-order mark and with LF at the end of each line."""
        decoder = _Decoder(part.place, self.codec)
        newlines = io.IncrementalNewlineDecoder(None, translate=True)
        at_start = True
        # No bytes tell a decoder that the file has ended.
        for data in chain(part.blocks(), [b""]):
            text = decoder.decode(data)
            if text and at_start:
                at_start = False
                if text[0] == BYTE_ORDER_MARK:
                    text = text[1:]
                    self.notes.setdefault("mark", f"a byte-order mark at the start of {part.place} was dropped")
            text = newlines.decode(text, final=not data)
            if text:
                yield text
        if newlines.newlines not in (None, "\n"):
            self.notes.setdefault("line ends", f"the line ends of {part.place}, CRLF or CR, were turned into LF")


# Names to bytes


@dataclass(frozen=True)
class _Part:
    """The bytes of a regular file, or of an open copy when they came through a pipe."""

    # For humans.
    name: str
    origin: Path | IO[bytes]

    @property
    def place(self) -> str:
        """Where to look when something is wrong with it."""
        return repr(str(self.origin)) if isinstance(self.origin, Path) else self.name

    def blocks(self) -> Iterator[bytes]:
        """The bytes in chunks."""
        try:
            opening: AbstractContextManager[IO[bytes]] = (
                self.origin.open("rb") if isinstance(self.origin, Path) else nullcontext(self.origin)
            )
            with opening as file:
                # A copy stands where it was last written or read.
                file.seek(0)
                while data := file.read(CHUNK_BYTES):
                    yield data
        except OSError as error:
            raise CorpusError(f"cannot read {self.place}: {reason(error)}") from None


def _gather(sources: Sequence[str], copies: ExitStack, sha256: str | None, progress: Progress | None) -> list[_Part]:
    """The parts that the sources stand for.

    Raises:
        CorpusError: one cannot be had, or the digest does not apply or is another one.
    """
    if isinstance(sources, str):
        raise ValueError(f"sources={sources!r} is one string; give a list")
    if sha256 is not None:
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", sha256):
            raise CorpusError(f"--sha256 {sha256!r} is not 64 hexadecimal digits")
        if len(sources) > 1:
            raise CorpusError(f"--sha256 speaks of one text, and {len(sources)} are given: give one")
    if not sources:
        return [_require_digest(_Part("the bundled plays", bundled_text()), sha256)]
    if sources.count(STDIN) > 1:
        raise CorpusError(f"stdin can be read only once, and {STDIN} is given {sources.count(STDIN)} times")
    # What is near is looked at first: a mistyped name should not wait for a download to be noticed.
    local = {source: _list_files(source) for source in sources if source != STDIN and not _is_remote(source)}
    if sha256 is not None and any(Path(source).is_dir() for source in local):
        raise CorpusError(f"--sha256 speaks of one text, and {sources[0]!r} is a folder: give a file")
    parts = []
    for source in sources:
        if source in local:
            parts += [_require_digest(_file_part(path, copies), sha256) for path in local[source]]
        elif source == STDIN:
            parts.append(_require_digest(_stdin_part(copies), sha256))
        elif source == SHAKESPEARE:
            path = fetch(SHAKESPEARE_URL, DATA_FOLDER, sha256=sha256 or SHAKESPEARE_SHA256, progress=progress)
            parts.append(_Part(SHAKESPEARE, path))
        else:
            path = fetch(source, DATA_FOLDER, sha256=sha256, progress=progress)
            parts.append(_Part(shown_name(source), path))
    return parts


def _is_remote(source: str) -> bool:
    """Whether a source is to be fetched; a file of that name comes before the download called "shakespeare"."""
    if source == SHAKESPEARE:
        return not os.path.lexists(source)
    return re.match(r"https?://", source, re.IGNORECASE) is not None


def _list_files(source: str) -> list[Path]:
    """The files that a local source stands for: itself, or what a folder holds."""
    path = Path(source)
    try:
        # An empty name would be the current folder to pathlib.
        if not source:
            raise FileNotFoundError
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        # Hidden files are left out, as `*.txt` does in a shell: macOS puts binary `._name.txt` beside a text.
        with os.scandir(path) as entries:
            names = [
                e.name for e in entries if e.name.endswith(".txt") and not e.name.startswith(".") and not e.is_dir()
            ]
    except (FileNotFoundError, NotADirectoryError):
        advice = "only http:// and https:// addresses can be fetched" if "://" in source else "check the name"
        raise CorpusError(f"there is no file or folder {source!r}: {advice}") from None
    except OSError as error:
        raise CorpusError(f"cannot read {source!r}: {reason(error)}") from None
    except ValueError as error:
        raise CorpusError(f"{source!r} is not a usable name: {reason(error)}") from None
    if not names:
        raise CorpusError(f"the folder {source!r} has no *.txt files in it: name the files, or another folder")
    return [path / name for name in sorted(names)]


def _file_part(path: Path, copies: ExitStack) -> _Part:
    # Names may hold bytes that no encoding explains, and this one is printed and stored.
    name = printable(os.fsencode(path.name).decode("utf-8", "replace"))
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            # A file that may not be read is noticed before those after it are fetched or copied.
            path.open("rb").close()
            return _Part(name, path)
        if stat.S_ISFIFO(mode):
            with path.open("rb") as pipe:
                return _copied(name, pipe, copies)
    except OSError as error:
        raise CorpusError(f"cannot read {str(path)!r}: {reason(error)}") from None
    raise CorpusError(f"{str(path)!r} is a device, not a text: give a file, or {STDIN} for stdin")


def _stdin_part(copies: ExitStack) -> _Part:
    if sys.stdin is None or sys.stdin.closed:
        raise CorpusError("stdin is closed: give a file instead")
    return _copied("stdin", sys.stdin.buffer, copies)


def _copied(name: str, pipe: IO[bytes], copies: ExitStack) -> _Part:
    """What comes through a pipe, in a temporary file without a name."""
    try:
        copy = copies.enter_context(tempfile.TemporaryFile(prefix="minigpt-"))  # noqa: SIM115
        shutil.copyfileobj(pipe, copy, CHUNK_BYTES)
        copy.flush()
    except OSError as error:
        raise CorpusError(
            f"cannot copy {name} to a temporary file in {tempfile.gettempdir()!r}: {reason(error)}"
        ) from None
    return _Part(name, copy)


def _require_digest(part: _Part, sha256: str | None) -> _Part:
    """The part itself, when its bytes have that digest or none is asked for."""
    if sha256 is None:
        return part
    digest = hashlib.sha256()
    for data in part.blocks():
        digest.update(data)
    if digest.hexdigest() != sha256.lower():
        raise CorpusError(
            f"{part.place} has sha256 {digest.hexdigest()}, not {sha256.lower()}: check the file and the digest"
        )
    return part


# Bytes to characters


def _require_codec(encoding: str) -> str:
    """The name that Python gives an encoding.

    Raises:
        CorpusError: Python knows none of that name, or it is not one that texts are kept in.
    """
    try:
        "A".encode(encoding)
        codec = codecs.lookup(encoding).name
    # UnicodeError and "embedded null character" are ValueErrors.
    except (LookupError, ValueError):
        codec = ""
    # These two are for parts of host names, and decode a text in chunks into something else than the text in one piece.
    if codec in ("", "punycode", "idna"):
        raise CorpusError(f"--encoding {encoding!r} is not known: use one such as utf-8, utf-16, cp1252 or latin-1")
    return codec


class _Decoder:
    """Turns the bytes of a file into characters, chunk by chunk, and knows at which byte it fails."""

    def __init__(self, place: str, codec: str) -> None:
        self._place = place
        self._codec = codec
        self._decoder = codecs.getincrementaldecoder(codec)()
        # In UTF-16 and UTF-32 ordinary text is full of NUL bytes, and only the character NUL gives a binary file away.
        self._wide = b"\0" in "A".encode(codec)
        # Bytes of the file before the next chunk.
        self._offset = 0

    def decode(self, data: bytes) -> str:
        """The characters that a chunk completes; an empty chunk is the end of the file.

        Raises:
            CorpusError: a NUL, or bytes that mean nothing; the message gives the offset in the file.
        """
        nul = None
        if not self._wide and 0 in data:
            nul = data.index(0)
            # An earlier fault is the one to name, so what stands before is decoded all the same.
            data = data[: nul + 1]
        before = self._decoder.getstate()
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            # `object` is the bytes held back from earlier chunks and then these, so both end at the same place.
            offset = self._offset + len(data) - len(error.object) + error.start
            self._refuse_bytes(offset, error)
        except UnicodeError:
            # The two decoders that look for a mark say nothing more exact when there is none.
            raise CorpusError(
                f"{self._place} does not begin with a byte-order mark, so the order of its bytes is unknown:"
                f" try --encoding {self._codec}-le or {self._codec}-be"
            ) from None
        if nul is None and "\0" in text:
            nul = self._find_nul(before, data)
        if nul is not None:
            raise CorpusError(
                f"{self._place} has a NUL at byte {self._offset + nul:,}, so it is no text in {self._codec}: it is a"
                " binary file, or in another --encoding, such as utf-16-le"
            )
        self._offset += len(data)
        return text

    def _refuse_bytes(self, offset: int, error: UnicodeDecodeError) -> NoReturn:
        likely = "utf-8" if self._codec == "ascii" else "latin-1"
        if offset == 0 and error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            likely = "utf-16"
        raise CorpusError(
            f"{self._place} is no text in {self._codec}: 0x{error.object[error.start]:02x} at byte {offset:,} means"
            f" nothing there ({error.reason}); if it is not a binary file, try --encoding {likely}"
        ) from None

    def _find_nul(self, before: tuple[bytes, int], data: bytes) -> int:
        """Where, counted from the start of a chunk, the first character NUL begins; below 0 in an earlier chunk.

        Args:
            before: the decoder's state before the chunk.
        """
        self._decoder.setstate(before)
        for place in range(len(data)):
            held_back = len(self._decoder.getstate()[0])
            if "\0" in self._decoder.decode(data[place : place + 1]):
                return place - held_back
        raise AssertionError("the same bytes gave a NUL a moment ago")
