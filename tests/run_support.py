"""What the tests of runs share."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from minigpt.runs import BEST, LAST, LOG, LOSS_PLOT, SAMPLES, TENSORBOARD
from tests.cli_support import PATIENCE_S


def wait_until(happened: Callable[[], bool]) -> None:
    """Looks every few milliseconds; what never happens is a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


# What is in a run's folder


def names_in(folder: Path) -> list[str]:
    """Names of all that is in a folder, hidden ones too, sorted."""
    return sorted(path.name for path in folder.iterdir())


def log_of(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's log, every one of which is whole."""
    lines = (Path(folder) / LOG).read_text(encoding="utf-8").splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines), lines[-1]
    return [json.loads(line) for line in lines]


def metadata_of(path: Path) -> dict[str, str]:
    """The texts that a model file holds besides its tensors."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


def facts_of(path: Path) -> dict[str, Any]:
    """What those texts tell, but for how long it took."""
    return {key: without_times(json.loads(value)) for key, value in metadata_of(path).items()}


def samples_of(folder: str | Path) -> list[tuple[int, str, str]]:
    """Step, rest of the heading and text of each sample that a run kept."""
    text = (Path(folder) / SAMPLES).read_text(encoding="utf-8")
    before, *parts = re.split(r"^step (\d+): (.*)\n", text, flags=re.MULTILINE)
    assert before == "", before
    return list(zip(map(int, parts[::3]), parts[1::3], parts[2::3], strict=True))


def tensorboard_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run: the steps and values of each curve."""
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

    events = event_accumulator.EventAccumulator(str(folder / TENSORBOARD), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# Whether two are the same


def without_times(values: Any) -> Any:
    """Everything but how long it took."""
    if isinstance(values, dict):
        times = ("elapsed_s", "stopwatch")
        return {key: without_times(value) for key, value in values.items() if key not in times}
    if isinstance(values, list):
        return [without_times(value) for value in values]
    return values


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and behind each the same tensor to the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        # As bytes: bits, not values.
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def assert_same_run(found: Path, expected: Path) -> None:
    """All files of two runs are the same to the last bit, but for times and the folder that the text lay in."""
    assert names_in(found) == names_in(expected)
    for name in (BEST, LAST):
        assert_same_tensors(load_file(found / name), load_file(expected / name))
        assert _placeless(facts_of(found / name)) == _placeless(facts_of(expected / name))
    assert without_times(log_of(found)) == without_times(log_of(expected))
    for name in {LOSS_PLOT, SAMPLES} & set(names_in(expected)):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def _placeless(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts that name the files of the text without their folder."""
    extra = facts.get("state", {}).get("extra", {})
    if "sources" in extra:
        extra["sources"] = [Path(source).name for source in extra["sources"]]
    return facts
