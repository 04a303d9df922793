"""RecurrenceParts: a recurrent block's matrices and numbers; and its computation in PyTorch.

Shapes: T rows, C channels of the convolution, N heads, K key size, V value size, G gates, F inputs of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.product import Product
from specinfer.kernels.recurrence_config import LANES, GateNorm, LayerKind, Recurrence
from specinfer.kernels.states import ZERO, StateMemory, StatePass

_L2_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceParts:
    """A recurrent block, whose sizes state the formulas.

    A row of a short convolution's first product holds the input's factor, the output's gate and the input
    (LFM2's B, C, x). A row of other blocks holds the output's gate z [N V], the convolution's inputs [C], and
    the dt [N] of Mamba-2. These inputs are q, k, v, or Mamba-2's x, B, C; silu follows their convolution.
    """

    layer: int  # among the model's recurrent layers
    sizes: Recurrence
    products: tuple[Product, Product]  # the first, and the last, [N V] (or [C]) -> D
    gates: Product | None  # beta, then the decay's input, of each head: float32 [T, 2 N]; gated delta only
    conv_CT: Tensor  # float32 [C, taps], contiguous
    conv_bias_C: Tensor | None  # float32
    decay_N: Tensor | None  # float32, -exp(A_log)
    dt_bias_N: Tensor | None  # float32
    skip_N: Tensor | None  # float32, Mamba-2's D: output += D x
    norm_weight: Tensor | None  # float32, [V] for each head, or [N V]
    # Adds int32 numbers of all ranks up in place; None: its last product does, or there are none.
    total: Callable[[Tensor], Tensor] | None = None


class _State(NamedTuple):
    """A layer's state after some token."""

    matrices_NKV: Tensor
    tail_C: Tensor  # the last taps - 1 inputs of the convolution, [taps - 1, C]


def recur(parts: RecurrenceParts, made_TC: Tensor, gates_TG: Tensor | None, states: StatePass) -> Tensor:
    """The rows for the last product, [T, N V] (or [T, C]), in the dtype of the first product's rows.

    `gates_TG` are the gates of a gated delta rule. Writes states, saves and rings as kernels/states.py says.
    Computes token after token in float32, each by itself.
    """
    given_TF, behind_TV = _inputs(parts, made_TC, gates_TG)
    memory, rows = states.memory, states.rows
    out_TV = made_TC.new_empty(len(made_TC), parts.sizes.values)
    visits_V5 = rows.visits_V5.tolist()
    saves = defaultdict[tuple[int, int], list[int]](list)
    for request, visits, slot in rows.saves_S3.tolist():
        saves[request, visits].append(slot)
    for number, (first, count, chain, source, slot) in enumerate(rows.requests_R5.tolist()):
        state = _read(parts, memory, source)
        ring_NF = memory.rings_LRNF[parts.layer, slot]
        nodes: dict[int, _State] = {}  # states after nodes with children
        for visit, (row, place, parent, depth, has_children) in enumerate(visits_V5[first : first + count]):
            given_F = ring_NF[place] if row < 0 else given_TF[row]
            made, value_V = _step(parts, nodes.get(parent, state), given_F)
            if row >= 0:
                out_TV[row] = _gated(parts, value_V, behind_TV[row])
            if not depth:
                state = made
                for to in saves[number, visit + 1]:
                    _write(parts, memory, to, state)
                continue
            if row >= 0:
                ring_NF[place] = given_F
            if has_children:
                nodes[visit] = made
        if chain or source != slot:
            _write(parts, memory, slot, state)
    return out_TV


def _inputs(parts: RecurrenceParts, made_TC: Tensor, gates_TG: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each row's inputs of the recurrence, float32 [T, F], and its output's gate."""
    made_TC = made_TC.float()
    if parts.sizes.kind is LayerKind.SHORT_CONV:
        factor_TC, behind_TC, x_TC = made_TC.chunk(3, 1)
        return factor_TC * x_TC, behind_TC
    behind_TV, given_TF = made_TC.tensor_split([parts.sizes.values], 1)
    return given_TF if gates_TG is None else torch.cat([given_TF, gates_TG], 1), behind_TV


def _step(parts: RecurrenceParts, state: _State, given_F: Tensor) -> tuple[_State, Tensor]:
    """The state after a token with these inputs, and the token's values."""
    r = parts.sizes
    N, K, V = r.heads, r.key_size, r.value_size
    window_C = torch.cat([state.tail_C, given_F[None, : r.channels]])
    x_C = (window_C.T * parts.conv_CT).sum(1)
    if parts.conv_bias_C is not None:
        x_C = x_C + parts.conv_bias_C
    if r.kind is LayerKind.SHORT_CONV:
        return _State(state.matrices_NKV, window_C[1:]), x_C
    x_C, keys = F.silu(x_C), r.groups * K
    S_NKV, decay_N, bias_N = state.matrices_NKV, parts.decay_N, parts.dt_bias_N
    assert decay_N is not None, "only a short convolution has none"
    assert bias_N is not None, "likewise"
    dt_N = F.softplus(given_F[-N:] + bias_N)
    if r.kind is LayerKind.GATED_DELTA:
        q, k, v = torch.split(x_C, [keys, keys, N * V])
        q_NK, k_NK = (_normalized(_by_head(r, one)) for one in (q, k))
        q_NK, v_NV = q_NK * K**-0.5, v.view(N, V)
        decay_N1 = torch.exp(dt_N * decay_N)[:, None]
        read_NV = (S_NKV * k_NK[:, :, None]).sum(1)
        delta_NV = torch.sigmoid(given_F[-2 * N : -N])[:, None] * (v_NV - decay_N1 * read_NV)
    else:
        v, k, q = torch.split(x_C, [N * V, keys, keys])
        q_NK, k_NK, v_NV = _by_head(r, q), _by_head(r, k), v.view(N, V)
        dt_N = dt_N.clamp(r.min_dt, r.max_dt)
        decay_N1 = torch.exp(dt_N * decay_N)[:, None]
        delta_NV = dt_N[:, None] * v_NV
    kq_N1 = (k_NK * q_NK).sum(1, keepdim=True)
    y_NV = decay_N1 * (S_NKV * q_NK[:, :, None]).sum(1) + kq_N1 * delta_NV
    if parts.skip_N is not None:
        y_NV = y_NV + parts.skip_N[:, None] * v_NV
    S_NKV = decay_N1[:, :, None] * S_NKV + k_NK[:, :, None] * delta_NV[:, None]
    return _State(S_NKV, window_C[1:]), y_NV.flatten()


def _by_head(r: Recurrence, x: Tensor) -> Tensor:
    """The key or query of each head, that of its group, [N, K]."""
    each, x_GK = r.heads // r.groups, x.view(r.groups, r.key_size)
    return x_GK.repeat(each, 1) if r.tiled else x_GK.repeat_interleave(each, 0)


def _normalized(x_NK: Tensor) -> Tensor:
    return x_NK * torch.rsqrt((x_NK * x_NK).sum(1, keepdim=True) + _L2_EPS)


def _gated(parts: RecurrenceParts, value_V: Tensor, behind_V: Tensor) -> Tensor:
    """A token's values with their gate and norm."""
    r = parts.sizes
    if r.kind is LayerKind.SHORT_CONV:
        return behind_V * value_V
    gate_V = F.silu(behind_V)
    if r.norm is GateNorm.BEHIND:
        value_V, gate_V = value_V * gate_V, torch.ones(())
    if parts.norm_weight is not None:
        whole = value_V.view(r.norm_groups, -1)
        normed = F.rms_norm(whole, whole.shape[1:], eps=r.norm_eps)
        value_V = (normed.view(-1, len(parts.norm_weight)) * parts.norm_weight).flatten()
    return value_V * gate_V


def _read(parts: RecurrenceParts, memory: StateMemory, slot: int) -> _State:
    """The state of a slot; zeros for ZERO."""
    r, slots_SF = parts.sizes, memory.states_LSF[parts.layer]
    state_F = torch.zeros_like(slots_SF[0]) if slot == ZERO else slots_SF[slot].clone()
    blocks_F, tail_F = state_F.tensor_split([r.matrix_floats])
    blocks = blocks_F.view(r.heads, r.value_size // LANES, r.key_size, LANES)
    matrices_NKV = blocks.transpose(1, 2).reshape(r.heads, r.key_size, r.value_size)
    return _State(matrices_NKV, tail_F.view(r.taps - 1, r.channels))


def _write(parts: RecurrenceParts, memory: StateMemory, slot: int, state: _State) -> None:
    r = parts.sizes
    blocks = state.matrices_NKV.view(r.heads, r.key_size, r.value_size // LANES, LANES).transpose(1, 2)
    memory.states_LSF[parts.layer, slot] = torch.cat([blocks.flatten(), state.tail_C.flatten()])
