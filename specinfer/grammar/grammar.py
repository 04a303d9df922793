"""Grammar: which tokens may follow a text, at every node of a token tree.

A request's cursor stands at the end of a path below the committed text. To look at another node it rolls
back to where the two paths part and consumes the rest, microseconds a token, so that a walk down a tree, or
siblings asked one after the other, cost little more than their masks; these are kept until the next commit.

Matchers of one grammar share the automaton they build as they go. It has a limited size, and one that is
full stays so for all of them: a request that fills it must not fail the others, nor may a grammar wear out
with use. So a matcher that breaks is replaced by one with a new automaton, and asked once more.

A mask holds every token whose bytes the grammar permits, so the target is free to spell a forced text as it
likes; `forced` guesses the canonical spelling. (The library would rather mask all other spellings away: its
option no_forcing stops that, and a second matcher without the option makes the guesses.)

The library is llguidance; why, and what was measured, is in docs/log.md. It is imported when the first
grammar is compiled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from specinfer.errors import RequestError
from specinfer.grammar.lark import lark_of
from specinfer.grammar.library_vocabulary import LibraryVocabulary, complaint, shortened, without_places
from specinfer.structured_output import OutputKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from specinfer.tokenizer import Tokenizer

_DEAD_END = "NoExtension"  # how the library's complaint begins when nothing can follow
_Answer = TypeVar("_Answer")
CACHED_GRAMMARS = 32
CACHED_MASKS = 256  # of one request, within one step; 19 kB each at a vocabulary of 152k
LONG_FORCED = 256  # tokens; longer forced text is kept: to find it takes time in proportion to its length
TRIAL_TOKENS = 32  # how far a new grammar is tried, each of TRIALS times
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
    """Makes matchers that share one automaton, until that is worn. Safe to share by threads."""

    def __init__(self, grammar: str, vocabulary: LibraryVocabulary, parameter: str) -> None:
        self.vocabulary = vocabulary
        self.parameter = parameter  # for messages
        self._grammar = grammar
        self._lock = threading.Lock()
        self._first: LLMatcher | None = vocabulary.matcher(grammar)

    @property
    def first(self) -> LLMatcher:
        """The matcher the others are copied from, at the start of the text; it is never moved itself."""
        with self._lock:
            if self._first is None:
                self._first = self.vocabulary.matcher(self._grammar)
            return self._first

    def replace(self, worn: LLMatcher) -> None:
        """Begin a new automaton, unless `worn` is not the present one any more."""
        with self._lock:
            if worn is self._first:
                self._first = None


class Cursor:
    """A place in a grammar: the committed text, and any path of tokens below it."""

    def __init__(self, source: MatcherSource) -> None:
        self._source = source
        self._first = source.first
        self._matcher = self._first.deep_copy()
        self._base = 0  # of the committed tokens the matcher has followed so many,
        self._path: list[int] = []  # and consumed these after them
        self.committed: list[int] = []

    def ask(self, path: Sequence[int], question: Callable[[LLMatcher], _Answer]) -> _Answer | None:
        """What `question` makes of the matcher after the committed text and `path`.

        None when `path` is not allowed, or turns out to be a dead end. `question` may compute, but not
        consume. Raises RequestError when the grammar is too complex to follow there.
        """
        for is_last in (False, True):
            answer = question(self._matcher) if self._follow() and self._go_to(path) else None
            if not self._matcher.is_error():
                return answer
            said = complaint(self._matcher)
            if said.startswith(_DEAD_END):
                self._start_again()
                return None
            self._source.replace(self._first)
            self._start_again()
            if is_last:
                raise RequestError(
                    f"{self._source.parameter} is too complex to follow ({said}); make it smaller: fewer "
                    "nested repeats, tighter bounds"
                )
        raise AssertionError("the second time ends the loop")

    def commit(self, tokens: Sequence[int]) -> None:
        """Move the committed text on; the tokens must be allowed.

        The matcher follows when it is next asked: a grammar that breaks on the way fails whoever asks, never
        the commit, which a whole batch shares.
        """
        self.committed += tokens

    def _follow(self) -> bool:
        """Put the matcher behind what was committed since it was last asked; False when it broke there."""
        ahead = self.committed[self._base :]
        if self._path[: len(ahead)] != ahead and not self._go_to(ahead):
            self._matcher.compute_bitmask()  # one whose automaton is full says so only when it makes a mask
            assert self._matcher.is_error(), f"tokens {ahead} are not allowed by {self._source.parameter}"
            return False
        del self._path[: len(ahead)]
        self._base += len(ahead)
        return True

    def _go_to(self, path: Sequence[int]) -> bool:
        """Put the matcher after `path`; False when it is not allowed, or the matcher broke on the way."""
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
    """Compiles the forms that requests ask for, against one model's vocabulary.

    Any thread may compile while others do, or follow what was compiled. `vocab_size` is the number of the
    target's logits; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocabulary = LibraryVocabulary(tokenizer, vocab_size)
        self._places: OrderedDict[StructuredOutput, _Place] = OrderedDict()
        self._lock = threading.Lock()  # of the dictionary; a form being compiled holds its own place alone

    def compile(self, spec: StructuredOutput) -> Grammar:
        """The grammar of a form; the last 32 are kept, and threads that ask for one at once share it.

        Raises RequestError, naming the parameter, on a form that is malformed, uses what is not supported,
        cannot be begun, or is too large to follow, and when the model has no token that ends a text. A form
        that can be begun but never be complete is compiled: its texts go on until they are cut.
        """
        if spec.preamble:
            self.compile(replace(spec, preamble=""))  # tried at its beginning, and blamed for its own faults
        if not self._vocabulary.end_ids:
            raise RequestError(
                f"{spec.parameter} needs a model with an end-of-text token, which says that the form is "
                "complete; this one names none: leave it out"
            )
        with self._lock:
            place = self._places.setdefault(spec, _Place())
            self._places.move_to_end(spec)
            if len(self._places) > CACHED_GRAMMARS:
                self._places.popitem(last=False)
        with place.lock:
            if place.grammar is None:
                try:
                    place.grammar = Grammar(spec, self._vocabulary)
                except RecursionError:
                    raise RequestError(
                        f"{spec.parameter} has parts too deep inside one another; make it flatter"
                    ) from None
            return place.grammar


