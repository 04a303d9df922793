"""Transcript: a request's output, with its text, stop conditions, counters and times.

StopSearch finds stop strings in the text and in the names of its special tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specinfer.errors import RequestError
from specinfer.request import (
    Answer,
    Delta,
    FinishReason,
    Logprobs,
    PrefixMiss,
    Request,
    RequestOutput,
    SpeculationFigures,
    Timing,
)
from specinfer.tokenizer import Detokenizer, Tokenizer
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import proposed_by
from specinfer.verify.coupled import Acceptance
from specinfer.verify.logprobs import PromptLogprobs


class Transcript:
    """Owns a request's tokens, decodes them, and decides when the request ends.

    The cost of a step depends on its tokens and not on the length of the text.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        ending: frozenset[int],
        max_context: int,
        now: float,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self.request = request
        self._ending = ending  # end-of-text (unless ignored) and stop token ids
        self._max_context = max_context
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, request.params.visible_token_ids)
        stop, visible = request.params.stop, request.params.visible_token_ids
        self._stops = StopSearch(stop, tokenizer, visible) if stop else None
        self.ids = list(request.prompt_token_ids)  # prompt and output; only appended to
        self._pieces: list[str] = []  # text of the returned deltas
        self._sent_chars = 0  # characters in these
        self._sent_tokens = 0  # output tokens in returned deltas
        self._rest = ""  # text after the pieces; its end may start a stop string
        self._steps: list[tuple[int, int]] = []  # drafted and accepted tokens of steps without a delta yet
        self.finish_reason: FinishReason | None = None
        self._stopped_by: str | None = None
        self.error: str | None = None
        self._internal_error = False
        self.figures = SpeculationFigures()
        self.logprobs: list[Logprobs] = []  # one per output token, if requested
        self._tokenizer = tokenizer
        self.cached_tokens = 0  # prompt tokens found in the cache
        self.miss: PrefixMiss | None = None  # why not the rest, with tokens
        self.prompt_logprobs = prompt_logprobs  # if requested; n completions share them
        self._sent_prompt = False  # True once a delta had them
        self._arrived = now
        self._first_token: float | None = None
        self._finished: float | None = None

    @property
    def finished(self) -> bool:
        """True if the request has ended."""
        return self.finish_reason is not None

    @property
    def num_output(self) -> int:
        """Number of output tokens."""
        return len(self.ids) - len(self.request.prompt_token_ids)

    def resume(self, prior_output: Sequence[int]) -> None:
        """Start after output tokens that the caller has already received.

        They are in no delta and in no counter. Raises RequestError if the text would have ended among them.
        """
        for token in prior_output:
            if self.finish_reason is not None:
                break
            self._push(token)
        if self.finish_reason is not None:
            raise RequestError(
                f"prior_output has {len(prior_output)} tokens, and the text ends after {self.num_output}; "
                "give only tokens of a text that goes on"
            )
        self.logprobs = [{}] * len(prior_output)
        self._take_text()
        self._sent_prompt = True

    def commit(self, tree: TokenTree, acceptance: Acceptance, now: float) -> tuple[int, ...]:
        """Add a step's tokens; returns those up to the text's end."""
        tokens = acceptance.tokens(tree)
        kept = 0
        for token in tokens:
            kept += 1
            self._push(token)
            if self.finish_reason is not None:
                break
        if self._first_token is None:
            self._first_token = now
        else:
            self._count(tree, acceptance, kept)
        if self.finish_reason is not None:
            self._finished = now
        return tokens[:kept]

    def end_with_prompt(self, now: float) -> None:
        """End a request with max_tokens 0 after its prompt is computed."""
        self._end(FinishReason.LENGTH, flush=False)
        self._finished = now

    def fail(self, error: str, now: float, *, internal: bool) -> None:
        """End the request with an error.

        `internal` is True if the engine or the model failed, False if the parameters exclude every token.
        """
        self.error, self._internal_error = error, internal
        self._end(FinishReason.ERROR, flush=True)
        self._finished = now

    def abort(self, now: float) -> None:
        """End the request with finish reason "abort"."""
        self._end(FinishReason.ABORT, flush=True)
        self._finished = now

    def delta(self) -> Delta:
        """Return the new output since the last call."""
        first, reports = self._sent_tokens, None
        if not self._sent_prompt:  # the whole prompt is computed before the first token
            reports, self._sent_prompt = self.prompt_logprobs, True
        text = self._take_text()
        steps, self._steps = tuple(self._steps), []
        miss = None if self.finish_reason is None else self.miss
        return Delta(
            self.request.request_id,
            text,
            tuple(self.ids[len(self.request.prompt_token_ids) + first :]),
            () if self.request.params.logprobs is None else tuple(self.logprobs[first : self._sent_tokens]),
            (),
            steps,
            self.finish_reason,
            self._stopped_by,
            self.error,
            internal_error=self._internal_error,
            figures=self.figures if self.finish_reason is not None else None,
            prompt_logprobs=reports,
            cached_tokens=self.cached_tokens,
            miss=miss and miss.read(self._tokenizer.text_of),
        )

    def output(self, new_text: str = "") -> RequestOutput:
        """Return the output up to the last delta, whose text is `new_text`; no step may run meanwhile."""
        scored = self.request.params.logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            answer=Answer(
                *(self._pieces, self.ids, len(self.request.prompt_token_ids)),
                logprobs=self.logprobs if scored else None,
            ),
            finish_reason=self.finish_reason,
            seed=self.request.seed,
            figures=self.figures.copy(),
            timing=Timing(self._arrived, self._first_token, self._finished),
            new_text=new_text,
            index=self.request.index,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            miss=self.miss and self.miss.read(self._tokenizer.text_of),
            error=self.error,
            internal_error=self._internal_error,
            stopped_by=self._stopped_by,
        )

    def _take_text(self) -> str:
        """Mark all tokens as returned; returns the new text that no stop string can still remove."""
        held = 0 if self._stops is None or self.finish_reason is not None else self._stops.held
        text, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
        if text:
            self._pieces.append(text)
            self._sent_chars += len(text)
        self._sent_tokens = self.num_output
        return text

    def _push(self, token: int) -> None:
        self.ids.append(token)
        count, params = self.num_output, self.request.params
        may_stop = count >= params.min_tokens
        if may_stop and token in self._ending:
            self._grow(self._detokenizer.flush(), token, may_stop=True, omitted=True)
            self.finish_reason = FinishReason.STOP
        elif self._grow(self._detokenizer.push((token,)), token, may_stop=may_stop):
            self.finish_reason = FinishReason.STOP
        elif count >= params.max_tokens or len(self.ids) >= self._max_context:
            self._end(FinishReason.LENGTH, flush=True)

    def _end(self, reason: FinishReason, *, flush: bool) -> None:
        if flush:
            self._grow(self._detokenizer.flush(), may_stop=True)
        self.finish_reason = reason

    def _grow(self, text: str, token: int | None = None, *, may_stop: bool, omitted: bool = False) -> bool:
        """Add the text that ends with `token`; returns whether a stop string ends there, and cuts the text.

        A stop string that ends before min_tokens stays in the text.
        """
        self._rest += text
        if self._stops is None:
            return False
        found = self._stops.feed(text, token, omitted=omitted)
        if found is None or not may_stop:
            return False
        self._stopped_by = found.string
        self._rest = self._rest[: found.start - self._sent_chars]
        if self.request.params.include_stop_str_in_output:
            self._rest += found.string
        return True

    def _count(self, tree: TokenTree, acceptance: Acceptance, kept: int) -> None:
        figures = self.figures
        accepted = acceptance.path[:kept]
        figures.steps += 1
        figures.output_tokens += kept
        figures.drafted_tokens += tree.num_nodes - 1
        figures.accepted_tokens += len(accepted)
        self._steps.append((tree.num_nodes - 1, len(accepted)))
        if tree.num_nodes == 1:
            return
        depths = max(tree.depths())
        _count_up(figures.drafted_per_depth, depths)
        _count_up(figures.accepted_per_depth, len(accepted))
        names = proposed_by(tree)
        _count_each(figures.proposed_by, (name for node in names for name in node))
        _count_each(figures.accepted_by, (name for node in accepted for name in names[node]))


