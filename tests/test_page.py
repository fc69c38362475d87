"""Pages: one file that needs nothing else, whose text and data survive whatever characters they hold."""

from __future__ import annotations

import errno
import html
import json
import os
import re
from pathlib import Path

import pytest

from minigpt.errors import ReportError
from minigpt.page import write_page

HOSTILE = "\"'</script><script>alert(1)</script><!--\\\n\t\u2028 café 漢字 \U0001f600 &amp;"


def data_of(page: str) -> object:
    """The JSON in a page, found as a browser does: up to the first end of a script."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL)
    return json.loads(text)


def test_a_page_has_its_title_body_style_script_and_data(tmp_path: Path) -> None:
    data = {"weights": [[1.0, 0], [0.25, 0.75]], "none": None}
    write_page(tmp_path / "a.html", "Title", "<p>body</p>", data, style="p { color: red; }", script="start();")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>\n")
    assert '<meta charset="utf-8">' in page
    for part in ("<title>Title</title>", "<h1>Title</h1>", "<p>body</p>", "p { color: red; }</style>"):
        assert page.count(part) == 1
    assert data_of(page) == data
    # After the data that it reads.
    assert page.index("<script>start();</script>") > page.index('id="data"')
    assert page.endswith("</html>\n")


def test_a_page_without_a_script_has_none(tmp_path: Path) -> None:
    write_page(tmp_path / "a.html", "Title", "", {})
    assert "<script>" not in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_hostile_characters_survive_and_end_nothing(tmp_path: Path) -> None:
    write_page(tmp_path / "a.html", HOSTILE, "", {HOSTILE: [HOSTILE]})
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert data_of(page) == {HOSTILE: [HOSTILE]}
    assert page.count("<script") == page.count("</script") == 1
    assert page.count(html.escape(HOSTILE)) == 2


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    write_page(tmp_path / "a.html", "a\udc80b", "", {"name": "a\udc80b"})
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<h1>a?b</h1>" in page
    assert data_of(page) == {"name": "a\udc80b"}


def test_a_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    write_page(tmp_path / "a.html", "Title", "", {})
    assert not re.search(r"https?:|url\(|src=|href=|@import", (tmp_path / "a.html").read_text(encoding="utf-8"))


def test_a_page_that_cannot_be_written_is_one_sentence_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.html").write_text("old")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ReportError, match=r"^cannot write .*a\.html: No space left on device$"):
        write_page(tmp_path / "a.html", "Title", "", {})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.html", "old")]
