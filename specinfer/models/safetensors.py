"""Hugging Face folders: reads config.json and row ranges of safetensors files, and writes folders.

A safetensors file is an 8-byte length, a JSON header of that length, and the tensors' bytes. Files are
read, not mapped, so that their pages take no memory besides the weights. Files are written atomically.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.files import NewFile, write_text
from specinfer.hub.foreign_format import INSTEAD, quantized_tensor
from specinfer.hub.model_files import ModelFiles, read_json
from specinfer.kernels.file_blocks import StoredRows
from specinfer.models.config import ModelConfig
from specinfer.models.families.registry import hf_family, other_senses, read_config
from specinfer.models.fields import Fields
from specinfer.models.hf_config import HfFamily, config_to_hf
from specinfer.models.next_layer import NextNames
from specinfer.models.quantized.checkpoint import STORED, dequantized, quantization_of
from specinfer.models.quantized.pieces import LastFew, MadeTensor, StoredTensor, TensorEntry
from specinfer.models.quantized.scaled import IntegerMatrix
from specinfer.models.sources import Names, Sources
from specinfer.tokenizer.gguf_vocabulary import write_tokenizer

_LOG = logging.getLogger(__name__)
DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
FLOATS: Final = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}
EAGLE_3: Final = "EAGLE-3"
MTP: Final = "MTP"
_NEXT: Final = re.compile(r"(?:mtp|model\.mtp_layers)\.")  # names of layers for further tokens
_IN_LAYER: Final = re.compile(r"(?:^|\.)layers\.\d+\.")
_TEXT_PARTS: Final = ("language_model.", "text_model.")  # modules of models with other senses
_MAX_HEADER = 100 << 20  # the format's own limit
_MAX_BYTES: Final = 1 << 62
_KEPT: Final = 2  # experts in memory, one for each thread that reads
# Tables and masks in files of older versions, and a version number of OPT's; not used.
_UNUSED: Final = re.compile(
    r"(?:\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|\.masked_bias|\.attn\.bias|\.attention\.bias"
    r"|decoder\.version)$"
)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], *, mode: int = 0o644) -> None:
    """Write these tensors, on the CPU and contiguous, to `path` atomically.

    `mode` is the file's permissions. Raises OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    pieces: list[bytes | memoryview] = []
    for name, tensor in tensors.items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        pieces.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(path, mode=mode) as new:
        new.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            new.write(piece)
        new.keep()


class SafetensorsFolder:
    """An open model folder: its config, and its tensors under the decoder's names.

    Raises ModelFileError if a file is missing, truncated or damaged, ModelError if config.json requires an
    unsupported feature.
    """

    next_names: NextNames | None = None  # names of its layer for further tokens, if it has one

    def __init__(self, path: Path, weights: Sequence[Path]) -> None:
        """`weights` are the folder's safetensors files."""
        described = read_json(path / "config.json")
        senses = other_senses(described)
        files = files_by_tensor(path, weights, indexed=bool(senses))
        if (kind := head_kind(files)) is not None:
            raise ModelFileError(
                f"{path} is a draft head ({kind}), which makes no text: name it in drafts, beside its target"
            )
        quantized = quantization_of(described)
        family = hf_family(described)
        if family.next_names is not None and family.next_names.of(files):
            self.next_names = family.next_names
        generation = path / "generation_config.json"
        config = read_config(described, read_json(generation) if generation.is_file() else None)
        bare = _bare_names(path, files, family, text_alone=bool(senses))
        if senses and len(bare) < len(files):
            _LOG.warning(
                "%s also reads images or sound (%s), and runs as a text model: %d of its %d tensors are not "
                "read",
                *(path.name, ", ".join(senses), len(files) - len(bare), len(files)),
            )
        used = dict.fromkeys(files[name] for name in bare) if senses else weights
        self._open(path, [*used], bare, quantized, family.names, config)

    def _open(
        self,
        path: Path,
        files: Sequence[Path],
        bare: Mapping[str, str],
        quantized: Fields | None,
        names: Names,
        config: ModelConfig,
    ) -> None:
        """Open the tensors of `bare` in these files: names there, and without the family's prefix."""
        self.path = path
        dtypes = FLOATS if quantized is None else FLOATS | STORED
        stored = {bare[name]: one for name, one in read_entries(files, dtypes, bare).items()}
        tensors: Mapping[str, StoredTensor] = stored
        if quantized is not None:
            tensors = dequantized(path, quantized, stored)
        elif quantizes := next(filter(quantized_tensor, tensors), None):
            raise ModelFileError(
                f"{tensors[quantizes].path} is quantized, but config.json does not declare it: tensor "
                f"{quantizes!r} is not of a plain model; {INSTEAD}"
            )
        last = LastFew[Tensor](_KEPT)
        self._entries = {name: _stack(name, one, names, config, last) for name, one in tensors.items()}
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        self._sources = Sources(path, names, shapes, config)
        self.shapes = self._sources.shapes  # shapes by the decoder's names of tensors
        # As in transformers: the config can tie embeddings and output layer, unless the files have both. If
        # the two are equal, only memory use differs.
        both = "lm_head.weight" in self._sources
        self.config = replace(config, tie_embeddings=config.tie_embeddings and not both)

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in the file; None if it is quantized."""
        return self._entries[self._sources[name].name].dtype

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in the decoder's order.

        The dtype is the file's, or float32 if the tensor is quantized.
        """
        return self._sources.read(name, self._read, start, stop)

    def stored(self, name: str) -> StoredRows | None:
        """The place of a tensor in its file; None if its elements are not those of rows of the file."""
        if name not in self._sources or (source := self._sources[name]).transposed or source.changed:
            return None
        entry = self._entries[source.name]
        return entry.stored(name, source.rows) if isinstance(entry, TensorEntry) else None

    def _read(self, there: str, start: int, stop: int) -> Tensor:
        return self._entries[there].read_rows(start, stop)

    def int4_reader(self, name: str) -> Callable[[int, int], Tensor] | None:
        """A reader of rows of a matrix for `int4_rows` without rounding; None for other matrices."""
        source = self._sources[name]
        matrix = self._entries[source.name]
        if not isinstance(matrix, IntegerMatrix) or source.transposed or source.changed:
            return None
        read = matrix.int4_reader()
        if read is None:
            return None
        return partial(self._sources.read, name, lambda _, start, stop: read(start, stop))


