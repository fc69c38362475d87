"""What is installed: the metadata, the wheel and what is in it, and minigpt as it runs from there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import typer.main

import minigpt
from minigpt.cli import app
from tests.cli_support import PATIENCE_S, SHAPE, as_in_a_shell, run

REPOSITORY = Path(__file__).resolve().parent.parent
BUNDLED = REPOSITORY / "data" / "aldersea.txt"
has_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds the wheel, is not installed"
)


def pip(*arguments: str | Path) -> None:
    """Runs pip of this environment, with no network to reach."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, REPOSITORY)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@has_hatchling
def test_the_wheel_holds_the_package_and_the_bundled_text_and_nothing_else(wheel: Path) -> None:
    modules = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "minigpt").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("minigpt/data/aldersea.txt") == BUNDLED.read_bytes()
    licences = {name for name in names if ".dist-info/licenses/" in name}
    assert {name.rpartition("licenses/")[2] for name in licences} == {"LICENSE", "data/LICENSE"}
    rest = {name for name in names - licences if ".dist-info/" in name}
    assert {name.rpartition("/")[2] for name in rest} == {"METADATA", "RECORD", "WHEEL", "entry_points.txt"}
    assert names - licences - rest == modules | {"minigpt/data/aldersea.txt"}


@has_hatchling
def test_the_wheel_is_for_every_machine(wheel: Path) -> None:
    assert wheel.name == f"minigpt-{minigpt.__version__}-py3-none-any.whl"


@has_hatchling
def test_the_metadata_says_what_is_needed(metadata: Message) -> None:
    assert metadata["Name"] == "minigpt"
    assert metadata["Version"] == minigpt.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT AND CC0-1.0"
    assert metadata["Summary"]
    readme = metadata.get_payload()
    assert isinstance(readme, str)
    assert readme.lstrip().startswith("# minigpt")
    needed = [str(line) for line in metadata.get_all("Requires-Dist", [])]
    core = {re.split(r"[^a-z]", line)[0] for line in needed if "extra ==" not in line}
    assert core == {"filelock", "numpy", "rich", "safetensors", "torch", "tqdm", "typer", "uniplot"}
    tests = {re.split(r"[^a-z-]", line)[0] for line in needed if "extra == 'test'" in line}
    assert tests >= {"hypothesis", "mypy", "pytest", "ruff"}


@has_hatchling
def test_minigpt_from_a_wheel_learns_the_bundled_text_anywhere(wheel: Path, tmp_path: Path) -> None:
    installed, folder = tmp_path / "installed", tmp_path / "elsewhere"
    pip("install", "--no-deps", "--target", installed, wheel)
    folder.mkdir()
    options: dict[str, Any] = as_in_a_shell()
    options["env"]["PYTHONPATH"] = str(installed)
    (script,) = (installed / ("Scripts" if os.name == "nt" else "bin")).iterdir()
    assert script.stem == "minigpt"
    done = subprocess.run(
        [sys.executable, script, "train", *SHAPE, "--steps", "1", "--eval-chars", "64", "--out", "a"],
        cwd=folder,
        capture_output=True,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stderr
    # The one of the wheel, which knows nothing of this checkout.
    assert f"{len(BUNDLED.read_text('utf-8')):,} characters" in done.stderr
    assert (folder / "checkpoints" / "a" / "best.safetensors").is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints"]


def test_the_module_and_the_option_tell_the_version_of_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minigpt", "--version"], capture_output=True, text=True, **as_in_a_shell()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"minigpt {minigpt.__version__}\n", "")
    assert run("--version").stdout == done.stdout
    assert re.fullmatch(r"\d+\.\d+\.\d+", minigpt.__version__)


def test_everything_that_the_package_offers_is_there() -> None:
    for name in minigpt.__all__:
        assert getattr(minigpt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minigpt.nothing


def test_the_readme_names_only_commands_and_options_that_there_are() -> None:
    group: Any = typer.main.get_command(app)
    explain = group.commands["explain"].commands
    known = {"--help", "--version", *group.commands, *explain}
    for command in [*group.commands.values(), *explain.values()]:
        known |= {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    told = []
    for line in re.findall(r"(?:\$ |`|^ *)minigpt ([^`\n]*)", readme, re.MULTILINE):
        told += re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", line)
        command = line.split()[0]
        if command.isalpha():
            told.append(command)
        if command == "explain" and len(line.split()) > 1:
            told.append(line.split()[1])
    assert len(told) > 3
    assert set(told) <= known
