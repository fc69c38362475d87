"""Text and what becomes of it: files, folders, standard input, addresses -> characters -> ids -> parts -> batches.

Owns everything between the names a user gives and the tensors a trainer reads. However long the text is, it is read
in chunks: once to learn its characters, once to encode it. The ids of a long text live in a file that is mapped into
memory and kept for the next start. Downloading and writing in one step are left to `download`.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from minigpt.download import Progress, fetch, file_digest, reason, replacing, shown_name
from minigpt.errors import CorpusError
from minigpt.tokenizer import CharTokenizer

# Ids of any of the unsigned types.
Ids = npt.NDArray[np.unsignedinteger[Any]]

STDIN = "-"
# Karpathy 2015, "The Unreasonable Effectiveness of Recurrent Neural Networks": 1,115,394 characters.
SHAKESPEARE = "shakespeare"
SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# Both relative to the folder that minigpt is run in.
DATA_FOLDER = Path("data")
ENCODED_FOLDER = DATA_FOLDER / "encoded"

# Bytes read at a time; what is made of a chunk takes about fifteen times as much memory.
CHUNK_BYTES = 1 << 20
# Longer texts have their ids in a file instead of in memory.
LARGE_CHARS = 64 << 20
# Of the files in ENCODED_FOLDER; another number makes minigpt forget those written before.
ENCODED_VERSION = 1

CODE_POINTS = 0x110000
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text, ready to be learnt."""

    # For humans: file names, "shakespeare", "stdin" or "the bundled plays".
    name: str
    # Of the text in UTF-8, without byte-order marks and with LF at the end of each line.
    sha256: str
    # Its characters, sorted by code point.
    tokenizer: CharTokenizer
    # (N,), the smallest unsigned type that holds the vocabulary, read-only; mapped from a file when the text is long.
    ids: Ids
    # The character that occurs most; of several, the one with the lowest code point.
    most_frequent: str
    # What was changed on reading, one sentence each.
    notes: tuple[str, ...]

    def split(self, val_fraction: float, block_size: int) -> tuple[Ids, Ids]:
        """Cuts the text in two: the beginning to learn from and the rest, held out, to judge by.

        Args:
            val_fraction: share of the held-out part, strictly between 0 and 1; it is rounded up to a character.
            block_size: characters in one training example, at least 1.

        Returns:
            train, val, views of `ids`.

        Raises:
            CorpusError: too little text to fill one training example and to predict one held-out character.
        """
        if not 0 < val_fraction < 1 or block_size < 1:
            raise ValueError(
                f"val_fraction={val_fraction} must lie between 0 and 1, and block_size={block_size} above 0"
            )
        # As the decimal number that was written, so that 0.1 of 10 characters is 1 and no float noise.
        held_out = Fraction(str(val_fraction))
        n_train = int(len(self.ids) * (1 - held_out))
        train, val = self.ids[:n_train], self.ids[n_train:]
        if len(train) < block_size + 1 or len(val) < 2:
            # The smallest N with floor(N (1 - f)) > block_size, and with ceil(N f) > 1.
            needed = max(-int(-(block_size + 1) // (1 - held_out)), int(1 / held_out) + 1)
            smaller = "a smaller --block-size or --val-fraction" if len(val) >= 2 else "a larger --val-fraction"
            raise CorpusError(
                f"{self.name} has {len(self.ids):,} characters, and --block-size {block_size} with --val-fraction"
                f" {val_fraction} needs at least {needed:,}: use more text, or {smaller}"
            )
        return train, val


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


def load_corpus(
    sources: Sequence[str], *, encoding: str = "utf-8", sha256: str | None = None, progress: Progress | None = None
) -> Corpus:
    """Reads and encodes a text.

    Args:
        sources: put together in this order, on lines of their own: files, folders (each ``*.txt`` in one, sorted by
            name), http(s) addresses (kept in ``data``), ``-`` for standard input, ``shakespeare``; none at all is
            the bundled text.
        encoding: of all of them, any that Python knows.
        sha256: digest that the bytes of the only source must have.
        progress: told how a download gets on.

    Raises:
        CorpusError: something cannot be found, fetched, read, decoded or written, or holds nothing to learn.
    """
    with ExitStack() as stack:
        codec = _require_codec(encoding)
        parts = _gather(sources, stack, sha256, progress)
        name = _summary(parts)
        state = _state(parts)
        # What came through a pipe cannot be recognised the next time.
        kept_at = _kept_at(state, codec) if all(part.path for part in parts) else None
        if kept_at is not None and (kept := _load_kept(name, kept_at)):
            return kept

        facts = _survey(parts, codec)
        if len(facts.chars) == 1:
            raise CorpusError(f"{name} holds {facts.chars!r} over and over: there is nothing to learn")
        pieces = _encoded(parts, codec, facts, state)
        if facts.length <= LARGE_CHARS:
            ids = _in_memory(pieces, facts)
        elif kept_at is None:
            ids = _in_nameless_file(pieces, facts)
        else:
            ids = _in_kept_file(pieces, facts, kept_at)
        return _corpus(name, facts, ids)


def read_text(
    sources: Sequence[str], *, encoding: str = "utf-8", sha256: str | None = None, progress: Progress | None = None
) -> Iterator[str]:
    """The text that `load_corpus` encodes, in chunks of about a million characters, none empty.

    Errors, those of `load_corpus`, come when the first chunk is asked for, or later.
    """
    with ExitStack() as stack:
        codec = _require_codec(encoding)
        yield from _joined(_gather(sources, stack, sha256, progress), codec, {})


def batch(ids: Ids, block_size: int, batch_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text and, one further, what follows each of their characters.

    Args:
        ids: (N,), of any integer type, N > block_size.
        generator: on the CPU; every start from 0 to N - block_size - 1 is equally likely.

    Returns:
        x, y, each (batch_size, block_size), int64, on the CPU.
    """
    n_starts = len(ids) - block_size
    if n_starts < 1:
        raise ValueError(f"{len(ids)} ids hold no window of block_size={block_size} and the id after it")
    # 62 random bits, for torch may draw from a smaller range with 32, and then a text of 10^9 characters would see some
    # starts 25 % more often than others. Here it is one in 10^9.
    draws = torch.randint(1 << 62, (batch_size, 1), generator=generator)
    starts = (draws % n_starts).numpy()
    windows = torch.from_numpy(ids[starts + np.arange(block_size + 1)].astype(np.int64))  # (B, T + 1)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# Sources


@dataclass(frozen=True)
class _Part:
    """Bytes that can be read any number of times: of a regular file, or of a spool when they came through a pipe."""

    # For humans.
    name: str
    path: Path | None
    spool: IO[bytes] | None = None

    @property
    def place(self) -> str:
        """Where to look when something is wrong with it."""
        return repr(str(self.path)) if self.path else self.name

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        if self.spool is not None:
            self.spool.seek(0)
            yield self.spool
        elif self.path is not None:
            with self.path.open("rb") as file:
                yield file

    def blocks(self) -> Iterator[bytes]:
        """The bytes in chunks."""
        try:
            with self.opened() as file:
                while data := file.read(CHUNK_BYTES):
                    yield data
        except OSError as error:
            raise CorpusError(f"cannot read {self.place}: {reason(error)}") from None


def _gather(sources: Sequence[str], stack: ExitStack, sha256: str | None, progress: Progress | None) -> list[_Part]:
    """Finds all sources, and fetches or spools what cannot be read twice; spools are closed with the stack.

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
    local = {source: _list_files(source) for source in sources if source != STDIN and not _address(source)}
    if sha256 is not None and any(Path(source).is_dir() for source in local):
        raise CorpusError(f"--sha256 speaks of one text, and {sources[0]!r} is a folder: give a file")
    parts = []
    for source in sources:
        if source == STDIN:
            parts.append(_require_digest(_spool_stdin(stack), sha256))
        elif address := _address(source):
            expected = sha256 or (SHAKESPEARE_SHA256 if source == SHAKESPEARE else None)
            name = SHAKESPEARE if source == SHAKESPEARE else shown_name(address)
            parts.append(_Part(name, fetch(address, DATA_FOLDER, sha256=expected, progress=progress)))
        else:
            parts += [_require_digest(_file_part(path, stack), sha256) for path in local[source]]
    return parts


def _address(source: str) -> str | None:
    """The http(s) address that a source stands for, if it does."""
    if re.match(r"https?://", source, re.IGNORECASE):
        return source
    if source == SHAKESPEARE and not os.path.lexists(source):
        return SHAKESPEARE_URL
    return None


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


def _file_part(path: Path, stack: ExitStack) -> _Part:
    name = _shown(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            # A file that may not be read is noticed before anything is fetched or spooled.
            path.open("rb").close()
            return _Part(name, path)
        if stat.S_ISFIFO(mode):
            with path.open("rb") as pipe:
                return _spool(name, pipe, stack)
    except OSError as error:
        raise CorpusError(f"cannot read {str(path)!r}: {reason(error)}") from None
    raise CorpusError(f"{str(path)!r} is a device, not a text: give a file, or {STDIN} for stdin")


def _spool_stdin(stack: ExitStack) -> _Part:
    if sys.stdin is None or sys.stdin.closed:
        raise CorpusError("stdin is closed: give a file instead")
    return _spool("stdin", sys.stdin.buffer, stack)


def _spool(name: str, stream: IO[bytes], stack: ExitStack) -> _Part:
    """Copies a stream to a temporary file without a name, for two passes are needed and a pipe allows one."""
    try:
        spool = stack.enter_context(tempfile.TemporaryFile(prefix="minigpt-"))  # noqa: SIM115
        shutil.copyfileobj(stream, spool, CHUNK_BYTES)
        spool.flush()
    except OSError as error:
        raise CorpusError(
            f"cannot copy {name} to a temporary file in {tempfile.gettempdir()!r}: {reason(error)}"
        ) from None
    return _Part(name, None, spool)


def _require_digest(part: _Part, sha256: str | None) -> _Part:
    """The part itself, when its bytes have that digest or none is asked for."""
    if sha256 is None:
        return part
    try:
        with part.opened() as file:
            found = file_digest(file)
    except OSError as error:
        raise CorpusError(f"cannot read {part.place}: {reason(error)}") from None
    if found != sha256.lower():
        raise CorpusError(f"{part.place} has sha256 {found}, not {sha256.lower()}: check the file and the digest")
    return part


def _shown(path: Path) -> str:
    """A file's name as text that can be printed and stored: names may hold bytes that no encoding explains."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def _summary(parts: Sequence[_Part]) -> str:
    names = [part.name for part in parts]
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


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


def _joined(parts: Sequence[_Part], codec: str, notes: dict[str, str]) -> Iterator[str]:
    """The text of all parts in chunks, with a newline between two where the earlier does not end in one.

    Args:
        notes: gets a sentence for each kind of change that is made to the text.

    Raises:
        CorpusError: a part cannot be read or decoded, or all are empty.
    """
    # The last character so far; before the first one no newline is due.
    last = None
    for part in parts:
        between = "" if last in (None, "\n") else "\n"
        for text in _decoded(part, codec, notes):
            yield between + text
            between, last = "", text[-1]
    if last is None:
        raise CorpusError(f"{_summary(parts)} is empty: give a text with something in it")


def _decoded(part: _Part, codec: str, notes: dict[str, str]) -> Iterator[str]:
    """The text of one part in chunks, none empty, without a byte-order mark and with LF at the end of each line."""
    decoder = _Decoder(part.place, codec)
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    at_start = True
    # No bytes tell a decoder that the file has ended.
    for data in chain(part.blocks(), [b""]):
        text = decoder.decode(data)
        if text and at_start:
            at_start = False
            if text[0] == BYTE_ORDER_MARK:
                text = text[1:]
                notes.setdefault("mark", f"a byte-order mark at the start of {part.place} was dropped")
        text = newlines.decode(text, final=not data)
        if text:
            yield text
    if newlines.newlines not in (None, "\n"):
        notes.setdefault("line ends", f"the line ends of {part.place}, CRLF or CR, were turned into LF")


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


# Characters to ids


@dataclass(frozen=True)
class _Facts:
    """All that is known of a text after one pass, and all that is kept of it beside its ids."""

    # Characters in the text; for the other fields see `Corpus`.
    length: int
    chars: str
    sha256: str
    most_frequent: str
    notes: tuple[str, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds the ids."""
        return np.min_scalar_type(len(self.chars) - 1)


def _survey(parts: Sequence[_Part], codec: str) -> _Facts:
    """The first pass.

    Raises:
        CorpusError: the text cannot be read, or is none.
    """
    counts = np.zeros(CODE_POINTS, np.int64)
    digest = hashlib.sha256()
    notes: dict[str, str] = {}
    for text in _joined(parts, codec, notes):
        try:
            digest.update(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            # Codecs with escapes, such as utf-7, let these through.
            place = int(counts.sum()) + error.start
            raise CorpusError(
                f"the text has U+{ord(text[error.start]):04X}, half a character, at {place:,}: check the --encoding"
            ) from None
        found = np.bincount(_code_points(text))
        counts[: len(found)] += found
    return _Facts(
        length=int(counts.sum()),
        chars="".join(map(chr, np.flatnonzero(counts))),
        sha256=digest.hexdigest(),
        most_frequent=chr(int(counts.argmax())),
        notes=tuple(notes.values()),
    )


def _encoded(parts: Sequence[_Part], codec: str, facts: _Facts, state: _State) -> Iterator[Ids]:
    """The second pass: the ids in pieces, together never more than the first pass counted.

    Args:
        state: of the parts before the first pass.

    Raises:
        CorpusError: the text is no longer the same.
    """
    id_of = np.zeros(CODE_POINTS, facts.dtype)
    id_of[_code_points(facts.chars)] = np.arange(len(facts.chars))
    left = facts.length
    for text in _joined(parts, codec, {}):
        left -= len(text)
        if left < 0:
            break
        yield id_of[_code_points(text)]
    if left or _state(parts) != state:
        raise CorpusError(f"{_summary(parts)} changed while it was being read: try again when nothing writes to it")


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


# Ids at rest


def _corpus(name: str, facts: _Facts, ids: Ids) -> Corpus:
    return Corpus(name, facts.sha256, CharTokenizer(facts.chars), ids, facts.most_frequent, facts.notes)


def _in_memory(pieces: Iterable[Ids], facts: _Facts) -> Ids:
    ids = np.empty(facts.length, facts.dtype)
    end = 0
    for piece in pieces:
        ids[end : end + len(piece)] = piece
        end += len(piece)
    ids.setflags(write=False)
    return ids


def _in_nameless_file(pieces: Iterable[Ids], facts: _Facts) -> Ids:
    """The ids in a temporary file that goes away with them."""
    try:
        with tempfile.TemporaryFile(prefix="minigpt-") as file:
            for piece in pieces:
                file.write(piece.tobytes())
            file.flush()
            return _mapped(file, facts)
    except OSError as error:
        raise CorpusError(
            f"cannot write the encoded text to a temporary file in {tempfile.gettempdir()!r}: {reason(error)}"
        ) from None


def _in_kept_file(pieces: Iterable[Ids], facts: _Facts, kept_at: Path) -> Ids:
    """The ids in a file that `_load_kept` finds the next time. Those of an earlier state of the sources go."""
    ids_path, facts_path = kept_at.with_suffix(".ids"), kept_at.with_suffix(".json")
    try:
        with replacing(ids_path) as file:
            for piece in pieces:
                file.write(piece.tobytes())
        try:
            # A file that is not the one written now will have another time, whatever its length.
            kept = {"version": ENCODED_VERSION, "ids_mtime_ns": ids_path.stat().st_mtime_ns, "facts": asdict(facts)}
            with replacing(facts_path) as file:
                file.write(json.dumps({"kept": kept, "mark": _mark(kept)}).encode("ascii"))
        except BaseException:
            ids_path.unlink(missing_ok=True)
            raise
        ids = _mapped(ids_path, facts)
    except OSError as error:
        raise CorpusError(
            f"cannot keep the encoded text in {str(kept_at.parent)!r}: {reason(error)}; free some space, or run minigpt"
            " in a folder that you may write to"
        ) from None
    sources_mark = kept_at.name.partition("-")[0]
    for stale in kept_at.parent.glob(f"{sources_mark}-*"):
        if stale.suffix in (".ids", ".json") and stale.stem != kept_at.name:
            # Windows keeps a file that another process has mapped.
            with suppress(OSError):
                stale.unlink()
    return ids


def _load_kept(name: str, kept_at: Path) -> Corpus | None:
    """The corpus that an earlier start left, or None when there is none or it is not whole."""
    ids_path, facts_path = kept_at.with_suffix(".ids"), kept_at.with_suffix(".json")
    try:
        found = json.loads(facts_path.read_bytes())
        kept = found["kept"]
        # Nothing below can be amiss in a file of ours that is as it was written.
        if found["mark"] != _mark(kept) or kept["version"] != ENCODED_VERSION:
            return None
        facts = _Facts(**{**kept["facts"], "notes": tuple(kept["facts"]["notes"])})
        ids = ids_path.stat()
        if ids.st_mtime_ns != kept["ids_mtime_ns"] or ids.st_size != facts.length * facts.dtype.itemsize:
            return None
        return _corpus(name, facts, _mapped(ids_path, facts))
    # Whatever else stands in the file, JSON or not, fails in one of these ways.
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(file: Path | IO[bytes], facts: _Facts) -> Ids:
    # As a plain array: np.memmap makes each slice and each picked value one of its own.
    return np.asarray(np.memmap(file, facts.dtype, mode="r", shape=(facts.length,)))


# (path, bytes, time of the last change) of each file.
_State = list[tuple[str, int, int]]


def _state(parts: Iterable[_Part]) -> _State:
    """What a change of the sources between two readings would change."""
    state = []
    for part in parts:
        if part.path is not None:
            try:
                found = part.path.stat()
            except OSError as error:
                raise CorpusError(f"cannot read {part.place}: {reason(error)}") from None
            state.append((os.path.realpath(part.path), found.st_size, found.st_mtime_ns))
    return state


def _kept_at(state: _State, codec: str) -> Path:
    """Where the ids of sources in this state are kept, without a suffix: a mark of the sources, one of their state."""
    sources = _mark([codec, [path for path, _, _ in state]])
    return ENCODED_FOLDER / f"{sources}-{_mark([ENCODED_VERSION, codec, state])}"


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode("ascii")).hexdigest()[:20]
