"""Model files -> a model that is ready to run; memory never exceeds the weights by more than a few matrices.

    file --rows--> float --cast--> one stacked matrix --pack--> Linear      (then the stacked matrix is freed)

Rows are read, dequantized and cast in pieces, straight into the matrix they belong to. Quantized matrices are
made of such pieces, too, or read as they were kept (quantization_cache.py).
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from specinfer.config import Quantization
from specinfer.errors import ModelFileError, ModelNotFoundError
from specinfer.hub.model_files import ModelFiles, local_model
from specinfer.kernels.choice import TORCH, Kernels
from specinfer.kernels.library import BLOCK
from specinfer.kernels.quantized import Int4Weight, Int8Weight, int4_bytes, int8_bytes
from specinfer.models.config import Family, ModelConfig
from specinfer.models.decoder import Decoder, decoder_shapes
from specinfer.models.gguf import GGUFFile
from specinfer.models.language_model import LanguageModel, Weights
from specinfer.models.linear import Linear, make_linear
from specinfer.models.opt import OPTDecoder, opt_shapes
from specinfer.models.quantization import quantize_int4, quantize_int8
from specinfer.models.quantization_cache import (
    DamagedCacheError,
    FloatTable,
    KeptMatrices,
    NewMatrices,
    QuantizedMatrices,
    cache_path,
    identity,
)
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.progress import NoProgress, Progress

# Elements dequantized at a time. They pass through arrays of 0.5 MB that stay in the CPU's cache even where
# others use it: 10 ns an element on a busy machine, 16 with 1 MB; in quiet 1.3, 6.8 with 8 MB (Q4_K).
_CHUNK_ELEMENTS = 1 << 17
_READERS = 2  # threads that read a tensor, or layers that were kept
_SERIAL = 1 << 14
_LOG = logging.getLogger(__name__)
_Part = TypeVar("_Part")


class TensorFile(Protocol):
    """Tensors on disk, by name."""

    path: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in any floating dtype."""
        ...


class OpenModel(TensorFile, Protocol):
    """An open model file or folder, with its tensors under the decoder's names."""

    config: ModelConfig


def open_model(files: ModelFiles | Path) -> OpenModel:
    """A model whose config is read and whose tensors are what the config promises; reads no weights.

    Raises ModelNotFoundError if there is nothing at a path, ModelFileError if a file is damaged, incomplete
    or of another shape than its config says, ModelError if the model is not supported.
    """
    if isinstance(files, Path):
        if not files.exists():
            raise ModelNotFoundError(f"{files} does not exist; give a model folder or a .gguf file")
        files = local_model(str(files), files)
    header = files.header
    opened: OpenModel = SafetensorsFolder(files.path, files.weights) if header is None else GGUFFile(header)
    _check(opened)
    return opened


def load_model(
    model: OpenModel | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    name: str | None = None,
    logit_ids: Sequence[int] | None = None,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
    cache: Path | None = None,
) -> LanguageModel:
    """A model, or that in a folder (config.json and safetensors) or a .gguf file, in `dtype` on `device`.

    With `logit_ids` its logits are those of these token ids alone, in their order. With `quantization`
    matrices are int8 or int4 (the output layer int8), kept in the folder `cache`, by default of the user's,
    and read from there the next time; activations stay in `dtype`.
    `progress` sees the bytes of weights arrive, under `name`, by default that of the path. Raises as
    `open_model`, before any weight is read.
    """
    file = open_model(model) if isinstance(model, Path) else model
    made = OPTDecoder if file.config.family is Family.OPT else Decoder

    def make(weights: Weights) -> LanguageModel:
        return made(file.config, weights)

    return load_parts(
        file,
        make,
        tensors=_shapes(file.config),
        dtype=dtype,
        device=device,
        progress=progress,
        name=name,
        logit_ids=logit_ids,
        kernels=kernels,
        quantization=quantization,
        cache=cache,
    )


