"""Pictures: what the loss curve shows, in which files, and that drawing it leaves nothing else changed."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from minigpt.errors import MissingPackageError, ReportError
from minigpt.history import History, LoggedEvaluation, LoggedUpdates
from minigpt.plot import COLOURS, INK, new_figure, plot_losses, save_figure
from tests.cli_support import as_in_a_shell

SVG = "{http://www.w3.org/2000/svg}"
HISTORY = History(
    tuple(LoggedUpdates(n, 4 - n / 40, 1.0, n / 8) for n in range(10, 101, 10)),
    tuple(
        LoggedEvaluation(n, 3.0, loss, loss < 3, n / 8) for n, loss in ((25, 3.5), (50, 2.5), (75, 2.25), (100, 2.4))
    ),
)


@pytest.fixture(autouse=True)
def _matplotlib(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("matplotlib", reason="draws with matplotlib")


def curves_of(svg: Path) -> dict[str, list[tuple[float, float]]]:
    """The points of each curve in the picture, by its name, in units of the picture."""
    root = ElementTree.parse(svg).getroot()
    found = {}
    for name in ("training", "held-out"):
        (group,) = [group for group in root.iter(f"{SVG}g") if group.get("id") == name]
        path = next(group.iter(f"{SVG}path")).get("d", "")
        found[name] = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]
    return found


def words_of(svg: Path) -> set[str]:
    return {"".join(text.itertext()).strip() for text in ElementTree.parse(svg).getroot().iter(f"{SVG}text")}


# The loss curve


def test_the_picture_has_both_curves_with_all_their_points(tmp_path: Path) -> None:
    plot_losses(HISTORY, tmp_path / "loss.svg")
    curves = curves_of(tmp_path / "loss.svg")
    assert [len(points) for points in curves.values()] == [10, 4]
    # Both on the same scales: SVG counts y downwards, and losses and steps are linear.
    (x0, y0), (x1, y1) = curves["training"][0], curves["training"][-1]
    for name, values in (("training", HISTORY.training), ("held-out", HISTORY.held_out)):
        for (x, y), step, loss in zip(curves[name], *values, strict=True):
            assert x == pytest.approx(x0 + (x1 - x0) * (step - 10) / 90, abs=1e-3)
            assert y == pytest.approx(y0 + (y1 - y0) * (3.75 - loss) / 2.25, abs=1e-3)


def test_the_picture_says_in_words_what_it_shows(tmp_path: Path) -> None:
    plot_losses(HISTORY, tmp_path / "loss.svg")
    words = words_of(tmp_path / "loss.svg")
    assert words >= {"steps", "loss, nats a character", "training", "held-out", "best: 2.2500 at step 75", "0", "100"}


def test_a_long_run_has_a_picture_too(tmp_path: Path) -> None:
    steps = range(10, 30_001, 10)
    history = History(
        tuple(LoggedUpdates(n, 1 + (n % 70) / n, 1.0, n / 8) for n in steps),
        tuple(LoggedEvaluation(n, 2.0, 1 + 9 / n, True, n / 8) for n in range(250, 30_001, 250)),
    )
    plot_losses(history, tmp_path / "loss.svg")
    assert len(curves_of(tmp_path / "loss.svg")["held-out"]) > 20
    assert "best: 1.0003 at step 30,000" in words_of(tmp_path / "loss.svg")


def test_a_run_with_one_evaluation_has_a_picture(tmp_path: Path) -> None:
    plot_losses(History((), HISTORY.evaluations[:1]), tmp_path / "loss.svg")
    assert "best: 3.5000 at step 25" in words_of(tmp_path / "loss.svg")


def test_before_the_first_evaluation_there_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="first evaluation"):
        plot_losses(History(HISTORY.updates, ()), tmp_path / "loss.svg")
    assert list(tmp_path.iterdir()) == []


# Files


def test_a_png_is_a_png_of_the_size_asked_for(tmp_path: Path) -> None:
    plot_losses(HISTORY, tmp_path / "loss.PNG")
    data = (tmp_path / "loss.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (7 * 150, 4 * 150)
    assert b"IEND" in data[-12:]


@pytest.mark.parametrize("name", ["loss.svg", "loss.png"])
def test_the_same_losses_are_the_same_bytes_whatever_the_user_prefers(tmp_path: Path, name: str) -> None:
    import matplotlib

    plot_losses(HISTORY, tmp_path / f"1-{name}")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black", "svg.fonttype": "path", "savefig.dpi": 30}):
        plot_losses(HISTORY, tmp_path / f"2-{name}")
    assert (tmp_path / f"1-{name}").read_bytes() == (tmp_path / f"2-{name}").read_bytes()
    if name.endswith("svg"):
        text = (tmp_path / f"1-{name}").read_text(encoding="utf-8")
        assert "<dc:date>" not in text
        assert matplotlib.__version__ not in text


def test_a_name_with_another_ending_is_refused(tmp_path: Path) -> None:
    for name in ("loss.pdf", "loss", "loss.svg.txt"):
        with pytest.raises(ReportError, match=rf"{name} .*\.svg or \.png"):
            plot_losses(HISTORY, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_the_old_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "loss.svg").write_text("old")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ReportError, match=r"cannot write .*loss\.svg: No space left on device") as caught:
        plot_losses(HISTORY, tmp_path / "loss.svg")
    assert "\n" not in str(caught.value)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("loss.svg", "old")]


def test_any_figure_can_be_drawn_in_the_house_style(tmp_path: Path) -> None:
    with new_figure(3, 2) as figure:
        figure.add_subplot().imshow([[0.0, 1.0], [1.0, 0.0]])
        save_figure(figure, tmp_path / "map.png")
    assert int.from_bytes((tmp_path / "map.png").read_bytes()[16:20], "big") == 3 * 150


# Colours


def luminance(colour: str) -> float:
    """As WCAG 2.2 defines it, from 0 for black to 1 for white."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_curves_stand_out_on_white_and_on_black_and_letters_on_their_page() -> None:
    # WCAG 2.2 asks a contrast of 3 of lines that matter, and of 4.5 of text.
    for colour in COLOURS[:2]:
        assert 1.05 / (luminance(colour) + 0.05) >= 3
        assert (luminance(colour) + 0.05) / 0.05 >= 3
    assert 1.05 / (luminance(INK) + 0.05) >= 4.5


# matplotlib as a guest


def test_drawing_changes_no_settings_and_needs_no_screen(tmp_path: Path) -> None:
    program = f"""
import sys, logging, matplotlib
def settings():
    # Asking for the backend would choose one.
    return {{name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}}
before = settings()
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from minigpt.plot import plot_losses
from tests.test_plot import HISTORY
plot_losses(HISTORY, Path("loss.svg"))
plot_losses(HISTORY, Path("loss.png"))
assert settings() == before
assert logging.getLogger("matplotlib").level == logging.NOTSET
assert "matplotlib.pyplot" not in sys.modules
"""
    options: dict[str, Any] = as_in_a_shell()
    options["env"].pop("DISPLAY", None)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_matplotlib_there_is_a_sentence_that_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'minigpt\[plot\]'") as caught:
        plot_losses(HISTORY, tmp_path / "loss.svg")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_module_is_imported_without_matplotlib() -> None:
    program = "import sys, minigpt.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], **as_in_a_shell()).returncode == 0
