"""Which device computes, with how many threads, and in which number format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minigpt.config import GPTConfig
from minigpt.errors import ConfigError, DeviceError
from minigpt.parallel import ALONE, World

# A hundred thousand would crash the process in OpenMP.
MOST_THREADS = 1024
# How much faster a number format must be to be worth its casts.
MARGIN = 1.3


def choose_device(name: str = "auto", world: World = ALONE) -> torch.device:
    """The device of that name; ``auto`` is a CUDA GPU where there is one, else an Apple GPU, else the CPU.

    Of several processes each has a CUDA GPU of its own, or all compute on the CPU.

    Raises:
        DeviceError: torch does not know the name, or this machine lacks the device.
    """
    if world.size > 1:
        return _device_in(name, world)
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"there is no device {name!r}: use auto, cpu, cuda or mps") from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False) or (device.type == "cuda" and _index(device) >= torch.cuda.device_count()):
        raise DeviceError(f"this machine or this torch has no device {name!r}: use --device cpu")
    return device


def set_threads(threads: int | None) -> int:
    """Sets the number of CPU threads torch computes with (None leaves it); returns the number in force.

    Raises:
        DeviceError: more threads than any machine has.
    """
    if threads is not None:
        if threads > MOST_THREADS:
            raise DeviceError(f"--threads {threads} is more than any machine has cores: use at most {MOST_THREADS}")
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def require_memory(config: GPTConfig, batch_size: int, processes: int = 1) -> None:
    """Refuses at once what could only fail after a long time of swapping.

    Args:
        batch_size: examples of a step, of which each process takes its part.
        processes: that train together, on one machine or several.

    Raises:
        ConfigError: training such a model needs more memory than this machine has.
    """
    if not hasattr(os, "sysconf"):
        # Windows; there the allocation fails.
        return
    there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    C, F, V = config.n_embd, config.n_inner, config.vocab_size
    # Weights, gradients and momenta in float32.
    parameters = config.n_layer * (4 * C * C + 3 * C * F) + 2 * C * V
    model_bytes = 3 * 4 * parameters
    # The least that is kept for the backward pass: ids and logits, and of a layer its stream and feed-forward widths.
    share = -(-batch_size // processes)
    batch_bytes = 4 * share * config.block_size * (2 + V + config.n_layer * (C + 3 * F))
    for what, needed, remedy in (
        (f"a model of n_layer={config.n_layer} and n_embd={C}", model_bytes, "smaller ones"),
        (
            f"a batch_size of {batch_size}{f', {share} a process,' if processes > 1 else ''}",
            batch_bytes,
            "a smaller one",
        ),
    ):
        if needed > there_is:
            raise ConfigError(
                f"{what} needs {needed / 1e9:,.0f} GB of memory to train, and there are {there_is / 1e9:,.0f}: choose"
                f" {remedy}"
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that says that there is no memory left; torch says it of the CPU in a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def fastest_precision(device: torch.device) -> str:
    """The number format in which the device multiplies matrices fastest: "float32" or "bfloat16".

    On GPUs it is known. Processors differ: with instructions for bfloat16 they are faster in it, without them ten times
    slower, so both are tried for a moment.
    """
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    if device.type != "cpu":
        return "float32"
    times = {name: _multiplication_s(getattr(torch, name)) for name in ("float32", "bfloat16")}
    # Casts to and fro cost something too.
    return "bfloat16" if times["bfloat16"] * MARGIN < times["float32"] else "float32"


def compiled(model: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The model's forward pass as training calls it, with the same shapes each time.

    On CUDA it is compiled into few kernels; on CPUs a compiled step took longer than one of `kernels`.
    """
    return torch.compile(model) if device.type == "cuda" else model


def _multiplication_s(dtype: torch.dtype) -> float:
    """Seconds of a matrix product that is large enough to tell, the fastest of a few."""
    a, b = torch.ones(256, 256, dtype=dtype), torch.ones(256, 512, dtype=dtype)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - started)
    return min(times)


def _device_in(name: str, world: World) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} cannot be shared by {world.size} processes: use --device cpu or cuda")
    if name == "cpu":
        return torch.device(name)
    if world.local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"this machine has {torch.cuda.device_count()} CUDA devices, too few for a process each: start as many"
            " processes, or use --device cpu"
        )
    return torch.device(name, world.local_rank)


def _index(device: torch.device) -> int:
    return device.index or 0
