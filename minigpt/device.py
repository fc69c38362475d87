"""Which device computes, and with how many threads."""

from __future__ import annotations

import torch

from minigpt.errors import DeviceError

# A hundred thousand would crash the process in OpenMP.
MOST_THREADS = 1024


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name; ``auto`` is a CUDA GPU where there is one, else an Apple GPU, else the CPU.

    Raises:
        DeviceError: torch does not know the name, or this machine lacks the device.
    """
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


def _index(device: torch.device) -> int:
    return device.index or 0
