"""Argument structures of the native library, as in its headers, and the codes of kinds."""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Final, Literal

Kind = Literal["float32", "bfloat16", "int8", "int4", "blocks4", "blocks8"]
FloatType = Literal["float32", "bfloat16"]
Form = Literal["serial", "after sum", "parallel"]  # order of a layer; see cpu/layers.h
KINDS: Final[dict[Kind, int]] = {
    **{"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3},
    **{"blocks4": 4, "blocks8": 5},  # blocks of GGUF files, unchanged
}
TYPES: Final[dict[FloatType, int]] = {"float32": 0, "bfloat16": 1}
ACTIVATIONS: Final = {"silu": 0, "gelu_tanh": 1, "relu": 2, "gelu": 3, "clamped_swish": 4}
FORMS: Final[dict[Form, int]] = {"serial": 0, "after sum": 1, "parallel": 2}
FILE_KINDS: Final = {"Q4_0": 0, "Q4_1": 1, "Q5_0": 2, "Q5_1": 3, "Q8_0": 4, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7}
FLOAT_KINDS: Final = {"F32": 8, "F16": 9, "BF16": 10}  # of files, as the blocks above
STAGES: Final = ("norms", "products", "rope and K, V", "attention", "gates", "embeddings")
_PADDED: Final[dict[Kind, int]] = {
    **{"float32": 1, "bfloat16": 32, "int8": 64, "int4": 32},
    **{"blocks4": 32, "blocks8": 32},
}
BLOCK: Final = 16  # output channels that are interleaved


class PartsArgs(ctypes.Structure):
    """The parts of a product's inner elements, as in cpu/product.h."""

    _fields_ = (
        ("ends", c_void_p),
        ("count", c_int64),
        ("first", c_int64),
        ("shares", c_void_p),
        ("ranks", c_int64),
    )


class BlockPartsArgs(ctypes.Structure):
    """Further arrays of block weights, as in cpu/product.h."""

    _fields_ = (("steps", c_void_p), ("mins", c_void_p), ("min_steps", c_void_p), ("span", c_int64))


class ProductArgs(ctypes.Structure):
    """A laid-out matrix, as in cpu/product.h."""

    _fields_ = (
        ("kind", c_int32),
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("channels", c_int64),
        ("inner", c_int64),
        ("largest", c_float),
        ("loose", c_int32),
        ("nontemporal", c_int32),
        ("exchange", c_void_p),
        ("parts", PartsArgs),
        ("blocks", BlockPartsArgs),
    )


class FileRowsArgs(ctypes.Structure):
    """Rows of a matrix in a file, as in cpu/file_blocks.h."""

    _fields_ = (
        ("file", c_int32),
        ("kind", c_int32),
        ("offset", c_int64),
        ("row_bytes", c_int64),
        ("order", c_void_p),
        ("first", c_int64),
        ("count", c_int64),
    )


class NormArgs(ctypes.Structure):
    """A norm of rows, as in cpu/layer_ops.h; without a weight there is none."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("centred", c_int32))


class LowRankPartArgs(ctypes.Structure):
    """An adapter's term for one matrix of a product, as in cpu/low_rank.h."""

    _fields_ = (
        ("block", c_int64),
        ("blocks", c_int64),
        ("offset", c_int64),
        ("rank", c_int64),
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
        ("rows", c_void_p),
        ("ends", c_void_p),
        ("adapters", c_void_p),
        ("count", c_int64),
        ("places", c_void_p),
    )


class HeadsArgs(ctypes.Structure):
    """The heads of an attention block, as in cpu/layer_ops.h."""

    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head", c_int64),
        ("scale", c_float),
        ("eps", c_float),
        ("window", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("whole_norms", c_int32),
        ("softcap", c_float),
        ("slopes", c_void_p),
        ("rounded", c_int32),
        ("sinks", c_void_p),
    )


class PathsArgs(ctypes.Structure):
    """The positions each row attends to, and their slots, as in cpu/paths.h."""

    _fields_ = (
        ("tables", c_void_p),
        ("requests", c_void_p),
        ("shared", c_void_p),
        ("tail_ends", c_void_p),
        ("tails", c_void_p),
        ("num_blocks", c_int64),
        ("num_requests", c_int64),
        ("rows", c_int64),
        ("num_tails", c_int64),
        ("block_size", c_int64),
    )


class ExpertsArgs(ctypes.Structure):
    """A mixture of experts, as in cpu/experts.h."""

    _fields_ = (
        ("router", ProductArgs),
        ("gate_up", POINTER(ProductArgs)),
        ("down", POINTER(ProductArgs)),
        ("count", c_int64),
        ("per_token", c_int64),
        ("normalized", c_int32),
        ("shared", c_int32),
        ("shared_gate_up", ProductArgs),
        ("shared_down", ProductArgs),
    )


class LayerArgs(ctypes.Structure):
    """A decoder layer, as in cpu/layers.h."""

    _fields_ = (
        ("before_attention", NormArgs),
        ("before_mlp", NormArgs),
        ("after_attention", NormArgs),
        ("after_mlp", NormArgs),
        ("heads", HeadsArgs),
        ("qkv", ProductArgs),
        ("o", ProductArgs),
        ("up", ProductArgs),
        ("down", ProductArgs),
        ("rope", c_int32),
        ("form", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("clip", c_float),
        ("scale", c_float),
        ("experts", POINTER(ExpertsArgs)),
    )


class TapsArgs(ctypes.Structure):
    """The layers whose inputs are copied, as in cpu/layers.h."""

    _fields_ = (("layers", c_void_p), ("count", c_int64), ("out", c_void_p))


class RotationsArgs(ctypes.Structure):
    """Rotations of positions 0, 1, ..., as in cpu/layers.h."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("positions", c_int64))


class DecoderArgs(ctypes.Structure):
    """A decoder up to its output layer, as in cpu/decoder.h."""

    _fields_ = (
        ("type", c_int32),
        ("scale", c_float),
        ("embedding", c_void_p),
        ("tokens", c_int64),
        ("places", c_void_p),
        ("num_places", c_int64),
        ("place_offset", c_int64),
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
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("chosen", c_void_p),
        ("num_chosen", c_int64),
        ("adapted", POINTER(AdaptedRowsArgs)),
    )


class BlockHeadArgs(ctypes.Structure):
    """A head that guesses a block in one pass, as in cpu/block_head.h."""

    _fields_ = (
        ("type", c_int32),
        ("scale", c_float),
        ("causal", c_int32),
        ("skipped", c_int32),
        ("fc", ProductArgs),
        ("context", ProductArgs),
        ("entry", ProductArgs),
        ("output", ProductArgs),
        ("hidden_norm", NormArgs),
        ("entry_norm", NormArgs),
        ("norm", NormArgs),
        ("layers", POINTER(LayerArgs)),
        ("num_layers", c_int64),
        ("rotations", RotationsArgs),
        ("embedding", c_void_p),
        ("tokens", c_int64),
        ("mask", c_int64),
    )


class BlockStepArgs(ctypes.Structure):
    """The texts and guesses of a block head's step, as in cpu/block_head.h."""

    _fields_ = (
        ("texts", c_void_p),
        ("count", c_int64),
        ("taps", c_void_p),
        ("tables", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
    )


class CachesArgs(ctypes.Structure):
    """Caches of all layers, as in cpu/block_head.h."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("slots", c_int64))


class GuesserArgs(ctypes.Structure):
    """Post-processing of a head's logits, as in cpu/best_first.h."""

    _fields_ = (
        ("type", c_int32),
        ("ids", c_void_p),
        ("markov", ProductArgs),
        ("before", c_void_p),
        ("named", c_void_p),
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
        ("counts", c_void_p),
        ("parents", c_void_p),
        ("tokens", c_void_p),
        ("confidences", c_void_p),
        ("evidence", c_void_p),
    )


class LookupRules(ctypes.Structure):
    """Settings of lookups in texts, as in cpu/lookups.h."""

    _fields_ = (
        ("longest", c_int64),
        ("surest", c_int64),
        ("depth_factor", c_double),
        ("min_probability", c_double),
    )


def padded_inner(kind: Kind, inner: int) -> int:
    """An inner size as padded in memory."""
    return -(-inner // _PADDED[kind]) * _PADDED[kind]


def num_blocks(channels: int) -> int:
    """Number of blocks of output channels, the last one padded."""
    return -(-channels // BLOCK)
