"""Ops: the small operations around a transformer's products, in PyTorch; native_ops.py has native ones.

Shapes: T rows, R chosen rows, D hidden size, F MLP size, V vocabulary. Each row is computed independently of
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.recurrence import RecurrenceParts, recur
from specinfer.kernels.states import StatePass
from specinfer.kernels.structures import NormArgs, ScoresArgs

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
    "relu2": lambda x: F.relu(x).square(),
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


@dataclass(frozen=True, slots=True)
class SigmoidScores:
    """Scores of experts that are sigmoids of their logits; a softmax has none of this."""

    bias_E: Tensor | None  # float32, added to scores in choosing experts, not in weighing them
    scale: float = 1.0  # of the weights
    epsilon: float = 0.0  # added to the sum of the chosen experts' scores, which divides normalized ones

    @property
    def args(self) -> ScoresArgs:
        """The library's structure, which points to this object's memory."""
        bias = None if self.bias_E is None else self.bias_E.data_ptr()
        return ScoresArgs(True, self.scale, self.epsilon, bias)


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

    def predict_streams(
        self, x_TSD: Tensor, routed_TS: Tensor, coefficients_CS: Tensor, active: int
    ) -> tuple[Tensor, Tensor]:
        """x_j + the sum of x_k * f_jk, [T, S, D], and its active stream, [T, D].

        Factors f are coefficients [S * S, S] times tanh(routed / D); both are float32.
        """
        _, count, size = x_TSD.shape
        factors_TSS = _factors(routed_TS, coefficients_CS, size).view(-1, count, count)
        x = x_TSD.float()
        for k in range(count):
            x = x + x_TSD[:, k, None].float() * factors_TSS[:, :, k, None]
        predicted_TSD = x.to(x_TSD.dtype)
        return predicted_TSD, predicted_TSD[:, active].contiguous()

    def correct_streams(
        self, x_TSD: Tensor, routed_TS: Tensor, coefficients_SS: Tensor, before_TD: Tensor, behind_TD: Tensor
    ) -> None:
        """x_j += (behind - before) * (f_j + 1) in place, with coefficients [S, S]."""
        factors_TS = _factors(routed_TS, coefficients_SS, x_TSD.shape[2]) + 1
        moved_TD = behind_TD.float() - before_TD.float()
        x_TSD.copy_(x_TSD.float() + moved_TD[:, None] * factors_TS[:, :, None])

    def cut_off(self, gate_TF: Tensor, deviations: float) -> None:
        """Subtract each row's mean and that many standard deviations in place; negative values become 0.

        Gates may be columns of longer rows.
        """
        wide_TF = gate_TF.float()
        mean_T1 = wide_TF.mean(-1, keepdim=True)
        deviation_T1 = (wide_TF - mean_T1).square().mean(-1, keepdim=True).sqrt()
        gate_TF.copy_((wide_TF - (mean_T1 + deviation_T1 * deviations)).relu())

    def activate(self, x_TF: Tensor, activation: str) -> Tensor:
        """act(x), [T, F]."""
        return torch.cat([_ACTIVATIONS[activation](part) for part in _single_rows(x_TF)])

    def choose_experts(
        self,
        logits_TC: Tensor,
        count: int,
        each: int,
        *,
        normalized: bool,
        scores: SigmoidScores | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The `each` experts of every row, ascending, int64 [T, each], and their weights, float32.

        The experts with the largest of the first `count` logits are chosen; ties go to the lower number.
        Weights are softmaxes over the chosen if `normalized`, else over all, or such `scores`. A row with a
        logit that is not finite gets the first experts and NaN weights, which end its request.
        """
        logits_TE = logits_TC[:, :count]
        sound_T1 = logits_TE.isfinite().all(1, keepdim=True)
        logits_TE = logits_TE.where(sound_T1, torch.zeros(()))
        score_TE = logits_TE
        if scores is not None:
            score_TE = torch.cat([torch.sigmoid(row) for row in _single_rows(logits_TE)])
        choice_TE = score_TE if scores is None or scores.bias_E is None else score_TE + scores.bias_E
        best_TE = choice_TE.sort(dim=1, descending=True, stable=True).indices
        numbers_TK = best_TE[:, :each].sort(1).values
        if scores is not None:
            weights_TK = score_TE.gather(1, numbers_TK)
            if normalized:
                weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + scores.epsilon)
            weights_TK = weights_TK * scores.scale
        elif normalized:
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

    def open_values(self, values_TC: Tensor, gates_TC: Tensor) -> Tensor:
        """values * sigmoid(gates), [T, C], in float32, rounded once; may change the values."""
        pairs = zip(_single_rows(values_TC), _single_rows(gates_TC), strict=True)
        return torch.cat([(v.float() * torch.sigmoid(g.float())).to(v.dtype) for v, g in pairs])

    def recur(
        self, parts: RecurrenceParts, made_TC: Tensor, gates_TG: Tensor | None, states: StatePass
    ) -> Tensor:
        """The rows for the last product of a recurrent block; see kernels/recurrence.py."""
        return recur(parts, made_TC, gates_TG, states)


def _factors(routed_TS: Tensor, coefficients_CS: Tensor, size: int) -> Tensor:
    """The factors of streams, [T, C]; each row alone."""
    rows = _single_rows(routed_TS)
    return torch.cat([(coefficients_CS * torch.tanh(row / size)[:, None]).sum(-1) for row in rows])


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
