"""NativeOps: the small operations around a transformer's products, by the native library.

Shapes: T rows, R chosen rows, D hidden size, F MLP size, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from specinfer.kernels.library import Library
from specinfer.kernels.native_recurrence import NativeRecurrence, states_args
from specinfer.kernels.ops import NormParts, Ops, SigmoidScores
from specinfer.kernels.product import check_rows, check_tensor, float_code
from specinfer.kernels.recurrence import RecurrenceParts
from specinfer.kernels.states import StatePass
from specinfer.kernels.structures import ACTIVATIONS, ScoresArgs, StreamsArgs


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

    def predict_streams(
        self, x_TSD: Tensor, routed_TS: Tensor, coefficients_CS: Tensor, active: int
    ) -> tuple[Tensor, Tensor]:
        """See Ops."""
        rows, count, size = x_TSD.shape
        out_TSD, active_TD = torch.empty_like(x_TSD), x_TSD.new_empty(rows, size)
        given = x_TSD.data_ptr(), routed_TS.data_ptr(), coefficients_CS.data_ptr()
        streams = ctypes.byref(StreamsArgs(count, size, active))
        made = out_TSD.data_ptr(), active_TD.data_ptr()
        self.library.predict_streams(float_code(x_TSD), streams, *given, *made, rows)
        return out_TSD, active_TD

    def correct_streams(
        self, x_TSD: Tensor, routed_TS: Tensor, coefficients_SS: Tensor, before_TD: Tensor, behind_TD: Tensor
    ) -> None:
        """See Ops."""
        rows, count, size = x_TSD.shape
        streams = ctypes.byref(StreamsArgs(count, size, 0))
        given = (one.data_ptr() for one in (x_TSD, routed_TS, coefficients_SS, before_TD, behind_TD))
        self.library.correct_streams(float_code(x_TSD), streams, *given, rows)

    def cut_off(self, gate_TF: Tensor, deviations: float) -> None:
        """See Ops."""
        rows, size = gate_TF.shape
        given = gate_TF.data_ptr(), gate_TF.stride(0), deviations
        self.library.cut_off(float_code(gate_TF), *given, rows, size)

    def activate(self, x_TF: Tensor, activation: str) -> Tensor:
        """See Ops."""
        code, out_TF = check_rows(x_TF, x_TF.shape[-1]), torch.empty_like(x_TF)
        given = ACTIVATIONS[activation], x_TF.data_ptr(), out_TF.data_ptr()
        self.library.activate(code, *given, *x_TF.shape)
        return out_TF

    def choose_experts(
        self,
        logits_TC: Tensor,
        count: int,
        each: int,
        *,
        normalized: bool,
        scores: SigmoidScores | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See Ops; logits are contiguous float32."""
        rows, stride = logits_TC.shape
        check_tensor("a router's logits", logits_TC, torch.float32, rows, stride)
        numbers_TK = torch.empty(rows, each, dtype=torch.int64)
        weights_TK = torch.empty(rows, each)
        given = logits_TC.data_ptr(), stride, rows, count, each, normalized
        chosen = ctypes.byref(ScoresArgs() if scores is None else scores.args)
        self.library.choose_experts(*given, chosen, numbers_TK.data_ptr(), weights_TK.data_ptr())
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

    def recur(
        self, parts: RecurrenceParts, made_TC: Tensor, gates_TG: Tensor | None, states: StatePass
    ) -> Tensor:
        """See Ops; raises ValueError if rows, gates or states do not fit the block."""
        native, rows = NativeRecurrence.of(parts), len(made_TC)
        native.check(states)
        code = check_rows(made_TC, parts.sizes.width)
        if parts.gates is not None:
            given_TG = made_TC[:0] if gates_TG is None else gates_TG
            check_tensor("gates", given_TG, torch.float32, rows, parts.sizes.gates)
        out_TV = made_TC.new_empty(rows, parts.sizes.values)
        block = ctypes.byref(native.args), code, made_TC.data_ptr()
        gates = None if gates_TG is None else gates_TG.data_ptr()
        given = *block, gates, ctypes.byref(states_args(states, rows, self.library)), rows
        if parts.total is None or not parts.sizes.whole_heads:
            self.library.recur(*given, out_TV.data_ptr())
            return out_TV
        values_TV = torch.empty(rows, parts.sizes.values)
        squares_TN = torch.empty(rows, parts.sizes.whole_heads)
        made = values_TV.data_ptr(), squares_TN.data_ptr()
        self.library.recur_alone(*given, *made, out_TV.data_ptr())
        parts.total(squares_TN.view(torch.int32))  # others have zeros in their place
        self.library.norm_values(*block, *made, rows, out_TV.data_ptr())
        return out_TV

    def open_values(self, values_TC: Tensor, gates_TC: Tensor) -> Tensor:
        """See Ops; changes the values in place."""
        code, (rows, size) = check_rows(values_TC, values_TC.shape[1]), values_TC.shape
        if gates_TC.shape != values_TC.shape or gates_TC.dtype != values_TC.dtype or gates_TC.stride(1) != 1:
            raise ValueError(f"gates must be rows of {size} {values_TC.dtype}, got {list(gates_TC.shape)}")
        given = gates_TC.data_ptr(), gates_TC.stride(0), values_TC.data_ptr()
        self.library.open_values(code, *given, rows, size)
        return values_TC
