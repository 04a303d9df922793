"""Hardware: the device, dtype and kernels of an engine, and the form of weights that suits them.

The option "auto" of a quantization takes the form that loses least and fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import psutil
import torch

from specinfer.config import EngineConfig
from specinfer.errors import ConfigError
from specinfer.kernels.choice import Kernels, choose_kernels
from specinfer.kernels.machine import cgroup_memory, thread_count
from specinfer.models.gguf import GGUFFile
from specinfer.models.hosted.folder import HostedFolder
from specinfer.models.open_model import OpenModel
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.models.weight_reader import ROUTERS
from specinfer.models.weight_sizes import LOOKED_UP, estimate_bytes
from specinfer.progress import Progress
from specinfer.runtime.kv_cache import gib
from specinfer.speculation_config import Quantization
from specinfer.support import Feature, check_support

_SHARE: Final = 0.5  # part of the memory that weights may take before they are rounded to fewer bits


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
        kernels = replace(kernels, int8_cache=config.kv_cache_dtype == "int8")
        if device.type == "cpu" and kernels.library is None:
            check_support(config.features | {Feature.TORCH: lacking or f"kernels is {config.kernels!r}"})
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


class Choice(NamedTuple):
    """A quantization, and the reason in a few words."""

    kind: Quantization
    reason: str

    def __str__(self) -> str:
        return f"quantization {self.kind} ({self.reason})"


def choose_quantization(
    model: OpenModel,
    *,
    hardware: Hardware,
    memory: int | None,
    divided: bool,
    streams: bool,
    share: float = 1.0,
) -> Choice:
    """Return the quantization of a model: its own blocks, else the most bits that fit.

    It depends on the size of the machine's memory, not on the part that is free now, so that each start
    writes the same text. `memory` is the option of that name; `divided` is True if processes divide layers,
    `streams` if layers that do not fit are read from the disk; `share` is this host's part of the weights.
    Reads the scales of some quantized folders, and no other weights.
    """
    device, dtype, kernels, _ = hardware
    if device.type != "cpu":
        return Choice("none", "quantized products run on CPUs only")
    if kernels.library is None:
        return Choice("none", "quantized products are slow without native kernels")
    most = machine_memory() if memory is None else memory

    def size(kind: Quantization) -> int:
        return round(share * estimate_bytes(model, dtype, kernels, kind))

    floats = str(dtype).removeprefix("torch.")
    matrices = _matrices(model)
    quantized = [name for name in matrices if model.dtype(name) is None]
    if not quantized:
        if streams or size("none") <= _SHARE * most:
            return Choice("none", f"{floats} takes {gib(size('none'))}; memory {gib(most)}")
        reason = f"{floats} would take {gib(size('none'))}, more than half of {gib(most)} of memory"
    elif isinstance(model, GGUFFile):
        if divided:
            reason = "processes cannot divide the file's blocks"
        elif streams or size("gguf") <= most or size("int4") > most:
            return Choice("gguf", _blocks(model, matrices, floats))
        else:
            return Choice("int4", f"its blocks would take {gib(size('gguf'))} of {gib(most)} of memory")
    elif isinstance(model, SafetensorsFolder) and all(_is_int4(model, name) for name in matrices):
        return Choice("int4", "the file's levels, without rounding")
    else:
        reason = "the file's numbers have no form of their own here"
    if streams or size("int8") <= _SHARE * most:
        return Choice("int8", reason)
    return Choice("int4", f"{reason}; int8 would take {gib(size('int8'))} of {gib(most)} of memory")


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the process's cgroup if that has fewer."""
    total, limit = int(psutil.virtual_memory().total), cgroup_memory()
    return total if limit is None else min(total, limit)


def _matrices(model: OpenModel) -> list[str]:
    """The names of the matrices that products multiply with; tied embeddings are also the output layer."""
    looked_up = LOOKED_UP[1:] if model.config.tie_embeddings else LOOKED_UP
    return [
        name
        for name, shape in model.shapes.items()
        if len(shape) > 1
        and not name.endswith(ROUTERS)
        and not name.endswith(looked_up)
        and not (isinstance(model, HostedFolder) and not model.has(name))
    ]


def _is_int4(model: SafetensorsFolder, name: str) -> bool:
    """True if int4 has a matrix's numbers; an output layer is int8 in any case."""
    return name.startswith("lm_head") or name.endswith(LOOKED_UP) or model.int4_reader(name) is not None


def _blocks(model: GGUFFile, matrices: Iterable[str], floats: str) -> str:
    """Describe what a file's matrices become."""
    own, rounded, plain = set[str](), set[str](), set[str]()
    for name in matrices:
        kinds = plain if model.dtype(name) is not None else own if model.has_own_blocks(name) else rounded
        kinds.add(model.kind(name))
    parts = [
        (own, "{} as they are"),
        (rounded, "{} rounded to blocks of 4 or 8 bits"),
        (plain, f"{{}} in {floats}"),
    ]
    return "; ".join(text.format(", ".join(sorted(kinds))) for kinds, text in parts if kinds)
