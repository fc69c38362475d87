"""Models and tensors of random numbers, the same ones every time."""

from __future__ import annotations

import torch
from torch import Tensor

from minigpt.config import GPTConfig
from minigpt.model import GPT


def random_model(config: GPTConfig, seed: int = 0) -> GPT:
    """A model with weights that are not zero anywhere, unlike those that training starts from."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config, generator)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.5, generator=generator)
    return model.eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
