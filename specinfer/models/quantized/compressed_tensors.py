"""compressed-tensors: packed integers, int8 and FP8 with scales per matrix, channel, group or block.

Source: the compressed-tensors package, pack_quantized and naive_quantized compressors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from specinfer.errors import ModelError, ModelFileError
from specinfer.models.fields import Fields, boolean, mapping
from specinfer.models.quantized.integers import IntegerMatrix, LevelRows, order_of_groups, unpacked
from specinfer.models.quantized.pieces import FLOATS, Pieces, StoredTensor, whole
from specinfer.models.quantized.scaled import scaled

_FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision"),
)
_INTEGERS: Final = (torch.int32, torch.int64)


def compressed_tensors(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The matrices of such a model by name; `settings` is the quantization_config.

    Tensors determine how each matrix is quantized; `settings` has the rest. Raises ModelError for unsupported
    settings, ModelFileError if tensors contradict them.
    """
    groups = list(_weights(settings))
    block, asymmetric = (
        _block(groups),
        bool(groups) and not any(boolean(g, "symmetric", True) for g in groups),
    )
    found = dict[str, StoredTensor]()
    for stem in pieces.stems(".weight_packed"):
        found[f"{stem}.weight"] = _packed(pieces, stem, asymmetric)
    kinds = (torch.int8, torch.float8_e4m3fn)
    for name in [
        name for name, one in pieces.rest.items() if one.dtype in kinds and name.endswith(".weight")
    ]:
        values = pieces.take(name, kinds, (None, None))
        scales = pieces.take(f"{name}_scale", FLOATS)
        zeros = None
        if values.dtype is torch.int8:
            take = pieces.take if asymmetric else pieces.optional
            zeros = take(f"{name}_zero_point", (torch.int8,), scales.shape)
        found[name] = scaled(f"{name}_scale", values, scales, block, zeros)
    return found


def _packed(pieces: Pieces, stem: str, asymmetric: bool) -> IntegerMatrix:
    words = pieces.take(f"{stem}.weight_packed", (torch.int32,), (None, None))
    size = pieces.take(f"{stem}.weight_shape", _INTEGERS, (2,))
    channels, inner = whole(size).tolist()
    bits = next((bits for bits in (4, 8) if words.shape == (channels, -(-inner * bits // 32))), None)
    if bits is None:
        raise ModelFileError(
            f"{words.path}: tensor '{stem}.weight_packed' has shape {list(words.shape)} for a matrix "
            f"{channels} x {inner}; supported num_bits: 4, 8. Give the original model"
        )
    scales = pieces.take(f"{stem}.weight_scale", FLOATS, (channels, None))
    groups = scales.shape[1]
    if not groups or inner % groups:
        raise ModelFileError(
            f"{words.path}: '{stem}.weight_scale' has {groups} groups; no group_size divides rows of "
            f"{inner} elements into that many. Get the model again"
        )
    take = pieces.take if asymmetric else pieces.optional
    zeros = take(f"{stem}.weight_zero_point", (torch.int32, torch.int8))
    if zeros is not None and zeros.shape != _zeros_shape(zeros.dtype, channels, groups, bits):
        raise ModelFileError(
            f"{words.path}: tensor '{stem}.weight_zero_point' has shape {list(zeros.shape)} for "
            f"{channels} rows of {groups} groups; get the model again"
        )
    index = pieces.optional(f"{stem}.weight_g_idx", _INTEGERS, (inner,))
    rows = _PackedRows(words, scales, zeros, bits, inner)
    group_of = None if index is None else order_of_groups(f"{stem}.weight_g_idx", index, groups)
    return IntegerMatrix(
        words.path, (channels, inner), bits, scales, rows.read, groups=groups, group_of=group_of
    )


class _PackedRows:
    """Reads [channels, words of a row], scales [channels, groups] and zeros [words of channels, groups]."""

    def __init__(
        self, words: StoredTensor, scales: StoredTensor, zeros: StoredTensor | None, bits: int, inner: int
    ) -> None:
        self._words, self._scales, self._zeros = words, scales, zeros
        self._bits, self._inner = bits, inner

    def read(self, start: int, stop: int) -> LevelRows:
        levels = unpacked(self._words.read_rows(start, stop), self._bits)[:, : self._inner]
        scales = self._scales.read_rows(start, stop)
        return LevelRows(levels.contiguous(), scales, self._read_zeros(start, stop, scales.shape[1]))

    def _read_zeros(self, start: int, stop: int, groups: int) -> torch.Tensor:
        """The levels of 0; levels and zero points are stored with half the number of levels added."""
        half = 1 << (self._bits - 1)
        if self._zeros is None:
            return torch.full((stop - start, groups), half, dtype=torch.uint8)
        if self._zeros.dtype is torch.int8:
            return (self._zeros.read_rows(start, stop).short() + half).to(torch.uint8)
        per = 32 // self._bits
        first = start // per
        words = self._zeros.read_rows(first, -(-stop // per)).T
        return unpacked(words, self._bits).T[start - first * per : stop - first * per]


def _zeros_shape(dtype: torch.dtype | None, channels: int, groups: int, bits: int) -> tuple[int, int]:
    return (channels if dtype is torch.int8 else -(-channels * bits // 32)), groups


def _weights(settings: Fields) -> Iterator[Fields]:
    """The weight settings of each config group of matrices."""
    _check_format("format", settings.get("format"))
    if settings.get("transform_config"):
        raise ModelError(
            "transform_config transforms activations, which is not supported for compressed-tensors"
        )
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ModelError(
            f"sparsity_config is {str(sparsity)[:60]}; supported for compressed-tensors: 'dense'. "
            "Give the original model"
        )
    for name in mapping(settings, "config_groups"):
        group = mapping(mapping(settings, "config_groups"), name)
        _check_format(f"format of {name}", group.get("format"))
        if isinstance(weights := group.get("weights"), dict):
            yield weights


def _check_format(key: str, value: object) -> None:
    if value is not None and value not in _FORMATS:
        raise ModelError(
            f"{key} is {value!r}; supported for compressed-tensors: {', '.join(_FORMATS)}. "
            "Give the original model, or a GGUF file of it"
        )


def _block(groups: list[Fields]) -> tuple[int, int] | None:
    """The rows and columns of a block, if scales are per block."""
    for weights in groups:
        match weights.get("block_structure"):
            case [int(high), int(wide)] if high > 0 and wide > 0:
                return high, wide
            case None:
                continue
            case other:
                raise ModelError(f"block_structure is {other!r}; expected two numbers of rows and columns")
    return None
