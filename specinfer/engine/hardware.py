"""Hardware: the device, dtype and kernels of an engine, and the threads that it computes with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError
from specinfer.kernels.choice import Kernels, choose_kernels
from specinfer.kernels.machine import thread_count
from specinfer.progress import Progress
from specinfer.support import Feature, check_support


class Hardware(NamedTuple):
    """The device and kernels that run models, and the dtype of weights that are not quantized."""

    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    lacking: str | None = None  # why the kernels are not native although the device is a CPU

    @classmethod
    def of(cls, config: EngineConfig, progress: Progress) -> Hardware:
        """Return the hardware that a config asks for; raises ConfigError if it cannot be used."""
        device = pick_device(config.device)
        check_support(config.features | ({} if device.type == "cpu" else {Feature.GPU: device}))
        kernels, lacking = choose_kernels(config.kernels, device, progress)
        return cls(device, pick_dtype(config.dtype, device, kernels), kernels, lacking)


def pick_device(name: str) -> torch.device:
    """Return the device that an option names; raises ConfigError if it is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device is {name!r}, which this PyTorch does not have; use auto or cpu")
    return device


def pick_dtype(name: str, device: torch.device, kernels: Kernels) -> torch.dtype:
    """Return the dtype of an option; auto is bfloat16 on GPUs and with native kernels, else float32."""
    if name == "auto":
        native = device.type == "cuda" or kernels.library is not None
        return torch.bfloat16 if native else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def use_threads(wanted: int | None, kernels: Kernels, processes: int = 1) -> int:
    """Set the number of threads of this process's native kernels, and return it.

    None takes the cores divided by `processes`. It is at most OMP_NUM_THREADS.
    """
    count = thread_count(wanted, processes)
    if kernels.library is not None:
        kernels.library.set_threads(count)
    return count