def _count_up(per_depth: list[int], depth: int) -> None:
    per_depth.extend([0] * (depth - len(per_depth)))
    for i in range(depth):
        per_depth[i] += 1


def _count_each(counts: dict[str, int], names: Iterable[str]) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1


@dataclass(frozen=True, slots=True, order=True)
class Stop:
    """A stop string that ended in the new text: its place in characters of the text, and the string."""

    start: int
    end: int  # the start plus the part of the string that the text has
    string: str


class StopSearch:
    """Finds stop strings in a text that omits special tokens.

    A stop string may contain names of special tokens ("<|im_end|>"). Such strings are also searched in the
    text with the names of omitted tokens, and an omitted token takes no characters of the text.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer, visible: Iterable[int] = ()) -> None:
        """`visible` are the special tokens that the text shows."""
        self._tokenizer = tokenizer
        self._visible = frozenset(visible)
        with_names = [one for one in strings if any(name in one for name in tokenizer.special_names)]
        self._plain = StopStrings(strings)
        self._named = StopStrings(with_names) if with_names else None
        self._longest = max(map(len, with_names), default=0)
        # Place and length of the latest omitted names in the named text, and the length of all before them.
        self._omitted: deque[tuple[int, int]] = deque()
        self._earlier = 0

    @property
    def held(self) -> int:
        """Number of characters at the text's end that may start a string."""
        if self._named is None:
            return self._plain.held
        read = self._named.read
        return max(self._plain.held, self._shown(read) - self._shown(read - self._named.held))

    def feed(self, text: str, token: int | None = None, *, omitted: bool = False) -> Stop | None:
        """Read new text and then, if it is a special one that the text does not show, the token behind it.

        `omitted` is true for a token that the text omits in any case. Returns the string that ends there: the
        one with the earliest start, and among these the shortest.
        """
        found = []
        if (place := self._plain.feed(text)) is not None:
            found.append(Stop(*place, self._plain.last))
        if self._named is not None:
            name = ""
            if token is not None and self._tokenizer.is_special(token):
                name = self._tokenizer.text_of(token) if omitted or token not in self._visible else ""
            if name:
                self._omitted.append((self._named.read + len(text), len(name)))
            while self._omitted and sum(self._omitted[0]) < self._named.read - self._longest:
                self._earlier += self._omitted.popleft()[1]
            if (place := self._named.feed(text + name)) is not None:
                start, end = map(self._shown, place)
                found.append(Stop(start, end, self._named.last))
        return min(found, default=None)

    def _shown(self, place: int) -> int:
        """Return how many characters before a place of the named text are in the text."""
        omitted = sum(min(length, max(place - start, 0)) for start, length in self._omitted)
        return place - omitted - self._earlier


