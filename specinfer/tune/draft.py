"""What training, measuring and keeping ask of a draft, whatever its kind is.

A kind (head_kinds.py, small_model.py) is a frozen config that makes drafts; a draft is a module
with what it reads and names.

Shapes: B texts, A anchors a text, L levels, N taps, D hidden size, U tokens it can name, S some of them.
"""

from __future__ import annotations

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
from specinfer.models.weights import OpenModel
from specinfer.tune.dataset import BlockBatch, TrainingSet

EVERY_ANCHOR: Final = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Who is to be guessed: its files and what they hold."""

    files: ModelFiles
    model: OpenModel

    @property
    def config(self) -> ModelConfig:
        """What it is."""
        return self.model.config

    @property
    def name(self) -> str:
        """As cards and configs say it: without folders, which are nobody's business."""
        return Path(self.files.name).name


class TrainableDraft(ABC):
    """A draft that learns."""

    module: nn.Module  # its weights; those that require a gradient are trained
    scale_ND: Tensor  # what hidden states are multiplied by before it reads them; N is 0 where it reads none
    ids: Tensor  # the tokens it can name, ascending, int64 [U]
    vocab: int  # how many tokens its target has
    depth: int  # the levels that are measured
    learnt_depth: int  # the levels that are learnt: one, where the others are the same pass at the next place
    one_pass: bool  # whether it guesses all levels of a tree in one pass; else a level in each
    anchors: int = EVERY_ANCHOR  # of a text that a step computes, at most
    last_norm: HeadNorm  # the norm before the output layer

    @abstractmethod
    def guessed(self, batch: BlockBatch, levels: int) -> Tensor:
        """What the output layer reads of so many levels behind every anchor, [B, A, L, D]."""

    @abstractmethod
    def logits(self, h: Tensor, before: Tensor, entries_S: Tensor | None = None) -> Tensor:
        """The logits [..., S] of rows [..., D] behind tokens [...]: of entries of `ids`, or of all."""

    @abstractmethod
    def write(self, folder: Path, target: Target) -> None:
        """Write it as a folder that `--draft` takes; raises OSError, and ModelError for weights that are not
        finite.
        """

    @abstractmethod
    def described(self) -> Description:
        """What a card says of it."""

    def copy(self) -> Self:
        """Another one with trained weights of its own, which are the same; the others are shared."""
        return deepcopy(self, {id(p): p for p in self.module.parameters() if not p.requires_grad})


@dataclass(frozen=True, slots=True)
class Description:
    """A draft in words for its card."""

    library: str  # that hubs file it under
    tag: str
    title: str  # what it is, behind "A"
    does: str  # what it reads and how it guesses, behind "It"
    kind: str  # with its layout and sizes
    reads: str
    of_target: str  # what its files hold of the target's weights


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """What a draft that has not learnt anything is made of."""

    target: Target
    dataset: TrainingSet
    seed: int
    loss_of: Callable[[TrainableDraft], float]  # on some texts, the same ones every time
    say: Callable[[str], None]  # to a person


class Kind(ABC):
    """A kind of draft, and what may be chosen about it: a frozen dataclass."""

    name: ClassVar[str]

    @abstractmethod
    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raise ModelError for targets it does not fit, TuneError for what it cannot begin as.

        An `init` that names a draft is looked up, and opened: ModelError and its kind where there is none.
        """

    @abstractmethod
    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """The layers whose inputs it reads."""

    @abstractmethod
    def facts(self) -> dict[str, object]:
        """What a tuning that is gone on with has to have in common with this one."""

    @abstractmethod
    def new(self, init: str | None, beginning: Beginning) -> TrainableDraft:
        """A draft before it has learnt anything; `init` as `specinfer tune` has it.

        Raises TuneError and ModelError for an `init` that cannot be used.
        """

    @abstractmethod
    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> TrainableDraft:
        """A draft whose trained weights are anybody's: a checkpoint's take their place."""


def entries_of(draft: TrainableDraft) -> Tensor:
    """Where each of the target's tokens is among those the draft can name, int64 [V]; -1: it cannot."""
    entry_V = torch.full((draft.vocab,), -1, dtype=torch.int64)
    entry_V[draft.ids] = torch.arange(len(draft.ids))
    return entry_V
