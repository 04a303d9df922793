"""Respelling: a text that grows in one model's tokens, in another's.

The one idea: bytes are what both models mean. The text's last bytes are open: with what follows, the reader
may spell them otherwise, so they are encoded again whenever the text grows. What lies further back, and
before a special token, is closed.

    ids     closed ................... | spelled from the open bytes
    bytes   (forgotten)                | at most 2 * _OPEN, cut where a word begins

A special token is read as the special token of the same name; one that the reader does not have is left out.

SharedTokens are those that two vocabularies both have, whatever their ids. Two tokens are the same where they
stand for the same bytes; special tokens, which stand for none, where they have the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.tokenizer.detokenizer import is_byte_token
from specinfer.tokenizer.tokenizer import Tokenizer

_OPEN: Final = 32  # bytes that stay open when more are closed: longer than nearly every word
_SPACES: Final = b" \t\n\r"


class Respelling:
    """One text as the reader's ids, `whole` unless its last character is half there and has no spelling.

    `specials` says which of the reader's ids the writer's special tokens are read as.
    """

    def __init__(self, writer: Tokenizer, reader: Tokenizer, specials: Mapping[int, int]) -> None:
        self._writer, self._reader, self._specials = writer, reader, specials
        first = reader.encode("")[:1]
        self.ids: list[int] = first if first == [reader.bos_token_id] else []
        self.taken = 0  # tokens of the writer's
        self.whole = True
        self._open = b""
        self._closed = len(self.ids)

    def extend(self, tokens: Sequence[int]) -> int:
        """Take in tokens of the writer; how many of the ids before are still the first ones."""
        closed, before = self._closed, self.ids[self._closed :]
        table = self._writer.token_bytes
        for token in tokens:
            if token in table.special_ids:
                self._add_special(token)
            else:
                self._open += table[token]
        self._spell()
        self._close()
        self.taken += len(tokens)
        now = self.ids[closed:]
        pairs = enumerate(zip(before, now, strict=False))
        return closed + next((i for i, (was, is_) in pairs if was != is_), min(len(before), len(now)))

    def _add_special(self, token: int) -> None:
        """Close what is open, and add the reader's special token of that name."""
        self._spell()
        spelled = self._specials.get(token)
        if spelled is not None and self.ids != [spelled]:  # the text's first token may be there already
            self.ids.append(spelled)
        self._open, self._closed = b"", len(self.ids)

    def _spell(self) -> None:
        """Spell the open bytes; of half a character each byte, where the reader has tokens for them."""
        text, rest = complete(self._open)
        del self.ids[self._closed :]
        self.ids += self._reader.encode_behind(text)
        spelled = [self._reader.token_bytes.byte_id(byte) for byte in rest]
        self.whole = None not in spelled
        if self.whole:
            self.ids += [i for i in spelled if i is not None]

    def _close(self) -> None:
        """Close all but the last words, where much is open."""
        if len(self._open) <= 2 * _OPEN:
            return
        spelled = [self._reader.token_bytes[i] for i in self.ids[self._closed :]]
        if b"".join(spelled) != self._open:  # the reader writes it otherwise: nobody knows what is whose
            if complete(self._open)[1] == b"":
                self._open, self._closed = b"", len(self.ids)
            return
        ends = [0, *accumulate(map(len, spelled))]
        far = [i for i in range(1, len(spelled)) if ends[i] <= len(self._open) - _OPEN]
        words = [i for i in far if spelled[i][0] in _SPACES and spelled[i - 1][-1] not in _SPACES]
        if not far:
            return
        cut = words[-1] if words else far[-1]
        self._open = self._open[ends[cut] :]
        self._closed += cut


def complete(text: bytes) -> tuple[str, bytes]:
    """UTF-8 as text, and the bytes of a character at its end that is only half there."""
    for back in range(1, min(3, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            if back < length:
                return text[:-back].decode("utf-8", "replace"), text[-back:]
            break
        if byte < 0x80:
            break
    return text.decode("utf-8", "replace"), b""


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