def load_parts(
    file: TensorFile,
    make: Callable[[Weights], _Part],
    *,
    tensors: Collection[str],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    name: str | None = None,
    logit_ids: Sequence[int] | None = None,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
    cache: Path | None = None,
    borrowed: Path | None = None,
) -> _Part:
    """What `make` makes of a file's weights, which are these `tensors`; else as `load_model`.

    `borrowed` is another model's path whose tensors are among them: matrices kept of both are of both.
    """
    show = progress or NoProgress()

    def load(quantized: _Quantized | None) -> _Part:
        weights = _FileWeights(file, dtype, device, show, logit_ids, kernels, quantized)
        elements = sum(math.prod(file.shapes[tensor]) for tensor in tensors)
        show.start(elements * dtype.itemsize, f"loading {name or file.path.name}")
        try:
            return make(weights)
        finally:
            show.finish()

    if quantization == "none":
        return load(None)
    kept = cache_path(file.path, quantization, dtype, cache)
    made_from = identity(file.path, quantization, dtype, borrowed)
    try:
        if (matrices := KeptMatrices.open(kept, made_from)) is not None:
            return load(_Quantized(quantization, matrices))
    except DamagedCacheError as error:
        _LOG.warning("a kept quantized model is damaged and made anew: %s", error)
    with NewMatrices(kept, made_from) as new:
        loaded = load(_Quantized(quantization, new))
        new.finish()
    return loaded


def load_config(path: Path) -> ModelConfig:
    """The config of a model folder or .gguf file; raises as `open_model`."""
    return open_model(path).config


def estimate_bytes(
    model: OpenModel | Path,
    dtype: torch.dtype,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
) -> int:
    """The bytes a model's weights will take in `dtype`, without loading them.

    Counts the second copy of tied embeddings that native or quantized products read. Raises as `open_model`.
    """
    config = (open_model(model) if isinstance(model, Path) else model).config
    output_layer = (config.vocab_size, config.embedding_size)
    if quantization == "none":
        elements = sum(math.prod(shape) for shape in _shapes(config).values())
        if config.tie_embeddings and kernels.library is not None:
            elements += math.prod(output_layer)
        return elements * dtype.itemsize
    size = int8_bytes(*output_layer)
    for name, shape in _shapes(config).items():
        if name == "lm_head.weight":
            continue
        if len(shape) < 2 or name.endswith(("embed_tokens.weight", "embed_positions.weight")):
            size += math.prod(shape) * dtype.itemsize
        else:
            size += (int4_bytes if quantization == "int4" else int8_bytes)(shape[0], shape[1])
    return size


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return opt_shapes(config) if config.family is Family.OPT else decoder_shapes(config)


def _check(file: OpenModel) -> None:
    """The file holds what its config promises, in that shape, and nothing else; or ModelFileError."""
    wanted, found = _shapes(file.config), file.shapes
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelFileError(f"{file.path} lacks {_some(missing)}; the model is incomplete, get it again")
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise ModelFileError(
                f"{file.path}: tensor {name!r} has shape {list(found[name])}, the config asks for "
                f"{list(shape)}; config and weights belong to different models, get both again"
            )
    extra = [name for name in found if name not in wanted]
    if extra:
        raise ModelFileError(
            f"{file.path} has unexpected {_some(extra)}; ignoring weights would change the text. "
            f"This is not a plain {file.config.family} model: merge adapters into it, or use another."
        )


def _cast(source: Tensor, into: Tensor) -> None:
    if into.device.type != "cpu":
        into.copy_(source)
        return
    # Pieces this small are cast by the calling thread. torch would share larger ones out among its threads,
    # and meeting them a thousand times took 50 s of a 64 s load on a machine that was busy otherwise.
    flat, out = source.reshape(-1), into.view(-1)
    for start in range(0, len(flat), _SERIAL):
        out[start : start + _SERIAL].copy_(flat[start : start + _SERIAL])


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


@dataclass(frozen=True, slots=True)
class _Quantized:
    """That matrices are quantized, how, and where they come from."""

    kind: Quantization
    matrices: QuantizedMatrices


