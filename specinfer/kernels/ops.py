"""The small operations around a transformer's products, in PyTorch and native.

Shapes: T rows, R chosen rows, D hidden size, F MLP size, V vocabulary. Each row is computed independently of
the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.library import Library
from specinfer.kernels.product import check_rows, check_tensor, float_code
from specinfer.kernels.structures import ACTIVATIONS, NormArgs

_CLAMP: Final = 7.0
_CLAMPED: Final = "clamped_swish"


def _clamped_swish(x: Tensor, up: Tensor | None = None) -> Tensor:
    """In float32, rounded once; with `up` times clamp(up, -7, 7) + 1."""
    clamped = x.float().clamp(max=_CLAMP)
    made = clamped * torch.sigmoid(1.702 * clamped)
    return (made if up is None else made * (up.float().clamp(-_CLAMP, _CLAMP) + 1)).to(x.dtype)


_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "gelu": F.gelu,
    _CLAMPED: _clamped_swish,
}


def torch_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name in PyTorch."""
    return _ACTIVATIONS[name]


@dataclass(frozen=True, slots=True)
class NormParts:
    """A norm of rows: RMSNorm, or LayerNorm if `centred`, which may have a bias."""

    weight_D: Tensor
    eps: float
    centred: bool = False
    bias_D: Tensor | None = None

    @property
    def args(self) -> NormArgs:
        """The library's structure, which points to this object's memory."""
        bias = None if self.bias_D is None else self.bias_D.data_ptr()
        return NormArgs(self.weight_D.data_ptr(), bias, self.eps, self.centred)


