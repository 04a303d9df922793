"""Vocabularies of drafts: reduced output layers, and drafts with another tokenizer than the target.

A draft never proposes a token outside its vocabulary; the output does not change, as the target decides it.
So the output layer of a draft model, a large part of a small model, can be reduced to frequent tokens. Model
files do not give frequencies, but byte-pair merges are numbered from the most frequent pair on, so low ids
are frequent ones. A user who knows the texts better can give a file of ids.

A draft with another tokenizer reads the target's text in its own tokens (tokenizer/detokenizer.py), and
guesses only tokens that both vocabularies have. Its distribution is restricted to them and renormalized; its
draws are declared with that distribution, a valid q for every verifier.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ConfigError
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.detokenizer import Respelling, shared_tokens


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The ids of a reduced output layer; entry i of its logits belongs to token ids[i]."""

    ids: NDArray[np.int64]  # [kept], ascending
    size: int  # of the whole vocabulary

    def widened(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a row of logits, [kept], over the whole vocabulary, [size], with -inf for other tokens."""
        row = np.full(self.size, -np.inf, dtype=np.float32)
        row[self.ids] = logits
        return row


def draft_vocabulary(option: int | str | None, tokenizer: Tokenizer, size: int) -> DraftVocabulary | None:
    """Return the tokens that the option `draft_vocabulary` keeps of `size` tokens; None: all.

    A number keeps as many tokens: special and end-of-text tokens, then the lowest ids. A string is the path
    of a file of ids, a JSON list or one per line; special and end-of-text tokens are added. Raises
    ConfigError if the number is too small for the special tokens, or the file cannot be used.
    """
    if option is None:
        return None
    special = {i for i in (*tokenizer.token_bytes.special_ids, *tokenizer.eos_token_ids) if i < size}
    if isinstance(option, str):
        return _kept(special.union(_read(Path(option).expanduser(), size)), size)
    if option >= size:
        return None
    if option <= len(special):
        raise ConfigError(
            f"draft_vocabulary is {option}, and {len(special)} tokens are special; allowed: more than these"
        )
    return _kept(special.union([i for i in range(option) if i not in special][: option - len(special)]), size)


def named_tokens(ids: Sequence[int], size: int) -> DraftVocabulary | None:
    """Return the vocabulary of a head's ascending token `ids`; None if they are all `size` tokens."""
    return None if len(ids) == size else DraftVocabulary(np.array(ids, dtype=np.int64), size)


def first_tokens(count: int, size: int, kept: DraftVocabulary | None = None) -> DraftVocabulary:
    """Return the first `count` tokens of a vocabulary of `size`, or those of them that are in `kept`."""
    ids = np.arange(count) if kept is None else kept.ids[kept.ids < count]
    return DraftVocabulary(ids, size)


def _kept(ids: Iterable[int], size: int) -> DraftVocabulary:
    return DraftVocabulary(np.array(sorted(ids), dtype=np.int64), size)


def _read(path: Path, size: int) -> list[int]:
    """Return the ids of a file; raises ConfigError."""
    allowed = f"a JSON list of token ids, or one a line, each from 0 to {size - 1}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"draft_vocabulary {path} cannot be read ({error}); give {allowed}") from error
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except ValueError as error:
        raise ConfigError(f"draft_vocabulary {path} holds no ids ({error}); give {allowed}") from error
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < size]
    if wrong or not ids:
        raise ConfigError(f"draft_vocabulary {path} holds {wrong[0] if ids else 'nothing'!r}; give {allowed}")
    return list(ids)


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
    kept: DraftVocabulary | None = None,
    *,
    name: str,
) -> ForeignTokens:
    """Return the shared tokens of a target and the draft called `name`, which have logits for `sizes` ids.

    `kept` are the only tokens of the target that the draft may propose. Raises ConfigError for a draft that
    shares no token with its target.
    """
    shared = shared_tokens(target, draft, *sizes)
    specials = {
        one: other
        for one, other in zip(shared.target.tolist(), shared.draft.tolist(), strict=True)
        if target.is_special(one)
    }
    ids, draft_ids = shared.target, shared.draft
    if kept is not None:
        both = np.isin(ids, kept.ids)
        ids, draft_ids = ids[both], draft_ids[both]
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
