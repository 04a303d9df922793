"""Writes model folders in other programs' quantization formats, each weight rounded to the nearest value.

Published files are calibrated: GPTQ and AWQ choose levels and scales by the activations of sample texts.
Rounding to nearest needs no texts. Layouts, scales and zero points are those of the formats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.identity.quantized_layouts import (
    NF4,
    Pieces,
    awq_config,
    awq_pieces,
    compressed_config,
    four_bit_config,
    four_bit_pieces,
    gptq_config,
    gptq_pieces,
    group_index,
    pack_quantized_pieces,
)
from specinfer.hub import ModelFiles
from specinfer.models.open_model import open_model
from specinfer.models.safetensors import write_model

QUANTIZED: Final = "proj.weight"  # end of the names of quantized matrices
_WEIGHTS: Final = "model.safetensors"
_SMALLEST: Final = 1e-5  # scale of a group of zeros
_E4M3: Final = 448.0  # largest value
_E2M1: Final = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_E2M1_EXPONENT: Final = 2  # of its largest value
_MX_GROUP: Final = 32
_NF4_BLOCK: Final = 64
_FP8_BLOCK: Final = (128, 128)


class RoundedFormat(NamedTuple):
    """A file format: its quantization_config, and the rounding of a float32 matrix [out, in]."""

    config: Mapping[str, Any]
    pieces: Callable[[Tensor], Pieces]


def rounded_formats(size: int) -> dict[str, RoundedFormat]:
    """The formats by name; integers have groups of `size` elements."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(_FP8_BLOCK)}
    ints: dict[str, Any] = {"type": "int", "symmetric": True}
    return {
        "gptq 4 bits": RoundedFormat(
            gptq_config(4, size, form="gptq", sym=True, desc_act=False), lambda weight: _gptq(weight, size)
        ),
        "awq 4 bits": RoundedFormat(
            awq_config(size),
            lambda weight: awq_pieces(*_grid(weight, 4, size, symmetric=False, dtype=torch.float16)),
        ),
        "compressed-tensors w4a16": RoundedFormat(
            compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=size, **ints),
            lambda weight: _pack_quantized(weight, size),
        ),
        "compressed-tensors w8a8": RoundedFormat(
            compressed_config("int-quantized", num_bits=8, strategy="channel", **ints), _int8
        ),
        "compressed-tensors FP8 channels": RoundedFormat(
            compressed_config(
                "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"
            ),
            lambda weight: _float8(weight, (1, weight.shape[1]), "weight_scale", torch.bfloat16),
        ),
        "fp8 blocks": RoundedFormat(
            fp8, lambda weight: _float8(weight, _FP8_BLOCK, "weight_scale_inv", torch.float32)
        ),
        "mxfp4": RoundedFormat({"quant_method": "mxfp4"}, _mxfp4),
        "bitsandbytes nf4": RoundedFormat(four_bit_config("nf4"), _nf4),
    }


def write_bfloat16(model: ModelFiles, folder: Path) -> None:
    """Write a model as a folder in bfloat16, with its tokenizer.

    Raises ModelError for a family that cannot be written.
    """
    opened = open_model(model.path)
    tensors = {name: opened.read_rows(name, 0, shape[0]).float() for name, shape in opened.shapes.items()}
    write_model(opened.config, tensors, folder, tokenizer=model)


def write_rounded(source: Path, folder: Path, form: RoundedFormat) -> None:
    """Write the bfloat16 folder `source` with the matrices of its layers in a format."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(_WEIGHTS))
    stored = dict[str, Tensor]()
    for name, tensor in load_file(source / _WEIGHTS).items():
        if not name.endswith(QUANTIZED):
            stored[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        for end, piece in form.pieces(tensor.float()).items():
            stored[stem + (end if end.startswith("_") else f".{end}")] = piece.contiguous()
    save_file(stored, folder / _WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(config))


def _grid(
    weight: Tensor, bits: int, size: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [out, in], and scales in `dtype` and zeros [out, groups] that cover the range of each group."""
    groups, top = weight.view(len(weight), -1, size), (1 << bits) - 1
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).clamp_(min=_SMALLEST).to(dtype)
    zeros = torch.full_like(low, 1 << (bits - 1)) if symmetric else (-low / scales.float()).round_()
    zeros.clamp_(0, top)
    levels = (groups / scales.float()[..., None]).add_(zeros[..., None]).round_().clamp_(0, top)
    return levels.flatten(1).long(), scales, zeros.long()


def _gptq(weight: Tensor, size: int) -> Pieces:
    inner = weight.shape[1]
    levels, scales, zeros = _grid(weight, 4, size, symmetric=True, dtype=torch.float16)
    group_of = group_index(inner, inner // size)
    return gptq_pieces(levels, scales, zeros, bits=4, form="gptq", group_of=group_of)


def _pack_quantized(weight: Tensor, size: int) -> Pieces:
    levels, scales, _ = _grid(weight, 4, size, symmetric=True, dtype=torch.bfloat16)
    return pack_quantized_pieces(levels, scales, None, bits=4)


def _int8(weight: Tensor) -> Pieces:
    scales = (weight.abs().amax(1, keepdim=True) / 127.5).clamp_(min=_SMALLEST).bfloat16()
    values = (weight / scales.float()).round_().clamp_(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}


def _float8(weight: Tensor, block: tuple[int, int], scale: str, dtype: torch.dtype) -> Pieces:
    """E4M3 with a scale of `dtype` per block of rows and columns; the last ones may be smaller."""
    (out, inner), (high, wide) = weight.shape, block
    full = F.pad(weight, (0, -inner % wide, 0, -out % high))
    tiles = full.view(-(-out // high), high, -(-inner // wide), wide)
    scales = (tiles.abs().amax((1, 3)) / _E4M3).clamp_(min=_SMALLEST**2).to(dtype)
    values = (tiles / scales.float()[:, None, :, None]).clamp_(-_E4M3, _E4M3).view(full.shape)
    return {"weight": values[:out, :inner].to(torch.float8_e4m3fn), scale: scales}


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    """The index of the nearest of ascending values, int64."""
    return torch.bucketize(x, (values[1:] + values[:-1]) / 2)


def _mxfp4(weight: Tensor) -> Pieces:
    """The layout of gpt-oss, as a stack of one expert."""
    groups = weight.view(len(weight), -1, _MX_GROUP)
    largest = groups.abs().amax(2).clamp_(min=_SMALLEST**2)
    powers = largest.log2().floor_().int() - _E2M1_EXPONENT
    x = torch.ldexp(groups, -powers[..., None])
    codes = _nearest(x.abs(), _E2M1) + 8 * (x < 0)
    octets = codes[..., ::2] | codes[..., 1::2] << 4
    return {"_blocks": octets.to(torch.uint8)[None], "_scales": (powers + 127).to(torch.uint8)[None]}


def _nf4(weight: Tensor) -> Pieces:
    blocks = weight.view(-1, _NF4_BLOCK)
    scales = blocks.abs().amax(1).clamp_(min=_SMALLEST**2)
    codes = _nearest(blocks / scales[:, None], torch.tensor(NF4)).flatten()
    return four_bit_pieces(codes, weight.shape, {"weight.absmax": scales}, kind="nf4", size=_NF4_BLOCK)
