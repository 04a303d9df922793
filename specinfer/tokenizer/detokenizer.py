"""Bytes of tokens: incremental decoding of growing text, and its retokenization for another model.

Decoding uses bytes, not the tokenizer library's strings. Text is the UTF-8 decoding of the concatenated bytes
of the tokens, so it can be decoded incrementally and exactly, at a cost that depends on the new tokens alone.
Invalid UTF-8 becomes U+FFFD.

Respelling turns one model's tokens into another's. The last bytes of the text are open: later bytes may
change how the reader tokenizes them, so they are encoded again whenever the text grows. Earlier bytes, and
those before a special token, are closed.

    ids     closed ................... | encoded from the open bytes
    bytes   (dropped)                  | at most 2 * _OPEN, cut at the start of a word

A special token becomes the reader's special token of the same name, or is dropped if there is none.

SharedTokens are the tokens in both vocabularies. Two tokens are the same if they stand for the same bytes;
special tokens, which stand for no bytes, if they have the same name.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from specinfer.errors import ModelFileError

if TYPE_CHECKING:
    from specinfer.tokenizer.tokenizer import Tokenizer

SPACE_SYMBOL = "\u2581"  # SentencePiece's space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_DECODER = codecs.getincrementaldecoder("utf-8")
_OPEN: Final = 32  # bytes that stay open when earlier ones are closed: longer than nearly every word
_SPACES: Final = b" \t\n\r"


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes, character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items()}


class TokenBytes(dict[int, bytes]):
    """token id -> bytes; empty for special tokens and for ids without a token (padding rows)."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._to_bytes, self.strips_first_space = _decoding_rules(backend)

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self.special_ids or token_id < 0 else self._backend.id_to_token(token_id)
        found = b"" if token is None else self._to_bytes(token)
        self[token_id] = found
        return found

    def byte_id(self, byte: int) -> int | None:
        """The token of a single byte; None if there is none."""
        name = _CHARACTERS[byte] if self._to_bytes is _byte_level else f"<0x{byte:02X}>"
        token_id: int | None = self._backend.token_to_id(name)
        return token_id


def _decoding_rules(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """Return the map from a token's string to bytes, and True if decoding drops a leading space."""
    if backend.decoder is None:
        raise ModelFileError("tokenizer.json has no decoder; it cannot turn token ids into text")
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    byte_level = sentencepiece = strips = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                sentencepiece = True
            case {"type": "Metaspace", "replacement": "\u2581"}:
                sentencepiece = True
                strips = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = start == 1
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise ModelFileError(
                    f"the tokenizer's decoder {step['type']} is not supported; supported: byte-level BPE "
                    "(GPT-2, Llama 3, Qwen) and SentencePiece BPE (Llama 2, Mistral, Gemma)"
                )
    if byte_level == sentencepiece:
        raise ModelFileError("the tokenizer's decoder is neither byte-level nor SentencePiece")
    return (_byte_level if byte_level else _sentencepiece), strips


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, stored as plain text
        return token.encode()


def is_byte_token(token: str) -> bool:
    """True for a byte-fallback token of SentencePiece."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_SYMBOL, " ").encode()


class Detokenizer:
    """Converts the token ids of one generation into text, incrementally.

    The pieces add up to `Tokenizer.decode` of the prompt and the ids together, without the prompt's text. An
    incomplete character is held back until it is complete, until the next bytes show that it is invalid (it
    then becomes U+FFFD), or until `flush`. `decode` omits special tokens; those in `visible` appear by name.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), visible: Iterable[int] = ()
    ) -> None:
        self._bytes: Mapping[int, bytes] = tokenizer.token_bytes
        self._decoder = _DECODER("replace")
        # The prompt matters only by an incomplete character at its end (3 bytes at most), and by being
        # non-empty, for tokenizers that drop the first space of a text.
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
            self._bytes = ChainMap(shown, tokenizer.token_bytes)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that has become final; often that of `ids`, sometimes empty."""
        table = self._bytes
        return self._add(self._decoder.decode(b"".join([table[token_id] for token_id in ids])))

    def flush(self) -> str:
        """Return the rest at the end of the generation: U+FFFD for an incomplete character."""
        return self._add(self._decoder.decode(b"", True))

    def _add(self, text: str) -> str:
        if self._drops_space and text:
            self._drops_space = False
            text = text.removeprefix(" ")
        return text


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
    decoder = _DECODER("replace")
    return decoder.decode(text), decoder.getstate()[0]


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