class Ops:
    """The operations between products except attention, in PyTorch; runs on every device."""

    __slots__ = ()

    def embed(self, token_ids_T: Tensor, table_VD: Tensor, scale: float) -> Tensor:
        """The rows of the table at `token_ids_T`, times `scale`, [T, D]."""
        x_TD = F.embedding(token_ids_T, table_VD)
        return x_TD if scale == 1.0 else x_TD * scale

    def add_norm(self, x_TD: Tensor, y_TD: Tensor | None, norm: NormParts) -> Tensor:
        """x += y in place, if there is a y; then the norm of x as a new tensor, [T, D]."""
        if y_TD is not None:
            x_TD += y_TD
        return _normed(x_TD, norm)

    def norm_of_sum(
        self, x_TD: Tensor, y_TD: Tensor | None, norm: NormParts, rows_R: Tensor | None = None
    ) -> Tensor:
        """The norm of x + y for these rows (None: all), [R, D]; x is unchanged."""
        if rows_R is not None:
            x_TD = x_TD.index_select(0, rows_R)
            y_TD = None if y_TD is None else y_TD.index_select(0, rows_R)
        return _normed(x_TD if y_TD is None else x_TD + y_TD, norm)

    def gate(self, gate_up_T2F: Tensor, activation: str) -> Tensor:
        """act(gate) * up, [T, F]; a row holds gate, then up.

        With clamped_swish up becomes clamp(up, -7, 7) + 1 (gpt-oss).
        """
        halves = (part.chunk(2, dim=-1) for part in _single_rows(gate_up_T2F))
        if activation == _CLAMPED:
            return torch.cat([_clamped_swish(gate_TF, up_TF) for gate_TF, up_TF in halves])
        act = _ACTIVATIONS[activation]
        return torch.cat([act(gate_TF) * up_TF for gate_TF, up_TF in halves])

    def activate(self, x_TF: Tensor, activation: str) -> Tensor:
        """act(x), [T, F]."""
        return torch.cat([_ACTIVATIONS[activation](part) for part in _single_rows(x_TF)])

    def choose_experts(
        self, logits_TC: Tensor, count: int, each: int, *, normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """The `each` experts of every row, ascending, int64 [T, each], and their weights, float32.

        The experts with the largest of the first `count` logits are chosen; ties go to the lower number.
        Weights are softmaxes over the chosen if `normalized`, else over all. A row with a logit that is not
        finite gets the first experts and NaN weights, which end its request.
        """
        logits_TE = logits_TC[:, :count]
        sound_T1 = logits_TE.isfinite().all(1, keepdim=True)
        logits_TE = logits_TE.where(sound_T1, torch.zeros(()))
        best_TE = logits_TE.sort(dim=1, descending=True, stable=True).indices
        numbers_TK = best_TE[:, :each].sort(1).values
        if normalized:
            weights_TK = logits_TE.gather(1, numbers_TK).softmax(1)
        else:
            weights_TK = logits_TE.softmax(1).gather(1, numbers_TK)
        return numbers_TK, weights_TK.where(sound_T1, torch.tensor(torch.nan))

    def open_gates(self, logits_TC: Tensor, column: int) -> Tensor:
        """The sigmoids of a column, float32 [T]."""
        # As softmax([gate, 0]), which is computed row by row; torch.sigmoid splits tensors at any element.
        gate_T1 = logits_TC[:, column : column + 1]
        return torch.cat([gate_T1, torch.zeros_like(gate_T1)], 1).softmax(1)[:, 0]

    def add_weighted(self, total_TD: Tensor, made_RD: Tensor, rows_R: Tensor, weights_R: Tensor) -> None:
        """total[rows] += weights * made in place, in float32; rows must be distinct."""
        total_TD[rows_R] += weights_R[:, None] * made_RD.float()


def _normed(x_TD: Tensor, norm: NormParts) -> Tensor:
    shape = norm.weight_D.shape
    if norm.centred:
        return F.layer_norm(x_TD, shape, norm.weight_D, norm.bias_D, norm.eps)
    return F.rms_norm(x_TD, shape, norm.weight_D, norm.eps)


def _single_rows(x_TC: Tensor) -> tuple[Tensor, ...]:
    """Split into single rows on a CPU.

    Torch splits a large tensor between threads at any element, and rounds differently at the end of a part.
    """
    alone = x_TC.device.type == "cpu" and len(x_TC) > 1
    return x_TC.tensor_split(len(x_TC)) if alone else (x_TC,)


class NativeOps(Ops):
    """The Ops of a CPU in bfloat16 and float32."""

    __slots__ = ("library",)

    def __init__(self, library: Library) -> None:
        self.library = library

    def embed(self, token_ids_T: Tensor, table_VD: Tensor, scale: float) -> Tensor:
        """See Ops; ids are int64 and index rows of the table."""
        rows, size = len(token_ids_T), table_VD.shape[1]
        check_tensor("token ids", token_ids_T, torch.int64, rows)
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

    def add_norm(self, x_TD: Tensor, y_TD: Tensor | None, norm: NormParts) -> Tensor:
        """See Ops."""
        return self._norm(x_TD, y_TD, norm, None, in_place=True)

    def norm_of_sum(
        self, x_TD: Tensor, y_TD: Tensor | None, norm: NormParts, rows_R: Tensor | None = None
    ) -> Tensor:
        """See Ops; chosen rows are int64."""
        return self._norm(x_TD, y_TD, norm, rows_R, in_place=False)

    def _norm(
        self, x_TD: Tensor, y_TD: Tensor | None, norm: NormParts, rows_R: Tensor | None, *, in_place: bool
    ) -> Tensor:
        size = x_TD.shape[-1]
        code = check_rows(x_TD, size)
        for name, part in (("weight", norm.weight_D), ("bias", norm.bias_D)):
            if part is not None:
                check_tensor(name, part, x_TD.dtype, size)
        if y_TD is not None:
            check_tensor("y", y_TD, x_TD.dtype, *x_TD.shape)
        if rows_R is not None:
            check_tensor("chosen rows", rows_R, torch.int64, len(rows_R))
        rows = (x_TD if rows_R is None else rows_R).size(0)
        out = x_TD.new_empty(rows, size)
        self.library.add_norm(
            code,
            x_TD.data_ptr(),
            None if y_TD is None else y_TD.data_ptr(),
            ctypes.byref(norm.args),
            out.data_ptr(),
            None if rows_R is None else rows_R.data_ptr(),
            rows,
            size,
            in_place,
        )
        return out

    def gate(self, gate_up_T2F: Tensor, activation: str) -> Tensor:
        """See Ops."""
        if gate_up_T2F.shape[-1] % 2 or not gate_up_T2F.is_contiguous():
            raise ValueError(f"gate_up must be contiguous rows of even size, got {list(gate_up_T2F.shape)}")
        rows, size = gate_up_T2F.size(0), gate_up_T2F.size(1) // 2
        code = float_code(gate_up_T2F)
        out_TF = gate_up_T2F.new_empty(rows, size)
        given = ACTIVATIONS[activation], gate_up_T2F.data_ptr(), out_TF.data_ptr()
        self.library.gate(code, *given, rows, size)
        return out_TF

    def activate(self, x_TF: Tensor, activation: str) -> Tensor:
        """See Ops."""
        code, out_TF = check_rows(x_TF, x_TF.shape[-1]), torch.empty_like(x_TF)
        given = ACTIVATIONS[activation], x_TF.data_ptr(), out_TF.data_ptr()
        self.library.activate(code, *given, *x_TF.shape)
        return out_TF

    def choose_experts(
        self, logits_TC: Tensor, count: int, each: int, *, normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """See Ops; logits are contiguous float32."""
        rows, stride = logits_TC.shape
        check_tensor("a router's logits", logits_TC, torch.float32, rows, stride)
        numbers_TK = torch.empty(rows, each, dtype=torch.int64)
        weights_TK = torch.empty(rows, each)
        given = logits_TC.data_ptr(), stride, rows, count, each, normalized
        self.library.choose_experts(*given, numbers_TK.data_ptr(), weights_TK.data_ptr())
        return numbers_TK, weights_TK

    def open_gates(self, logits_TC: Tensor, column: int) -> Tensor:
        """See Ops; logits are contiguous float32."""
        rows, stride = logits_TC.shape
        check_tensor("a router's logits", logits_TC, torch.float32, rows, stride)
        open_T = torch.empty(rows)
        begin = logits_TC.data_ptr() + column * logits_TC.element_size()
        self.library.open_gates(begin, stride, rows, open_T.data_ptr())
        return open_T

    def add_weighted(self, total_TD: Tensor, made_RD: Tensor, rows_R: Tensor, weights_R: Tensor) -> None:
        """See Ops."""
        weights_R = weights_R.contiguous()
        code, size = check_rows(made_RD, total_TD.shape[1]), total_TD.shape[1]
        given = total_TD.data_ptr(), made_RD.data_ptr(), rows_R.data_ptr(), weights_R.data_ptr()
        self.library.add_weighted(code, *given, len(made_RD), size)
