"""Block heads as a kind of draft that is tuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from torch import Tensor

from specinfer.errors import TuneError
from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, check_target
from specinfer.models.config import Family, ModelConfig
from specinfer.tune.collect import default_taps
from specinfer.tune.draft import Beginning, Target
from specinfer.tune.head_draft import BlockHeadDraft
from specinfer.tune.held_out import entries_of
from specinfer.tune.informed_head import begin_as_target, learn_pairs
from specinfer.tune.known_head import known_folder, known_head, widened
from specinfer.tune.lessons import first_texts
from specinfer.tune.loudness import tune_loudness
from specinfer.tune.new_head import (
    USUAL_VOCABULARY,
    body_of,
    check_trainable,
    frequent_tokens,
    new_head,
    scale_of,
)

Layout = Literal["specinfer", "dspark"]
_SOLVED_BY: Final = 1000  # texts by which a head begins as its target


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """A causal block head: a kind of Draft."""

    name: ClassVar[str] = "block"
    # Rows begin with the target's last hidden state, and its output layer is used; or, as vLLM reads it, rows
    # begin with embeddings, and the output layer is the head's own.
    layout: Layout = "specinfer"
    layers: int = 1
    depth: int = 5  # tokens of a block that are guessed
    vocabulary: int | None = None  # tokens it can name, at most; None: as usual, or as one to go on from
    markov_rank: int = 64  # of the term by which a guess depends on the token before it
    anchors: int = 64  # of a text that a step computes, at most

    def check(self, target: ModelConfig, init: str | None) -> None:
        """Raises as Kind."""
        if init == "target" and self.layout != "specinfer":
            raise TuneError(
                "init is target, which is for block heads of layout specinfer; allowed: random, or a head"
            )
        config = self.config(target, default_taps(target))
        if init not in (None, "target", "random"):
            known_folder(init, config, self.vocabulary, target)

    def taps(self, target: ModelConfig) -> tuple[int, ...]:
        """An early layer, one in the middle, one near the end."""
        return default_taps(target)

    def facts(self) -> dict[str, object]:
        """The head's shape; anchors are how it is trained."""
        names = ("layout", "layers", "depth", "vocabulary", "markov_rank")
        facts = {"kind": self.name, **{name: getattr(self, name) for name in names}}
        facts["vocabulary"] = self.vocabulary or USUAL_VOCABULARY
        return facts

    def new(self, init: str | None, beginning: Beginning) -> BlockHeadDraft:
        """A head that knows what can be had without learning, a random one, or an exported one."""
        target, lessons = beginning.target, beginning.lessons
        config = self.config(target.config, default_taps(target.config))
        scale_ND = scale_of(lessons)
        init = init or ("target" if self.layout == "specinfer" else "random")
        if init not in ("target", "random"):
            known = known_head(init, config, target.model, scale_ND)
            assert isinstance(known, BlockHead)  # of the config's kind
            return BlockHeadDraft(widened(known, self.vocabulary, beginning), scale_ND, self.anchors)
        ids = frequent_tokens(lessons.corpus, config.draft_vocab_size, config.body.vocab_size)
        head = new_head(config, target.model, ids, beginning.seed)
        draft = BlockHeadDraft(head, scale_ND, self.anchors)
        if init == "target":
            learn_pairs(head, lessons, entries_of(draft))
            begin_as_target(head, target.model, first_texts(lessons, _SOLVED_BY), scale_ND)
            beginning.say(f"the head begins with a loss of {tune_loudness(draft, beginning.loss_of):.2f}")
        return draft

    def blank(self, target: Target, scale_ND: Tensor, ids: list[int]) -> BlockHeadDraft:
        """A head of this shape that can name these tokens."""
        config = self.config(target.config, default_taps(target.config))
        return BlockHeadDraft(new_head(config, target.model, ids, 0), scale_ND, self.anchors)

    def config(self, target: ModelConfig, taps: tuple[int, ...]) -> BlockConfig:
        """A head whose layers have the sizes of the target's.

        The tokens behind a block's anchor are guessed from rows of the target's end of text, from which no
        block ever hangs. Raises ModelError for targets it does not fit.
        """
        check_trainable(target)
        config = BlockConfig(
            body=body_of(target, Family.QWEN3, self.layers),
            taps=taps,
            target_hidden_size=target.hidden_size,
            draft_vocab_size=min(self.vocabulary or USUAL_VOCABULARY, target.vocab_size),
            block_size=self.depth,
            mask_token_id=target.eos_ids[0] if target.eos_ids else 0,
            markov_rank=self.markov_rank,
            reads_last=self.layout == "specinfer",
            own_head=self.layout != "specinfer",
        )
        check_target(config, target, "to be trained")
        return config
