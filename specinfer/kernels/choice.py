"""Which kernels a model runs on: the native ones where they can be had, their PyTorch twins elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from specinfer.attention.backend import AttentionBackend
from specinfer.attention.native import NativeAttention
from specinfer.attention.sdpa import SdpaAttention
from specinfer.config import KernelChoice
from specinfer.errors import ConfigError, KernelBuildError
from specinfer.kernels.bfloat16 import is_fastest, tiled_product
from specinfer.kernels.build import load_library
from specinfer.kernels.ops import NativeOps, Ops, TorchOps
from specinfer.kernels.product import Product
from specinfer.kernels.quantized import NativeProducts, Products, TorchProducts
from specinfer.kernels.sampling import NativeScan
from specinfer.progress import Progress
from specinfer.verify.scan import NUMPY, Scan


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a model computes what lies between its products, and how its logits are read."""

    ops: Ops
    attention: AttentionBackend
    scan: Scan
    products: Products  # of quantized weights
    bfloat16: Callable[[Tensor, Tensor | None], Product] | None = None  # products; None: oneDNN's
    batch_invariant: bool | None = None  # as EngineConfig has it


TORCH: Final = Kernels(TorchOps(), SdpaAttention(), NUMPY, TorchProducts())


def choose_kernels(
    wanted: KernelChoice,
    device: torch.device,
    progress: Progress | None = None,
    batch_invariant: bool | None = None,
) -> tuple[Kernels, str | None]:
    """The kernels for `device`, and why they are the twins where native ones were to be had; else None.

    Compiles the native ones on first use; `batch_invariant` is EngineConfig's. With "native", raises
    ConfigError on another device than a CPU and KernelBuildError where they cannot be built.
    """
    if wanted == "native" and device.type != "cpu":
        raise ConfigError(f"kernels is 'native' on device {device}; allowed there: auto, torch")
    twins = replace(
        TORCH, attention=SdpaAttention(by_paths=bool(batch_invariant)), batch_invariant=batch_invariant
    )
    if wanted == "torch" or device.type != "cpu":
        return twins, None
    try:
        load_library(progress)
    except KernelBuildError as error:
        if wanted == "native":
            raise
        return twins, str(error)
    products = NativeProducts(onednn=torch.cpu._is_amx_tile_supported())
    bfloat16 = tiled_product if is_fastest() else None
    return Kernels(NativeOps(), NativeAttention(), NativeScan(), products, bfloat16, batch_invariant), None
