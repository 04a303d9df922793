"""Suffix speculation: what followed these tokens in this text and in earlier answers of the same caller.

Every place where the last tokens stood before votes for what followed there, and longer matches weigh more.
The votes make a tree: its likeliest nodes are added one by one (SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from specinfer.errors import ConfigError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.calibration import SUREST_MATCH, match_confidence
from specinfer.speculate.speculator import Outcome
from specinfer.speculate.suffix_store import SuffixStore
from specinfer.speculate.text_index import TextIndex
from specinfer.tree import Draw, DrawRule, TokenTree
from specinfer.tree.draw import as_runs
from specinfer.tree.token_tree import single_node

LONGEST_MATCH = 32  # tokens; a longer match is no better a guess
VOTERS = 16  # places looked at, in the own text and in the store each
EXTENSION_VOTERS = 4  # and for what follows a guess of another: it may not be asked for
_SURE: Final = [match_confidence(tokens) for tokens in range(SUREST_MATCH + 1)]


@dataclass(slots=True)
class _Running:
    """One request's own text: its prompt and what was committed."""

    key: str | None
    prompt: int  # tokens of the prompt
    text: TextIndex = field(default_factory=TextIndex)


class _Vote(NamedTuple):
    """What followed at one place, as far as its match supports a guess."""

    tokens: Sequence[int]
    matched: int  # tokens before the place
    weight: int


