"""How llguidance is used: the tokenizer it wants, a thread with a deep stack for it, and its complaints."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from specinfer.tokenizer import Tokenizer

_Result = TypeVar("_Result")
_stack_size = threading.Lock()  # Python has one stack size for all threads that start from now on
_OURS = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")  # places in what we wrote
_SPECIAL = b"\xff"  # how the library marks tokens that are not text
# A state of a text in which every token of one of these forms is legal takes them all at once, without a
# look at each. Short forms serve JSON strings of bounded length, of which the library's own set has none.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHARACTER}{{1,{n}}}" for n in (2, 4, 7, 10, 30)), f"{_CHARACTER}+"]


class DeepThread:
    """Runs calls one after the other on a thread of its own, with `stack` bytes of stack.

    The first call starts the thread. It ends with the process, after the call it is in: a thread that the
    process does not wait for may not come back from a library that gave up the interpreter's lock. A forked
    process starts one of its own. Safe to share by threads; a call must not make another one.
    """

    def __init__(self, name: str, stack: int) -> None:
        self._name = name
        self._stack = stack
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0  # whose thread it is

    def run(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns; raises what it raises, and RuntimeError when no thread can be started."""
        return self._started().submit(work).result()

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._process != os.getpid():
                executor = ThreadPoolExecutor(1, self._name)
                with _stack_size:
                    usual = threading.stack_size(self._stack)
                    try:
                        executor.submit(int)  # the first call starts the only thread
                    finally:
                        threading.stack_size(usual)
                self._executor, self._process = executor, os.getpid()
            return self._executor


def complaint(matcher: LLMatcher) -> str:
    """What the library says of a matcher that is in error."""
    return in_one_line(matcher.get_error())


def in_one_line(said: str) -> str:
    """What the library says, without the excerpt of our own notation below it."""
    said = said.replace("<non-verbose/>", "").partition("\n   1 |")[0]
    return shortened(" ".join(said.split()))


def without_places(said: str) -> str:
    """What the library says, without lines and columns of a grammar that the caller never saw."""
    return _OURS.sub("", said)


def shortened(text: str) -> str:
    """A text that is short enough for a message."""
    return text if len(text) <= 160 else text[:157] + "..."


# The library descends one stack frame per rule or schema within another, without a limit, and an overflow
# ends the process. This is room for whatever fits into MAX_SOURCE. Only what was once used becomes memory: a
# few pages as a rule, 44 MB after 15,000 rules within one another.
_DEEP = DeepThread("grammar", 1 << 29)


class LibraryVocabulary:
    """The tokens of one model, and matchers for grammars over them.

    The end of the text is one id of ours, after all others, in place of the model's end-of-text ids: a
    grammar cannot name these. Other special tokens have no bytes; a Lark grammar may name them.
    `text_bits` and `end_bits` have a bit a token: which can be part of a text, which end it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.size = vocab_size
        self.end_ids = frozenset(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._tokens = [self._bytes_of(i) for i in range(vocab_size)]
        self.text_bits = _packed([bool(token) for token in self._tokens])
        self.end_bits = _packed([i in self.end_ids for i in range(vocab_size)])
        self._library: tuple[LLTokenizer, LLParserLimits] | None = None

    def is_text(self, token: int) -> bool:
        """Whether the id stands for something a grammar can ask for: bytes, or a special token by name."""
        return 0 <= token < self.size and bool(self._tokens[token])

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of a text, for a Lark grammar; in an error state if that is no good.

        Any thread may ask; matchers are made one after the other.
        """
        return _DEEP.run(lambda: self._matcher(grammar))

    def _matcher(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer, limits = self._prepared()
        return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)

    def _prepared(self) -> tuple[LLTokenizer, LLParserLimits]:
        if self._library is None:
            from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

            # About a tenth of a second of work when a grammar is compiled, a few milliseconds at a node.
            limits = LLParserLimits(
                initial_lexer_fuel=200_000,
                step_lexer_fuel=50_000,
                max_lexer_states=20_000,
                max_grammar_size=100_000,
                verbose_errors=False,
            )
            wrapped = TokenizerWrapper(_Encoder(self.tokenizer, [*self._tokens, b""]))
            tokens = LLTokenizer(wrapped, n_vocab=self.size + 1, eos_token=self.size, slices=_SLICES)
            self._library = tokens, limits
        return self._library

    def _bytes_of(self, token: int) -> bytes:
        if token in self.end_ids:
            return b""
        if self.tokenizer.is_special(token):
            return _SPECIAL + (self.tokenizer.id_to_token(token) or "").encode()
        found = self.tokenizer.token_bytes[token]
        return b"" if found.startswith(_SPECIAL) else found  # 0xFF is in no UTF-8 text


def fault_of(grammar: str) -> str:
    """What the library says against a Lark grammar, whatever the vocabulary; empty when it is good.

    Any thread may ask. How large the grammar becomes, and where it leads, shows when it is compiled.
    """
    from llguidance import LLMatcher

    return _DEEP.run(lambda: LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar)))


def _packed(flags: list[bool]) -> NDArray[np.uint8]:
    """A bit a token, the first lowest, as in the library's masks."""
    return np.packbits(flags, bitorder="little")


class _Encoder:
    """How the library asks for the canonical tokens of a text; it must get tokens of exactly its bytes."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self._byte_ids = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        """The ids of a text from the middle of an answer."""
        wanted = text.encode()
        # SentencePiece puts a space before a text; what follows a line break is spared it.
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special=False)
            for skipped in range(3 if before else 1):
                if self._spell(ids[skipped:]) == wanted:
                    return ids[skipped:]
        # The text has the name of a special token in it, say; byte by byte it is text again.
        return [self._byte_ids[byte] for byte in wanted if byte in self._byte_ids]

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join([self.tokens[i] if i < len(self.tokens) else b"" for i in ids])
