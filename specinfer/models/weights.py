"""Model files -> a model that is ready to run; memory never exceeds the weights by more than a matrix or two.

    file --rows--> float --cast--> one stacked matrix --pack--> Linear      (then the stacked matrix is freed)

Rows are read, dequantized and cast a megabyte at a time, straight into the matrix they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specinfer.errors import ModelFileError, ModelNotFoundError
from specinfer.models.config import Family, ModelConfig
from specinfer.models.decoder import Decoder, LanguageModel, decoder_shapes
from specinfer.models.gguf import GGUFFile
from specinfer.models.linear import Linear, make_linear, packs
from specinfer.models.opt import OPTDecoder, opt_shapes
from specinfer.models.safetensors import SafetensorsFolder

# Elements dequantized at a time. 1 MB in float32 stays in the cache: 1.3 ns an element, 6.8 with 8 MB (Q4_K).
_CHUNK_ELEMENTS = 1 << 18
_SERIAL = 1 << 14

Progress = Callable[[int, int], None]


class ModelFile(Protocol):
    """An open model file or folder, with its tensors under the decoder's names."""

    path: Path
    config: ModelConfig

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in any floating dtype."""
        ...


def load_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> LanguageModel:
    """The model in a folder (config.json and safetensors) or a .gguf file, in `dtype` on `device`.

    `progress(done, total)` is called as bytes of weights arrive. Raises ModelNotFoundError if there is
    nothing at `path`, ModelFileError if a file is damaged, incomplete or of another shape than its config
    says (before any weight is read), ModelError if the model is not supported.
    """
    file = _open(path)
    weights = _FileWeights(file, dtype, device, progress)
    if file.config.family is Family.OPT:
        return OPTDecoder(file.config, weights)
    return Decoder(file.config, weights)


def load_config(path: Path) -> ModelConfig:
    """The config of a model folder or .gguf file; raises as `load_model`, and reads no weights."""
    return _open(path).config


def estimate_bytes(path: Path, dtype: torch.dtype, device: torch.device | None = None) -> int:
    """The bytes a model's weights will take in `dtype` on `device` (default: the CPU), without loading them.

    Counts the packed second copy of tied embeddings where there is one. Raises as `load_model`.
    """
    file = _open(path)
    elements = sum(math.prod(shape) for shape in _shapes(file.config).values())
    if file.config.tie_embeddings and packs(dtype, device or torch.device("cpu")):
        elements += file.config.vocab_size * file.config.embedding_size
    return elements * dtype.itemsize


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return opt_shapes(config) if config.family is Family.OPT else decoder_shapes(config)


def _open(path: Path) -> ModelFile:
    file: ModelFile
    if path.is_dir():
        file = SafetensorsFolder(path)
    elif path.is_file():
        file = GGUFFile(path)
    else:
        raise ModelNotFoundError(f"{path} does not exist; give a model folder or a .gguf file")
    _check(file)
    return file


def _check(file: ModelFile) -> None:
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


class _FileWeights:
    """A model file as the `Weights` a decoder is built from."""

    def __init__(
        self, file: ModelFile, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._file = file
        self._shapes = file.shapes
        self._progress = progress
        self._done = 0
        self._total = sum(math.prod(s) for s in _shapes(file.config).values()) * dtype.itemsize

    def tensor(self, *names: str) -> Tensor:
        """The tensor of that name; several are stacked along the first dimension."""
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty(rows, *shapes[0][1:], dtype=self.dtype, device=self.device)
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            step = max(1, _CHUNK_ELEMENTS // math.prod(shape[1:]))
            for start in range(0, shape[0], step):
                stop = min(start + step, shape[0])
                _cast(self._file.read_rows(name, start, stop), out[first + start : first + stop])
                self._report((stop - start) * math.prod(shape[1:]))
            first += shape[0]
        return out

    def linear(self, *names: str, bias: bool = False, kept: Tensor | None = None) -> Linear:
        """The product with the matrix `name`.weight, and `name`.bias if asked; several are stacked.

        `kept` is that matrix where the model holds it anyway, as it does tied embeddings.
        """
        return make_linear(
            kept if kept is not None else self.tensor(*(f"{name}.weight" for name in names)),
            self.tensor(*(f"{name}.bias" for name in names)) if bias else None,
        )

    def _report(self, elements: int) -> None:
        self._done += elements * self.dtype.itemsize
        if self._progress is not None:
            self._progress(self._done, self._total)
