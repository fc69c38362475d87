"""``--save``: the end of the name decides what is written, and a bad name is refused before anything is computed."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from minigpt.cli.save import Page, check_save, save
from minigpt.errors import MissingPackageError, ReportError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytestmark = pytest.mark.usefixtures("own_folder")


def draw(figure: Figure) -> None:
    figure.add_subplot().plot([0, 1], [0, 1], gid="line")


def never(figure: Figure) -> None:
    raise AssertionError("no picture was asked for")


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], object] = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))


def test_without_a_name_nothing_is_written_or_said(capsys: pytest.CaptureFixture[str]) -> None:
    check_save(None)
    save(None, "Title", {}, never)
    assert list(Path().iterdir()) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["it.svg", "it.PNG", "it.html", "folder/it.html"])
def test_names_that_can_be_written_are_taken(name: str) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    Path("folder").mkdir()
    check_save(name)
    assert [path.name for path in Path().iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["it", "it.pdf", "it.svg.gz", "html", ".html", ""])
def test_other_endings_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ReportError, match=r"is no name for what --save writes: end it in \.svg, \.png or \.html$"):
        check_save(name)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ReportError, match=r"^cannot write 'no/it\.html': there is no folder 'no'$"):
        check_save("no/it.html")


@pytest.mark.parametrize(
    ("name", "reason"), [("folder.html", "it is a folder"), (f"{'x' * 300}.html", os.strerror(errno.ENAMETOOLONG))]
)
def test_what_cannot_be_written_is_said_before_anything_is_computed(name: str, reason: str) -> None:
    Path("folder.html").mkdir()
    with pytest.raises(ReportError, match=rf"^cannot write '{name}': {reason}$"):
        check_save(name)


def test_a_folder_that_cannot_be_written_to_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ReportError, match=r"^cannot write 'it\.html': the folder '\.' cannot be written to$"):
        check_save("it.html")


@pytest.mark.usefixtures("without_matplotlib")
def test_pictures_need_matplotlib_and_pages_do_not() -> None:
    for name in ("it.svg", "it.png"):
        with pytest.raises(MissingPackageError, match=r"pip install 'minigpt\[plot\]'"):
            check_save(name)
    check_save("it.html")
    save("it.html", "Title", {"a": 1}, never, lambda: Page("<p>body</p>"))
    assert "<p>body</p>" in Path("it.html").read_text(encoding="utf-8")


def test_a_picture_is_drawn_in_its_size_and_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    save("it.png", "Title", {}, draw, size=(3.0, 2.0))
    data = Path("it.png").read_bytes()
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (450, 300)
    captured = capsys.readouterr()
    assert (captured.out, captured.err.strip()) == ("", "written to it.png")
    save("it.svg", "Title", {}, draw)
    assert 'id="line"' in Path("it.svg").read_text(encoding="utf-8")


def test_a_page_has_its_own_body_style_and_script_and_the_data() -> None:
    save("it.html", "Title", {"a": [1, None]}, never, lambda: Page("<p>body</p>", "p { margin: 0; }", "start();"))
    page = Path("it.html").read_text(encoding="utf-8")
    for part in ("<h1>Title</h1>", "<p>body</p>", "p { margin: 0; }", "start();"):
        assert part in page
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(data) == {"a": [1, None]}


def test_a_page_without_one_of_its_own_shows_the_picture() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    save("it.html", "Title", {}, draw)
    page = Path("it.html").read_text(encoding="utf-8")
    assert "<figure><svg" in page
    assert 'id="line"' in page
    assert "<?xml" not in page
