"""Text -> ids -> the parts to learn from and to judge by.

A text is read twice, once to learn its characters and once to encode it; the ids of a long one live in a file that is
mapped into memory and kept for the next start. Where the characters come from is left to `sources`, batches to
`examples`.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from minigpt.atomic import replacing
from minigpt.download import Progress
from minigpt.errors import CorpusError
from minigpt.sources import DATA_FOLDER, State, Text, open_text
from minigpt.tokenizer import CharTokenizer

# A half-written file that was not written to for so long is nobody's.
STALE_S = 24 * 3600.0

# Ids of any of the unsigned types.
Ids = npt.NDArray[np.unsignedinteger[Any]]

# Where the ids of long texts are kept, relative to the folder that minigpt is run in.
ENCODED_FOLDER = DATA_FOLDER / "encoded"
# Of the files in it; another number makes minigpt forget those written before.
ENCODED_VERSION = 1
# Longer texts have their ids in a file instead of in memory.
LARGE_CHARS = 64 << 20

CODE_POINTS = 0x110000


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
            ValueError: an argument is out of range.
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
            # If both parts are too short, what helps one of them harms the other.
            remedy = ""
            if len(val) >= 2:
                remedy = ", or a smaller --block-size (and --window) or --val-fraction"
            elif len(train) > block_size:
                remedy = ", or a larger --val-fraction"
            raise CorpusError(
                f"{self.name} has {len(self.ids):,} characters, and --block-size {block_size} with --val-fraction"
                f" {val_fraction} needs at least {needed:,}: use more text{remedy}"
            )
        return train, val


def load_corpus(
    sources: Sequence[str], *, encoding: str = "utf-8", sha256: str | None = None, progress: Progress | None = None
) -> Corpus:
    """Reads and encodes a text.

    Args:
        sources: files, folders, http(s) addresses, ``-``, ``shakespeare``; none at all is the bundled text. For these
            and for the other arguments see `minigpt.sources.open_text`.

    Raises:
        CorpusError: something cannot be found, fetched, read, decoded or written, or holds nothing to learn.
    """
    with open_text(sources, encoding=encoding, sha256=sha256, progress=progress) as text:
        state = text.state()
        kept_at = _kept_at(state, text.codec) if text.in_files else None
        if kept_at is not None and (kept := _load_kept(kept_at)):
            facts, ids = kept
        else:
            facts = _survey(text)
            pieces = _encoded(text, facts, state)
            if facts.length <= LARGE_CHARS:
                ids = _in_memory(pieces, facts)
            elif kept_at is None:
                ids = _in_nameless_file(pieces, facts)
            else:
                ids = _in_kept_file(pieces, facts, kept_at)
        return Corpus(text.name, facts.sha256, CharTokenizer(facts.chars), ids, facts.most_frequent, facts.notes)


# Characters to ids


@dataclass(frozen=True)
class _Survey:
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


def _survey(text: Text) -> _Survey:
    """The first pass.

    Raises:
        CorpusError: the text cannot be read, or holds nothing to learn.
    """
    counts = np.zeros(CODE_POINTS, np.int64)
    digest = hashlib.sha256()
    for chunk in text.chunks():
        try:
            digest.update(chunk.encode("utf-8"))
        except UnicodeEncodeError as error:
            # Codecs with escapes, such as utf-7, let these through.
            place = int(counts.sum()) + error.start
            raise CorpusError(
                f"the text has U+{ord(chunk[error.start]):04X}, half a character, at {place:,}: check the --encoding"
            ) from None
        found = np.bincount(_code_points(chunk))
        counts[: len(found)] += found
    chars = "".join(map(chr, np.flatnonzero(counts)))
    if len(chars) == 1:
        raise CorpusError(f"{text.name} holds {chars!r} over and over: there is nothing to learn")
    return _Survey(
        length=int(counts.sum()),
        chars=chars,
        sha256=digest.hexdigest(),
        most_frequent=chr(int(counts.argmax())),
        notes=tuple(text.notes.values()),
    )


def _encoded(text: Text, facts: _Survey, state: State) -> Iterator[Ids]:
    """The second pass: the ids in pieces, together never more than the first pass counted.

    Args:
        state: of the text before the first pass.

    Raises:
        CorpusError: the text is no longer the same.
    """
    id_of = np.zeros(CODE_POINTS, facts.dtype)
    id_of[_code_points(facts.chars)] = np.arange(len(facts.chars))
    left = facts.length
    for chunk in text.chunks():
        left -= len(chunk)
        if left < 0:
            break
        yield id_of[_code_points(chunk)]
    if left or text.state() != state:
        raise CorpusError(f"{text.name} changed while it was being read: try again when nothing writes to it")


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


# Ids at rest


def _in_memory(pieces: Iterable[Ids], facts: _Survey) -> Ids:
    ids = np.empty(facts.length, facts.dtype)
    end = 0
    for piece in pieces:
        ids[end : end + len(piece)] = piece
        end += len(piece)
    ids.setflags(write=False)
    return ids


def _in_nameless_file(pieces: Iterable[Ids], facts: _Survey) -> Ids:
    """The ids in a temporary file that goes away with them."""
    try:
        with tempfile.TemporaryFile(prefix="minigpt-") as file:
            for piece in pieces:
                file.write(piece.tobytes())
            file.flush()
            return _mapped(file, facts)
    except OSError as error:
        raise CorpusError(
            f"cannot write the encoded text to a temporary file in {tempfile.gettempdir()!r}: {error.strerror or error}"
        ) from None


def _in_kept_file(pieces: Iterable[Ids], facts: _Survey, kept_at: Path) -> Ids:
    """The ids in a file that `_load_kept` finds the next time. Those of an earlier state of the sources go."""
    ids_path, facts_path = kept_at.with_suffix(".ids"), kept_at.with_suffix(".json")
    try:
        kept_at.parent.mkdir(parents=True, exist_ok=True)
        with replacing(ids_path, shared=True) as file:
            for piece in pieces:
                file.write(piece.tobytes())
        try:
            # A file that is not the one written now will have another time, whatever its length.
            kept = {"version": ENCODED_VERSION, "ids_mtime_ns": ids_path.stat().st_mtime_ns, "facts": asdict(facts)}
            with replacing(facts_path, shared=True) as file:
                file.write(json.dumps({"kept": kept, "mark": _mark(kept)}).encode("ascii"))
        except BaseException:
            ids_path.unlink(missing_ok=True)
            raise
        ids = _mapped(ids_path, facts)
    except OSError as error:
        raise CorpusError(
            f"cannot keep the encoded text in {str(kept_at.parent)!r}: {error.strerror or error}; free some space, or"
            " run minigpt in a folder that you may write to"
        ) from None
    _remove_stale(kept_at)
    return ids


def _remove_stale(kept_at: Path) -> None:
    """Removes what was encoded of earlier states of the sources, and what a killed process left of this one."""
    sources_mark = kept_at.name.partition("-")[0]
    for partial in kept_at.parent.glob(f".{sources_mark}-*.partial"):
        with suppress(OSError):
            # One that is being written has a time of now.
            if time.time() - partial.stat().st_mtime > STALE_S:
                partial.unlink()
    for stale in kept_at.parent.glob(f"{sources_mark}-*"):
        if stale.suffix in (".ids", ".json") and stale.stem != kept_at.name:
            # Windows keeps a file that another process has mapped.
            with suppress(OSError):
                stale.unlink()


def _load_kept(kept_at: Path) -> tuple[_Survey, Ids] | None:
    """What an earlier start left, or None when there is none or it is not whole."""
    ids_path, facts_path = kept_at.with_suffix(".ids"), kept_at.with_suffix(".json")
    try:
        found = json.loads(facts_path.read_bytes())
        kept = found["kept"]
        # Nothing below can be amiss in a file of ours that is as it was written.
        if found["mark"] != _mark(kept) or kept["version"] != ENCODED_VERSION:
            return None
        facts = _Survey(**{**kept["facts"], "notes": tuple(kept["facts"]["notes"])})
        ids = ids_path.stat()
        if ids.st_mtime_ns != kept["ids_mtime_ns"] or ids.st_size != facts.length * facts.dtype.itemsize:
            return None
        return facts, _mapped(ids_path, facts)
    # Whatever else stands in the file, JSON or not, fails in one of these ways.
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(file: Path | IO[bytes], facts: _Survey) -> Ids:
    # As a plain array: np.memmap makes each slice and each picked value one of its own.
    return np.asarray(np.memmap(file, facts.dtype, mode="r", shape=(facts.length,)))


def _kept_at(state: State, codec: str) -> Path:
    """Where the ids of sources in this state are kept, without a suffix: a mark of the sources, one of their state."""
    sources = _mark([codec, [path for path, _, _ in state]])
    return ENCODED_FOLDER / f"{sources}-{_mark([ENCODED_VERSION, codec, state])}"


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode("ascii")).hexdigest()[:20]
