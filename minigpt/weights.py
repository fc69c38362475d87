"""Number formats of a model's weights: rounding them in place, and packing them for the fused engine.

A model of float16 or int8 weights is a float32 model whose matrices hold rounded numbers. So there is one function to
agree on: every engine, with the cache and without, multiplies the same weights, and sums in float32. What the formats
buy is memory to read, where an engine reads the packed form.

Norms, a thousandth of all weights, stay as they are.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.errors import ConfigError
from minigpt.model import GPT

FORMATS = ("float32", "float16", "int8")
# The largest int8; -128 is left out, so that both signs reach equally far.
MOST_INT8 = 127


@torch.no_grad()
def round_weights(model: GPT, format: str) -> None:
    """Rounds all matrices of a model to what the format can hold, in place.

    Args:
        format: "float32" changes nothing, "float16" rounds each weight to the nearest half-precision number, "int8" to
            the nearest of 255 multiples of a scale, one for each row: that of its largest weight.

    Raises:
        ConfigError: there is no such format, or a weight is too large for it.
    """
    if format not in FORMATS:
        raise ConfigError(f"there are no weights {format!r}: choose one of {', '.join(FORMATS)}")
    for param in model.parameters():
        if param.ndim != 2 or format == "float32":
            continue
        if format == "float16":
            rounded = param.half().to(param.dtype)
            if not rounded.isfinite().all():
                raise ConfigError("a weight is too large for float16: choose --weights int8 or float32")
            param.copy_(rounded)
        else:
            scale = int8_scales(param)[:, None]
            param.copy_((param / scale).round() * scale)


def int8_scales(matrix: Tensor) -> Tensor:
    """What one step of int8 is worth in each row, (rows,); 1 where a row is all zeros."""
    largest = matrix.abs().amax(dim=1)
    return torch.where(largest > 0, largest / MOST_INT8, 1.0)


def packed(matrix: Tensor, format: str) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """A matrix of rounded weights, (rows, columns), float32, as numbers of the format and what one of them is worth.

    Returns:
        float32 as it is, in the same memory; float16 by its bits, uint16; int8. And the scales of rows, (rows,).
    """
    matrix = matrix.detach()
    ones = np.ones(len(matrix), np.float32)
    if format == "float32":
        return matrix.numpy(), ones
    if format == "float16":
        return matrix.half().numpy().view(np.uint16), ones
    scales = int8_scales(matrix)
    return (matrix / scales[:, None]).round().to(torch.int8).numpy(), scales.numpy()
