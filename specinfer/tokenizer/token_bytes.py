"""TokenBytes: the bytes each token stands for, looked up once per token.

Decoding works on bytes and not on the tokenizer library's strings: text is then simply the UTF-8
decoding of the tokens' bytes one after another, so a growing text can be decoded as it grows, exactly
and at a cost that depends on the new tokens alone. Bytes that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import tokenizers

from specinfer.errors import ModelFileError

SPACE_SYMBOL = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items()}


class TokenBytes(dict[int, bytes]):
    """token id -> bytes; empty for special tokens and for ids that hold no token (padding rows)."""

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
        """The token of that byte alone, whatever it is a part of; None where there is none."""
        name = _CHARACTERS[byte] if self._to_bytes is _byte_level else f"<0x{byte:02X}>"
        token_id: int | None = self._backend.token_to_id(name)
        return token_id


def _decoding_rules(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How a token's string becomes bytes, and whether the text loses one leading space."""
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
    except KeyError:  # an added token, stored as it reads
        return token.encode()


def is_byte_token(token: str) -> bool:
    """Whether SentencePiece wrote this token for a byte that it had no other token for."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_SYMBOL, " ").encode()
