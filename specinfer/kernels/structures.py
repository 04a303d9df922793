"""Argument structures of the native library, as in its headers, and the codes of kinds."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any, Final, Literal

Kind = Literal["float32", "bfloat16", "int8", "int4", "blocks4", "blocks6", "blocks8"]
FloatType = Literal["float32", "bfloat16"]
KINDS: Final[dict[Kind, int]] = {
    **{"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3},
    **{"blocks4": 4, "blocks6": 5, "blocks8": 6},  # blocks of GGUF files, unchanged
}
BLOCK_KINDS: Final[dict[int, Kind]] = {4: "blocks4", 6: "blocks6", 8: "blocks8"}  # by bits of a level
TYPES: Final[dict[FloatType, int]] = {"float32": 0, "bfloat16": 1}
ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1, "relu": 2, "gelu": 3, "clamped_swish": 4, "relu2": 5}
FILE_KINDS: Final = {"Q4_0": 0, "Q4_1": 1, "Q5_0": 2, "Q5_1": 3, "Q8_0": 4, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7}
FLOAT_KINDS: Final = {"F32": 8, "F16": 9, "BF16": 10}  # of files, as the blocks above
STAGES: Final = ("norms", "products", "rope and K, V", "attention", "gates", "embeddings", "recurrences")
_PADDED: Final[dict[Kind, int]] = {
    **{"float32": 1, "bfloat16": 32, "int8": 64, "int4": 32},
    **{"blocks4": 32, "blocks6": 32, "blocks8": 32},
}
BLOCK: Final = 16  # output channels that are interleaved


def _alike(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type, one after another."""
    return tuple((name, kind) for name in names)


class PartsArgs(ctypes.Structure):
    """The parts of a product's inner elements, as in cpu/product.h."""

    _fields_ = (
        ("ends", c_void_p),
        *_alike(c_int64, "count", "first"),
        ("shares", c_void_p),
        ("ranks", c_int64),
    )


class BlockPartsArgs(ctypes.Structure):
    """Further arrays of block weights, as in cpu/product.h."""

    _fields_ = (
        *_alike(c_void_p, "steps", "mins", "min_steps"),
        ("span", c_int64),
    )


class ProductArgs(ctypes.Structure):
    """A laid-out matrix, as in cpu/product.h."""

    _fields_ = (
        ("kind", c_int32),
        *_alike(c_void_p, "weight", "scales", "zeros", "bias"),
        *_alike(c_int64, "channels", "inner"),
        ("largest", c_float),
        *_alike(c_int32, "loose", "nontemporal"),
        ("exchange", c_void_p),
        ("parts", PartsArgs),
        ("blocks", BlockPartsArgs),
    )


class FileRowsArgs(ctypes.Structure):
    """Rows of a matrix in a file, as in cpu/file_blocks.h."""

    _fields_ = (
        *_alike(c_int32, "file", "kind"),
        *_alike(c_int64, "offset", "row_bytes"),
        ("order", c_void_p),
        *_alike(c_int64, "first", "count"),
    )


class NormArgs(ctypes.Structure):
    """A norm of rows, as in cpu/layer_ops.h; without a weight there is none."""

    _fields_ = (
        *_alike(c_void_p, "weight", "bias"),
        ("eps", c_float),
        ("centred", c_int32),
    )


class LowRankPartArgs(ctypes.Structure):
    """An adapter's term for one matrix of a product, as in cpu/low_rank.h."""

    _fields_ = (
        *_alike(c_int64, "block", "blocks", "offset", "rank"),
        ("up", c_void_p),
        ("scale", c_float),
    )


class LowRankArgs(ctypes.Structure):
    """An adapter's terms for one product, as in cpu/low_rank.h."""

    _fields_ = (
        ("kind", c_int32),
        ("down", c_void_p),
        ("ranks", c_int64),
        ("parts", POINTER(LowRankPartArgs)),
        ("count", c_int64),
    )


class AdaptedRowsArgs(ctypes.Structure):
    """The adapted rows of a pass, as in cpu/low_rank.h."""

    _fields_ = (
        *_alike(c_void_p, "rows", "ends", "adapters"),
        ("count", c_int64),
        ("places", c_void_p),
    )


