"""The tokens that a draft can name, and how one with a vocabulary of its own speaks with its target.

A draft that cannot name a token never proposes it, and nothing else changes: the target's law decides what
becomes text. So the head of a draft model, a large part of a small one, can be cut to the tokens that are
common. Model files do not say which these are, but a tokenizer does roughly: byte-pair merges are numbered in
the order they were made, the most frequent pair first, so low ids are frequent ones. A caller who knows the
texts better gives a file of ids.

A draft with other tokens reads the target's text in its own (tokenizer/respelling.py), and guesses in one of
two ways:

    shared    only tokens that both have. The draft's law is restricted to them and renormalised, which is the
              law its draws are declared with: a valid q for every verifier
    text      any token. The text along a path of them is retokenized for the target: guesses that are
              functions of the text, without a law, so coupled draws and point masses alone

Text makes more tokens a step of as many nodes, so it is what is done where nothing needs a law: under the
coupled verifier.
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
    """The kept ids, and the size of the vocabulary they are from; entry i of a pruned row is of ids[i]."""

    ids: NDArray[np.int64]  # [kept], ascending
    size: int

    def widened(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A row of logits, [kept], as one over the whole vocabulary, [size]: -inf for what is not kept."""
        row = np.full(self.size, -np.inf, dtype=np.float32)
        row[self.ids] = logits
        return row


def draft_vocabulary(option: int | str | None, tokenizer: Tokenizer, size: int) -> DraftVocabulary | None:
    """What the option `draft_vocabulary` means for a vocabulary of `size`; None for all of it.

    A number is how many tokens are kept: special and end-of-text tokens, then the lowest ids. A string is
    the path of a file of ids, a JSON list or one a line; special and end-of-text tokens are kept besides.
    Raises ConfigError when the number is too small for the special tokens, or the file cannot be used.
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
    """The tokens that a head names, ascending, of a vocabulary of `size`; None where they are all."""
    return None if len(ids) == size else DraftVocabulary(np.array(ids, dtype=np.int64), size)


def first_tokens(count: int, size: int, kept: DraftVocabulary | None = None) -> DraftVocabulary:
    """The first tokens of a vocabulary of `size`, of which a model has so many; of these the `kept` ones."""
    ids = np.arange(count) if kept is None else kept.ids[kept.ids < count]
    return DraftVocabulary(ids, size)


def _kept(ids: Iterable[int], size: int) -> DraftVocabulary:
    return DraftVocabulary(np.array(sorted(ids), dtype=np.int64), size)


def _read(path: Path, size: int) -> list[int]:
    """The ids of a file; raises ConfigError."""
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
    """Both tokenizers, and what the draft's tokens are called where trees are made of them.

    A token that both have is called by the target's id, another one by the size of the target's vocabulary
    plus its own id. So draws are made with names alone: equal names share the target's noise.
    """

    ours: Tokenizer
    theirs: Tokenizer
    by_text: bool  # guesses are spelled again; else every name is a token of the target
    vocabulary: DraftVocabulary  # the names of the draft's logits, ascending
    logit_ids: NDArray[np.int64]  # [named] the draft's ids, in that order
    shared: int  # tokens that both have, and the draft may guess
    our_size: int  # names from here on are of tokens that the target lacks
    _specials: dict[int, int]  # the target's special tokens that the draft has, as the draft's
    _by_name: dict[int, int]  # name -> the draft's id
    _names: dict[int, int]  # and back

    def respelling(self) -> Respelling:
        """An empty text of the target's, as the draft reads it."""
        return Respelling(self.ours, self.theirs, self._specials)

    def spelled(self, names: Sequence[int]) -> list[int]:
        """The draft's ids of tokens by their names."""
        return [*map(self._by_name.__getitem__, names)]

    def name(self, token_id: int) -> int:
        """What one of the draft's ids is called; -1 for one that it cannot guess."""
        return self._names.get(token_id, -1)

    @property
    def way(self) -> str:
        """Which of the two it is."""
        return "text" if self.by_text else "shared"

    def rule(self, rule: DrawRule) -> DrawRule:
        """How it draws where drafts draw by `rule`."""
        sampled = rule in (DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT)
        return DrawRule.POINT_MASS if self.by_text and sampled else rule


def foreign_tokens(
    ours: Tokenizer,
    theirs: Tokenizer,
    sizes: tuple[int, int],
    speculation: SpeculationConfig,
    kept: DraftVocabulary | None = None,
    *,
    draft: str,
) -> ForeignTokens:
    """The exchange between a target and the `draft` of that name, with logits for `sizes` ids.

    `kept` are the only tokens of the target that a draft may name. Raises ConfigError for a draft that
    shares no token with its target, and for options that make no sense for one that writes text.
    """
    shared = shared_tokens(ours, theirs, *sizes)
    by_text = speculation.draft_tokens == "text"
    if speculation.draft_tokens == "auto":
        by_text = speculation.verifier == "coupled" and kept is None
    specials = {
        one: other
        for one, other in zip(shared.ours.tolist(), shared.theirs.tolist(), strict=True)
        if ours.is_special(one)
    }
    if by_text and kept is not None:
        raise ConfigError(
            f"draft_vocabulary counts tokens of the target, and draft {draft} writes text in its own "
            "(draft_tokens is 'text'): leave one of the two out"
        )
    if by_text and speculation.draw in ("iid", "without_replacement"):
        raise ConfigError(
            f"draw is {speculation.draw!r}, and what draft {draft} writes is spelled again in the target's "
            "tokens, which leaves no law to sample from: draw top_k, or set draft_tokens to 'shared'"
        )
    if kept is not None:
        both = np.isin(shared.ours, kept.ids)
        shared = replace(shared, ours=shared.ours[both], theirs=shared.theirs[both])
    if len(shared) == 0 and not by_text:
        raise ConfigError(
            f"draft {draft} and the target have no token in common; set draft_tokens to 'text', "
            "or use a draft of another family"
        )
    names, ids = shared.ours, shared.theirs
    if by_text:
        others = _others(theirs, sizes[1], shared)
        names, ids = np.concatenate([names, others + sizes[0]]), np.concatenate([ids, others])
    by_name = dict(zip(names.tolist(), ids.tolist(), strict=True))
    return ForeignTokens(
        ours,
        theirs,
        by_text,
        DraftVocabulary(names, sum(sizes) if by_text else sizes[0]),
        ids,
        len(shared),
        sizes[0],
        specials,
        by_name,
        {token_id: name for name, token_id in by_name.items()},
    )


def _others(theirs: Tokenizer, size: int, shared: SharedTokens) -> NDArray[np.int64]:
    """The draft's ids that the target has no token for and that spell something, ascending."""
    table, known = theirs.token_bytes, set(shared.theirs.tolist())
    return np.array([i for i in range(size) if i not in known and table[i]], dtype=np.int64)
