"""Respelling: incremental retokenization of a growing text from one model's tokens into another's.

Both models' tokens stand for bytes. The last bytes of the text are open: later bytes may change how the
reader tokenizes them, so they are encoded again whenever the text grows. Earlier bytes, and those before a
special token, are closed.

    ids     closed ................... | encoded from the open bytes
    bytes   (dropped)                  | at most 2 * _OPEN, cut at the start of a word

A special token becomes the reader's special token of the same name, or is dropped if there is none.

SharedTokens are the tokens in both vocabularies. Two tokens are the same if they stand for the same bytes;
special tokens, which stand for no bytes, if they have the same name.
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

_OPEN: Final = 32  # bytes that stay open when earlier ones are closed: longer than nearly every word
_SPACES: Final = b" \t\n\r"


class Respelling:
    """A text as the reader's ids; `whole` unless it ends in an incomplete character without byte tokens.

    `specials` maps the writer's special token ids to the reader's.
    """

    def __init__(self, writer: Tokenizer, reader: Tokenizer, specials: Mapping[int, int]) -> None:
        self._writer, self._reader, self._specials = writer, reader, specials
        first = reader.encode("")[:1]
        self.ids: list[int] = first if first == [reader.bos_token_id] else []
        self.taken = 0  # number of the writer's tokens read
        self.whole = True
        self._open = b""
        self._closed = len(self.ids)

    def extend(self, tokens: Sequence[int]) -> int:
        """Append tokens of the writer; return the number of leading ids that did not change."""
        closed, before = self._closed, self.ids[self._closed :]
        table = self._writer.token_bytes
        for token in tokens:
            if token in table.special_ids:
                self._add_special(token)
            else:
                self._open += table[token]
        self._encode_open()
        self._close()
        self.taken += len(tokens)
        now = self.ids[closed:]
        pairs = enumerate(zip(before, now, strict=False))
        return closed + next((i for i, (was, is_) in pairs if was != is_), min(len(before), len(now)))

    def _add_special(self, token: int) -> None:
        """Close the open bytes, and append the reader's special token of that name."""
        self._encode_open()
        encoded = self._specials.get(token)
        if encoded is not None and self.ids != [encoded]:  # the text's first token may be there already
            self.ids.append(encoded)
        self._open, self._closed = b"", len(self.ids)

    def _encode_open(self) -> None:
        """Encode the open bytes; an incomplete character becomes byte tokens, if the reader has them."""
        text, rest = complete(self._open)
        del self.ids[self._closed :]
        self.ids += self._reader.encode_behind(text)
        encoded = [self._reader.token_bytes.byte_id(byte) for byte in rest]
        self.whole = None not in encoded
        if self.whole:
            self.ids += [i for i in encoded if i is not None]

    def _close(self) -> None:
        """Close all but the last words if many bytes are open."""
        if len(self._open) <= 2 * _OPEN:
            return
        encoded = [self._reader.token_bytes[i] for i in self.ids[self._closed :]]
        # the reader's ids stand for other bytes, so they cannot be aligned
        if b"".join(encoded) != self._open:
            if complete(self._open)[1] == b"":
                self._open, self._closed = b"", len(self.ids)
            return
        ends = [0, *accumulate(map(len, encoded))]
        far = [i for i in range(1, len(encoded)) if ends[i] <= len(self._open) - _OPEN]
        words = [i for i in far if encoded[i][0] in _SPACES and encoded[i - 1][-1] not in _SPACES]
        if not far:
            return
        cut = words[-1] if words else far[-1]
        self._open = self._open[ends[cut] :]
        self._closed += cut


def complete(text: bytes) -> tuple[str, bytes]:
    """Decode UTF-8; return the text and the bytes of an incomplete character at its end."""
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
    """Pairs of ids for the same token: entry i of both arrays; no id occurs twice."""

    target: NDArray[np.int64]  # [shared], ascending
    draft: NDArray[np.int64]  # [shared]

    def __len__(self) -> int:
        return len(self.target)


def shared_tokens(target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> SharedTokens:
    """The tokens common to the first `target_size` ids of `target` and the first `draft_size` of `draft`.

    The first of several ids for the same bytes counts; plain tokens precede byte-fallback tokens.
    """
    one, other = _meanings(target, target_size), _meanings(draft, draft_size)
    pairs = sorted((one[meaning], other[meaning]) for meaning in one.keys() & other.keys())
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return SharedTokens(both[:, 0].copy(), both[:, 1].copy())


def _meanings(tokenizer: Tokenizer, size: int) -> dict[bytes | str, int]:
    """bytes, or the name of a special token, -> id, for the first `size` ids."""
    table, found = tokenizer.token_bytes, dict[bytes | str, int]()
    fallbacks = dict[bytes | str, int]()
    for token_id in range(size):
        if token_id in table.special_ids:
            found.setdefault(tokenizer.id_to_token(token_id) or "", token_id)
        elif encoded := table[token_id]:
            single = len(encoded) == 1 and is_byte_token(tokenizer.id_to_token(token_id) or "")
            (fallbacks if single else found).setdefault(encoded, token_id)
    found.pop("", None)
    return fallbacks | found
