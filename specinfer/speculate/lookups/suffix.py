"""Suffix speculation: what followed these tokens in this text and in earlier answers of the same caller.

Every place where the last tokens stood before votes for what followed there, and longer matches weigh more.
The votes make a tree: its likeliest nodes are added one by one (SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from specinfer.errors import ConfigError
from specinfer.kernels.library import Library
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.lookups.lookups import LONGEST_MATCH, Ask, Lookups
from specinfer.speculate.lookups.native_lookups import NativeLookups
from specinfer.speculate.lookups.plain_lookups import PlainLookups
from specinfer.speculate.lookups.suffix_store import SuffixStore
from specinfer.speculate.lookups.text_index import TextIndex
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.tree import TokenTree

VOTERS: Final = 16  # places looked at, in the own text and in the store each
EXTENSION_VOTERS: Final = 4  # and for what follows a guess of another: it may not be asked for


@dataclass(slots=True)
class _Running:
    """One request's own text: its prompt and what was committed."""

    key: str | None
    prompt: int  # tokens of the prompt
    text: TextIndex
    unread: list[int] = field(default_factory=list)  # committed tokens that the index comes to read


class SuffixSpeculator(Speculator):
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
        library: Library | None = None,
    ) -> None:
        """`library` looks guesses up, plain Python without one."""
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
        self._lookups: Lookups = PlainLookups(name) if library is None else NativeLookups(name, library)
        self._store = SuffixStore(memory, self._lookups.new_index)
        self._running: dict[str, _Running] = {}

    def most_nodes(self, request: Request) -> int:
        """What its trees are cut to."""
        return self._max_nodes - 1

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One tree per entry, best first, all point masses; a prompt is read in step with the target.

        A draw's evidence is how many tokens matched before it, how many places vote for it, and their share.
        """
        trees = self._look_up([self._ask(entry) for entry in plan.entries])
        if len(plan.tree_entries) == len(trees):
            return trees
        return [tree for entry, tree in zip(plan.entries, trees, strict=True) if entry.has_tree]

    def extend(self, entry: PlanEntry, path: Sequence[int], most: int) -> TokenTree:
        """As `propose`, by the votes of fewer places."""
        running = self._running[entry.request.request_id]
        depth, nodes = min(self._max_depth, most - 1), min(most, self._max_nodes)
        kept = self._store.of(running.key)
        ask = Ask(running.text, entry.token_ids, entry.end, path, depth, nodes, EXTENSION_VOTERS, kept)
        return self._look_up([ask])[0]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Add what was committed to the texts; the answers of requests that ended go to the store."""
        for outcome in outcomes:
            running = self._running.get(outcome.request_id)
            if running is None:
                continue  # never asked about it, so its text and key are not known
            running.unread += outcome.committed
            if outcome.finished:
                del self._running[outcome.request_id]
                text = running.text.newest_text()
                text.extend(running.unread)
                if len(text) > running.prompt:
                    self._store.add(running.key, text[max(0, running.prompt - LONGEST_MATCH) :])

    def check_integrity(self) -> None:
        """Raise IntegrityError when a text or the store is inconsistent."""
        self._store.check_integrity()
        for running in self._running.values():
            running.text.check_integrity()

    def _ask(self, entry: PlanEntry) -> Ask:
        """What follows the text of this step."""
        request, end = entry.request, entry.end
        running = self._running.get(request.request_id)
        if running is None:
            key, prompt = request.params.cache_salt, len(request.prompt_token_ids)
            running = self._running[request.request_id] = _Running(key, prompt, self._lookups.new_index())
        if running.unread and running.text.num_tokens < end:
            del running.unread[: end - running.text.num_tokens]
        depth, nodes = min(self._max_depth, entry.max_depth), min(self._max_nodes, entry.max_nodes)
        kept = self._store.of(running.key)
        return Ask(running.text, entry.token_ids, end, (), depth, nodes, VOTERS, kept)

    def _look_up(self, asks: Sequence[Ask]) -> list[TokenTree]:
        return self._lookups.suffix_trees(
            asks, depth_factor=self._depth_factor, min_probability=self._min_probability
        )
