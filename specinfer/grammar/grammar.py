"""Grammar: the tokens that may follow a text, at every node of a token tree.

A request's cursor is at the end of a path below the committed text. To inspect another node it rolls back to
the common prefix of the two paths and consumes the rest, at microseconds per token. So a walk down a tree, or
a query of siblings, costs little more than the masks, and masks are cached until the next commit.

Matchers of one grammar share an automaton that is built on demand and has a limited size. Once full, it fails
for every matcher. A request that fills it must not fail the others, nor may a grammar wear out with use. So a
matcher that fails is replaced by one with a new automaton, and the query is repeated once.

A mask contains every token whose bytes the grammar allows, so the target may spell a forced text in any way;
`forced` guesses the canonical spelling. (By default the library masks all other spellings; the option
no_forcing disables that, and a second matcher without the option makes the guesses.)

The library is llguidance (docs/decisions/16-grammar.md has the reasons). It is imported when the first
grammar is compiled.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import RequestError
from specinfer.grammar.lark import lark_of, unenforced_keywords
from specinfer.grammar.library_vocabulary import LibraryVocabulary, error_of, shortened, without_positions
from specinfer.structured_output import OutputKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from specinfer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_DEAD_END = "NoExtension"  # prefix of the library's error when nothing can follow
_Answer = TypeVar("_Answer")
CACHED_GRAMMARS = 32
CACHED_MASKS = 256  # per request and step; 19 kB each at a vocabulary of 152k
# tokens; longer forced text is cached, since finding it takes time in proportion to its length
LONG_FORCED = 256
TRIAL_TOKENS = 32  # tokens of each trial of a new grammar
TRIALS = 2
_NO_FORCING = '%llguidance {"no_forcing": true}'
_HINTS = {
    OutputKind.REGEX: "allowed: Rust's regex syntax without look-around, back-references and \\b",
    OutputKind.GRAMMAR: "allowed: a Lark grammar with a rule start, or GBNF rules with a rule root",
    OutputKind.CHOICE: "allowed: fewer or shorter strings",
    OutputKind.JSON_SCHEMA: "change or drop that part of the schema",
    OutputKind.JSON_OBJECT: "give a JSON schema",
}


class MatcherSource:
    """Makes matchers that share one automaton until it is full. Safe to share between threads."""

    def __init__(self, grammar: str, vocabulary: LibraryVocabulary, parameter: str) -> None:
        self.vocabulary = vocabulary
        self.parameter = parameter  # for error messages
        self._grammar = grammar
        self._lock = threading.Lock()
        self._first: LLMatcher | None = vocabulary.matcher(grammar)

    @property
    def first(self) -> LLMatcher:
        """The matcher at the start of the text from which others are copied; it never moves."""
        with self._lock:
            if self._first is None:
                self._first = self.vocabulary.matcher(self._grammar)
            return self._first

    def replace(self, worn: LLMatcher) -> None:
        """Start a new automaton, unless `worn` was replaced already."""
        with self._lock:
            if worn is self._first:
                self._first = None


class Cursor:
    """A position in a grammar: the committed text and a path of tokens below it."""

    def __init__(self, source: MatcherSource) -> None:
        self._source = source
        self._first = source.first
        self._matcher = self._first.deep_copy()
        self._base = 0  # number of committed tokens that the matcher has consumed
        self._path: list[int] = []  # tokens consumed after them
        self.committed: list[int] = []

    def query(self, path: Sequence[int], question: Callable[[LLMatcher], _Answer]) -> _Answer | None:
        """Evaluate `question` on the matcher after the committed text and `path`.

        Returns None if `path` is not allowed or is a dead end. `question` must not consume tokens. Raises
        RequestError if the grammar is too complex to follow there.
        """
        for is_last in (False, True):
            answer = question(self._matcher) if self._follow() and self._go_to(path) else None
            if not self._matcher.is_error():
                return answer
            error = error_of(self._matcher)
            if error.startswith(_DEAD_END):
                self._start_again()
                return None
            self._source.replace(self._first)
            self._start_again()
            if is_last:
                raise RequestError(
                    f"{self._source.parameter} is too complex to follow ({error}); make it smaller: fewer "
                    "nested repeats, tighter bounds"
                )
        raise AssertionError("the second attempt returns or raises")

    def commit(self, tokens: Sequence[int]) -> None:
        """Append to the committed text; the tokens must be allowed.

        The matcher advances at the next query: a grammar that fails on the way then fails that query, never
        the commit, which a whole batch shares.
        """
        self.committed += tokens

    def _follow(self) -> bool:
        """Advance the matcher over tokens committed since the last query; False if it failed."""
        ahead = self.committed[self._base :]
        if self._path[: len(ahead)] != ahead and not self._go_to(ahead):
            self._matcher.compute_bitmask()  # a full automaton reports its error only with a mask
            assert self._matcher.is_error(), f"tokens {ahead} are not allowed by {self._source.parameter}"
            return False
        del self._path[: len(ahead)]
        self._base += len(ahead)
        return True

    def _go_to(self, path: Sequence[int]) -> bool:
        """Move the matcher to `path`; False if it is not allowed or the matcher failed."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        rest = list(path[shared:])
        if not all(map(self._source.vocabulary.is_text, rest)):
            return False
        consumed = self._matcher.try_consume_tokens(rest) if rest else 0
        self._path += rest[:consumed]
        return consumed == len(rest) and not self._matcher.is_error()

    def _start_again(self) -> None:
        self._first = self._source.first
        self._matcher = self._first.deep_copy()
        self._path.clear()
        if self._base:
            self._matcher.consume_tokens(self.committed[: self._base])


