"""The kinds of draft head: who reads their folders, trains them and runs them. A new kind is a row here.

What is guessed with a head is a row in speculate/drafts/head_drafts.py, by the same name.
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
from specinfer.heads.foreign_config import is_head_config, named_as_here, published_config
from specinfer.heads.medusa import (
    MedusaHead,
    MedusaModel,
    is_medusa,
    medusa_config,
    medusa_name,
    named_by_map,
)
from specinfer.heads.runner import HeadModel
from specinfer.heads.vocabulary import Entries, named_by_offsets, own_tensors
from specinfer.models.language_model import LayeredModel
from specinfer.models.weight_memory import Weights

HeadModule = EagleHead | BlockHead | MedusaHead
AnyHeadModel = HeadModel[Any, Any]
Shapes = Mapping[str, tuple[int, ...]]


class FolderReader(NamedTuple):
    """How folders of some kinds are read; each part raises ModelError on what it does not support."""

    reads: Callable[[Mapping[str, object]], bool]  # whether a config.json describes one of these kinds
    # Of a config.json and a tensor's name in a file its name here; None: nothing is computed with it.
    tensor_name: Callable[[Mapping[str, object], str], str | None]
    # Of a config.json, the target's layers and the shapes of all tensors by their names here.
    config: Callable[[Mapping[str, object], int, Shapes], HeadConfig]
    # The tokens that a head can name, ascending, and its tensors with their rows in this order.
    tokens: Callable[[Path, Any, Entries], tuple[Sequence[int], Entries]]


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind of head."""

    reader: FolderReader
    module: Callable[[Any, Sequence[int]], HeadModule]  # trains, and says what the engine's has to compute
    model: Callable[[Any, Weights, LayeredModel, Sequence[int]], AnyHeadModel]  # the engine's


_PUBLISHED: Final = FolderReader(is_head_config, named_as_here, published_config, named_by_offsets)
_MEDUSA: Final = FolderReader(is_medusa, medusa_name, medusa_config, named_by_map)
KINDS: Final[Mapping[str, HeadKind]] = {
    EagleConfig.kind: HeadKind(_PUBLISHED, EagleHead, EagleModel),
    BlockConfig.kind: HeadKind(_PUBLISHED, BlockHead, BlockModel),
    MedusaConfig.kind: HeadKind(_MEDUSA, MedusaHead, MedusaModel),
}


def reader_of(described: Mapping[str, object]) -> FolderReader | None:
    """Who reads the folder of a head with such a config.json; None: nobody knows it by that alone."""
    return next((kind.reader for kind in KINDS.values() if kind.reader.reads(described)), None)


# EAGLE's authors say LlamaForCausalLM, as a language model does: theirs are known by their tensors.
DEFAULT_READER: Final = _PUBLISHED


def head_shapes(config: HeadConfig) -> Shapes:
    """The shapes of the tensors that compute, those of the target's that the head uses left out.

    Raises ModelError for sizes that no tensor can have.
    """
    try:
        with torch.device("meta"):  # a module without memory
            module = KINDS[config.kind].module(config, range(config.draft_vocab_size))
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ModelError(f"a head's config asks for tensors that are too large: {error}") from error
    return {name: tuple(tensor.shape) for name, tensor in own_tensors(module).items()}
