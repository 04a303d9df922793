"""PredictionSpeculator: guesses from the caller's predicted output, which is aligned with the output.

An edited file is the old one with parts replaced, inserted or deleted. While the output follows the
prediction, there is one continuation. After a difference it may return at several places: where its last
tokens occur again (a deletion), where it differed (an insertion), or as many tokens later as it has written
since (a replacement). All of them are guessed until the output has followed one of them far enough.

    prediction   a b c d x e f g h         answer so far   a b c d z e
                         |   |                                     | |
                    anchor   at              `since` = 2 tokens after the anchor, of which `run` = 1 agrees
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.lookups.lookup import match_confidence
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.tree import TokenTree, TreeBuilder
from specinfer.tree.token_tree import single_node

CERTAIN_RUN = 4  # consecutive agreeing tokens that make a place certain
MAX_TAIL = 16  # tokens; longer matches do not improve a place
MAX_REPLACEMENT = 8  # tokens; longer replacements are not expected to recur
MAX_NEAR = 16  # candidate places on either side of the anchor
SIDE_DEPTH = 4  # tokens of every guess but the first: enough to become certain, and cheap if wrong
BRANCHES = 4  # continuations guessed after a difference
UNCERTAIN_LIMIT = 32  # tokens since the last certain place after which guesses are few and short
_MAX_REPLACED: Final = 64  # recorded replacements, as each guess searches all of them
_LENGTHS: Final = (3, 1)  # lengths of the n-grams that locate a place, longest first
_BITS: Final = 21  # bits of a token id, so that three fit into one integer
# Limit of the prediction's length beyond the output's: longer deletions are rare, and a request with a short
# output could otherwise send megabytes.
MAX_DELETED: Final = 1024  # tokens
_CHARACTERS: Final = 16  # maximum characters per token that are tokenized


class PredictionIndex:
    """Index of the n-grams of token ids: the positions after each n-gram, ascending."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Index token ids, each below 2**21."""
        ids = np.array(token_ids, dtype=np.int64)
        self._found: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for n in _LENGTHS:
            keys = np.zeros(max(len(ids) - n + 1, 0), dtype=np.int64)
            for i in range(n):
                keys = (keys << _BITS) | ids[i : i + len(keys)]
            order = np.argsort(keys, kind="stable")
            self._found[n] = keys[order], order + n

    def near(self, ngram: Sequence[int], place: int, count: int) -> list[int]:
        """Return positions after an n-gram, ascending: at most `count` before `place` and `count` after."""
        keys, stops = self._found[len(ngram)]
        key = 0
        for token in ngram:
            key = (key << _BITS) | token
        first, end = np.searchsorted(keys, key, "left"), np.searchsorted(keys, key, "right")
        middle = first + int(np.searchsorted(stops[first:end], place))
        near: list[int] = stops[max(first, middle - count) : min(end, middle + count)].tolist()
        return near


class IndexedPrediction(tuple[int, ...]):
    """Token ids of a prediction with their index, made before a step needs it; equal to the plain tuple."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Index token ids, each below 2**21."""
        self.ngrams = PredictionIndex(token_ids)


def relevant_tokens(
    prediction: str | Sequence[int], room: int, encode: Callable[[str], Sequence[int]]
) -> tuple[int, ...]:
    """Return the token ids of a prediction that can matter to an output of at most `room` tokens.

    Only the needed part of a text is encoded.
    """
    limit = max(room, 0) + MAX_DELETED
    token_ids = encode(prediction[: limit * _CHARACTERS]) if isinstance(prediction, str) else prediction
    return tuple(token_ids[:limit])


