"""Which device computes, and with how many threads."""

from __future__ import annotations

import torch

from minigpt.errors import DeviceError
from minigpt.parallel import ALONE, World

# A hundred thousand would crash the process in OpenMP.
MOST_THREADS = 1024


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


def _device_in(name: str, world: World) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} cannot be shared by {world.size} processes: use auto, cpu or cuda")
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
