"""The file behind an address: downloaded whole, checked by its digest, and kept for the next time.

Owns the network; which addresses there are and what the bytes mean is left to `sources`.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

from minigpt.atomic import replacing
from minigpt.errors import CorpusError

# (bytes received so far, bytes to come in all or None when the server does not say)
Progress = Callable[[int, int | None], None]

BLOCK_BYTES = 1 << 16
# Seconds without a single byte after which a server counts as gone.
TIMEOUT_S = 30.0


def fetch(url: str, folder: Path, *, sha256: str | None = None, progress: Progress | None = None) -> Path:
    """The file behind an http(s) URL, downloaded unless the folder already keeps it.

    Args:
        folder: where it is kept; made when missing.
        sha256: 64 hexadecimal digits that the content must have, a kept one too.
        progress: told after every block, and only when something is downloaded.

    Returns:
        The path of the kept file, which is always complete: it appears in one step.

    Raises:
        CorpusError: the server or the disk fails, the connection breaks off, or the digest is another one. What was
            kept before stays as it was, and nothing half-done is left.
    """
    target = folder / kept_name(url)
    if target.is_file():
        if sha256 is not None:
            _check_kept(target, url, sha256.lower())
        return target
    with _connect(url) as response:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(target, shared=True) as file:
                found = _receive(url, response, file, progress)
                if sha256 is not None and found != sha256.lower():
                    raise CorpusError(
                        f"what {url} sends has sha256 {found}, not {sha256.lower()}, and was not kept: check the digest"
                    )
        except OSError as error:
            raise CorpusError(
                f"cannot keep {url} in {str(folder)!r}: {reason(error)}; free some space, or run minigpt in a folder"
                " that you may write to"
            ) from None
    return target


def shown_name(url: str) -> str:
    """The file name of a URL, reduced to characters that are safe in a file name everywhere."""
    path = PurePosixPath(urllib.parse.unquote(_split(url).path))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem).strip("._-")[:80]
    return (stem or "download") + (path.suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,8}", path.suffix) else "")


def kept_name(url: str) -> str:
    """The name under which a URL is kept: its file name, marked with a digest so that no two URLs share one."""
    name = PurePosixPath(shown_name(url))
    mark = hashlib.sha256(urllib.parse.urldefrag(url).url.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{name.stem}-{mark}{name.suffix}"


def reason(error: Exception) -> str:
    """Why something failed, on one line and without error numbers."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    words = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    return " ".join(str(words).split()) or type(error).__name__


def _check_kept(kept: Path, url: str, sha256: str) -> None:
    """Raises a CorpusError when a kept file does not have the digest."""
    digest = hashlib.sha256()
    try:
        with kept.open("rb") as file:
            while data := file.read(BLOCK_BYTES):
                digest.update(data)
    except OSError as error:
        raise CorpusError(f"cannot read {str(kept)!r}: {reason(error)}") from None
    if digest.hexdigest() != sha256:
        raise CorpusError(
            f"{str(kept)!r}, kept from {url}, has sha256 {digest.hexdigest()}, not {sha256}: check the digest, or"
            " delete the file to download it again"
        )


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(url)
    except ValueError as error:
        raise CorpusError(f"{url!r} is not a usable address: {reason(error)}") from None


def _connect(url: str) -> http.client.HTTPResponse:
    parts = _split(url)
    try:
        # People paste addresses as they read them; only ASCII may be sent. '%' stays, for it may be a quote already.
        wire = urllib.parse.urlunsplit(
            (
                parts.scheme,
                parts.netloc.encode("idna").decode("ascii"),
                urllib.parse.quote(parts.path, safe="/%:@!$&'()*+,;=~"),
                urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~?"),
                "",
            )
        )
        request = urllib.request.Request(wire, headers={"User-Agent": "minigpt"})
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        return response
    except urllib.error.HTTPError as error:
        error.close()
        raise CorpusError(
            f"cannot download {url}: the server answers {error.code} {error.reason}; check the address"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise CorpusError(
            f"cannot download {url}: {reason(error)}; check the address and the network, or give a file instead"
        ) from None
    # Covers UnicodeError too, from a host name that IDNA has no form for.
    except ValueError as error:
        raise CorpusError(f"{url!r} is not a usable address: {reason(error)}") from None


def _receive(url: str, response: http.client.HTTPResponse, file: IO[bytes], progress: Progress | None) -> str:
    """Copies the body of a response to a file and returns its sha256."""
    packing = response.headers.get("Content-Encoding", "identity")
    if packing.lower() != "identity":
        raise CorpusError(f"{url} comes packed as {packing!r}: unpack it yourself and give the file instead")
    announced = response.headers.get("Content-Length", "")
    total = int(announced) if announced.isdecimal() else None
    done = 0
    digest = hashlib.sha256()
    while True:
        try:
            data = response.read(BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise CorpusError(
                f"the download of {url} broke off after {done:,} bytes: {reason(error)}; try again"
            ) from None
        if not data:
            break
        file.write(data)
        digest.update(data)
        done += len(data)
        if progress is not None:
            progress(done, total)
    # With a block size given, http.client takes an early end of the connection for the end of the body.
    if total is not None and done < total:
        raise CorpusError(f"the download of {url} broke off after {done:,} of {total:,} bytes; try again")
    if done == 0:
        raise CorpusError(f"{url} is empty: check the address")
    return digest.hexdigest()
