"""Heads of EAGLE-3's shape as a kind of draft that is tuned."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.config import EagleConfig, check_target
from specinfer.heads.eagle import EagleHead
from specinfer.models.config import Family, ModelConfig
from specinfer.tune.collect import default_taps
from specinfer.tune.draft import Beginning, Target
from specinfer.tune.head_draft import EagleHeadDraft
from specinfer.tune.known_head import known_folder, known_head, widened
from specinfer.tune.new_head import (
    USUAL_VOCABULARY,
    body_of,
    check_trainable,
    frequent_tokens,
    new_head,
    scale_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleKind:
    """A head that makes a pass a level: a kind of Draft."""

    name: ClassVar[str] = "eagle"
    layers: int = 1
    depth: int = 5  # levels that are learnt
    vocabulary: int | None = None  # tokens it can name, at most; None: as usual, or as one to go on from

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        if init == "target":
            raise TuneError(
                "init is target, which is for block heads of layout specinfer and for small models; allowed: "
                "random, or a head"
            )
        config = self.config(target, default_taps(target))
        if init not in (None, "random"):
            known_folder(init, config, self.vocabulary, target)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """An early layer, one in the middle, one near the end."""
        return default_taps(target)

    def facts(self) -> dict[str, object]:
        """The head's shape."""
        return {"kind": self.name, **asdict(self), "vocabulary": self.vocabulary or USUAL_VOCABULARY}

    def new(self, init: str | None, beginning: Beginning) -> EagleHeadDraft:
        """A head of random matrices, or an exported one."""
        target, lessons = beginning.target, beginning.lessons
        config = self.config(target.config, default_taps(target.config))
        scale_ND = scale_of(lessons)
        if init not in (None, "random"):
            known = known_head(init, config, target.model, scale_ND)
            assert isinstance(known, EagleHead)  # of the config's kind
            return EagleHeadDraft(widened(known, self.vocabulary, beginning), scale_ND)
        ids = frequent_tokens(lessons.corpus, config.draft_vocab_size, config.body.vocab_size)
        return EagleHeadDraft(new_head(config, target.model, ids, beginning.seed), scale_ND)

    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> EagleHeadDraft:
        """A head of this shape that can name these tokens."""
        config = self.config(target.config, default_taps(target.config))
        return EagleHeadDraft(new_head(config, target.model, ids, 0), scale_ND)

    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> EagleConfig:
        """A head whose layers have the sizes of the target's; raises ModelError where it does not fit."""
        check_trainable(target)
        config = EagleConfig(
            body=body_of(target, Family.LLAMA, self.layers),
            taps=taps,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(self.vocabulary or USUAL_VOCABULARY, target.vocab_size),
            depth=self.depth,
        )
        check_target(config, target, "to be trained")
        return config
