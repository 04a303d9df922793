"""A dithered model for streaming, as a folder and as a GGUF file for other engines.

Available models are 4-bit files. Their weights in bfloat16 still lie on a 4-bit grid, which `quantize_int4`
finds again, so a 4-bit copy of such a target would nearly equal the target. A *dithered* model moves every
weight of every matrix by a uniform random amount within half a step of its own grid: the file may have been
quantized from any of these.

Files are written some rows at a time, whole or not at all, and made once.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specinfer.errors import UserError
from specinfer.files import NewFile, write_text
from specinfer.hub.model_files import local_model
from specinfer.models.config import ModelConfig
from specinfer.models.hf_config import config_to_hf
from specinfer.models.open_model import OpenModel, open_model
from specinfer.tokenizer.gguf_vocabulary import write_tokenizer

_PIECE: Final = 1 << 22  # weights read, moved and written at once: 16 MB in float32
_ALIKE: Final = 0.98  # min correlation of two quantizations of one matrix
_BF16: Final = gguf.GGMLQuantizationType.BF16
_BYTES: Final = 2  # per weight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Matrix = Callable[[int, int], Tensor]  # rows start..stop
Rows = Mapping[str, tuple[tuple[int, ...], Matrix]]  # tensors by name, each with its shape


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


def dithered(source: Path, folder: Path) -> tuple[Path, Path]:
    """Make a dithered model of a quantized GGUF file: a bfloat16 GGUF file and a folder of the same
    weights.

    Both are in `folder`. Raises UserError if the disk is full or a matrix is not quantized.
    """
    file = folder / f"dithered-{source.stem}-bf16.gguf"
    model = folder / f"dithered-{source.stem}"
    if not file.exists():
        write_dithered_gguf(source, file, seed=0)
    if not (model / "config.json").exists():
        files = local_model(str(file), file)
        opened = open_model(files)
        write_folder(opened.config, rows_of(opened), model)
        write_tokenizer(files, model)
    return file, model


def write_dithered_gguf(source: Path, target: Path, seed: int) -> None:
    """Write a quantized GGUF file's model in bfloat16, with every matrix dithered and the rest unchanged.

    If embeddings and output layer are two quantizations of one matrix, they become one: the finer, as
    embeddings. At most one matrix is in memory, in bfloat16. Raises UserError.
    """
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
    _ask_room(target.parent, sum(_BYTES * int(tensor.n_elements) for tensor in tensors.values()))
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
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        writer.write_tensor_data(_dithered(tensor, random) if len(tensor.shape) > 1 else tensor.data)
    writer.close()
    partial.rename(target)


def write_folder(config: ModelConfig, rows: Rows, folder: Path) -> None:
    """Write config.json and the bfloat16 weights of `rows`, which has each shape and reads rows.

    The config comes last, so a folder with it is complete. Raises UserError if the disk is full.
    """
    sizes = {name: _BYTES * int(np.prod(shape)) for name, (shape, _) in rows.items()}
    folder.mkdir(parents=True, exist_ok=True)
    _ask_room(folder, sum(sizes.values()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, _) in rows.items():
        places = [offset, offset + sizes[name]]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": places}
        offset += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(folder / "model.safetensors", mode=0o644) as new:
        new.write(len(text).to_bytes(8, "little") + text)
        for shape, read in rows.values():
            for start, stop in _pieces(shape):
                piece = read(start, stop).to(torch.bfloat16).contiguous()
                new.write(piece.view(-1).view(torch.uint8).numpy().data)
        new.keep()
    write_text(folder / "config.json", json.dumps(config_to_hf(config), indent=2))


def _dithered(tensor: Any, random: np.random.Generator) -> Bytes:
    """Return a quantized matrix of a GGUF file in bfloat16, each weight moved within half a step of its
    grid.
    """
    rows = tensor.data  # [rows, bytes of a row], mapped
    inner = int(tensor.shape[0])
    out = torch.empty(len(rows), inner, dtype=torch.bfloat16)
    for start, stop in _pieces((len(rows), inner)):
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
        values_and_steps(np.array(tensor.data[:256]), tensor.tensor_type)[0].ravel()
        for tensor in (output, embeddings)
    )
    return len(first) == len(second) and float(np.corrcoef(first, second)[0, 1]) > _ALIKE


def rows_of(opened: OpenModel) -> Rows:
    def reading(name: str) -> Matrix:
        return lambda start, stop: opened.read_rows(name, start, stop)

    return {name: (shape, reading(name)) for name, shape in opened.shapes.items()}


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of about _PIECE weights."""
    rows = max(1, _PIECE // max(1, int(np.prod(shape[1:]))))
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def _ask_room(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed + (1 << 30):
        raise UserError(
            f"{folder} needs {needed / 1e9:.1f} GB and 1 GB to spare, {free / 1e9:.1f} GB are free; make room"
        )