class SuffixSpeculator:
    """Guesses from the request's own text, and from answers of finished requests with its cache key.

    `params.cache_salt` is the key; requests without one share the answers of None, and nothing else.
    A request's own prompt and output are always looked at, which covers a conversation, since its
    prompt repeats the earlier turns. Its output enters the shared store when it ends, with the last
    tokens of its prompt before it, so that the beginning of an answer is found as well.

    A place that matches n tokens votes `depth_factor` * n tokens deep, at most `max_depth`, with weight
    n squared. A node's probability is its share of all weights: the likeliest nodes are proposed, at
    most `max_nodes` with the root, none below `min_probability`. `memory` bounds the bytes kept of
    finished requests, over all keys, about 60 for a token; the oldest answers leave whole. A running
    request's text takes 52 to 100 bytes a token besides. Raises ConfigError on an option outside its range.
    """

    remembers_answers = True  # of other requests, which may have had the seed of one that is running

    def __init__(
        self,
        *,
        max_depth: int = 16,
        max_nodes: int = 32,
        min_probability: float = 0.05,
        depth_factor: float = 4.0,
        memory: int = 16 << 20,
        name: str = "suffix",
    ) -> None:
        for option, value, good, allowed in (
            ("max_depth", max_depth, max_depth >= 1, "1 or more"),
            ("max_nodes", max_nodes, max_nodes >= 1, "1 or more, the root included"),
            ("min_probability", min_probability, 0 <= min_probability <= 1, "0 to 1"),
            ("depth_factor", depth_factor, 0 < depth_factor < math.inf, "a finite number above 0"),
            ("memory", memory, memory >= 0, "0 or more bytes"),
        ):
            if not good:
                raise ConfigError(f"{option} of the suffix speculator is {value}; allowed: {allowed}")
        self.name = name
        self._max_depth = max_depth
        self._max_nodes = max_nodes
        self._min_probability = min_probability
        self._depth_factor = depth_factor
        self._store = SuffixStore(memory)
        self._running: dict[str, _Running] = {}

    def most_nodes(self, request: Request) -> int:
        """What its trees are cut to."""
        return self._max_nodes - 1

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One tree per entry, best first, all point masses; a prompt is read in step with the target.

        A draw's evidence is how many tokens matched before it, how many places vote for it, and their share.
        """
        for entry in plan.entries:
            self._read(entry)
        return [self._tree(entry) for entry in plan.tree_entries]

    def extend(self, entry: PlanEntry, path: Sequence[int], most: int) -> TokenTree:
        """As `propose`, by the votes of fewer places."""
        running = self._running[entry.request.request_id]
        tail = running.text.tail(LONGEST_MATCH)
        tail.extend(path)
        depth = min(self._max_depth, most - 1)
        votes = self._votes(running, tail[-LONGEST_MATCH:], depth, EXTENSION_VOTERS, path)
        return self._grow(votes, path[-1], min(most, self._max_nodes))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Add what was committed to the texts; the answers of requests that ended go to the store."""
        for outcome in outcomes:
            running = self._running.get(outcome.request_id)
            if running is None:
                continue  # never asked about it, so its text and key are not known
            running.text.extend(outcome.committed)
            if outcome.finished:
                del self._running[outcome.request_id]
                text = running.text.newest_text()
                if len(text) > running.prompt:
                    self._store.add(running.key, text[max(0, running.prompt - LONGEST_MATCH) :])

    def check_integrity(self) -> None:
        """Raise IntegrityError when a text or the store is inconsistent."""
        self._store.check_integrity()
        for running in self._running.values():
            running.text.check_integrity()

    def _read(self, entry: PlanEntry) -> None:
        """Index the text of this step and before."""
        request = entry.request
        running = self._running.get(request.request_id)
        if running is None:
            running = _Running(request.params.cache_salt, len(request.prompt_token_ids))
            self._running[request.request_id] = running
        if running.text.num_tokens < entry.end:
            running.text.extend(entry.token_ids[running.text.num_tokens : entry.end])

    def _tree(self, entry: PlanEntry) -> TokenTree:
        text, end = entry.token_ids, entry.end
        running = self._running[entry.request.request_id]
        depth = min(self._max_depth, entry.max_depth)
        max_nodes = min(self._max_nodes, entry.max_nodes)
        if depth < 1 or max_nodes < 2:
            return single_node(text[end - 1])
        tail = running.text.tail(LONGEST_MATCH)
        return self._grow(self._votes(running, tail, depth, VOTERS), text[end - 1], max_nodes)

    def _votes(
        self, running: _Running, tail: array[int], depth: int, voters: int, path: Sequence[int] = ()
    ) -> list[_Vote]:
        """What followed `tail`, the end of the text with `path`, in the own text and in the store."""
        votes: list[_Vote] = []
        for index in (running.text, self._store.of(running.key)):
            if index is None:
                continue
            for position, matched in index.occurrences(tail, voters):
                reach = min(depth, max(1, int(self._depth_factor * matched)))
                tokens = index.following(position, reach)
                if index is running.text and len(tokens) < reach:
                    tokens.extend(path[: reach - len(tokens)])
                    _loop(tokens, reach)
                votes.append(_Vote(tokens, matched, matched**2))
        return votes

    def _grow(self, votes: list[_Vote], root: int, max_nodes: int) -> TokenTree:
        """The nodes most votes go through, best first; the earlier voter is better when votes are equal."""
        token_ids, parents, draws = [root], [-1], list[Draw]()

        def draw(parent: int, token: int, matched: int, voters: int, share: float) -> int:
            node = len(token_ids)
            token_ids.append(token)
            parents.append(parent)
            sure, seen = share * _SURE[min(matched, SUREST_MATCH)], (float(matched), float(voters), share)
            draws.append(Draw(parent, node, self.name, DrawRule.POINT_MASS, None, sure, seen))
            return node

        least = self._min_probability * sum([vote.weight for vote in votes])
        # Likeliest first, then oldest: -weight, number, parent, depth, token, longest match, share, voters.
        waiting: list[tuple[int, int, int, int, int, int, float, list[_Vote]]] = []
        made = 0
        node, depth, through = 0, 0, votes
        while len(token_ids) < max_nodes:
            if len(through) == 1 and not waiting:  # and so it stays: one place alone says what follows
                tokens, matched, _ = through[0]
                for token in tokens[depth : depth + max_nodes - len(token_ids)]:
                    node = draw(node, token, matched + depth, 1, 1.0)
                    depth += 1
                break
            below: dict[int, list[_Vote]] = {}
            for vote in through:
                if depth < len(vote.tokens):
                    below.setdefault(vote.tokens[depth], []).append(vote)
            total = sum([vote.weight for vote in through])
            for token, voters in below.items():
                weight = sum([vote.weight for vote in voters])
                if weight >= least:
                    made += 1
                    matched = max([vote.matched for vote in voters]) + depth
                    heapq.heappush(
                        waiting, (-weight, made, node, depth + 1, token, matched, weight / total, voters)
                    )
            if not waiting:
                break
            _, _, parent, depth, token, matched, share, through = heapq.heappop(waiting)
            node = draw(parent, token, matched, len(through), share)
        return TokenTree(tuple(token_ids), tuple(parents), as_runs(draws))


def _loop(tokens: array[int], reach: int) -> None:
    """A guess that runs into the end of the text it comes from goes on into itself."""
    period = len(tokens)
    while len(tokens) < reach:
        tokens.append(tokens[len(tokens) - period])
