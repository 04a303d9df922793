"""GPTQ and AWQ: integers packed into int32 words, with transposed matrices.

Source: AutoGPTQ's and GPTQModel's torch linears, AutoAWQ's gemm linear.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.models.fields import Fields, boolean, integer
from specinfer.models.quantized.integers import (
    IntegerMatrix,
    LevelRows,
    TransposedTensor,
    order_of_groups,
    unpacked,
)
from specinfer.models.quantized.pieces import FLOATS, LastFew, Pieces, StoredTensor

_WORDS: Final = (torch.int32,)
_PER_WORD: Final = 8  # elements per word in AWQ
_KEPT: Final = 6  # tensors of two matrices
# AWQ's positions within a word of eight adjacent columns.
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The matrices of a GPTQ model by name; `settings` is the quantization_config.

    Raises ModelError for unsupported settings, ModelFileError if tensors contradict them.
    """
    bits = _one_of(settings, "bits", (2, 4, 8))
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"checkpoint_format is {form!r}; supported for GPTQ: 'gptq', 'gptq_v2'")
    if settings.get("pack_dtype", "int32") != "int32":
        raise ModelError(f"pack_dtype is {settings['pack_dtype']!r}; supported for GPTQ: 'int32'")
    if settings.get("adapter"):
        raise ModelError("the GPTQ model has an adapter (EoRA), which is not supported")
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not str(rule).startswith("-:") for rule in dynamic):
        raise ModelError(
            "dynamic has other settings for some matrices; supported for GPTQ: '-:' rules to skip some"
        )
    # The first version stores zero points minus one; 0 wraps to the largest level.
    offset = 1 if form == "gptq" else 0
    acts, found = boolean(settings, "desc_act", False), dict[str, StoredTensor]()
    last = LastFew[Tensor](_KEPT)
    for stem in pieces.stems(".qweight"):
        words = pieces.take(f"{stem}.qweight", _WORDS, (None, None))
        inner, channels = words.shape[0] * 32 // bits, words.shape[1]
        groups = _groups(settings, stem, inner)
        scales = pieces.take(f"{stem}.scales", FLOATS, (groups, channels))
        zeros = pieces.take(f"{stem}.qzeros", _WORDS, (groups, -(-channels * bits // 32)))
        index = pieces.optional(f"{stem}.g_idx", (torch.int32, torch.int64), (inner,))
        if index is None and acts:
            raise ModelFileError(
                f"config.json sets desc_act, and {words.path} has no tensor '{stem}.g_idx', the order of "
                "columns; the model is incomplete, get it again"
            )
        transposed = (
            TransposedTensor(words, last),
            TransposedTensor(scales, last),
            TransposedTensor(zeros, last),
        )
        read = _GptqRows(*transposed, bits, offset).read
        found[f"{stem}.weight"] = IntegerMatrix(
            *(words.path, (channels, inner), bits, scales, read),
            groups=groups,
            group_of=None if index is None else order_of_groups(f"{stem}.g_idx", index, groups),
        )
    return found


def awq(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The matrices of an AWQ model; see gptq."""
    _one_of(settings, "bits" if "bits" in settings else "w_bit", (4,))
    form = settings.get("version") or settings.get("format") or "gemm"
    if not isinstance(form, str) or form.lower() != "gemm":
        raise ModelError(f"version is {form!r}; supported for AWQ: 'gemm'")
    found, last = dict[str, StoredTensor](), LastFew[Tensor](_KEPT)
    for stem in pieces.stems(".qweight"):
        words = pieces.take(f"{stem}.qweight", _WORDS, (None, None))
        inner, channels = words.shape[0], words.shape[1] * _PER_WORD
        groups = _groups(settings, stem, inner)
        scales = pieces.take(f"{stem}.scales", FLOATS, (groups, channels))
        zeros = pieces.take(f"{stem}.qzeros", _WORDS, (groups, words.shape[1]))
        transposed = (
            TransposedTensor(words, last),
            TransposedTensor(scales, last),
            TransposedTensor(zeros, last),
        )
        read = _AwqRows(*transposed).read
        found[f"{stem}.weight"] = IntegerMatrix(words.path, (channels, inner), 4, scales, read, groups=groups)
    return found


class _GptqRows:
    """Reads [inner words, channels], scales [groups, channels] and zeros [groups, words of channels]."""

    def __init__(
        self,
        words: TransposedTensor,
        scales: TransposedTensor,
        zeros: TransposedTensor,
        bits: int,
        offset: int,
    ) -> None:
        self._words, self._scales, self._zeros = words, scales, zeros
        self._bits, self._offset = bits, offset

    def read(self, start: int, stop: int) -> LevelRows:
        per = 32 // self._bits
        first = start // per
        packed = self._zeros.rows(first, -(-stop // per)).T
        zeros = unpacked(packed, self._bits).T[start - first * per : stop - first * per]
        zeros = zeros.add(self._offset).bitwise_and_((1 << self._bits) - 1)
        return LevelRows(
            unpacked(self._words.rows(start, stop), self._bits), self._scales.rows(start, stop), zeros
        )


class _AwqRows:
    """Reads [inner, words of channels], and scales and zeros as in GPTQ."""

    def __init__(self, words: TransposedTensor, scales: TransposedTensor, zeros: TransposedTensor) -> None:
        self._words, self._scales, self._zeros = words, scales, zeros

    def read(self, start: int, stop: int) -> LevelRows:
        first = start // _PER_WORD
        behind, within = -(-stop // _PER_WORD), slice(start - first * _PER_WORD, stop - first * _PER_WORD)
        return LevelRows(
            _channels(self._words.rows(first, behind))[within],
            self._scales.rows(start, stop),
            _channels(self._zeros.rows(first, behind))[within],
        )


def _channels(words: Tensor) -> Tensor:
    """Words of eight channels, int32 [words, n], as uint8 [words * 8, n]."""
    by_place = unpacked(words, 4).view(*words.shape, _PER_WORD).movedim(2, 1)
    return by_place[:, list(_AWQ_PLACES)].flatten(0, 1)


def _one_of(settings: Fields, key: str, allowed: tuple[int, ...]) -> int:
    value = integer(settings, key)
    if value not in allowed:
        raise ModelError(
            f"{key} of the quantized model is {value}; supported: {', '.join(map(str, allowed))}. "
            "Give the original model, or a GGUF file of it"
        )
    return value


def _groups(settings: Fields, stem: str, inner: int) -> int:
    """The number of groups in a row of `inner` elements."""
    size = integer(settings, "group_size" if "group_size" in settings else "q_group_size", -1)
    if size == -1:
        return 1
    if size < 1 or inner % size:
        raise ModelError(
            f"group_size is {size}, which does not divide the {inner} elements of a row of {stem}"
        )
    return inner // size
