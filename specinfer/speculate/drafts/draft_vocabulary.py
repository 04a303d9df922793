"""The tokens a draft model's output layer is kept for: its head then has a row for each, and no others.

A draft that cannot name a token never proposes it, and nothing else changes: the target's law decides what
becomes text. So the head, a large part of a small model, can be cut to the tokens that are common.

Model files do not say which tokens are common, but a tokenizer does roughly: byte-pair merges are numbered in
the order they were made, the most frequent pair first, so low ids are frequent ones. A caller who knows the
texts better gives a file of ids.
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
