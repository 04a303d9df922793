"""SharedTokens: the tokens that two vocabularies both have, whatever their ids.

Two tokens are the same where they stand for the same bytes; special tokens, which stand for none, where they
have the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specinfer.tokenizer.token_bytes import is_byte_token
from specinfer.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class SharedTokens:
    """Pairs of ids that stand for the same token: entry i of both is one; no id comes twice."""

    ours: NDArray[np.int64]  # [shared], ascending
    theirs: NDArray[np.int64]  # [shared]

    def __len__(self) -> int:
        return len(self.ours)


def shared_tokens(ours: Tokenizer, theirs: Tokenizer, our_size: int, their_size: int) -> SharedTokens:
    """What the first `our_size` ids of one tokenizer and the first `their_size` of another have in common.

    Of several ids of one vocabulary for the same bytes the first counts, spelled-out tokens before the
    single bytes that SentencePiece falls back on.
    """
    one, other = _meanings(ours, our_size), _meanings(theirs, their_size)
    pairs = sorted((one[meaning], other[meaning]) for meaning in one.keys() & other.keys())
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return SharedTokens(both[:, 0].copy(), both[:, 1].copy())


def _meanings(tokenizer: Tokenizer, size: int) -> dict[bytes | str, int]:
    """What each of the first `size` ids stands for, bytes or the name of a special token -> id."""
    table, found = tokenizer.token_bytes, dict[bytes | str, int]()
    fallbacks = dict[bytes | str, int]()
    for token_id in range(size):
        if token_id in table.special_ids:
            found.setdefault(tokenizer.id_to_token(token_id) or "", token_id)
        elif spelled := table[token_id]:
            single = len(spelled) == 1 and is_byte_token(tokenizer.id_to_token(token_id) or "")
            (fallbacks if single else found).setdefault(spelled, token_id)
    found.pop("", None)
    return fallbacks | found
