"""What the tests share: folders of their own, small float64 models whose every weight is random, ids to feed them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

from minigpt.bench import random_model
from minigpt.config import GPTConfig
from minigpt.engine import FusedEngine
from minigpt.model import GPT
from minigpt.sampling import Sampling
from minigpt.weights import FORMATS

# The same examples in every run, and no deadline: a slow machine is no failure.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")
# Matrices this small gain nothing from threads, which wait on each other for long where a machine is busy.
torch.set_num_threads(1)
# A check of theirs that fails tells its values, as those of the tests do.
pytest.register_assert_rewrite("tests.run_support", "tests.source_support")


@pytest.fixture(scope="session", autouse=True)
def _compiled_engine() -> None:
    """Compiles the fused engine, once for all later processes, so that no test is told that this takes a while."""
    if importlib.util.find_spec("numba") is not None:
        model = random_model(GPTConfig(vocab_size=3, n_layer=1, n_head=1, n_embd=4, block_size=4, window=2))
        for weights in FORMATS:
            engine = FusedEngine(model, weights, 1, lambda _: None)
            engine.decode(model.new_cache(), [0], np.zeros((1, 1)), Sampling(), 0.0)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a folder of the test's own the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def own_text(own_folder: None) -> None:
    """A folder of the test's own with one text in it, harbour.txt."""
    # Here, since few tests are of the command line.
    from tests.cli_support import TEXT

    Path("harbour.txt").write_text(TEXT, encoding="utf-8")


@pytest.fixture
def own_run(own_folder: None) -> None:
    """A folder of the test's own with one run, harbour, and its text in it."""
    from tests.cli_support import place

    place("harbour")


@cache
def _model_of(config: GPTConfig) -> GPT:
    model = random_model(config).double()
    # The gains of the norms start at one, where a test could not tell one norm from another.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.fixture(scope="session")
def tiny_config() -> GPTConfig:
    """A shape that reaches all its edges early: window 4, receptive field 10, block 16."""
    return GPTConfig(vocab_size=7, n_layer=3, n_head=2, n_embd=12, block_size=16, window=4)


@pytest.fixture(scope="session")
def model_of() -> Callable[[GPTConfig], GPT]:
    """The random float64 model of a shape; one object a shape, so change only copies of it."""
    return _model_of


@pytest.fixture(scope="session")
def tiny_model(tiny_config: GPTConfig) -> GPT:
    """The random float64 model of `tiny_config`; change only copies of it."""
    return _model_of(tiny_config)


@pytest.fixture(scope="session")
def draw_ids() -> Callable[..., Tensor]:
    """Random ids, (batch, length), below a vocabulary size."""

    def draw(length: int, batch: int = 1, *, seed: int = 0, vocab_size: int = 7) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(vocab_size, (batch, length), generator=generator)

    return draw
