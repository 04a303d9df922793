"""Arguments of the library's recurrent blocks (cpu/recurrence.h)."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from specinfer.kernels.library import Library
from specinfer.kernels.product import NativeProduct, check_tensor, product_args
from specinfer.kernels.recurrence import RecurrenceParts
from specinfer.kernels.recurrence_config import GateNorm, LayerKind
from specinfer.kernels.states import StatePass
from specinfer.kernels.structures import ProductArgs, RecurrenceArgs, StatesArgs

# Numbered as in cpu/recurrence.h.
_KINDS: Final = (LayerKind.SHORT_CONV, LayerKind.GATED_DELTA, LayerKind.MAMBA2)
_NORMS: Final = tuple(GateNorm)
_SIZES: Final = (
    *("taps", "channels", "heads", "groups", "tiled", "key_size", "value_size"),
    *("norm_groups", "whole_heads", "first_head", "norm_eps", "min_dt", "max_dt"),
)
_FAULTS: Final = (  # as cpu/states.cpp numbers them
    "",
    "requests whose visits do not follow one another to the last",
    "a slot that the states do not have",
    "rows that are not each visited once",
    "a place that the ring does not have",
    "visits that are not depth first",
    "a copy of a state that its request does not reach",
)


class NativeRecurrence(NamedTuple):
    """A block's arguments, and the tensors that they point to."""

    args: RecurrenceArgs
    kept: tuple[RecurrenceParts, Tensor]

    @classmethod
    def of(cls, parts: RecurrenceParts) -> NativeRecurrence:
        """The arguments of a block; products that are not native are left out.

        Raises ValueError if a tensor is not contiguous float32 of its size.
        """
        sizes, weight = parts.sizes, parts.norm_weight
        by_tap_TC = parts.conv_CT.t().contiguous()
        check_tensor("a convolution's weight", by_tap_TC, torch.float32, sizes.taps, sizes.channels)
        first, last = (_args(product) for product in parts.products)
        args = RecurrenceArgs(
            kind=_KINDS.index(sizes.kind),
            norm=_NORMS.index(sizes.norm),
            first=first,
            last=last,
            gates=_args(parts.gates),
            layer=parts.layer,
            conv=by_tap_TC.data_ptr(),
            conv_bias=_address(parts.conv_bias_C, sizes.channels),
            decay=_address(parts.decay_N, sizes.heads),
            dt_bias=_address(parts.dt_bias_N, sizes.heads),
            skip=_address(parts.skip_N, sizes.heads),
            norm_weight=None if weight is None else _address(weight, len(weight)),
            norm_weights=0 if weight is None else len(weight),
            **{name: getattr(sizes, name) for name in _SIZES},
        )
        return cls(args, (parts, by_tap_TC))

    def check(self, states: StatePass) -> None:
        """Raise ValueError if the memory of states is not this block's."""
        (parts, _), memory = self.kept, states.memory
        for name, tensor, floats in (
            ("states", memory.states_LSF, parts.sizes.state_floats),
            ("rings", memory.rings_LRNF, parts.sizes.input_floats),
        ):
            check_tensor(name, tensor, torch.float32, *tensor.shape[:-1], floats)
            if parts.layer >= len(tensor):
                raise ValueError(f"{name} of {len(tensor)} layers for layer {parts.layer}")


def states_args(states: StatePass, rows: int, library: Library) -> StatesArgs:
    """The arguments for a pass of that many rows; raises ValueError if its visits are inconsistent."""
    memory, order = states.memory, states.rows
    layers, slots, state_floats = memory.states_LSF.shape
    _, ring_slots, nodes, input_floats = memory.rings_LRNF.shape
    numbers = (order.requests, order.visits, order.saves)
    args = StatesArgs(
        *(array.buffer_info()[0] for array in numbers),
        *(order.num_requests, order.num_visits, order.num_saves),
        *(memory.states_LSF.data_ptr(), memory.rings_LRNF.data_ptr()),
        *(layers, slots, ring_slots, nodes, state_floats, input_floats),
    )
    fault = library.fault_of_states(args, rows)
    if fault:
        raise ValueError(
            f"{_FAULTS[fault]}: {rows} rows, requests {order.requests_R5.tolist()} (first visit, visits, "
            f"chain, slots read and written) of {slots} slots, {order.num_visits} visits, rings of {nodes} "
            f"nodes for {ring_slots} slots, saves {order.saves_S3.tolist()}"
        )
    return args


def _args(product: object) -> ProductArgs:
    return product_args(product) if isinstance(product, NativeProduct) else ProductArgs()


def _address(tensor: Tensor | None, size: int) -> int | None:
    if tensor is None:
        return None
    check_tensor("a recurrence's tensor", tensor, torch.float32, size)
    return tensor.data_ptr()
