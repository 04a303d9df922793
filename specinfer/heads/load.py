"""A head's folder -> a head that is ready to run beside its target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specinfer.config import Quantization
from specinfer.heads.checkpoint import HeadFolder, target_head
from specinfer.heads.kinds import KINDS, AnyHeadModel
from specinfer.kernels.choice import TORCH, Kernels
from specinfer.kernels.quantized import int4_bytes, int8_bytes
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import OpenModel, load_parts
from specinfer.progress import Progress

_LOOKED_UP = ("embed_tokens.weight", "markov_w1.weight")  # tables: they are never quantized


class _Tensors:
    """A head's tensors with the rows of its target's output layer that it borrows."""

    def __init__(self, head: HeadFolder, target: OpenModel) -> None:
        self.path: Path = head.path
        self._head = head
        self._target = target

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return tensor_shapes(self._head)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in any floating dtype."""
        config = self._head.config
        if not config.own_head and name == f"{config.output}.weight":
            return target_head(self._target, self._head.ids[start:stop])
        return self._head.read_rows(name, start, stop)


def load_head(
    head: HeadFolder,
    target_files: OpenModel,
    target: LanguageModel,
    *,
    progress: Progress | None = None,
    name: str | None = None,
    kernels: Kernels = TORCH,
    quantization: Quantization = "none",
    cache: Path | None = None,
) -> AnyHeadModel:
    """The head for a loaded target, in its dtype and on its device; `target_files` has its weights.

    As models.weights.load_model for the rest. Raises ModelFileError for weights that are no finite numbers.
    """
    tensors = _Tensors(head, target_files)
    config = head.config

    return load_parts(
        tensors,
        lambda weights: KINDS[config.kind].model(config, weights, target, head.ids),
        tensors=tensors.shapes,
        dtype=target.dtype,
        device=target.device,
        progress=progress,
        name=name,
        kernels=kernels,
        quantization=quantization,
        cache=cache,
        borrowed=None if config.own_head else target_files.path,
    )


def tensor_shapes(head: HeadFolder) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a head's tensors, with an output layer whoever's it is."""
    config = head.config
    if config.own_head:
        return head.shapes
    return {**head.shapes, f"{config.output}.weight": (config.draft_vocab_size, config.hidden_size)}


def head_bytes(head: HeadFolder, dtype: torch.dtype, quantization: Quantization = "none") -> int:
    """The bytes a head's weights take, without loading them: its output layer is never int4."""
    size = 0
    for name, shape in tensor_shapes(head).items():
        if quantization == "none" or len(shape) != 2 or name.endswith(_LOOKED_UP):
            size += math.prod(shape) * dtype.itemsize
        else:
            narrow = quantization == "int4" and not name.startswith(head.config.output)
            size += (int4_bytes if narrow else int8_bytes)(*shape)
    return size