class GrammarCompiler:
    """Compiles requests' forms for one model's vocabulary.

    Thread-safe. `vocab_size` is the number of the target's logits; ids beyond the tokenizer's are never
    allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocabulary = LibraryVocabulary(tokenizer, vocab_size)
        self._entries: OrderedDict[StructuredOutput, _Entry] = OrderedDict()
        self._lock = threading.Lock()  # guards both dictionaries; compiling holds only the form's own lock
        self.unenforced: Counter[str] = Counter()  # requests by keyword that their schema is enforced without

    def compile(self, spec: StructuredOutput) -> Grammar:
        """The grammar of a form; the last 32 are cached, and concurrent requests for one share the work.

        Raises RequestError, naming the parameter, if the form is malformed, unsupported, cannot be started,
        or is too large, and if the model has no end-of-text token. A form that can be started but never
        completed is accepted: its texts continue until they are cut.
        """
        if spec.preamble:
            self.compile(replace(spec, preamble=""))  # without the preamble, so that errors name the form
        if not self._vocabulary.end_ids:
            raise RequestError(
                f"{spec.parameter} needs a model with an end-of-text token, which marks the form as "
                "complete; this model has none: leave the parameter out"
            )
        with self._lock:
            entry = self._entries.setdefault(spec, _Entry())
            self._entries.move_to_end(spec)
            if len(self._entries) > CACHED_GRAMMARS:
                self._entries.popitem(last=False)
        with entry.lock:
            if entry.grammar is None:
                entry.grammar = Grammar(spec, self._vocabulary)
            grammar = entry.grammar
        with self._lock:
            self.unenforced.update(grammar.unenforced)
        return grammar


class _Entry:
    """A cache entry; its lock is held while the grammar is compiled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.grammar: Grammar | None = None


class Grammar:
    """A compiled form; creates a `GrammarState` for each request. Thread-safe.

    `unenforced` names the keywords that a schema in it is enforced without.
    """

    def __init__(self, spec: StructuredOutput, vocabulary: LibraryVocabulary) -> None:
        self.spec = spec
        self.vocabulary = vocabulary
        # the form without the preamble is known to be good
        self._parameter = "preamble" if spec.preamble else spec.parameter
        lark = lark_of(spec)
        self.exact = MatcherSource(f"{lark}\n{_NO_FORCING}", vocabulary, spec.parameter)
        if self.exact.first.is_error():
            error = error_of(self.exact.first)
            if spec.kind is not OutputKind.GRAMMAR or spec.preamble:
                error = without_positions(error)
            hint = "allowed: Lark rules with a rule preamble" if spec.preamble else _HINTS[spec.kind]
            hint += ", or leave out strict" if spec.strict else ""
            raise RequestError(f"{self._parameter} cannot be used: {error}; {hint}", self._parameter)
        self.unenforced = unenforced_keywords(lark, self.exact.first.get_grammar_warnings())
        if self.unenforced:
            _LOG.warning("%s is enforced without %s", spec.parameter, ", ".join(self.unenforced))
        self.guide = MatcherSource(lark, vocabulary, spec.parameter)
        self._check_start()

    def state(self) -> GrammarState:
        """The state of a new request, at the start of its text."""
        return GrammarState(self)

    def _check_start(self) -> None:
        """Follow the grammar for a few tokens: most explosions and contradictions show at once."""
        for trial in range(TRIALS):
            state, choices = GrammarState(self), np.random.default_rng(trial)
            text: list[int] = []
            for _ in range(TRIAL_TOKENS):
                allowed = np.flatnonzero(state.allowed(()))
                if not allowed.size:
                    tail = self.vocabulary.tokenizer.decode(text)
                    raise RequestError(
                        f"{self._parameter} cannot be met: nothing can follow {shortened(repr(tail))}; "
                        "remove the contradiction",
                        self._parameter,
                    )
                token = int(choices.choice(allowed))
                if token in self.vocabulary.end_ids:
                    break
                state.commit([token])
                text.append(token)


