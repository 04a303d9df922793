"""bitsandbytes: int8 with a scale per channel, and 4-bit codes of a code book with a scale per block.

Source: bitsandbytes' QuantState and its default dequantization.
"""

import json
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.fields import Fields, count, number
from specinfer.models.quantized.pieces import FLOATS, MadeTensor, Pieces, StoredTensor, TensorEntry, whole
from specinfer.models.quantized.scaled import scaled_by

_STATE: Final = ".quant_state.bitsandbytes__"
_BYTES: Final = (torch.uint8,)
_WHOLE_ROWS: Final = 0  # weight_format of int8 with contiguous rows
_STEP: Final = 7.874015718698502e-3  # 1 / 127, as in bitsandbytes


def bitsandbytes(fields: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The matrices of such a model by name; their tensors describe the quantization.

    Raises ModelFileError if tensors do not fit each other.
    """
    found = dict[str, StoredTensor]()
    for stem in pieces.stems(".SCB"):
        values = pieces.take(f"{stem}.weight", (torch.int8,), (None, None))
        form = pieces.optional(f"{stem}.weight_format", _BYTES)
        if form is not None and whole(form).tolist() != [_WHOLE_ROWS]:
            raise ModelFileError(
                f"{values.path}: '{stem}.weight_format' is {whole(form).tolist()}; supported: [{_WHOLE_ROWS}]"
            )
        scales = pieces.take(f"{stem}.SCB", FLOATS, values.shape[:1])
        found[f"{stem}.weight"] = scaled_by(values, scales, (1, values.shape[1]), factor=_STEP)
    for name in [name for name in pieces.rest if _STATE in name]:
        matrix = name.partition(_STATE)[0]
        found[matrix] = _four_bits(pieces, matrix, pieces.take(name, _BYTES, (None,)))
    return found


def _octets(packed: TensorEntry, first: int, behind: int) -> Tensor:
    """These bytes, which are stored as elements of any type."""
    per = packed.dtype.itemsize
    begin = first // per
    octets = packed.read_rows(begin, -(-behind // per)).contiguous().view(torch.uint8).flatten()
    return octets[first - begin * per : behind - begin * per]


def _four_bits(pieces: Pieces, name: str, state: StoredTensor) -> MadeTensor:
    fields = _state(state)
    match fields.get("shape"):
        case [int(channels), int(inner)] if channels > 0 and inner > 0:
            pass
        case other:
            raise ModelFileError(
                f"{state.path}: the quant_state of {name!r} has shape {other}; expected two positive sizes"
            )
    size = count(fields, "blocksize")
    elements = channels * inner
    packed = pieces.take(name, (*_BYTES, *FLOATS), (None, 1))
    if packed.shape[0] * packed.dtype.itemsize != -(-elements // 2):
        raise ModelFileError(
            f"{packed.path}: tensor {name!r} has shape {list(packed.shape)}, its quant_state has "
            f"{channels} x {inner}; get the model again"
        )
    code = whole(pieces.take(f"{name}.quant_map", FLOATS, (16,))).float()
    blocks = -(-elements // size)
    scales = pieces.take(f"{name}.absmax", (*_BYTES, *FLOATS), (blocks,))
    nested = scales.dtype is torch.uint8
    if nested:  # a scale is book[scale] times the scale of its block of `each` scales, plus an offset
        each = count(fields, "nested_blocksize")
        outer = whole(pieces.take(f"{name}.nested_absmax", FLOATS, (-(-blocks // each),))).float()
        book = whole(pieces.take(f"{name}.nested_quant_map", FLOATS, (256,))).float()
        offset = number(fields, "nested_offset")

    def scales_of(start: int, stop: int) -> Tensor:
        found = scales.read_rows(start, stop)
        if not nested:
            return found.float()
        return book[found.int()] * outer[torch.arange(start, stop) // each] + offset

    def read_rows(start: int, stop: int) -> Tensor:
        """Rows of codes, two per byte, times the scale of their block, over consecutive rows."""
        begin, end = start * inner, stop * inner
        first, block = begin // 2, begin // size
        octets = _octets(packed, first, -(-end // 2))
        codes = torch.stack((octets >> 4, octets & 15), 1).flatten()[begin - 2 * first : end - 2 * first]
        of_each = scales_of(block, -(-end // size)).repeat_interleave(size)
        within = slice(begin - block * size, end - block * size)
        return (code[codes.int()] * of_each[within]).view(stop - start, inner)

    return MadeTensor(packed.path, (channels, inner), read_rows)


def _state(state: StoredTensor) -> Fields:
    try:
        fields = json.loads(bytes(whole(state).tolist()))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{state.path}: a quant_state is not JSON ({error}); get the model again"
        ) from error
    if not isinstance(fields, dict):
        raise ModelFileError(f"{state.path}: a quant_state is not a JSON object; get the model again")
    return fields
