"""Interface to llguidance: its tokenizer, a thread with a deep stack, and its error messages."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from specinfer.tokenizer import Tokenizer

_Result = TypeVar("_Result")
_OURS = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")  # positions in the generated grammar
_SPECIAL = b"\xff"  # the library's prefix of tokens that are not text
# In a parser state where every token of one of these forms is legal, the library allows them all at once
# without testing each. Its own set lacks short forms, which JSON strings of bounded length need.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{n}}}" for n in (2, 4, 7, 10, 30)), f"{_CHARACTER}+"]


def error_of(matcher: LLMatcher) -> str:
    """The library's error message for a matcher in an error state."""
    return _in_one_line(matcher.get_error())


def _in_one_line(message: str) -> str:
    """The error message without the grammar excerpt below it."""
    message = message.replace("<non-verbose/>", "").partition("\n   1 |")[0]
    return shortened(" ".join(message.split()))


def without_positions(message: str) -> str:
    """The error message without lines and columns of the generated grammar."""
    return _OURS.sub("", message)


def shortened(text: str) -> str:
    """Truncate a text for a message."""
    return text if len(text) <= 160 else text[:157] + "..."


# The library recurses once per nested rule or schema, without a limit, and a stack overflow ends the process.
# This stack suffices for anything within MAX_SOURCE. Only used pages become memory: usually a few, 44 MB
# after 15,000 nested rules.
_STACK: Final = 1 << 29  # bytes
_deep = threading.Lock()  # Python has one stack size for all threads started later


def _with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Return the result of `work` in a thread with a deep stack; one runs at a time. Raises its exception."""
    with _deep, ThreadPoolExecutor(1, "grammar") as executor:
        usual = threading.stack_size(_STACK)
        try:
            future = executor.submit(work)  # starts the thread
        finally:
            threading.stack_size(usual)
        return future.result()


class LibraryVocabulary:
    """The tokens of one model, and matchers for grammars over them.

    The end of the text is one extra id after all others, in place of the model's end-of-text ids, which a
    grammar cannot name. Other special tokens have no bytes; a Lark grammar may name them. `text_bits` and
    `end_bits` have one bit per token: whether it can be part of a text, and whether it ends one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.end_ids = frozenset(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._tokens = [self._bytes_of(i) for i in range(vocab_size)]
        # The lowest bit is first, as in the library's masks.
        self.text_bits = np.packbits([bool(token) for token in self._tokens], bitorder="little")
        self.end_bits = np.packbits([i in self.end_ids for i in range(vocab_size)], bitorder="little")

    def is_text(self, token: int) -> bool:
        """True if a grammar can require the id: it has bytes, or is a special token with a name."""
        return 0 <= token < self.size and bool(self._tokens[token])

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of a text for a Lark grammar; in an error state if the grammar is bad.

        Thread-safe; matchers are created one at a time.
        """
        return _with_deep_stack(lambda: self._matcher(grammar))

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer, limits = self._library
        return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)

    @cached_property
    def _library(self) -> tuple[LLTokenizer, LLParserLimits]:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        # About 0.1 s of work when a grammar is compiled, a few milliseconds per node.
        limits = LLParserLimits(
            initial_lexer_fuel=200_000,
            step_lexer_fuel=50_000,
            max_lexer_states=20_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        wrapped = TokenizerWrapper(_Encoder(self.tokenizer, [*self._tokens, b""]))
        return LLTokenizer(wrapped, n_vocab=self.size + 1, eos_token=self.size, slices=_SLICES), limits

    def _bytes_of(self, token: int) -> bytes:
        if token in self.end_ids:
            return b""
        if self.tokenizer.is_special(token):
            return _SPECIAL + (self.tokenizer.id_to_token(token) or "").encode()
        found = self.tokenizer.token_bytes[token]
        return b"" if found.startswith(_SPECIAL) else found  # 0xFF occurs in no UTF-8 text


def fault_and_warnings(grammar: str) -> tuple[str, list[str]]:
    """The library's error for a Lark grammar in one line, empty if it is good; and its warnings if it is.

    Warnings name what the library ignores. Independent of the vocabulary; thread-safe. The size of the
    grammar and its dead ends are found when it is compiled.
    """
    from llguidance import LLMatcher

    is_error, found = _with_deep_stack(
        lambda: LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    )
    return (without_positions(_in_one_line(found[0])), []) if is_error else ("", found)


class _Encoder:
    """Canonical tokenization for the library; the tokens must have exactly the text's bytes."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self._byte_ids = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text in the middle of an answer."""
        encoded, ids = text.encode(), self._tokenizer.encode_behind(text)
        if self._spell(ids) == encoded:
            return ids
        # The text contains the name of a special token, for example; single bytes make it text again.
        return [self._byte_ids[byte] for byte in encoded if byte in self._byte_ids]

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join([self.tokens[i] if i < len(self.tokens) else b"" for i in ids])