class HeadsArgs(ctypes.Structure):
    """The heads of an attention block, as in cpu/layer_ops.h."""

    _fields_ = (
        *_alike(c_int64, "heads", "kv_heads", "head"),
        *_alike(c_float, "scale", "eps"),
        ("window", c_int64),
        *_alike(c_void_p, "q_norm", "k_norm"),
        ("whole_norms", c_int32),
        ("softcap", c_float),
        ("slopes", c_void_p),
        ("rounded", c_int32),
        ("sinks", c_void_p),
        *_alike(c_int32, "gated", "kv_matrices", "value_norm"),
    )


class PathsArgs(ctypes.Structure):
    """The positions each row attends to, and their slots, as in cpu/paths.h."""

    _fields_ = (
        *_alike(c_void_p, "tables", "requests", "shared", "tail_ends", "tails"),
        *_alike(c_int64, "num_blocks", "num_requests", "rows", "num_tails", "block_size"),
    )


class ScoresArgs(ctypes.Structure):
    """The scores of experts, as in cpu/experts.h."""

    _fields_ = (("sigmoid", c_int32), *_alike(c_float, "scale", "epsilon"), ("bias", c_void_p))


class ExpertsArgs(ctypes.Structure):
    """A mixture of experts, as in cpu/experts.h."""

    _fields_ = (
        ("router", ProductArgs),
        *_alike(POINTER(ProductArgs), "gate_up", "down"),
        *_alike(c_int64, "count", "per_token"),
        *_alike(c_int32, "normalized", "shared", "shared_gated", "gated"),
        *_alike(ProductArgs, "shared_gate_up", "shared_down"),
        ("scores", ScoresArgs),
    )


class RecurrenceArgs(ctypes.Structure):
    """A recurrent block, as in cpu/recurrence.h."""

    _fields_ = (
        *_alike(c_int32, "kind", "norm"),
        *_alike(ProductArgs, "first", "last", "gates"),
        *_alike(c_int64, "layer", "taps", "channels", "heads", "groups", "key_size", "value_size"),
        *_alike(c_void_p, "conv", "conv_bias", "decay", "dt_bias", "skip", "norm_weight"),
        *_alike(c_int64, "norm_weights", "norm_groups", "whole_heads", "first_head"),
        *_alike(c_float, "norm_eps", "min_dt", "max_dt"),
        ("tiled", c_int32),
    )


class StatesArgs(ctypes.Structure):
    """The recurrent states of a pass, as in cpu/recurrence.h."""

    _fields_ = (
        *_alike(c_void_p, "requests", "visits", "saves"),
        *_alike(c_int64, "num_requests", "num_visits", "num_saves"),
        *_alike(c_void_p, "states", "rings"),
        *_alike(c_int64, "layers", "slots", "ring_slots", "nodes", "state_floats", "input_floats"),
    )


class StreamsArgs(ctypes.Structure):
    """Residual streams, as in cpu/layer_ops.h."""

    _fields_ = _alike(c_int64, "count", "size", "active")


class PerLayerArgs(ctypes.Structure):
    """A layer's term of per-layer embeddings, as in cpu/layers.h."""

    _fields_ = (
        *_alike(ProductArgs, "gate", "out"),
        ("after", NormArgs),
        ("first", c_int64),
    )


class LayerArgs(ctypes.Structure):
    """A decoder layer, as in cpu/layers.h."""

    _fields_ = (
        *_alike(NormArgs, "before_attention", "before_mlp", "after_attention", "after_mlp"),
        ("heads", HeadsArgs),
        *_alike(ProductArgs, "qkv", "o", "up", "down"),
        *_alike(c_int32, "rope", "parallel", "activation", "gated"),
        *_alike(c_float, "clip", "scale"),
        ("experts", POINTER(ExpertsArgs)),
        ("recurrence", POINTER(RecurrenceArgs)),
        ("per_layer", POINTER(PerLayerArgs)),
        ("factor", c_void_p),
    )