class _FileWeights:
    """A model file as the `Weights` a decoder is built from."""

    def __init__(
        self,
        file: TensorFile,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
        logit_ids: Sequence[int] | None,
        kernels: Kernels,
        quantized: _Quantized | None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.kernels = kernels
        self._file = file
        self._shapes = file.shapes
        self._progress = progress
        self._reporting = Lock()
        self._logit_ids = logit_ids
        self._quantized = quantized
        # Of a GGUF most of the time goes into arithmetic in NumPy, which leaves the other threads alone.
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="weights")

    def tensor(self, *names: str) -> Tensor:
        """The tensor of that name; several are stacked along the first dimension."""
        if self._quantized is None or len(self._shapes[names[0]]) < 2:
            return self._read(names, self._report)
        table = self._quantized.matrices.get(
            "+".join(names), FloatTable, lambda: FloatTable(self._read(names, lambda elements: None))
        )
        self._report(table.rows.numel())
        return table.rows

    def _read(self, names: Sequence[str], report: Callable[[int], None]) -> Tensor:
        """The tensor from the model's file; `report` is told the elements of each piece."""
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty(rows, *shapes[0][1:], dtype=self.dtype, device=self.device)
        pieces: list[tuple[str, int, int, Tensor]] = []
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            step = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))
            for start in range(0, shape[0], step):
                stop = min(start + step, shape[0])
                pieces.append((name, start, stop, out[first + start : first + stop]))
            first += shape[0]

        def read(piece: tuple[str, int, int, Tensor]) -> int:
            name, start, stop, into = piece
            _cast(self._file.read_rows(name, start, stop), into)
            return into.numel()

        if len(pieces) == 1:  # a norm, say
            report(read(pieces[0]))
            return out
        for elements in self._readers.map(read, pieces):
            report(elements)
        return out

    def linear(self, *names: str, bias: bool = False, loaded: Tensor | None = None) -> Linear:
        """The product with the matrix `name`.weight, and `name`.bias if asked; several are stacked.

        `loaded` is the same matrix, already in memory: tied embeddings.
        """
        matrices = [f"{name}.weight" for name in names]
        b = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        output_layer = loaded is not None or names[0].startswith("lm_head")
        if self._quantized is not None:
            product = self._quantized_linear(self._quantized, matrices, b, output_layer)
            if loaded is None:
                self._report(sum(math.prod(self._shapes[name]) for name in matrices))
            return product
        weight = loaded if loaded is not None else self.tensor(*matrices)
        if self._logit_ids is not None and output_layer:
            weight = _rows(weight, self._logit_ids)
        return make_linear(weight, b, self.kernels)

    def each(self, make: Callable[[int], _Part], count: int) -> list[_Part]:
        """`make(0)`, `make(1)`, ...: parts with tensors of their own, some at once where that is quicker."""
        if self._quantized is None or not isinstance(self._quantized.matrices, KeptMatrices):
            return [make(number) for number in range(count)]  # all readers read each tensor
        with ThreadPoolExecutor(_READERS, thread_name_prefix="layers") as pool:
            return [*pool.map(make, range(count))]

    def _quantized_linear(
        self, quantized: _Quantized, names: Sequence[str], bias: Tensor | None, output_layer: bool
    ) -> Linear:
        products, key, inner = self.kernels.products, "+".join(names), self._shapes[names[0]][1]
        bias = None if bias is None else bias.float()
        # Rounded to 4 bits, the output layer costs a small model more than all its other matrices together.
        if quantized.kind == "int4" and not output_layer:
            levels = quantized.matrices.get(key, Int4Weight, lambda: quantize_int4(self._parts(names)))
            return products.int4(levels, bias, inner, sum(self._shapes[name][0] for name in names))
        weight = quantized.matrices.get(key, Int8Weight, lambda: quantize_int8(self._parts(names)))
        if self._logit_ids is not None and output_layer:
            weight = Int8Weight(*(_rows(tensor, self._logit_ids) for tensor in weight))
        return products.int8(weight, bias, inner)

    def _parts(self, names: Sequence[str]) -> Iterator[Tensor]:
        """The stacked matrices in float32, some rows at a time: whole blocks of rows, the last part apart."""
        inner = self._shapes[names[0]][1]
        step = max(1, _CHUNK_ELEMENTS // inner // BLOCK) * BLOCK
        rest = torch.empty(0, inner)
        for name in names:
            rows = self._shapes[name][0]
            for start in range(0, rows, step):
                part = self._file.read_rows(name, start, min(start + step, rows)).float()
                if len(rest):
                    part = torch.cat([rest, part])
                whole = len(part) // BLOCK * BLOCK
                if whole:
                    yield part[:whole]
                rest = part[whole:]
        if len(rest):
            yield rest

    def _report(self, elements: int) -> None:
        with self._reporting:
            self._progress.advance(elements * self.dtype.itemsize)


def _rows(tensor: Tensor, ids: Sequence[int]) -> Tensor:
    """Those rows of a tensor; the first so many of them are no copy."""
    if all(map(operator.eq, ids, range(len(ids)))):
        return tensor[: len(ids)]
    return tensor[torch.tensor(ids, device=tensor.device)]
