"""Which device, how much memory, which number format."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from minigpt import device as device_module
from minigpt.config import GPTConfig
from minigpt.device import choose_device, compiled, fastest_precision, require_memory
from minigpt.errors import ConfigError, DeviceError
from minigpt.parallel import World


def test_each_process_has_a_gpu_of_its_own() -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
    ):
        assert choose_device("auto", World(5, 8, 1)) == torch.device("cuda:1")
        assert choose_device("cpu", World(5, 8, 1)) == torch.device("cpu")
        with pytest.raises(DeviceError, match="has 2 CUDA devices"):
            choose_device("cuda", World(2, 4, 2))
        with pytest.raises(DeviceError, match="--device cuda:1 cannot be shared by 4 processes"):
            choose_device("cuda:1", World(2, 4, 0))


@pytest.mark.parametrize(("bfloat16_s", "chosen"), [(1.0, "bfloat16"), (1.9, "float32"), (20.0, "float32")])
def test_the_faster_number_format_is_chosen_where_it_is_clearly_faster(
    bfloat16_s: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.float32: 2.0, torch.bfloat16: bfloat16_s}
    monkeypatch.setattr(device_module, "_multiplication_s", seconds.__getitem__)
    assert fastest_precision(torch.device("cpu")) == chosen


def test_what_no_memory_can_hold_is_refused_at_once() -> None:
    config = GPTConfig(vocab_size=65)
    require_memory(config, 4)
    with pytest.raises(
        ConfigError, match=r"n_layer=1000000 .* needs [\d,]+ GB of memory to train.*: choose smaller ones"
    ):
        require_memory(replace(config, n_layer=1_000_000, n_embd=512), 4)
    with pytest.raises(ConfigError, match=r"batch_size of 20000000 needs [\d,]+ GB .*: choose a smaller one"):
        require_memory(config, 20_000_000)
    with pytest.raises(ConfigError, match=r"batch_size of 80000000, 20000000 a process, needs "):
        require_memory(config, 80_000_000, 4)


@pytest.mark.parametrize(
    ("batch_size", "pages", "words"),
    [
        # 4 layers of 4 * 128^2 + 3 * 128 * 352 weights and 2 * 128 * 64 of characters are 819,200; three times 4 bytes
        # each are 9,830,400.
        (1, 2400, "a model of n_layer=4 and n_embd=128 needs"),
        # 4 * 256 positions, at each of which 2 + 64 numbers and in 4 layers 128 + 3 * 352 are kept, 4,802 in all; 4
        # bytes each are 19,668,992.
        (4, 4802, "a batch_size of 4 needs"),
    ],
)
def test_what_needs_all_memory_is_not_refused_unless_there_is_a_page_less(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, pages: int, words: str
) -> None:
    config = GPTConfig(vocab_size=64, n_layer=4, n_head=4, n_embd=128, block_size=256, window=64)
    assert config.n_inner == 352
    there_is = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}
    monkeypatch.setattr(os, "sysconf", there_is.__getitem__)
    require_memory(config, batch_size)
    there_is["SC_PHYS_PAGES"] -= 1
    with pytest.raises(ConfigError, match=words):
        require_memory(config, batch_size)


def test_on_a_cpu_the_model_is_called_as_it_is() -> None:
    model = torch.nn.Identity()
    assert compiled(model, torch.device("cpu")) is model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_cuda_the_compiled_step_is_the_step() -> None:
    from minigpt.bench import random_model

    device = torch.device("cuda")
    model = random_model(GPTConfig(vocab_size=7, n_layer=2, n_head=2, n_embd=32, block_size=64, window=16)).to(device)
    idx: Tensor = torch.randint(7, (4, 64), generator=torch.Generator().manual_seed(0)).to(device)
    torch.testing.assert_close(compiled(model, device)(idx), model(idx), rtol=1e-3, atol=1e-3)
