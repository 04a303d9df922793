"""Selects the reader of a quantized folder, and converts its tensors to matrices of floats."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from specinfer.errors import ModelError, ModelFileError
from specinfer.hub.foreign_format import INSTEAD, quantized_config, quantized_tensor
from specinfer.models.fields import Fields
from specinfer.models.quantized.bitsandbytes import bitsandbytes
from specinfer.models.quantized.packed import awq, compressed_tensors, gptq
from specinfer.models.quantized.pieces import FLOATS, Pieces, StoredTensor, TensorEntry
from specinfer.models.quantized.scaled import fp8, mxfp4

_LOG = logging.getLogger(__name__)
# Types of tensors in such files besides floats, by safetensors' names.
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
    """The quantization settings of a config.json, or None.

    Raises ModelError, naming quant_method, for an unsupported kind.
    """
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict) or (method := quantized_config(part)) is None:
            continue
        settings = part.get("quantization_config") or part.get("compression_config")
        if isinstance(settings, dict) and _method(settings) in _READERS:
            return settings
        raise ModelError(
            f"config.json (quant_method): the weights are quantized by {method}, which is not supported here"
            f"; supported: {', '.join(_READERS)}. Else {INSTEAD}"
        )
    return None


def dequantized(
    folder: Path, settings: Fields, tensors: Mapping[str, TensorEntry]
) -> dict[str, StoredTensor]:
    """The tensors of a folder with these settings, under their names before quantization.

    Reads no weights. Raises ModelError, naming the key of an unsupported setting, and ModelFileError, naming
    a tensor that is missing or unused.
    """
    method = _method(settings)
    pieces = Pieces(folder, tensors)
    found = _READERS[method](settings, pieces)
    for name, tensor in pieces.rest.items():
        if tensor.dtype not in FLOATS or quantized_tensor(name):
            raise ModelFileError(
                f"{tensor.path}: tensor {name!r} belongs to no matrix quantized by {method}; the model is "
                f"damaged or incomplete: get it again, or {INSTEAD}"
            )
    if not found:
        _LOG.warning(
            "config.json of %s says that the weights are quantized by %s, but no tensor is; they are read "
            "unquantized: take the setting out of config.json, or fetch the model again",
            *(folder, method),
        )
    return {**pieces.rest, **found}


def _method(settings: Fields) -> str:
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return method.lower() if isinstance(method, str) else ""
