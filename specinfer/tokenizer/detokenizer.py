"""Detokenizer: the text of a generation, while it grows."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specinfer.tokenizer.token_bytes import TokenBytes
    from specinfer.tokenizer.tokenizer import Tokenizer

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the token ids of one generation into text, piece by piece.

    Whatever the pieces, they add up to what `Tokenizer.decode` makes of the prompt and the ids together,
    less the prompt's own text. A character that is only half there is held back until it is whole, or
    until the next bytes show that it never will be (then it is U+FFFD), or until `flush`. Of the special
    tokens, which `decode` leaves out, those in `visible` stand in the text by their names.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), visible: Iterable[int] = ()
    ) -> None:
        self._bytes: dict[int, bytes] = tokenizer.token_bytes
        self._decoder = _DECODER("replace")
        self._parts: list[str] = []
        # All that the prompt decides is an unfinished character at its end (3 bytes at most), and
        # whether the text has begun, for tokenizers that drop the first space of a text.
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes[token_id] + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)
        self._drops_space = tokenizer.token_bytes.strips_first_space and not tail
        special = filter(tokenizer.is_special, visible)
        shown = {token_id: tokenizer.text_of(token_id).encode() for token_id in special}
        if shown:
            self._bytes = _WithNames(tokenizer.token_bytes, shown)

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final now and was not before; often that of `ids`, sometimes empty."""
        table = self._bytes
        return self._add(self._decoder.decode(b"".join([table[token_id] for token_id in ids])))

    def flush(self) -> str:
        """The rest, at the end of the generation: U+FFFD for a character that stayed unfinished."""
        return self._add(self._decoder.decode(b"", True))

    @property
    def text(self) -> str:
        """Everything that was returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def _add(self, text: str) -> str:
        if self._drops_space and text:
            self._drops_space = False
            text = text.removeprefix(" ")
        if text:
            self._parts.append(text)
        return text


class _WithNames(dict[int, bytes]):
    """The bytes of tokens, where some special ones have their names for bytes."""

    def __init__(self, others: TokenBytes, names: dict[int, bytes]) -> None:
        super().__init__(names)
        self._others = others

    def __missing__(self, token_id: int) -> bytes:
        return self._others[token_id]
