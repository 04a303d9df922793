"""Table of head kinds: how each is read from a folder, trained and run. A new kind adds a row.

speculate/drafts/head_drafts.py has a row of the same name for the speculator of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from specinfer.errors import ModelError
from specinfer.heads.block import BlockHead, BlockModel
from specinfer.heads.config import BlockConfig, EagleConfig, HeadConfig, MedusaConfig
from specinfer.heads.eagle import EagleHead, EagleModel
from specinfer.heads.foreign_config import is_head_config, published_config, unchanged_name
from specinfer.heads.medusa import (
    MedusaHead,
    MedusaModel,
    is_medusa,
    medusa_config,
    medusa_name,
    vocabulary_from_map,
)
from specinfer.heads.runner import HeadModel
from specinfer.heads.vocabulary import Entries, own_tensors, vocabulary_from_offsets
from specinfer.models.language_model import LayeredModel
from specinfer.models.weight_memory import Weights

HeadModule = EagleHead | BlockHead | MedusaHead
AnyHeadModel = HeadModel[Any, Any]
Shapes = Mapping[str, tuple[int, ...]]


class FolderReader(NamedTuple):
    """Functions that read the folders of some kinds; each raises ModelError on anything unsupported."""

    reads: Callable[[Mapping[str, object]], bool]  # config.json -> whether it is one of these kinds
    # (config.json, a tensor's name in the file) -> its name in the module; None: the tensor is not used.
    tensor_name: Callable[[Mapping[str, object], str], str | None]
    # (config.json, number of target layers, shapes by names in the module) -> config.
    config: Callable[[Mapping[str, object], int, Shapes], HeadConfig]
    # (folder, config, tensors) -> the draft vocabulary, ascending, and the tensors with rows in that order.
    tokens: Callable[[Path, Any, Entries], tuple[Sequence[int], Entries]]


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind of head."""

    reader: FolderReader
    module: Callable[[Any, Sequence[int]], HeadModule]  # for training, and the reference for `model`
    model: Callable[[Any, Weights, LayeredModel, Sequence[int]], AnyHeadModel]  # for the engine


_PUBLISHED: Final = FolderReader(is_head_config, unchanged_name, published_config, vocabulary_from_offsets)
_MEDUSA: Final = FolderReader(is_medusa, medusa_name, medusa_config, vocabulary_from_map)
KINDS: Final[Mapping[str, HeadKind]] = {
    EagleConfig.kind: HeadKind(_PUBLISHED, EagleHead, EagleModel),
    BlockConfig.kind: HeadKind(_PUBLISHED, BlockHead, BlockModel),
    MedusaConfig.kind: HeadKind(_MEDUSA, MedusaHead, MedusaModel),
}


def reader_of(described: Mapping[str, object]) -> FolderReader | None:
    """Return the reader for a config.json, or None if it does not identify a head kind."""
    return next((kind.reader for kind in KINDS.values() if kind.reader.reads(described)), None)


# EAGLE's authors name the architecture LlamaForCausalLM, so their heads are recognised by their tensors.
DEFAULT_READER: Final = _PUBLISHED


def head_shapes(config: HeadConfig) -> Shapes:
    """Return the shapes of a head's own tensors; tables of the target are left out.

    Raises ModelError if a size is too large for a tensor.
    """
    try:
        with torch.device("meta"):  # a module without memory
            module = KINDS[config.kind].module(config, range(config.draft_vocab_size))
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ModelError(f"a head's config asks for tensors that are too large: {error}") from error
    return {name: tuple(tensor.shape) for name, tensor in own_tensors(module).items()}
