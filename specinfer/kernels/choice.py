"""Selects the kernels of a model: native ones if available, else their PyTorch twins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from specinfer.attention.backend import AttentionBackend
from specinfer.attention.sdpa import SdpaAttention
from specinfer.config import KernelChoice
from specinfer.errors import ConfigError, KernelBuildError
from specinfer.kernels.attention import NativeAttention
from specinfer.kernels.library import Library, load_library
from specinfer.kernels.machine import cache_bytes, cpu_info
from specinfer.kernels.native_ops import NativeOps
from specinfer.kernels.ops import Ops
from specinfer.kernels.quantized import NativeProducts, Products
from specinfer.kernels.sampling import NativeScan
from specinfer.progress import Progress
from specinfer.verify.scan import NUMPY, Scan


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that a model computes with."""

    ops: Ops
    attention: AttentionBackend
    products: Products
    library: Library | None = None  # None: PyTorch's
    int8_cache: bool = False  # K and V are stored in int8, else unchanged

    @property
    def scan(self) -> Scan:
        """Scans of logits in host memory, wherever they were computed."""
        return NUMPY if self.library is None else NativeScan(self.library)

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a KV cache of a model with activations of `dtype`."""
        return torch.int8 if self.int8_cache else dtype


TORCH: Final = Kernels(Ops(), SdpaAttention(), Products())


def choose_kernels(
    wanted: KernelChoice, device: torch.device, progress: Progress | None = None
) -> tuple[Kernels, str | None]:
    """The kernels for `device`, and the reason if the twins replace native ones, else None.

    Compiles the native ones on first use if no wheel contains them. With "native", raises ConfigError for a
    device other than a CPU, and KernelBuildError if they are unavailable.
    """
    if wanted == "native" and device.type != "cpu":
        raise ConfigError(f"kernels is 'native' on device {device}; allowed there: auto, torch")
    if wanted == "torch" or device.type != "cpu":
        return TORCH, None
    try:
        library = load_library(progress)
    except KernelBuildError as error:
        if wanted == "native":
            raise
        return TORCH, str(error)
    return native_kernels(library), None


def native_kernels(library: Library) -> Kernels:
    """The kernels of a library."""
    return Kernels(NativeOps(library), NativeAttention(library), NativeProducts(library), library)


def draft_kernels(kernels: Kernels) -> Kernels:
    """Kernels for a draft: a row's result may depend on the number of rows, which is faster.

    Its cache is exact.
    """
    return replace(kernels, products=kernels.products.but(loose=True), int8_cache=False)


def streaming_kernels(kernels: Kernels, weights: int) -> Kernels:
    """Kernels for a model with `weights` bytes of weights.

    On AMD's CPUs weights that exceed the caches are read past them. On an Intel Xeon that takes 1.3 to 1.7
    times as long, and other CPUs were not measured.
    """
    past = weights > cache_bytes() and cpu_info("vendor_id") == "AuthenticAMD"
    return replace(kernels, products=kernels.products.but(nontemporal=past))