class StopStrings:
    """Incremental search for several strings in a text, character by character (Knuth, Morris and Pratt).

    For each partly matched string it keeps the number of its characters that the text ends with. A character
    costs a look-up of the strings that start with it, and one of the partly matched strings, for any length
    of the text and of the strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = list(dict.fromkeys(strings))
        self._borders = [_borders(one) for one in self._strings]
        self._by_first: dict[str, list[int]] = {}  # a character -> the numbers of strings that start with it
        for number, one in enumerate(self._strings):
            self._by_first.setdefault(one[0], []).append(number)
        self._matched: dict[int, int] = {}  # a string's number -> number of its characters at the text's end
        self.read = 0  # characters of the text so far
        self.last = ""  # the string that was found last

    @property
    def held(self) -> int:
        """Number of characters at the text's end that may start a string."""
        return max(self._matched.values(), default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Read new text; returns the start and end of the first string that ends in it, or None.

        The first string is the one with the earliest start, and among these the shortest.
        """
        found: tuple[int, int] | None = None
        if not self._strings:
            return None
        for char in text:
            self.read += 1
            for number in self._ended_by(char):
                place = (self.read - len(self._strings[number]), self.read)
                if found is None or place < found:
                    found, self.last = place, self._strings[number]
        return found

    def _ended_by(self, char: str) -> list[int]:
        """Read a character; returns the numbers of the strings that end with it."""
        ended: list[int] = []
        matches: dict[int, int] = {}
        for number, matched in self._matched.items():
            one, borders = self._strings[number], self._borders[number]
            while matched and one[matched] != char:
                matched = borders[matched - 1]
            if one[matched] != char:
                continue
            matched += 1
            if matched == len(one):
                ended.append(number)
                matched = borders[-1]
            if matched:
                matches[number] = matched
        for number in self._by_first.get(char, ()):
            if number in self._matched:
                continue
            if len(self._strings[number]) == 1:
                ended.append(number)
            else:
                matches[number] = 1
        self._matched = matches
        return ended


def _borders(text: str) -> list[int]:
    """Return the length of the longest border (proper prefix that is also a suffix) of each prefix."""
    borders = [0] * len(text)
    matched = 0
    for place in range(1, len(text)):
        while matched and text[place] != text[matched]:
            matched = borders[matched - 1]
        matched += text[place] == text[matched]
        borders[place] = matched
    return borders
