"""Interfaces of drafts that can be trained, measured and written, and of the kinds that create them.

A kind (head_draft.py, small_model.py) is a frozen config that creates drafts. A draft is a module with the
inputs it reads and the tokens it can predict.

Shapes: B texts, A anchors per text, L levels, N taps, D hidden size, U tokens of its vocabulary, S of these.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self

import torch
from torch import Tensor, nn

from specinfer.heads.layers import HeadNorm
from specinfer.hub.model_files import ModelFiles
from specinfer.models.config import ModelConfig
from specinfer.models.open_model import OpenModel
from specinfer.tune.dataset import BlockBatch, TrainingSet

EVERY_ANCHOR: Final = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The target model: its files and its opened weights."""

    files: ModelFiles
    model: OpenModel

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config

    @property
    def name(self) -> str:
        """Name for cards and configs, without the path."""
        return Path(self.files.name).name


@dataclass(frozen=True, slots=True)
class Description:
    """Phrases that describe a draft on its card."""

    library: str  # library name for hubs
    tag: str
    title: str  # noun phrase after "A"
    does: str  # inputs and method, after "It"
    kind: str  # with layout and sizes
    reads: str
    of_target: str  # target weights in its files


class TrainableDraft(ABC):
    """A draft that can be trained."""

    module: nn.Module  # weights; those that require a gradient are trained
    scale_ND: Tensor  # factors applied to hidden states before it reads them; N is 0 if it reads none
    ids: Tensor  # its vocabulary, ascending, int64 [U]
    vocab: int  # number of the target's tokens
    depth: int  # levels that are measured
    trained_depth: int  # levels that are trained: 1 if deeper levels are the same pass one position later
    one_pass: bool  # True if it predicts all levels of a tree in one pass; else one pass per level
    anchors: int = EVERY_ANCHOR  # maximum number of anchors per text in a step
    last_norm: HeadNorm  # the norm before the output layer

    @abstractmethod
    def level_states(self, batch: BlockBatch, levels: int) -> Tensor:
        """Inputs of the output layer for `levels` levels after each anchor, [B, A, L, D]."""

    @abstractmethod
    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """Logits [..., S] of rows [..., D] after tokens [...]: for entries of `ids`, or for all of them."""

    @abstractmethod
    def write(self, folder: Path, target: Target) -> None:
        """Write a folder that `--draft` accepts; raises OSError, and ModelError if a weight is not finite."""

    @abstractmethod
    def description(self) -> Description:
        """Description for the model card."""

    def copy(self) -> Self:
        """A copy with its own trained weights; frozen weights are shared."""
        return deepcopy(self, {id(p): p for p in self.module.parameters() if not p.requires_grad})


LossOf = Callable[[TrainableDraft], float]
Say = Callable[[str], None]


class Kind(ABC):
    """A kind of draft with its options; a frozen dataclass."""

    name: ClassVar[str]

    @abstractmethod
    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raise ModelError for unsupported targets, TuneError for an unsupported `init`.

        An `init` that names a draft is opened: raises ModelError or a subclass if there is none.
        """

    @abstractmethod
    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """The layers whose inputs it reads."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """Settings that must not change when a tuning is resumed."""

    @abstractmethod
    def new(
        self, init: str | None, target: Target, dataset: TrainingSet, seed: int, loss_of: LossOf, say: Say
    ) -> TrainableDraft:
        """An untrained draft; `init` is the option of `specinfer tune`.

        `loss_of` is over a fixed set of texts; `say` prints a line. Raises TuneError and ModelError for an
        `init` that cannot be used.
        """

    @abstractmethod
    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> TrainableDraft:
        """A draft whose trained weights are arbitrary, to be replaced by a checkpoint's."""


def entries_of(draft: TrainableDraft) -> Tensor:
    """Index of each target token in `draft.ids`, int64 [V]; -1: not in the draft's vocabulary."""
    entry_V = torch.full((draft.vocab,), -1, dtype=torch.int64)
    entry_V[draft.ids] = torch.arange(len(draft.ids))
    return entry_V