class _Place:
    """Where the grammar of one form is kept, and made by one thread at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.grammar: Grammar | None = None


class Grammar:
    """One compiled form; gives each request its own `GrammarState`. Safe to share by threads."""

    def __init__(self, spec: StructuredOutput, vocabulary: LibraryVocabulary) -> None:
        self.spec = spec
        self.vocabulary = vocabulary
        self._blamed = "preamble" if spec.preamble else spec.parameter  # its form is compiled already
        lark = lark_of(spec)
        self.exact = MatcherSource(f"{lark}\n{_NO_FORCING}", vocabulary, spec.parameter)
        if self.exact.first.is_error():
            said = complaint(self.exact.first)
            if spec.kind is not OutputKind.GRAMMAR or spec.preamble:
                said = without_places(said)
            hint = "allowed: Lark rules with a rule preamble" if spec.preamble else _HINTS[spec.kind]
            raise RequestError(f"{self._blamed} cannot be used: {said}; {hint}", self._blamed)
        self.guide = MatcherSource(lark, vocabulary, spec.parameter)
        self._try_out()

    def state(self) -> GrammarState:
        """The position of a new request: at the start of its text."""
        return GrammarState(self)

    def _try_out(self) -> None:
        """Follow the grammar a little way: what explodes or cannot be met mostly shows at once."""
        for trial in range(TRIALS):
            state, choices = GrammarState(self), np.random.default_rng(trial)
            text: list[int] = []
            for _ in range(TRIAL_TOKENS):
                allowed = np.flatnonzero(state.allowed(()))
                if not allowed.size:
                    tail = self.vocabulary.tokenizer.decode(text)
                    raise RequestError(
                        f"{self._blamed} cannot be met: nothing can follow {shortened(repr(tail))}; "
                        "take out what contradicts itself",
                        self._blamed,
                    )
                token = int(choices.choice(allowed))
                if token in self.vocabulary.end_ids:
                    break
                state.commit([token])
                text.append(token)


class GrammarState:
    """One request's position in its grammar: the committed text, and looks ahead of it. For one thread.

    A path is a sequence of token ids that would follow the committed text. Nothing but `commit` moves the
    position. An end-of-text token is allowed where the text may end, and nothing is after it. When a path
    is itself not allowed, or a vocabulary that lacks bytes cannot write what must come, nothing is.
    Every method raises RequestError when the grammar turns out too complex to follow at that place.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._cursor = Cursor(grammar.exact)
        self._guide: Cursor | None = None  # made when forced text is first asked for
        self._forced: list[int] = []  # what it said of the committed text
        self._ended = False
        self._masks: dict[tuple[int, ...], NDArray[np.uint8]] = {}  # by path, a bit a token

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Which tokens may follow the committed text and then `path`: [vocab_size], the caller's own."""
        bits = self._bits(tuple(path))
        if bits is None:
            return np.zeros(self._vocabulary.size, dtype=np.bool_)
        return np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(np.bool_)

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Whether `token` may follow the committed text and then `path`, without making a mask of it."""
        bits = self._masks.get(tuple(path))
        if bits is not None:
            return 0 <= token < self._vocabulary.size and bool(bits[token >> 3] >> (token & 7) & 1)
        if self._ended:
            return False
        if token in self._vocabulary.end_ids:
            return self._cursor.ask(path, lambda matcher: matcher.is_accepting()) is True
        return self._cursor.ask([*path, token], lambda matcher: True) is True

    def forced(self, path: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that the grammar forces after `path`, as the tokenizer writes that text.

        Empty when there is a choice, or when the forced text may go on inside a longer token. A good
        guess and no more: other tokens may spell the same text.
        """
        if limit <= 0 or self._ended:
            return ()
        found = self._found_forced(path, limit)[:limit]
        while found and self._cursor.ask([*path, *found], lambda matcher: True) is None:
            del found[-1]
        return tuple(found)

    def commit(self, tokens: Sequence[int]) -> None:
        """The tokens became text; each was allowed after the ones before it."""
        assert not (self._ended and tokens), "nothing follows the end of the text"
        text = [token for token in tokens if token not in self._vocabulary.end_ids]
        ends = len(text) < len(tokens)
        assert list(tokens[: len(text)]) == text, "nothing follows the end of the text"
        assert len(tokens) - len(text) <= 1, "nothing follows the end of the text"
        self._cursor.commit(text)
        if self._guide is not None:
            self._guide.commit(text)
        self._forced = self._forced[len(text) :] if self._forced[: len(text)] == text else []
        if ends:
            may_end = self._cursor.ask((), lambda matcher: matcher.is_accepting())
            assert may_end, f"the text may not end here, yet token {tokens[-1]} ended it"
            self._ended = True
        done = tuple(tokens)
        kept = {path[len(done) :]: mask for path, mask in self._masks.items() if path[: len(done)] == done}
        self._masks = {} if ends else kept

    def _found_forced(self, path: Sequence[int], limit: int) -> list[int]:
        """All that is forced after `path`, `limit` tokens at least where there are as many."""
        if not path and len(self._forced) >= max(limit, LONG_FORCED):
            return self._forced
        if self._guide is None:
            self._guide = Cursor(self._grammar.guide)
            self._guide.commit(self._cursor.committed)
        found = self._guide.ask(path, _forced_tokens) or []
        if not path:
            self._forced = found
        return found

    @property
    def finished(self) -> bool:
        """Whether the text is complete: nothing may follow but its end, or the end is there."""
        return self._ended or self._cursor.ask((), lambda m: m.is_stopped() and m.is_accepting()) is True

    def _bits(self, path: tuple[int, ...]) -> NDArray[np.uint8] | None:
        """The mask after `path`, as bits; None where nothing is allowed.

        None is not kept: a full automaton may have said so, and a new one may know better.
        """
        bits = self._masks.get(path)
        if bits is None and not self._ended:
            bits = self._cursor.ask(path, self._mask)
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
