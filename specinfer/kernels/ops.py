"""The small operations between a transformer's products, and their PyTorch twins.

Shapes: T rows, D hidden size, F MLP size. Rows are independent: none is read for another's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(Protocol):
    """What lies between products, apart from attention."""

    def add_rms_norm(self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """x += y in place, where there is a y; then x / rms(x) * weight as a new tensor, [T, D]."""
        ...

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """silu(gate) * up, [T, F]; a row holds gate, then up."""
        ...

    def gelu_tanh_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """gelu(gate) * up, [T, F], with tanh for the error function; a row holds gate, then up."""
        ...


class TorchOps:
    """The Ops of any device and dtype, and the native ones' oracle."""

    __slots__ = ()

    def add_rms_norm(self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """As Ops says."""
        if y_TD is not None:
            x_TD += y_TD
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """As Ops says."""
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        return F.silu(gate_TF) * up_TF

    def gelu_tanh_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """As Ops says."""
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
        return F.gelu(gate_TF, approximate="tanh") * up_TF


class NativeOps:
    """The Ops of a CPU in bfloat16 and float32; `kernels.build.load_library` comes before it."""

    __slots__ = ("_add_rms_norm", "_gelu_tanh_mul", "_silu_mul")

    def __init__(self) -> None:
        ops = torch.ops.specinfer
        self._add_rms_norm: Callable[..., Tensor] = ops.add_rms_norm.default
        self._silu_mul: Callable[[Tensor], Tensor] = ops.silu_mul.default
        self._gelu_tanh_mul: Callable[[Tensor], Tensor] = ops.gelu_tanh_mul.default

    def add_rms_norm(self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """As Ops says."""
        return self._add_rms_norm(x_TD, y_TD, weight_D, eps)

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """As Ops says."""
        return self._silu_mul(gate_up_T2F)

    def gelu_tanh_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """As Ops says."""
        return self._gelu_tanh_mul(gate_up_T2F)
