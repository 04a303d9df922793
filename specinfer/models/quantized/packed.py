"""Packed integers: GPTQ, AWQ and compressed-tensors.

GPTQ and AWQ pack integers into int32 words, with transposed matrices. compressed-tensors has packed integers,
int8 and FP8 with scales per matrix, channel, group or block.

Source: AutoGPTQ's and GPTQModel's torch linears, AutoAWQ's gemm linear, the compressed-tensors package's
pack_quantized and naive_quantized compressors.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.models.fields import Fields, boolean, integer, mapping
from specinfer.models.quantized.pieces import FLOATS, LastFew, Pieces, StoredTensor, TensorEntry, whole
from specinfer.models.quantized.scaled import (
    IntegerMatrix,
    LevelRows,
    block_of,
    order_of_groups,
    scaled,
    unpacked,
)

_WORDS: Final = (torch.int32,)
_INTEGERS: Final = (torch.int32, torch.int64)
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
    if settings.get("adapter"):
        raise ModelError("the GPTQ model has an adapter (EoRA), which is not supported")
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not str(rule).startswith("-:") for rule in dynamic):
        raise ModelError(
            "dynamic has other settings for some matrices; supported for GPTQ: '-:' rules to skip some"
        )
    # The first version stores zero points minus one; 0 wraps to the largest level.
    return _transposed(settings, pieces, bits, offset=1 if form == "gptq" else 0)


def awq(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The matrices of an AWQ model; see gptq."""
    _one_of(settings, "bits" if "bits" in settings else "w_bit", (4,))
    form = settings.get("version") or settings.get("format") or "gemm"
    if not isinstance(form, str) or form.lower() != "gemm":
        raise ModelError(f"version is {form!r}; supported for AWQ: 'gemm'")
    return _transposed(settings, pieces, 4, places=_AWQ_PLACES)


def _transposed(
    settings: Fields, pieces: Pieces, bits: int, *, offset: int = 0, places: Sequence[int] | None = None
) -> dict[str, StoredTensor]:
    """The matrices of GPTQ or, with `places`, of AWQ, by name.

    A word of GPTQ has elements of a row. A word of AWQ has an element of each of eight rows, whose positions
    in the word are `places`. Words of zero points have those of adjacent rows. `offset` is added to these.
    """
    acts = places is None and boolean(settings, "desc_act", False)
    last, per = LastFew[Tensor](_KEPT), 32 // bits

    def matrix(stem: str) -> IntegerMatrix:
        words = pieces.take(f"{stem}.qweight", _WORDS, (None, None))
        inner, channels = words.shape
        inner, channels = (inner * per, channels) if places is None else (inner, channels * per)
        groups = _groups(settings, stem, inner)
        scales = pieces.take(f"{stem}.scales", FLOATS, (groups, channels))
        zeros = pieces.take(f"{stem}.qzeros", _WORDS, (groups, -(-channels // per)))
        index = None if places else pieces.optional(f"{stem}.g_idx", _INTEGERS, (inner,))
        if index is None and acts:
            raise ModelFileError(
                f"config.json sets desc_act, and {words.path} has no tensor '{stem}.g_idx', the order of "
                "columns; the model is incomplete, get it again"
            )
        turned, factors, offsets = (partial(_columns, one, last) for one in (words, scales, zeros))

        def read(start: int, stop: int) -> LevelRows:
            """Read words, and scales and words of zeros by group."""
            of_zero = _unpacked_rows(offsets, bits, start, stop, places).add(offset)
            if places is None:
                levels = unpacked(turned(start, stop), bits)
            else:
                levels = _unpacked_rows(turned, bits, start, stop, places)
            return LevelRows(levels, factors(start, stop), of_zero.bitwise_and_((1 << bits) - 1))

        group_of = None if index is None else order_of_groups(f"{stem}.g_idx", index, groups)
        shape = channels, inner
        return IntegerMatrix(words.path, shape, bits, scales, read, groups=groups, group_of=group_of)

    return {f"{stem}.weight": matrix(stem) for stem in pieces.stems(".qweight")}


def _columns(tensor: TensorEntry, last: LastFew[Tensor], start: int, stop: int) -> Tensor:
    """Columns start..stop of a file's matrix, as rows.

    The whole matrix is in memory while it is read, in `last`, the folder's cache.
    """
    transposed = last.get(tensor, lambda: whole(tensor).T.contiguous())
    if stop == len(transposed):
        last.drop(tensor)
    return transposed[start:stop]


def _unpacked_rows(
    read: Callable[[int, int], Tensor], bits: int, start: int, stop: int, places: Sequence[int] | None = None
) -> Tensor:
    """Rows start..stop of integers whose words hold those of adjacent rows; `read` reads rows of words.

    `places` are the positions of rows within a word, if they are not in order.
    """
    per = 32 // bits
    first = start // per
    # A copy, since the slice of a single word has a stride that cannot be viewed as bytes.
    words = read(first, -(-stop // per)).clone(memory_format=torch.contiguous_format)
    by_place = unpacked(words, bits).view(*words.shape, per).movedim(2, 1)
    rows = by_place[:, list(places or range(per))].flatten(0, 1)
    return rows[start - first * per : stop - first * per]


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


_FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision"),
)


def compressed_tensors(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The matrices of such a model by name; `settings` is the quantization_config.

    Tensors determine how each matrix is quantized; `settings` has the rest. Raises ModelError for unsupported
    settings, ModelFileError if tensors contradict them.
    """
    groups = list(_weights(settings))
    blocks = (block_of(weights, "block_structure") for weights in groups)
    block = next((one for one in blocks if one is not None), None)
    asymmetric = bool(groups) and not any(boolean(g, "symmetric", True) for g in groups)
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
    rows_of_zeros = -(-channels * bits // 32) if zeros is None or zeros.dtype is not torch.int8 else channels
    if zeros is not None and zeros.shape != (rows_of_zeros, groups):
        raise ModelFileError(
            f"{words.path}: tensor '{stem}.weight_zero_point' has shape {list(zeros.shape)} for "
            f"{channels} rows of {groups} groups; get the model again"
        )
    index = pieces.optional(f"{stem}.weight_g_idx", _INTEGERS, (inner,))

    def read(start: int, stop: int) -> LevelRows:
        """Read [channels, words of a row], scales [channels, groups] and zeros [words of channels, groups].

        Levels and zero points are stored with half the number of levels added.
        """
        levels, half = unpacked(words.read_rows(start, stop), bits)[:, :inner], 1 << (bits - 1)
        factors = scales.read_rows(start, stop)
        if zeros is None:
            of_zero = torch.full(factors.shape, half, dtype=torch.uint8)
        elif zeros.dtype is torch.int8:
            of_zero = (zeros.read_rows(start, stop).short() + half).to(torch.uint8)
        else:
            of_zero = _unpacked_rows(zeros.read_rows, bits, start, stop)
        return LevelRows(levels.contiguous(), factors, of_zero)

    group_of = None if index is None else order_of_groups(f"{stem}.weight_g_idx", index, groups)
    return IntegerMatrix(words.path, (channels, inner), bits, scales, read, groups=groups, group_of=group_of)


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
