"""What a server can do to a download, and what is kept of it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minigpt import download
from minigpt.download import Progress, kept_name, shown_name
from tests.source_support import refusal_of

CONTENT = b"OLE: The tide, the tide!\n"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
FOLDER = Path("new/data")

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy stands before 127.0.0.1."""
    monkeypatch.setenv("no_proxy", "*")


class Server(ThreadingHTTPServer):
    """Answers each path with what the test put there, in the way that the path begins with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.contents: dict[str, bytes] = {}
        self.asked: list[str] = []

    def url(self, path: str, content: bytes | None = None) -> str:
        if content is not None:
            self.contents[path] = content
        return f"http://127.0.0.1:{self.server_address[1]}{path}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(self.path)
        kind = self.path.split("/")[1]
        content = self.server.contents.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(301 if kind == "moved" else 200)
        if kind == "moved":
            self.send_header("Location", content.decode())
            content = b""
        if kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            # The last chunk, an empty one, is missing.
            content = b"%x\r\n%s\r\n" % (len(content), content)
        elif kind == "packed":
            self.send_header("Content-Encoding", "gzip")
        elif kind != "endless":
            self.send_header("Content-Length", str(len(content) + (kind == "short")))
        self.end_headers()
        self.wfile.write(content)
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


def fetch(url: str, sha256: str | None = None, progress: Progress | None = None) -> bytes:
    return download.fetch(url, FOLDER, sha256=sha256, progress=progress).read_bytes()


def refusal(url: str, sha256: str | None = None) -> str:
    """The one sentence with which the address is refused."""
    return refusal_of(lambda: fetch(url, sha256))


def kept() -> list[str]:
    """Names of all files, hidden ones too."""
    return [path.name for path in FOLDER.glob("*")]


def test_an_address_is_downloaded_once_and_kept(server: Server) -> None:
    url = server.url("/play.txt", CONTENT)
    assert fetch(url) == CONTENT
    assert kept() == [kept_name(url)]
    assert fetch(url) == CONTENT
    assert server.asked == ["/play.txt"]


def test_progress_is_told_in_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BLOCK_BYTES", 4)
    told: list[tuple[int, int | None]] = []
    for url in (server.url("/a.txt", b"0123456789"), server.url("/endless/a.txt", b"01234")):
        for _ in range(2):
            fetch(url, progress=lambda done, total: told.append((done, total)))
    assert told == [(4, 10), (8, 10), (10, 10), (4, None), (5, None)]


def test_an_address_may_be_written_as_people_read_it(server: Server) -> None:
    server.contents["/gr%C3%B6%C3%9Fer%20als.txt"] = CONTENT
    assert fetch(server.url("/größer als.txt")) == fetch(server.url("/gr%C3%B6%C3%9Fer%20als.txt")) == CONTENT


def test_a_redirect_is_followed(server: Server) -> None:
    server.contents["/play.txt"] = CONTENT
    assert fetch(server.url("/moved/a.txt", b"/play.txt")) == CONTENT


def test_a_server_that_is_not_there_is_a_sentence() -> None:
    with Server() as gone:
        url = gone.url("/play.txt")
    assert f"cannot download {url}" in refusal(url)


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("/none.txt", None, "404 Not Found"),
        ("/packed/a.txt", CONTENT, "gzip"),
        ("/empty.txt", b"", "empty"),
        ("/short/a.txt", CONTENT, f"broke off after {len(CONTENT)} "),
        ("/chunked/a.txt", CONTENT, "broke off"),
    ],
)
def test_an_answer_that_is_no_whole_text_is_refused_and_not_kept(
    server: Server, path: str, content: bytes | None, words: str
) -> None:
    url = server.url(path, content)
    message = refusal(url)
    assert words in message
    assert url in message
    assert kept() == []


def test_while_it_arrives_a_download_has_a_hidden_name_of_its_own_and_an_interrupted_one_leaves_nothing(
    server: Server,
) -> None:
    url = server.url("/a.txt", CONTENT)
    seen: list[str] = []

    def interrupt(*_: object) -> None:
        seen.extend(kept())
        if len(seen) == 1:
            # Another process wants the same text at the same time.
            fetch(url, progress=interrupt)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(url, progress=interrupt)
    assert len(seen) == 3
    assert len(set(seen)) == 2
    assert all(name.startswith(".") and name.endswith(".partial") for name in seen)
    assert kept() == []


def test_a_full_disk_is_a_sentence_and_leaves_nothing(server: Server) -> None:
    resource = pytest.importorskip("resource")
    url = server.url("/a.txt", b"ab" * 100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert f"in {str(FOLDER)!r}" in refusal(url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept() == []


def test_a_digest_is_checked_when_downloading_and_each_time_after(server: Server) -> None:
    url = server.url("/a.txt", CONTENT)
    for already_kept in (False, True):
        assert len(kept()) == already_kept
        message = refusal(url, sha256="0" * 64)
        assert DIGEST in message
        assert "0" * 64 in message
        assert len(kept()) == already_kept
        assert fetch(url, sha256=DIGEST.upper()) == CONTENT


def test_a_kept_file_that_cannot_be_read_is_a_sentence(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is played."""
    url = server.url("/a.txt", CONTENT)
    fetch(url)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert f"{kept_name(url)}': Permission denied" in refusal(url, sha256=DIGEST)


@pytest.mark.parametrize("url", ["http://", "http://[::1/a", "http://a b/", "http://127.0.0.1:port/a", "http://ä..b/"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    assert url in refusal(url)


def test_addresses_with_one_file_name_are_kept_apart() -> None:
    urls = ["http://a.org/input.txt", "http://b.org/input.txt", "http://a.org/input.txt?v=2", "http://a.org/Input.txt"]
    assert len({kept_name(url).lower() for url in urls}) == len(urls)
    assert kept_name(urls[0]) == kept_name(urls[0] + "#chapter")


def test_the_shown_name_is_the_file_name_in_safe_characters() -> None:
    assert shown_name("http://a.org/b/gr%C3%B6%C3%9Fer%20als.txt?v=2") == "gr_er_als.txt"


@pytest.mark.parametrize(
    "path", ["", "/", "/..", "/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/.hidden", "/a%00b.txt", "/con:x.txt", "/a" * 300]
)
def test_the_name_of_a_kept_file_is_safe(path: str) -> None:
    name = kept_name(f"http://a.org{path}")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert not name.startswith(".")
    assert len(name) < 120