class Alignment:
    """An output's place in its prediction: `advance` follows the output, `guesses` returns continuations.

    A short part that was replaced is expected to be replaced wherever it occurs, such as a renamed variable,
    until the output keeps it once.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        indexed = prediction if isinstance(prediction, IndexedPrediction) else IndexedPrediction(prediction)
        self._index = indexed.ngrams
        self._at = 0  # the expected place of the next token
        # Consecutive agreeing tokens before it; 0: no place is preferred. An output starts at 0.
        self.run = CERTAIN_RUN
        self._anchor = 0  # the last certain place
        self._since = 0  # tokens of the output after the anchor
        self._tail: list[int] = []  # the output's last tokens
        self._replaced: dict[tuple[int, ...], tuple[int, ...]] = {}  # part of the prediction -> of the output
        self.read = 0  # tokens of the output read

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow the output by these tokens."""
        for token in tokens:
            self._tail.append(token)
            del self._tail[:-MAX_TAIL]
            self._since += 1
            if self.run and self._at < len(self._prediction) and self._prediction[self._at] == token:
                self._at += 1
                self.run += 1
                self._drop_kept_replacements()
            else:
                self._at, self.run = next(iter(self._matches()), (self._anchor, 0))
            if self.run >= CERTAIN_RUN:
                self._record_replacement()
                self._anchor, self._since = self._at, 0
        self.read += len(tokens)

    def guesses(self, depth: int, branches: int) -> list[list[int]]:
        """Return at most `branches` continuations, likeliest first.

        The first has at most `depth` tokens. Each other one has at most SIDE_DEPTH tokens, or as many after
        those that it shares with the first. An output without a certain place for long gets one short guess.
        """
        if self.run < CERTAIN_RUN and self._since > UNCERTAIN_LIMIT:
            depth, branches = min(depth, SIDE_DEPTH), 1
        guesses: list[list[int]] = []
        for place in self._places(branches):
            limit = depth if not guesses else min(depth, SIDE_DEPTH)
            guess, shared = self._replacing(place, limit)
            plain = list(self._prediction[place : place + min(limit, shared + SIDE_DEPTH)])
            guesses.extend([guess] if plain == guess[: len(plain)] else [guess, plain])
        return guesses[:branches]

    def _places(self, count: int) -> list[int]:
        """Return the places of possible continuations with different next tokens; one if it is certain."""
        if self.run >= CERTAIN_RUN:
            return [self._at] if self._at < len(self._prediction) else []
        matches = [place for place, _ in self._matches()]
        likely = [self._at] if self.run else []
        inserted, replaced = self._anchor, self._anchor + self._since
        chosen: dict[int, int] = {}  # next token -> the best place it stands at
        for place in [*likely, *matches[:2], inserted, replaced, *matches[2:]]:
            if place < len(self._prediction) and len(chosen) < count:
                chosen.setdefault(self._prediction[place], place)
        return list(chosen.values())

    def _matches(self) -> list[tuple[int, int]]:
        """Return the places after the output's last tokens, with the number of matching tokens.

        They are sorted by the length of the match, then those at or after the anchor, then by distance.
        """
        found: dict[int, int] = {}
        for n in _LENGTHS:
            near = self._index.near(self._tail[-n:], self._anchor, MAX_NEAR) if n <= len(self._tail) else []
            for stop in near:
                if stop not in found:
                    found[stop] = self._matched(stop)
        anchor = self._anchor
        return sorted(found.items(), key=lambda place: (-place[1], place[0] < anchor, abs(place[0] - anchor)))

    def _matched(self, stop: int) -> int:
        matched, limit = 0, min(stop, len(self._tail))
        while matched < limit and self._prediction[stop - 1 - matched] == self._tail[-1 - matched]:
            matched += 1
        return matched

    def _record_replacement(self) -> None:
        """After the output has returned to the prediction, record what it replaced."""
        old, new = self._at - self.run - self._anchor, self._since - self.run
        if 0 < old <= MAX_REPLACEMENT and 0 < new <= MAX_REPLACEMENT and self._since <= len(self._tail):
            was = tuple(self._prediction[self._anchor : self._anchor + old])
            end = len(self._tail)
            if was not in self._replaced and len(self._replaced) >= _MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]  # the oldest
            self._replaced[was] = tuple(self._tail[end - self._since : end - self.run])

    def _drop_kept_replacements(self) -> None:
        for was in list(self._replaced):
            n = len(was)
            if n <= min(self.run, self._at) and tuple(self._prediction[self._at - n : self._at]) == was:
                del self._replaced[was]

    def _replacing(self, place: int, depth: int) -> tuple[list[int], int]:
        """Return the continuation at `place` with known replacements, and the tokens before the first one."""
        guess: list[int] = []
        first: int | None = None
        while len(guess) < depth and place < len(self._prediction):
            for was, now in self._replaced.items():
                if tuple(self._prediction[place : place + len(was)]) == was:
                    first = len(guess) if first is None else first
                    guess.extend(now)
                    place += len(was)
                    break
            else:
                guess.append(self._prediction[place])
                place += 1
        return guess[:depth], depth if first is None else first


class PredictionSpeculator(Speculator):
    """Guesses that the output is `request.prediction`, and realigns with it after each difference.

    The output starts at token 0 of its prediction. While both agree, the tree is one chain of `depth` tokens.
    After a difference it has up to BRANCHES continuations, all but the first of them short, so at most
    1 + depth + (BRANCHES - 1) * SIDE_DEPTH nodes. A request without a prediction gets only the root, and no
    state.
    """

    name = "prediction"

    def __init__(self, *, depth: int = 15) -> None:
        self._depth = depth
        self._alignments: dict[str, Alignment] = {}

    def max_nodes(self, request: Request) -> int:
        """Return the nodes of one chain and its short branches, or 0 without a prediction."""
        return self._depth + (BRANCHES - 1) * SIDE_DEPTH if request.prediction else 0

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Return one tree per tree entry, the likeliest guess first, with point masses.

        A draw's evidence is the number of tokens before it that agree with its place in the prediction.
        """
        return [self._tree(entry) for entry in plan.tree_entries]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Drop the state of ended requests; committed tokens are read by the next `propose`."""
        for outcome in outcomes:
            if outcome.finished:
                self._alignments.pop(outcome.request_id, None)

    def _tree(self, entry: PlanEntry) -> TokenTree:
        request, text, end = entry.request, entry.token_ids, entry.end
        depth = min(self._depth, entry.max_depth)
        if not request.prediction or depth < 1 or entry.max_nodes < 2:
            return single_node(text[end - 1])
        alignment = self._alignments.get(request.request_id)
        if alignment is None:
            alignment = self._alignments[request.request_id] = Alignment(request.prediction)
        alignment.advance(text[len(request.prompt_token_ids) + alignment.read : end])
        builder = TreeBuilder(text[end - 1], entry.max_nodes)
        for number, guess in enumerate(alignment.guesses(depth, BRANCHES)):
            node: int | None = 0
            matched = alignment.run if number == 0 else 0
            for i, token in enumerate(guess):
                assert node is not None
                sure, seen = match_confidence(matched + i), (float(matched + i),)
                node = builder.add(node, token, self.name, confidence=sure, evidence=seen)
                if node is None:
                    return builder.build()
        return builder.build()
