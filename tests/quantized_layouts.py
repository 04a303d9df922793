"""Quantized matrices in the file formats of other programs: tensors and quantization_config.

Matrices are [out, in]; scales and zeros are [out, groups].
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch
from torch import Tensor

Pieces = dict[str, Tensor]  # tensors of one matrix, by the end of their names
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
NF4: Final = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.24611230, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
_FP4: Final = (0.0, 0.0052083333, 0.6666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
FP4: Final = (*_FP4, *(-value for value in _FP4))


def packed(levels: Tensor, bits: int, dim: int) -> Tensor:
    """Pack neighbours along a dimension into int32 words, the first in the lowest bits."""
    per = 32 // bits
    rows = levels.movedim(dim, 0).long()
    rows = torch.cat((rows, rows.new_zeros(-len(rows) % per, *rows.shape[1:])))
    words = torch.zeros(len(rows) // per, *rows.shape[1:], dtype=torch.int64)
    for place in range(per):
        words |= rows[place::per] << (bits * place)
    return words.to(torch.uint32).view(torch.int32).movedim(0, dim).contiguous()


def group_index(inner: int, groups: int) -> Tensor:
    """The group of each element of a row, int64 [in], for groups of equal size."""
    return torch.arange(inner) // (inner // groups)


def gptq_pieces(
    levels: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, form: str, group_of: Tensor | None
) -> Pieces:
    """GPTQ; `form` is the checkpoint_format, and `group_of` is written as g_idx unless it is None."""
    stored = (zeros - 1) % (1 << bits) if form == "gptq" else zeros
    pieces = {
        "qweight": packed(levels.T, bits, 0),
        "qzeros": packed(stored.T, bits, 1),
        "scales": scales.T.contiguous(),
    }
    return pieces if group_of is None else pieces | {"g_idx": group_of.int()}


def gptq_config(bits: int, size: int, *, form: str, sym: bool, desc_act: bool) -> dict[str, Any]:
    """The quantization_config of a GPTQ model with groups of `size` elements."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": desc_act}
    return settings | {"checkpoint_format": form}


def awq_pieces(levels: Tensor, scales: Tensor, zeros: Tensor) -> Pieces:
    """AWQ in 4 bits, version gemm: word w has the columns 8 w + order."""
    order = [8 * (c // 8) + AWQ_ORDER[c % 8] for c in range(len(levels))]
    return {
        "qweight": packed(levels[order].T, 4, 1),
        "qzeros": packed(zeros[order].T, 4, 1),
        "scales": scales.T.contiguous(),
    }


def awq_config(size: int) -> dict[str, Any]:
    """The quantization_config of an AWQ model with groups of `size` elements."""
    return {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}


def pack_quantized_pieces(
    levels: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, plain_zeros: bool = False
) -> Pieces:
    """pack-quantized of compressed-tensors; levels start at 0, and zeros are None if symmetric.

    `plain_zeros` are stored as int8, not packed.
    """
    shape = torch.tensor(levels.shape)
    pieces = {"weight_packed": packed(levels, bits, 1), "weight_shape": shape, "weight_scale": scales}
    if zeros is None:
        return pieces
    stored = (zeros - (1 << (bits - 1))).to(torch.int8) if plain_zeros else packed(zeros, bits, 0)
    return pieces | {"weight_zero_point": stored}


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    """The quantization_config of a compressed-tensors model with these settings of weights."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def four_bit_pieces(
    codes: Tensor,
    shape: torch.Size,
    scales: Pieces,
    *,
    kind: str,
    size: int,
    storage: torch.dtype = torch.uint8,
    nested: dict[str, Any] | None = None,
) -> Pieces:
    """bitsandbytes in 4 bits: codes [elements] of consecutive rows, an even number, in blocks of `size`.

    `scales` are the tensors with the scales of blocks, `nested` the settings of quantized scales, and
    `storage` the dtype that holds the bytes.
    """
    octets = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)
    state = {
        "quant_type": kind,
        "blocksize": size,
        "dtype": "bfloat16",
        "shape": list(shape),
        **(nested or {}),
    }
    return {
        **scales,
        "weight.quant_map": torch.tensor(NF4 if kind == "nf4" else FP4),
        "weight": octets.view(storage)[:, None],
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def four_bit_config(kind: str) -> dict[str, Any]:
    """The quantization_config of a bitsandbytes model in 4 bits."""
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
