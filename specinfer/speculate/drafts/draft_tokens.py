"""Vocabularies of drafts: reduced output layers, and drafts with another tokenizer than the target.

A draft never proposes a token outside its vocabulary; the output does not change, as the target decides it.
So the output layer of a draft model, a large part of a small model, can be reduced to frequent tokens. Model
files do not give frequencies, but byte-pair merges are numbered from the most frequent pair on, so low ids
are frequent ones. A user who knows the texts better can give a file of ids.

A draft with another tokenizer reads the target's text in its own tokens (tokenizer/respelling.py), and
guesses in one of two ways:

    shared    only tokens that both vocabularies have. The draft's distribution is restricted to them and
              renormalized; its draws are declared with that distribution, a valid q for every verifier
    text      any token. The text along a path is retokenized for the target. Such guesses are functions of
              the text without a distribution, so only coupled draws and point masses are possible

`text` yields more tokens per step for the same number of nodes, so it is the default where no distribution is
needed: with the coupled verifier.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import ConfigError
from specinfer.speculation_config import SpeculationConfig
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.respelling import Respelling, SharedTokens, shared_tokens
from specinfer.tree import DrawRule


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
    """The tokenizers of target and draft, and the names of the draft's tokens in its trees.

    The name of a shared token is the target's id; that of another token is the size of the target's
    vocabulary plus the draft's id. Draws use names, so that shared tokens share the target's noise.
    """

    target: Tokenizer
    draft: Tokenizer
    by_text: bool  # True if guesses are retokenized; else every name is a token of the target
    vocabulary: DraftVocabulary  # the names of the draft's logits, ascending
    logit_ids: NDArray[np.int64]  # [named] the draft's ids, in that order
    shared: int  # number of shared tokens that the draft may guess
    target_size: int  # the first name of a token that the target lacks
    _specials: dict[int, int]  # the target's special tokens that the draft has -> the draft's id
    _by_name: dict[int, int]  # name -> the draft's id
    _names: dict[int, int]  # the draft's id -> name

    def respelling(self) -> Respelling:
        """Return an empty text that converts the target's tokens to the draft's."""
        return Respelling(self.target, self.draft, self._specials)

    def spelled(self, names: Sequence[int]) -> list[int]:
        """Return the draft's ids of named tokens."""
        return [*map(self._by_name.__getitem__, names)]

    def name(self, token_id: int) -> int:
        """Return the name of one of the draft's ids; -1 if it cannot guess the token."""
        return self._names.get(token_id, -1)

    @property
    def way(self) -> str:
        """The way of guessing, "text" or "shared"."""
        return "text" if self.by_text else "shared"

    def rule(self, rule: DrawRule) -> DrawRule:
        """Return the draw rule of this draft if other drafts draw by `rule`."""
        sampled = rule in (DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT)
        return DrawRule.POINT_MASS if self.by_text and sampled else rule


def foreign_tokens(
    target: Tokenizer,
    draft: Tokenizer,
    sizes: tuple[int, int],
    speculation: SpeculationConfig,
    kept: DraftVocabulary | None = None,
    *,
    name: str,
) -> ForeignTokens:
    """Return the token names for a target and the draft called `name`, which have logits for `sizes` ids.

    `kept` are the only tokens of the target that the draft may propose. Raises ConfigError for a draft that
    shares no token with its target, and for options that contradict retokenized guesses.
    """
    shared = shared_tokens(target, draft, *sizes)
    by_text = speculation.draft_tokens == "text"
    if speculation.draft_tokens == "auto":
        by_text = speculation.verifier == "coupled" and kept is None
    specials = {
        one: other
        for one, other in zip(shared.target.tolist(), shared.draft.tolist(), strict=True)
        if target.is_special(one)
    }
    if by_text and kept is not None:
        raise ConfigError(
            f"draft_vocabulary counts tokens of the target, and draft {name} writes text in its own "
            "(draft_tokens is 'text'): leave one of the two out"
        )
    if by_text and speculation.draw in ("iid", "without_replacement"):
        raise ConfigError(
            f"draw is {speculation.draw!r}, and what draft {name} writes is spelled again in the target's "
            "tokens, which leaves no law to sample from: draw top_k, or set draft_tokens to 'shared'"
        )
    if kept is not None:
        both = np.isin(shared.target, kept.ids)
        shared = replace(shared, target=shared.target[both], draft=shared.draft[both])
    if len(shared) == 0 and not by_text:
        raise ConfigError(
            f"draft {name} and the target have no token in common; set draft_tokens to 'text', "
            "or use a draft of another family"
        )
    names, ids = shared.target, shared.draft
    if by_text:
        others = _others(draft, sizes[1], shared)
        names, ids = np.concatenate([names, others + sizes[0]]), np.concatenate([ids, others])
    by_name = dict(zip(names.tolist(), ids.tolist(), strict=True))
    return ForeignTokens(
        target,
        draft,
        by_text,
        DraftVocabulary(names, sum(sizes) if by_text else sizes[0]),
        ids,
        len(shared),
        sizes[0],
        specials,
        by_name,
        {token_id: name for name, token_id in by_name.items()},
    )


def _others(draft: Tokenizer, size: int, shared: SharedTokens) -> NDArray[np.int64]:
    """Return the draft's ids that are not shared and have bytes, ascending."""
    table, known = draft.token_bytes, set(shared.draft.tolist())
    return np.array([i for i in range(size) if i not in known and table[i]], dtype=np.int64)
