"""The small operations around a transformer's products, in PyTorch and native.

Shapes: T rows, R of them that are chosen, D hidden size, F MLP size, V vocabulary. Rows are independent: none
is read for another's result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.library import Library
from specinfer.kernels.product import check_rows, float_code


class Ops:
    """What lies between products, apart from attention, in PyTorch: it runs everywhere."""

    __slots__ = ()

    def embed(self, token_ids_T: Tensor, table_VD: Tensor, scale: float) -> Tensor:
        """The rows of the table at `token_ids_T`, times `scale`, [T, D]."""
        x_TD = F.embedding(token_ids_T, table_VD)
        return x_TD if scale == 1.0 else x_TD * scale

    def add_rms_norm(self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """x += y in place, where there is a y; then x / rms(x) * weight as a new tensor, [T, D]."""
        if y_TD is not None:
            x_TD += y_TD
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)

    def rms_norm_of_sum(
        self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float, rows_R: Tensor | None = None
    ) -> Tensor:
        """The same of these rows (None: all), [R, D], where x stays as it is."""
        if rows_R is not None:
            x_TD = x_TD.index_select(0, rows_R)
            y_TD = None if y_TD is None else y_TD.index_select(0, rows_R)
        return F.rms_norm(x_TD if y_TD is None else x_TD + y_TD, weight_D.shape, weight_D, eps)

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """silu(gate) * up, [T, F]; a row holds gate, then up."""
        return _by_rows(F.silu, gate_up_T2F)

    def gelu_tanh_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """gelu(gate) * up in its tanh form, [T, F]; a row holds gate, then up."""
        return _by_rows(partial(F.gelu, approximate="tanh"), gate_up_T2F)


def _by_rows(act: Callable[[Tensor], Tensor], gate_up_T2F: Tensor) -> Tensor:
    """act(gate) * up; on a CPU row by row.

    torch cuts a large tensor anywhere among its threads, and rounds differently where a part ends.
    """
    alone = gate_up_T2F.device.type == "cpu" and len(gate_up_T2F) > 1
    parts = gate_up_T2F.tensor_split(len(gate_up_T2F)) if alone else [gate_up_T2F]
    halves = (part.chunk(2, dim=-1) for part in parts)
    return torch.cat([act(gate_TF) * up_TF for gate_TF, up_TF in halves])


class NativeOps(Ops):
    """The Ops of a CPU in bfloat16 and float32."""

    __slots__ = ("library",)

    def __init__(self, library: Library) -> None:
        self.library = library

    def embed(self, token_ids_T: Tensor, table_VD: Tensor, scale: float) -> Tensor:
        """As Ops says; ids are int64 and those of rows of the table."""
        rows, size = len(token_ids_T), table_VD.shape[1]
        if token_ids_T.dtype is not torch.int64 or not token_ids_T.is_contiguous():
            raise TypeError(f"token ids must be contiguous int64, got {token_ids_T.dtype}")
        out_TD = table_VD.new_empty(rows, size)
        there = self.library.embed(
            float_code(table_VD),
            table_VD.data_ptr(),
            len(table_VD),
            token_ids_T.data_ptr(),
            scale,
            out_TD.data_ptr(),
            rows,
            size,
        )
        if not there:
            raise IndexError(f"token ids must be 0 .. {len(table_VD) - 1}")
        return out_TD

    def add_rms_norm(self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """As Ops says."""
        return self._norm(x_TD, y_TD, weight_D, eps, None, in_place=True)

    def rms_norm_of_sum(
        self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float, rows_R: Tensor | None = None
    ) -> Tensor:
        """As Ops says; chosen rows are int64."""
        return self._norm(x_TD, y_TD, weight_D, eps, rows_R, in_place=False)

    def _norm(
        self,
        x_TD: Tensor,
        y_TD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        rows_R: Tensor | None,
        *,
        in_place: bool,
    ) -> Tensor:
        size = x_TD.shape[-1]
        code = check_rows(x_TD, size)
        if weight_D.shape != (size,) or weight_D.dtype is not x_TD.dtype or not weight_D.is_contiguous():
            raise ValueError(
                f"weight must be [{size}] of x's dtype, got {list(weight_D.shape)} of {weight_D.dtype}"
            )
        if y_TD is not None and (
            y_TD.shape != x_TD.shape or y_TD.dtype is not x_TD.dtype or not y_TD.is_contiguous()
        ):
            raise ValueError(f"y must be as x is, {list(x_TD.shape)}, got {list(y_TD.shape)} of {y_TD.dtype}")
        if rows_R is not None and (rows_R.dtype is not torch.int64 or not rows_R.is_contiguous()):
            raise TypeError(f"chosen rows must be contiguous int64, got {rows_R.dtype}")
        rows = len(x_TD) if rows_R is None else len(rows_R)
        out = x_TD.new_empty(rows, size)
        self.library.add_rms_norm(
            code,
            x_TD.data_ptr(),
            None if y_TD is None else y_TD.data_ptr(),
            weight_D.data_ptr(),
            out.data_ptr(),
            None if rows_R is None else rows_R.data_ptr(),
            rows,
            size,
            eps,
            in_place,
        )
        return out

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """As Ops says."""
        return self._gate(gate_up_T2F, gelu=False)

    def gelu_tanh_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """As Ops says."""
        return self._gate(gate_up_T2F, gelu=True)

    def _gate(self, gate_up_T2F: Tensor, *, gelu: bool) -> Tensor:
        if gate_up_T2F.shape[-1] % 2 or not gate_up_T2F.is_contiguous():
            raise ValueError(f"gate_up must be contiguous rows of even size, got {list(gate_up_T2F.shape)}")
        rows, size = len(gate_up_T2F), gate_up_T2F.shape[1] // 2
        code = float_code(gate_up_T2F)
        out_TF = gate_up_T2F.new_empty(rows, size)
        self.library.gate(code, gelu, gate_up_T2F.data_ptr(), out_TF.data_ptr(), rows, size)
        return out_TF
