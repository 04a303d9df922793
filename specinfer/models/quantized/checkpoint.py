"""Which quantized folders are read, and their tensors as matrices of floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from specinfer.errors import ModelError, ModelFileError
from specinfer.hub.foreign_format import INSTEAD, quantized_config, quantized_tensor
from specinfer.models.fields import Fields
from specinfer.models.quantized.bitsandbytes import bitsandbytes
from specinfer.models.quantized.compressed_tensors import compressed_tensors
from specinfer.models.quantized.gptq import awq, gptq
from specinfer.models.quantized.mxfp4 import mxfp4
from specinfer.models.quantized.pieces import FLOATS, FileTensor, Pieces, StoredTensor
from specinfer.models.quantized.scaled import fp8

# The types of tensors in such files, beside those of floats, by safetensors' names.
STORED: Final = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_READERS: Final[Mapping[str, Callable[[Fields, Pieces], dict[str, StoredTensor]]]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fp8,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}


def quantization_of(config: Fields) -> Fields | None:
    """What a config.json says of quantized weights; None: nothing.

    Raises ModelError, naming quant_method, where they are of a kind that is not read.
    """
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict) or (method := quantized_config(part)) is None:
            continue
        said = part.get("quantization_config") or part.get("compression_config")
        if isinstance(said, dict) and _method(said) in _READERS:
            return said
        raise ModelError(
            f"config.json says (quant_method) that the weights are quantized by {method}, which is not read; "
            f"supported: {', '.join(_READERS)}. Else {INSTEAD}"
        )
    return None


def dequantized(folder: Path, said: Fields, tensors: Mapping[str, FileTensor]) -> dict[str, StoredTensor]:
    """The tensors of a folder whose config.json says this, under the names they had before.

    Reads no weights. Raises ModelError naming the key that asks for the unsupported, ModelFileError naming
    the tensor that is missing, or that nothing is made of.
    """
    method = _method(said)
    pieces = Pieces(folder, tensors)
    found = _READERS[method](said, pieces)
    for name, tensor in pieces.rest.items():
        if tensor.dtype not in FLOATS or quantized_tensor(name) is not None:
            raise ModelFileError(
                f"{tensor.path}: tensor {name!r} is of no matrix as {method} quantizes them; the model is "
                f"damaged or incomplete: get it again, or {INSTEAD}"
            )
    return {**pieces.rest, **found}


def _method(said: Fields) -> str:
    method = said.get("quant_method")
    if method is None and (said.get("load_in_4bit") or said.get("load_in_8bit")):
        return "bitsandbytes"
    return method.lower() if isinstance(method, str) else ""
