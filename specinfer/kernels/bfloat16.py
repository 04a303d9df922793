"""Products with bfloat16 weights in native code (cpu/bfloat16.cpp).

Weights lie in blocks of 16 output channels and are read straight through; oneDNN's packed layout, which
models/linear.py uses elsewhere, is read slower on CPUs that have no AMX. A row's result does not depend on
the rows beside it, or on whether there are any.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.product import NativeProduct
from specinfer.kernels.quantized import BLOCK

_STEP: Final = 4  # inner sizes are padded to it


def is_fastest() -> bool:
    """Whether this CPU multiplies pairs of bfloat16, and has no matrix unit that is faster still."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def tiled_product(weight: Tensor, bias: Tensor | None) -> NativeProduct:
    """The product with a bfloat16 weight [channels, inner] and bias [channels]; `weight` is not kept.

    `kernels.build.load_library` comes before it.
    """
    return NativeProduct("bfloat16", (tile(weight),), None if bias is None else bias.float(), len(weight))


def tile(weight: Tensor) -> Tensor:
    """bfloat16 [channels, inner] as the native product reads it: [blocks, inner / 2, BLOCK, 2], padded."""
    channels, inner = weight.shape
    whole = F.pad(weight, (0, -inner % _STEP, 0, -channels % BLOCK))
    pairs = whole.view(torch.int32).view(-1, BLOCK, whole.shape[1] // 2).transpose(1, 2).contiguous()
    return pairs.view(torch.bfloat16).view(-1, whole.shape[1] // 2, BLOCK, 2)
