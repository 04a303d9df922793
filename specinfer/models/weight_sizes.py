"""Bytes of weights in memory and in prepared files, known before any weight is read."""

import math
import re
from pathlib import Path
from typing import Final

import torch

from specinfer.kernels.choice import TORCH, Kernels
from specinfer.kernels.file_blocks import blocks_bytes
from specinfer.kernels.layout import int4_bytes, int8_bytes
from specinfer.models.config import ModelConfig
from specinfer.models.decoder_shapes import decoder_shapes
from specinfer.models.experts import EXPERTS
from specinfer.models.hosted.folder import HostedFolder
from specinfer.models.open_model import OpenModel, open_model
from specinfer.models.per_layer import PER_LAYER_TABLE
from specinfer.models.placement import ExpertMemory
from specinfer.models.weight_reader import FLOAT32, blocks_file, table_in_file
from specinfer.speculation_config import Quantization

_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")
_TABLE: Final = "model.embed_tokens.weight"
LOOKED_UP: Final = ("embed_tokens.weight", "embed_positions.weight")  # lookup tables, which stay floats


def estimate_bytes(
    model: OpenModel | Path,
    dtype: torch.dtype,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
) -> int:
    """The bytes of a model's weights in `dtype`, without loading them.

    Includes the second copy of tied embeddings for native or quantized products, but no embeddings that stay
    in the file. Raises as `open_model`.
    """
    opened = open_model(model) if isinstance(model, Path) else model
    if isinstance(opened, HostedFolder):
        if quantization == "gguf":
            blocks_file(opened)  # raises ModelError
        return opened.weight_bytes(dtype, quantization)
    if quantization != "gguf":
        return weight_bytes(opened.config, dtype, kernels, quantization)
    size = table_bytes(opened, dtype, quantization)
    for name, shape in opened.shapes.items():
        if name not in (_TABLE, PER_LAYER_TABLE):
            floats = len(shape) < 2 or name.endswith(LOOKED_UP)
            size += matrix_bytes(opened, name, dtype, "none" if floats else quantization)
    if opened.config.tie_embeddings:  # the output layer's blocks, in addition to the table
        size += matrix_bytes(opened, _TABLE, dtype, quantization)
    return size


def weight_bytes(
    config: ModelConfig, dtype: torch.dtype, kernels: Kernels, quantization: Quantization
) -> int:
    """The same for a model with this config, or a rank's part of one."""
    part, vocab = config.part, config.vocab_size
    output_layer = (vocab if part.vocab is None else len(part.vocab), config.hidden_size)
    begins, floats = config.stage.begins, quantization == "none"
    size = math.prod(output_layer) * dtype.itemsize if floats else int8_bytes(*output_layer)
    if not begins or (floats and config.tie_embeddings and kernels.library is None and part.vocab is None):
        size = 0  # on another stage, or PyTorch multiplies with the embeddings
    for name, shape in decoder_shapes(config).items():
        if name in ("lm_head.weight", PER_LAYER_TABLE):  # the output layer is counted, the table is on disk
            continue
        if name.endswith("embed_tokens.weight") and part.table is not None:
            size += len(part.table) * config.hidden_size * dtype.itemsize
        elif len(shape) < 2 or name.endswith(LOOKED_UP):
            size += math.prod(shape) * dtype.itemsize
        else:
            size += _shape_bytes(name, shape, dtype, quantization)
    return size


def table_bytes(model: OpenModel, dtype: torch.dtype, quantization: Quantization) -> int:
    """The bytes of a model's embeddings in memory: 0 if passes read their rows from the file."""
    if table_in_file(model, quantization, _TABLE) is not None:
        return 0
    return model.config.vocab_size * model.config.hidden_size * dtype.itemsize


def layer_bytes(model: OpenModel, dtype: torch.dtype, quantization: Quantization) -> list[int]:
    """Approximate bytes of each layer's matrices in a prepared file."""
    found = [0] * model.config.num_layers
    for name, shape in decoder_shapes(model.config).items():
        if len(shape) > 1 and (layer := _LAYER.search(name)) is not None:
            found[int(layer[1])] += matrix_bytes(model, name, dtype, quantization)
    return found


def expert_sizes(model: OpenModel, dtype: torch.dtype, quantization: Quantization) -> ExpertMemory | None:
    """The experts of a model and their bytes, about, none in memory; None: it has none."""
    experts = model.config.experts
    if experts is None or isinstance(model, HostedFolder):
        return None
    layers = model.config.num_layers - len(experts.dense_layers)
    each = -(-expert_bytes(model, dtype, quantization) // (layers * experts.count))
    return ExpertMemory(experts, layers, each)


def part_bytes(
    model: OpenModel, part: ModelConfig, dtype: torch.dtype, kernels: Kernels, quantization: Quantization
) -> int:
    """The bytes of a rank's part of a model, as `weight_bytes`; a GGUF file's blocks have their own sizes."""
    if quantization != "gguf":
        return weight_bytes(part, dtype, kernels, quantization)
    layers = layer_bytes(model, dtype, quantization)
    beside = estimate_bytes(model, dtype, kernels, quantization) - sum(layers)
    own = sum(layers[part.stage.first : part.stage.end])
    return own + (beside if part.stage.begins else 0)


def expert_bytes(model: OpenModel, dtype: torch.dtype, quantization: Quantization) -> int:
    """The bytes of all routed experts, which are included in `estimate_bytes`."""
    return sum(matrix_bytes(model, name, dtype, quantization) for name in model.shapes if EXPERTS in name)


def matrix_bytes(model: OpenModel, name: str, dtype: torch.dtype, quantization: Quantization) -> int:
    """The bytes of a single matrix; stacked with other blocks it may take more."""
    shape = model.shapes[name]
    if quantization == "gguf" and not name.endswith(FLOAT32):
        if (form := blocks_file(model).block_form(name)) is not None:
            return blocks_bytes(math.prod(shape[:-1]), shape[-1], form)
        quantization = "none"
    return _shape_bytes(name, shape, dtype, quantization)


def _shape_bytes(name: str, shape: tuple[int, ...], dtype: torch.dtype, quantization: Quantization) -> int:
    """The bytes of a matrix after specinfer's quantization, if any."""
    if name.endswith(FLOAT32):
        return math.prod(shape) * 4
    if quantization == "none":
        return math.prod(shape) * dtype.itemsize
    return (int4_bytes if quantization == "int4" else int8_bytes)(math.prod(shape[:-1]), shape[-1])