def _transposed(tensor: TensorEntry, last: LastFew[Tensor]) -> StoredTensor:
    """Transposed matrices of all experts, [experts, columns, rows], concatenated by rows.

    `last` caches the folder's last few experts.
    """
    experts, inner, rows = tensor.shape

    def matrix(number: int) -> Tensor:
        return last.get((tensor, number), lambda: tensor.read_rows(number, number + 1)[0].T.contiguous())

    def read(start: int, stop: int) -> Tensor:
        parts = [torch.empty(0, inner, dtype=tensor.dtype)]
        for number in range(start // rows, -(-stop // rows)):
            first = number * rows
            parts.append(matrix(number)[max(start - first, 0) : stop - first])
        return torch.cat(parts)

    return MadeTensor(tensor.path, (experts * rows, inner), read, tensor.dtype)


def _stack(
    name: str, tensor: StoredTensor, names: Names, config: ModelConfig, last: LastFew[Tensor]
) -> StoredTensor:
    """The tensor with parts of several experts concatenated by rows."""
    if not isinstance(tensor, TensorEntry):
        return tensor  # quantized tensors are matrices already
    if len(tensor.shape) == 3 and name.endswith(tuple(names.turned_stacks)):
        inputs = tensor.shape[2 if name.endswith("down_proj") else 1]  # newer folders are not transposed
        return _transposed(tensor, last) if inputs == config.hidden_size else tensor.joined()
    biases = tuple(stack for stack in names.expert_stacks if stack.endswith("bias"))
    least = 2 if name.endswith(biases) else 3  # dimensions of a stack
    return tensor.joined() if len(tensor.shape) >= least else tensor


def head_kind(names: Collection[str]) -> str | None:
    """The kind of draft head that has tensors of these names; None if it is neither EAGLE's nor MTP.

    The names decide, since config.json of published heads may describe them as language models.
    """
    if any(map(_NEXT.match, names)) and not any(
        _IN_LAYER.search(name) for name in names if not _NEXT.match(name)
    ):
        return MTP
    bare = {name.removeprefix("draft_model.").removeprefix("model.") for name in names}
    if "fc.weight" not in bare:
        return None
    if "d2t" in bare or "layers.0.hidden_norm.weight" in bare or "midlayer.hidden_norm.weight" in bare:
        return EAGLE_3
    first = {name.removeprefix("layers.0.") for name in bare if name.startswith("layers.0.")}
    # Its only layer reads the output of fc, and has no norm before it.
    return "EAGLE-1 or 2" if first and "input_layernorm.weight" not in first else None


def tensor_names(files: Sequence[Path]) -> list[str]:
    """The names of the tensors of safetensors files; raises ModelFileError if a header is damaged."""
    return [name for file in files for name in _read_header(file)[0]]


def files_by_tensor(path: Path, weights: Sequence[Path], *, indexed: bool) -> dict[str, Path]:
    """The file of each tensor; with `indexed` by the folder's index, if it has one, which opens no file."""
    index = path / "model.safetensors.index.json"
    if indexed and index.is_file():
        return {name: path / file for name, file in read_json(index)["weight_map"].items()}
    return {name: file for file in weights for name in _read_header(file)[0]}


def read_entries(
    files: Sequence[Path],
    dtypes: Mapping[str, torch.dtype] = FLOATS,
    names: Collection[str] | None = None,
) -> dict[str, TensorEntry]:
    """The tensors of safetensors files by name, except unused ones; all must have these dtypes.

    `names` are those to read; None: all.
    Raises ModelFileError if a file is damaged, or two files have a tensor of the same name.
    """
    entries: dict[str, TensorEntry] = {}
    for file in files:
        header, start, size = _read_header(file)
        for name, value in header.items():
            if _UNUSED.search(name) or (names is not None and name not in names):
                continue
            entry = _entry(file, name, value, start, size, dtypes)
            if name in entries:
                raise ModelFileError(
                    f"tensor {name!r} is in {entries[name].path.name} and in {file.name}; "
                    f"remove the file of {file.parent} that does not belong there"
                )
            entries[name] = entry
    return entries


def _read_header(path: Path) -> tuple[dict[str, object], int, int]:
    """A file's header, the offset of the tensors' bytes, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ModelFileError(
                f"{path} is not a safetensors file, or is truncated ({size} bytes); get it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} has a damaged header ({error}); get it again") from error
    if not isinstance(header, dict):
        raise ModelFileError(f"{path} has a damaged header; get it again")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def _entry(
    path: Path, name: str, value: object, start: int, size: int, dtypes: Mapping[str, torch.dtype]
) -> TensorEntry:
    match value:
        case {"dtype": str(kind), "shape": [*extents], "data_offsets": [begin, end]} if all(
            type(number) is int and 0 <= number < _MAX_BYTES for number in (*extents, begin, end)
        ):
            pass
        case _:
            raise ModelFileError(f"{path}: the entry of tensor {name!r} is damaged; get the file again")
    if kind not in dtypes:
        raise ModelFileError(
            f"{path}: tensor {name!r} is of type {kind[:20]}; "
            f"supported: {', '.join(dtypes)}. A quantized model needs quantization_config in config.json."
        )
    dtype, shape = dtypes[kind], tuple(extents)
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ModelFileError(
            f"{path}: tensor {name!r} has {end - begin} bytes for shape {list(shape)}; get it again"
        )
    if start + end > size:
        raise ModelFileError(
            f"{path} is truncated: tensor {name!r} ends at byte {start + end}, the file has {size}; "
            "get it again"
        )
    return TensorEntry(path, dtype, shape, start + begin, math.prod(shape[1:]) * dtype.itemsize)


def _bare_names(path: Path, names: Collection[str], family: HfFamily, *, text_alone: bool) -> dict[str, str]:
    """The names of files, and those of a plain model of the family.

    Files may have the text decoder alone, without its head, or inside a model with other senses, whose
    tensors are left out if `text_alone`.
    """
    root, dot, anchor = family.embeddings.removesuffix("weight").partition(".")
    root += dot
    apart = (f"{a}{b}" for part in _TEXT_PARTS for a, b in ((part, root), (root, part), (part, 2 * root)))
    prefixes = (root, "", "backbone.", *apart)
    prefix = next((p for p in prefixes if any(name.startswith(p + anchor) for name in names)), None)
    if prefix is None:
        raise ModelFileError(
            f"{path} has no tensor {family.embeddings}; it is not a {family.family} language model"
        )
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(family.others):
            continue
        own = name.removeprefix(_TEXT_PARTS[0])
        if name.startswith(prefix) and not own.startswith("lm_head."):
            found[name] = root + name.removeprefix(prefix)
        elif own != name or own.startswith("lm_head.") or not text_alone:
            found[name] = own
    return found


def lacking(path: Path, names: Sequence[str]) -> ModelFileError:
    """The error for a model without these tensors."""
    return ModelFileError(f"{path} lacks {some_tensors(names)}; the model is incomplete, get it again")


def some_tensors(names: Sequence[str]) -> str:
    """The first of these tensors, for a message."""
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def write_model(
    config: ModelConfig, tensors: Mapping[str, Tensor], folder: Path, *, tokenizer: ModelFiles
) -> None:
    """Write config, weights (bfloat16) and the tokenizer of a decoder, each atomically; makes the folder.

    `tensors` have the decoder's names; `tokenizer` is the model whose tokenizer is copied. Raises OSError,
    and ModelError for weights that are not finite.
    """
    narrow = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    for name, tensor in narrow.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"the model's tensor {name!r} has values that are not finite in bfloat16")
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, folder)
    write_safetensors(folder / "model.safetensors", narrow)
    write_text(folder / "config.json", json.dumps(config_to_hf(config), indent=2))
