"""A dithered model for streaming, a GGUF file that other engines read, too.

Available models are 4-bit files. Their weights in bfloat16 still lie on a 4-bit grid, which `quantize_int4`
finds again, so a 4-bit copy of such a target would nearly equal the target. A *dithered* model moves every
weight of every matrix by a uniform random amount within half a step of its own grid: the file may have been
quantized from any of these.
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch

from specinfer.errors import UserError

_PIECE: Final = 1 << 22  # weights read, moved and written at once: 16 MB in float32
_ALIKE: Final = 0.98  # min correlation of two quantizations of one matrix
_BF16: Final = gguf.GGMLQuantizationType.BF16
_BYTES: Final = 2  # per weight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Levels(NamedTuple):
    """The levels in a block of a quantized kind, for setting all of them to zero or one."""

    all: slice
    low: slice  # bytes with the levels' lowest bits
    one: int  # such a byte if every level in it is one


_LEVELS: Final = {
    "Q4_0": Levels(slice(2, 18), slice(2, 18), 0x11),
    "Q4_1": Levels(slice(4, 20), slice(4, 20), 0x11),
    "Q5_0": Levels(slice(2, 22), slice(6, 22), 0x11),
    "Q5_1": Levels(slice(4, 24), slice(8, 24), 0x11),
    "Q8_0": Levels(slice(2, 34), slice(2, 34), 0x01),
    "Q4_K": Levels(slice(16, 144), slice(16, 144), 0x11),
    "Q5_K": Levels(slice(16, 176), slice(48, 176), 0x11),
    "Q6_K": Levels(slice(0, 192), slice(0, 128), 0x11),
}


def dithered(source: Path) -> Path:
    """Write a quantized GGUF file's model in bfloat16 beside it once, with every matrix dithered; return it.

    If embeddings and output layer are two quantizations of one matrix, they become one: the
    finer, as embeddings. At most one matrix is in memory, in bfloat16. Raises UserError if the disk is full
    or a matrix is not quantized.
    """
    target = source.with_name(f"dithered-{source.stem}-bf16.gguf")
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    output = tensors.get("output.weight")
    if output is not None and _one_matrix(output, tensors["token_embd.weight"]):
        tensors["token_embd.weight"] = tensors.pop("output.weight")
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1 and tensor.tensor_type.name not in _LEVELS:
            raise UserError(
                f"{name} of {source.name} is {tensor.tensor_type.name}, which has no grid of steps"
            )
    needed = sum(_BYTES * int(tensor.n_elements) for tensor in tensors.values())
    if (free := shutil.disk_usage(target.parent).free) < needed + (1 << 30):
        raise UserError(
            f"{target.parent} needs {needed / 1e9:.1f} GB and 1 GB to spare, {free / 1e9:.1f} GB are free; "
            "make room"
        )
    partial = target.with_name(f"{target.name}.partial")
    writer = gguf.GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, tensor in tensors.items():
        shape = [int(size) for size in tensor.shape[::-1]]
        matrix = len(shape) > 1
        size = int(tensor.n_elements) * (_BYTES if matrix else 4)
        kind = _BF16 if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        random = np.random.default_rng([0, zlib.crc32(name.encode())])
        writer.write_tensor_data(_dithered(tensor, random) if len(tensor.shape) > 1 else tensor.data)
    writer.close()
    return partial.rename(target)


def _dithered(tensor: Any, random: np.random.Generator) -> Bytes:
    """Return a quantized matrix in bfloat16, each weight moved within half a step of its grid."""
    rows = tensor.data  # [rows, bytes of a row], mapped
    inner = int(tensor.shape[0])
    out = torch.empty(len(rows), inner, dtype=torch.bfloat16)
    step = max(1, _PIECE // inner)
    for start in range(0, len(rows), step):
        stop = start + step
        values, steps = values_and_steps(np.array(rows[start:stop]), tensor.tensor_type)
        moved = values + (random.random(values.shape, dtype=np.float32) - np.float32(0.5)) * steps
        out[start:stop] = torch.from_numpy(moved)
    return out.view(torch.uint8).numpy()


def values_and_steps(rows: Bytes, kind: gguf.GGMLQuantizationType) -> tuple[Floats, Floats]:
    """Return the weights of quantized rows, and the size of each weight's steps."""
    levels, block = _LEVELS[kind.name], gguf.GGML_QUANT_SIZES[kind][1]
    values = gguf.quants.dequantize(rows, kind)
    blocks = rows.reshape(len(rows), -1, block).copy()
    blocks[..., levels.all] = 0
    zero = gguf.quants.dequantize(blocks.reshape(rows.shape), kind)
    blocks[..., levels.low] = levels.one
    one = gguf.quants.dequantize(blocks.reshape(rows.shape), kind)
    return values, np.abs(one - zero)


def _one_matrix(output: Any, embeddings: Any) -> bool:
    """True if two quantized matrices are quantizations of one, judged by their first rows."""
    first, second = (
        gguf.quants.dequantize(np.array(tensor.data[:256]), tensor.tensor_type).ravel()
        for tensor in (output, embeddings)
    )
    return len(first) == len(second) and float(np.corrcoef(first, second)[0, 1]) > _ALIKE