class TapsArgs(ctypes.Structure):
    """The layers whose inputs are copied, as in cpu/layers.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("count", c_int64),
        ("out", c_void_p),
    )


class RotationsArgs(ctypes.Structure):
    """Rotations of positions 0, 1, ..., as in cpu/layers.h."""

    _fields_ = (
        *_alike(c_void_p, "cos", "sin"),
        ("positions", c_int64),
    )


class DecoderArgs(ctypes.Structure):
    """A decoder up to its output layer, as in cpu/decoder.h."""

    _fields_ = (
        ("type", c_int32),
        ("scale", c_float),
        ("embedding", c_void_p),
        ("tokens", c_int64),
        ("places", c_void_p),
        *_alike(c_int64, "num_places", "place_offset"),
        ("layers", POINTER(LayerArgs)),
        ("num_layers", c_int64),
        ("norm", NormArgs),
        ("output", ProductArgs),
        ("num_rotations", c_int64),
        ("rotations", RotationsArgs * 2),
    )


class DecoderRowsArgs(ctypes.Structure):
    """The rows of a decoder's pass, as in cpu/decoder.h."""

    _fields_ = (
        *_alike(c_void_p, "tokens", "positions", "chosen"),
        ("num_chosen", c_int64),
        ("adapted", POINTER(AdaptedRowsArgs)),
        ("states", POINTER(StatesArgs)),
        ("per_layer", c_void_p),
        ("per_layer_width", c_int64),
    )


class BlockHeadArgs(ctypes.Structure):
    """A head that guesses a block in one pass, as in cpu/block_head.h."""

    _fields_ = (
        ("type", c_int32),
        ("scale", c_float),
        *_alike(c_int32, "causal", "skipped"),
        *_alike(ProductArgs, "fc", "context", "entry", "output"),
        *_alike(NormArgs, "hidden_norm", "entry_norm", "norm"),
        ("layers", POINTER(LayerArgs)),
        ("num_layers", c_int64),
        ("rotations", RotationsArgs),
        ("embedding", c_void_p),
        *_alike(c_int64, "tokens", "mask"),
    )


class BlockStepArgs(ctypes.Structure):
    """The texts and guesses of a block head's step, as in cpu/block_head.h."""

    _fields_ = (
        ("texts", c_void_p),
        ("count", c_int64),
        *_alike(c_void_p, "taps", "tables"),
        *_alike(c_int64, "num_blocks", "block_size"),
    )


class LayerCacheArgs(ctypes.Structure):
    """K and V of one layer, as in cpu/layer_ops.h."""

    _fields_ = _alike(c_void_p, "keys", "values", "key_scales", "value_scales")


class CachesArgs(ctypes.Structure):
    """Caches of all layers, as in cpu/block_head.h."""

    _fields_ = (
        ("layers", POINTER(LayerCacheArgs)),
        ("slots", c_int64),
    )


class GuesserArgs(ctypes.Structure):
    """Post-processing of a head's logits, as in cpu/best_first.h."""

    _fields_ = (
        ("type", c_int32),
        ("ids", c_void_p),
        ("markov", ProductArgs),
        *_alike(c_void_p, "before", "named"),
        ("tokens", c_int64),
    )


# One request's tree that is grown best first, as in cpu/best_first.h. The row: first row, levels, token of
# the root, maximum number of nodes below it. The shape: temperature, minimum probability of a path.
# The noise: seed, position, and whether it decides.
TREE_REQUEST: Final = struct.Struct("4q 2d Q q i 4x")


class GrownArgs(ctypes.Structure):
    """Outputs of grown trees, as in cpu/best_first.h and cpu/lookups.h."""

    _fields_ = (
        ("room", c_int64),
        *_alike(c_void_p, "counts", "parents", "tokens", "confidences", "evidence"),
    )


class LookupRules(ctypes.Structure):
    """Settings of lookups in texts, as in cpu/lookups.h."""

    _fields_ = (
        *_alike(c_int64, "longest", "surest"),
        *_alike(c_double, "depth_factor", "min_probability"),
    )


def padded_inner(kind: Kind, inner: int) -> int:
    """An inner size as padded in memory."""
    return -(-inner // _PADDED[kind]) * _PADDED[kind]


def num_blocks(channels: int) -> int:
    """Number of blocks of output channels, the last one padded."""
    return -(-channels // BLOCK)
