"""NativeDecoder: a decoder's whole pass in one native call (cpu/decoder.cpp).

Calling an op takes a few microseconds, and a layer has nine. In a 4-bit pass of SmolLM2-135M (4.8 ms), the
calls took 1.7 ms. A dozen calls around the layers took 0.4 ms. models/decoder.py computes the same op by op,
for models with parts that are not native. Rotations of positions 0, 1, ... are tabulated; the tables grow
with the texts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, NamedTuple

import torch
from torch import Tensor

from specinfer.attention.backend import Rotation
from specinfer.kernels.attention import NativeAttend, NativeCache, heads_args
from specinfer.kernels.layer_parts import ExpertParts, LayerParts
from specinfer.kernels.library import Library
from specinfer.kernels.low_rank import AdaptedRows, NativeAdaptedRows
from specinfer.kernels.native_ops import NativeOps
from specinfer.kernels.native_recurrence import NativeRecurrence, states_args
from specinfer.kernels.ops import NormParts, Ops
from specinfer.kernels.product import FLOATS, NativeProduct, Product, check_tensor, product_args
from specinfer.kernels.states import StatePass
from specinfer.kernels.structures import (
    ACTIVATIONS,
    TYPES,
    DecoderArgs,
    DecoderRowsArgs,
    ExpertsArgs,
    HeadsArgs,
    LayerArgs,
    NormArgs,
    PerLayerArgs,
    ProductArgs,
    RotationsArgs,
    ScoresArgs,
    StatesArgs,
    TapsArgs,
)

# Makes rotation tables of at least the given number of positions: float32 [positions, H / 2], contiguous.
MakeRotations = Callable[[int], Sequence[Rotation]]
_NO_TOKEN: Final = 1  # as in cpu/decoder.h
_NO_POSITION: Final = 2
_LOST: Final = 3
_ROPES: Final = {"global": 0, "local": 1, "none": 2}  # as in cpu/layers.h


class NativeLayers:
    """The argument structures of layers whose parts are all native."""

    __slots__ = ("_experts", "_kept", "_recurrences", "args", "library", "size")

    def __init__(self, layers: Sequence[LayerParts], library: Library) -> None:
        """All products must be native."""
        self.library = library
        self._kept = list(layers)  # owns the memory that `args` points to
        self._experts = [None if layer.experts is None else _experts_args(layer.experts) for layer in layers]
        self._recurrences = [
            None if layer.recurrence is None else NativeRecurrence.of(layer.recurrence) for layer in layers
        ]
        self.args = (LayerArgs * len(layers))(*map(_layer_args, layers, self._experts, self._recurrences))
        self.size = _hidden_size(layers[0])

    @classmethod
    def of(cls, layers: Sequence[LayerParts], ops: Ops) -> NativeLayers | None:
        """Wrap these layers; None if a part is not native."""
        products = [product for layer in layers for product in layer.all_products]
        if not isinstance(ops, NativeOps) or not all(isinstance(p, NativeProduct) for p in products):
            return None
        return cls(layers, ops.library)

    def check_ranks(self) -> None:
        """Raise PeerLostError if a rank that shares these layers is lost."""
        for layer in self._kept:
            for product in layer.all_products:
                if isinstance(product, NativeProduct) and product.exchange is not None:
                    product.exchange.check()

    def check(self, cache: NativeCache, dtype: torch.dtype) -> None:
        """Raise ValueError if a cache does not fit these layers, with rows of that dtype."""
        if cache.checked is self:
            return
        layers = len(self.args)
        if len(cache.shapes) != layers:
            raise ValueError(f"caches of {len(cache.shapes)} layers for a model of {layers}")
        attending = [layer.heads for layer in self._kept if layer.heads is not None]
        for heads in {(one.num_kv_heads, one.head_dim): one for one in attending}.values():
            cache.check(dtype, heads)
        cache.checked = self

    def states_of(self, states: StatePass | None, rows: int) -> StatesArgs | None:
        """The arguments for the states of a pass; raises ValueError if they do not fit these layers."""
        recurrence = next(filter(None, reversed(self._recurrences)), None)
        if recurrence is None:
            return None
        if states is None:
            raise ValueError("got no states; a model with recurrent layers needs those of its requests")
        recurrence.check(states)
        return states_args(states, rows, self.library)


def _hidden_size(layer: LayerParts) -> int:
    products = layer.all_products if layer.recurrence is None else layer.recurrence.products
    return int(product_args(products[0]).inner)


def _layer_args(
    layer: LayerParts, experts: ExpertsArgs | None, recurrence: NativeRecurrence | None
) -> LayerArgs:
    norms = [NormArgs() if norm is None else norm.args for norm in layer.norms]
    products = [product_args(product) for product in layer.products]
    heads = HeadsArgs()
    if layer.heads is None:
        products = [ProductArgs(), ProductArgs(), *products]
    else:
        heads = heads_args(layer.heads)
        heads.gated = layer.heads.gated
    args = LayerArgs(
        *norms,
        heads,
        *products,
        *[ProductArgs()] * (4 - len(products)),
        _ROPES[layer.rope],
        layer.parallel,
        ACTIVATIONS[layer.activation],
        layer.gated,
        layer.clip or 0.0,
        layer.scale,
    )
    if experts is not None:
        args.experts = ctypes.pointer(experts)
    if recurrence is not None:
        args.recurrence = ctypes.pointer(recurrence.args)
    if (own := layer.per_layer) is not None:
        both = product_args(own.gate), product_args(own.out)
        args.per_layer = ctypes.pointer(PerLayerArgs(*both, own.after.args, own.first))
    if layer.factor is not None:
        args.factor = layer.factor.data_ptr()
    return args


def _experts_args(parts: ExpertParts) -> ExpertsArgs:
    """The structure for these parts, all native; the caller must keep their memory."""
    gate_up, down = (_array([both[which] for both in parts.each]) for which in (0, 1))
    args = ExpertsArgs(
        router=product_args(parts.router),
        gate_up=gate_up,
        down=down,
        count=len(parts.each),
        per_token=parts.per_token,
        normalized=parts.normalized,
        shared=parts.shared is not None,
        shared_gated=parts.shared_gated,
        gated=parts.gated,
        scores=ScoresArgs() if parts.scores is None else parts.scores.args,
    )
    if parts.shared is not None:
        args.shared_gate_up, args.shared_down = map(product_args, parts.shared)
    return args


def _array(products: Sequence[Product]) -> object:
    return (ProductArgs * len(products))(*map(product_args, products))


class Places(NamedTuple):
    """Learned positions: row `offset` + p of the table is added at position p."""

    table_PD: Tensor
    offset: int


class RotationTables:
    """Rotation tables in a native call's arguments, which grow in place.

    Thread-safe: a longer table starts with the values of the shorter one, which is kept for its readers.
    """

    __slots__ = ("_grows", "_kept", "_make", "_tables")

    def __init__(self, table: Sequence[RotationsArgs], make: MakeRotations) -> None:
        """`table` has parts of native arguments, written in place.

        `make` must not refer to the owner of this object, or weights would outlive their last user.
        """
        self._tables = table
        self._make = make
        self._kept: list[Rotation] = []  # owns the memory of the tables
        self._grows = Lock()

    def reach(self, positions: int) -> None:
        """Extend the tables to at least `positions` positions."""
        if self._reaches(positions):
            return
        with self._grows:
            if self._reaches(positions):  # another thread has extended them
                return
            made = self._make(positions)
            self._kept += made
            for table, one in zip(self._tables, made, strict=True):
                table.cos, table.sin = one.cos.data_ptr(), one.sin.data_ptr()
                table.positions = len(one.cos)  # last, so that a reader of the size has a table of that size

    def _reaches(self, positions: int) -> bool:
        return all(table.positions >= positions for table in self._tables)


class NativeDecoder:
    """A native decoder, from token ids to the input of its output layer, or to logits.

    Threads may share it, since calls keep no state. It holds no cache, so a cache may be freed earlier.
    """

    __slots__ = (
        *("_args", "_embedding_VD", "_layers", "_library", "_norm", "_output"),
        *("_places", "_rotations", "_size", "_type", "_writing"),
    )

    def __init__(
        self,
        layers: NativeLayers,
        embedding_VD: Tensor | None,
        scale: float,
        *,
        dtype: torch.dtype,
        places: Places | None,
        norm: NormParts | None,
        output: Product,
        rotations: tuple[int, MakeRotations],
        writing: int,
    ) -> None:
        """`embedding_VD` is contiguous and of `dtype`, as are `places`; None: each call passes rows of it.

        `norm` is the final norm, if there is one. `output` computes logits here if it is native. `rotations`
        are the number of rotation tables and the function that makes them: for global layers, and for
        sliding-window layers if different. Only the first `writing` layers write K and V.
        """
        self._library = layers.library
        self._layers = layers
        self._embedding_VD = embedding_VD
        self._type = dtype
        self._size = layers.size
        self._places = places
        self._writing = writing
        self._norm = norm  # owns memory that the arguments point to, as do places
        self._output = output if isinstance(output, NativeProduct) else None
        self._args = DecoderArgs(
            type=TYPES[FLOATS[dtype]],
            scale=scale,
            embedding=None if embedding_VD is None else embedding_VD.data_ptr(),
            tokens=0 if embedding_VD is None else len(embedding_VD),
            layers=layers.args,
            num_layers=len(layers.args),
        )
        if places is not None:
            self._args.places, self._args.num_places = places.table_PD.data_ptr(), len(places.table_PD)
            self._args.place_offset = places.offset
        if norm is not None:
            self._args.norm = norm.args
        if self._output is not None:
            self._args.output = self._output.args
        self._rotations: RotationTables | None = None
        count, make = rotations
        if count:
            self._args.num_rotations = count
            self._rotations = RotationTables(list(self._args.rotations)[:count], make)

    def __call__(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor | None,
        attend: NativeAttend,
        taps: Sequence[int],
        max_logits: int,
        embedding_ND: Tensor | None = None,
        adapted: AdaptedRows | None = None,
        states: StatePass | None = None,
        per_layer_TC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Inputs of the output layer for these rows (None: all), [R, D], taps, and perhaps logits, [R, V].

        Writes K and V of every row. `taps` are indices of layers, or the number of layers for the last
        output; their inputs are [T, N, D]. Logits are computed if at most `max_logits` rows are chosen. With
        `embedding_ND`, token ids index that table; `adapted` are the rows with adapters, and `per_layer_TC`
        the inputs of every layer beside the residual stream. Writes the `states` of recurrent layers. Raises
        IndexError for a token outside the embeddings, and for a position below 0 or beyond the last learned
        position. Raises ValueError for an unfitting cache, unfitting states or invalid arrays, PeerLostError
        if a rank that shares the layers is lost.
        """
        self._layers.check(attend.cache, self._type)
        count, size = attend.paths.rows, self._size
        check_tensor("token ids", token_ids_T, torch.int64, count)
        check_tensor("positions", positions_T, torch.int64, count)
        chosen = count
        if rows_R is not None:
            chosen = len(rows_R)
            check_tensor("chosen rows", rows_R, torch.int64, chosen)
        read_RD = torch.empty(chosen, size, dtype=self._type)
        tapped_TND = torch.empty(count, len(taps), size, dtype=self._type) if taps else None
        logits_RV: Tensor | None = None
        if self._output is not None and 0 < chosen <= max_logits:
            logits_RV = torch.empty(chosen, self._output.channels, dtype=self._type)
        of_states = self._layers.states_of(states, count)
        ids = (ctypes.c_int64 * len(taps))(*taps)
        out = None if tapped_TND is None else tapped_TND.data_ptr()
        rows = DecoderRowsArgs(
            token_ids_T.data_ptr(),
            positions_T.data_ptr(),
            None if rows_R is None else rows_R.data_ptr(),
            chosen,
            ctypes.pointer(adapted.args(count, self._type))
            if isinstance(adapted, NativeAdaptedRows)
            else None,
            None if of_states is None else ctypes.pointer(of_states),
            None if per_layer_TC is None else per_layer_TC.data_ptr(),
            0 if per_layer_TC is None else per_layer_TC.shape[1],
        )
        tapping = TapsArgs(ctypes.addressof(ids), len(taps), out)

        def call() -> int:
            args = self._args
            reads = chosen > 0 or len(taps) > 0  # else nothing needs the layers that write no K and V
            if embedding_ND is not None or not reads:
                args = DecoderArgs.from_buffer_copy(args)
                args.num_layers = args.num_layers if reads else self._writing
            if embedding_ND is not None:
                args.embedding, args.tokens = embedding_ND.data_ptr(), len(embedding_ND)
            fault: int = self._library.decode(
                *(ctypes.byref(args), ctypes.byref(rows), ctypes.byref(attend.paths)),
                *(attend.cache.layers, ctypes.byref(tapping), read_RD.data_ptr()),
                None if logits_RV is None else logits_RV.data_ptr(),
            )
            return fault

        fault = call()
        if fault == _NO_POSITION and self._rotations is not None and int(positions_T.min()) >= 0:
            self._rotations.reach(1 + int(positions_T.max()))
            fault = call()
        if fault == _LOST:
            self._layers.check_ranks()
        if fault == _NO_TOKEN:
            raise IndexError(f"token ids must be 0 .. {self._args.tokens - 1}")
        if fault:
            allowed = "0 or more"
            if self._places is not None:
                allowed = f"0 .. {len(self._places.table_PD) - self._places.offset - 1}"
            lowest, highest = int(positions_T.min()), int(positions_T.max())
            raise IndexError(f"positions must be {allowed}, got {lowest if lowest < 0 else highest}")
        return read_RD, tapped_TND, logits_RV
