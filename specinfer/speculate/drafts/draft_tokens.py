"""Vocabularies of drafts: those of heads, and of drafts with another tokenizer than the target.

A draft never proposes a token outside its vocabulary; the output does not change, as the target decides it.

A draft with another tokenizer reads the target's text in its own tokens (tokenizer/detokenizer.py), and
guesses only tokens that both vocabularies have. Its distribution is restricted to them and renormalized; its
draws are declared with that distribution, a valid q for every verifier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ConfigError
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.detokenizer import Respelling, shared_tokens

_RECENT: Final = 64  # tokens that say whether a text's tokens are common
_MAX_RARE: Final = 1 / 8  # share of others, above which a draft makes all logits


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The ids that a draft has logits for; entry i of its logits belongs to token ids[i]."""

    ids: NDArray[np.int64]  # [kept], ascending
    size: int  # of the whole vocabulary

    def widened(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a row of logits, [kept], over the whole vocabulary, [size], with -inf for other tokens."""
        row = np.full(self.size, -np.inf, dtype=np.float32)
        row[self.ids] = logits
        return row


class CommonTokens(DraftVocabulary):
    """The first `count` tokens of a vocabulary, the most frequent ones of most texts."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(np.arange(count), size)

    def has_most_of(self, token_ids: Sequence[int]) -> bool:
        """Return whether at most an eighth of a text's last 64 tokens are others."""
        last, count = token_ids[-_RECENT:], len(self.ids)
        return sum(token_id >= count for token_id in last) <= _MAX_RARE * len(last)


def named_tokens(ids: Sequence[int], size: int) -> DraftVocabulary | None:
    """Return the vocabulary of a head's ascending token `ids`; None if they are all `size` tokens."""
    return None if len(ids) == size else DraftVocabulary(np.array(ids, dtype=np.int64), size)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignTokens:
    """The tokenizers of target and draft, and the tokens that both have."""

    target: Tokenizer
    draft: Tokenizer
    vocabulary: DraftVocabulary  # the tokens that the draft may guess, as the target's ids
    logit_ids: NDArray[np.int64]  # the draft's ids of these tokens, in that order
    _specials: dict[int, int]  # the target's special tokens that the draft has -> the draft's id
    _of_target: dict[int, int]  # the target's id -> the draft's
    _of_draft: dict[int, int]  # the draft's id -> the target's

    def respelling(self) -> Respelling:
        """Return an empty text that converts the target's tokens to the draft's."""
        return Respelling(self.target, self.draft, self._specials)

    def to_draft(self, token_ids: Sequence[int]) -> list[int]:
        """Return the draft's ids of guessed tokens."""
        return [*map(self._of_target.__getitem__, token_ids)]

    def to_target(self, token_id: int) -> int:
        """Return the target's id of one of the draft's; -1 if it cannot guess the token."""
        return self._of_draft.get(token_id, -1)


def foreign_tokens(
    target: Tokenizer,
    draft: Tokenizer,
    sizes: tuple[int, int],
    *,
    name: str,
) -> ForeignTokens:
    """Return the shared tokens of a target and the draft called `name`, which have logits for `sizes` ids.

    Raises ConfigError for a draft that shares no token with its target.
    """
    shared = shared_tokens(target, draft, *sizes)
    specials = {
        one: other
        for one, other in zip(shared.target.tolist(), shared.draft.tolist(), strict=True)
        if target.is_special(one)
    }
    ids, draft_ids = shared.target, shared.draft
    if not len(ids):
        raise ConfigError(
            f"draft {name} and the target have no token in common; use a draft of another family"
        )
    of_target = dict(zip(ids.tolist(), draft_ids.tolist(), strict=True))
    return ForeignTokens(
        target,
        draft,
        DraftVocabulary(ids, sizes[0]),
        draft_ids,
        specials,
        of_target,
        {token_id: one for one, token_id in of_target.items()},
    )