class GrammarState:
    """A request's position in its grammar: the committed text, and queries ahead of it. Not thread-safe.

    A path is a sequence of token ids after the committed text. Only `commit` moves the position. An
    end-of-text token is allowed where the text may end, and nothing is allowed after it. Nothing is allowed
    after a path that is itself not allowed, or where the vocabulary lacks bytes for the required text. Every
    method raises RequestError if the grammar is too complex to follow at that place.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._cursor = Cursor(grammar.exact)
        self._guide: Cursor | None = None  # created at the first call of `forced`
        self._forced: list[int] = []  # cached forced tokens after the committed text
        self._ended = False
        self._masks: dict[tuple[int, ...], NDArray[np.uint8]] = {}  # by path, one bit per token

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """The tokens allowed after the committed text and `path`: a new array [vocab_size]."""
        bits = self._bits(tuple(path))
        if bits is None:
            return np.zeros(self._vocabulary.size, dtype=np.bool_)
        return np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(np.bool_)

    def permits(self, path: Sequence[int], token: int) -> bool:
        """True if `token` is allowed after the committed text and `path`; computes no mask."""
        bits = self._masks.get(tuple(path))
        if bits is not None:
            return 0 <= token < self._vocabulary.size and bool(bits[token >> 3] >> (token & 7) & 1)
        if self._ended:
            return False
        if token in self._vocabulary.end_ids:
            return self._cursor.query(path, lambda matcher: matcher.is_accepting()) is True
        return self._cursor.query([*path, token], lambda matcher: True) is True

    def forced(self, path: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that the grammar forces after `path`, in the tokenizer's spelling.

        Empty if there is a choice, or if the forced text may continue inside a longer token. The result is a
        guess: other tokens may spell the same text.
        """
        if limit <= 0 or self._ended:
            return ()
        found = self._found_forced(path, limit)[:limit]
        while found and self._cursor.query([*path, *found], lambda matcher: True) is None:
            del found[-1]
        return tuple(found)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; each must be allowed after the ones before it."""
        assert not (self._ended and tokens), "nothing follows the end of the text"
        ends = bool(tokens) and tokens[-1] in self._vocabulary.end_ids
        text = list(tokens[:-1] if ends else tokens)
        assert self._vocabulary.end_ids.isdisjoint(text), "nothing follows the end of the text"
        self._cursor.commit(text)
        if self._guide is not None:
            self._guide.commit(text)
        self._forced = self._forced[len(text) :] if self._forced[: len(text)] == text else []
        if ends:
            may_end = self._cursor.query((), lambda matcher: matcher.is_accepting())
            assert may_end, f"the text may not end here, yet token {tokens[-1]} ended it"
            self._ended = True
        done = tuple(tokens)
        kept = {path[len(done) :]: mask for path, mask in self._masks.items() if path[: len(done)] == done}
        self._masks = {} if ends else kept

    def _found_forced(self, path: Sequence[int], limit: int) -> list[int]:
        """All tokens forced after `path`; at least `limit` if there are as many."""
        if not path and len(self._forced) >= max(limit, LONG_FORCED):
            return self._forced
        if self._guide is None:
            self._guide = Cursor(self._grammar.guide)
            self._guide.commit(self._cursor.committed)
        found = self._guide.query(path, _forced_tokens) or []
        if not path:
            self._forced = found
        return found

    @property
    def finished(self) -> bool:
        """True if the text is complete: only its end may follow, or the end was committed."""
        return self._ended or self._cursor.query((), lambda m: m.is_stopped() and m.is_accepting()) is True

    def _bits(self, path: tuple[int, ...]) -> NDArray[np.uint8] | None:
        """The mask after `path` as bits; None if nothing is allowed.

        None is not cached: it may come from a full automaton, and a new one may give another result.
        """
        bits = self._masks.get(path)
        if bits is None and not self._ended:
            bits = self._cursor.query(path, self._mask)
            if bits is not None:
                if len(self._masks) >= CACHED_MASKS:
                    del self._masks[next(iter(self._masks))]
                self._masks[path] = bits
        return bits

    def _mask(self, matcher: LLMatcher) -> NDArray[np.uint8]:
        vocabulary, may_end = self._vocabulary, matcher.is_accepting()
        bits = np.zeros_like(vocabulary.text_bits)
        if not matcher.is_stopped():
            found = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8, count=bits.size)
            np.bitwise_and(found, vocabulary.text_bits, out=bits)
        return bits | vocabulary.end_bits if may_end else bits


def _forced_tokens(matcher: LLMatcher) -> list[int]:
    return [] if matcher.is_stopped() else matcher.compute_ff_tokens()
