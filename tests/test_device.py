"""Which device, how many threads, which number format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minigpt import device as device_module
from minigpt.config import GPTConfig
from minigpt.device import compiled, fastest_precision, require_memory
from minigpt.errors import ConfigError


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
