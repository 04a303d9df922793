"""Lookup speculation: what followed these tokens in this text and in earlier answers of the same caller.

Every place where the last tokens stood before votes for what followed there, and longer matches weigh more.
The votes make a tree: its likeliest nodes are added one by one (SuffixDecoding, arXiv 2411.04975). Within one
text this is prompt lookup, also known as n-gram speculation.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import Annotated, Final

from specinfer.errors import ConfigError
from specinfer.kernels.library import Library
from specinfer.kernels.structures import GrownArgs, LookupRules
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.lookups.answer_store import AnswerStore
from specinfer.speculate.lookups.text_index import LENGTHS, TextIndex, refuse
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.speculation_config import LONGEST_MATCH
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs

SUREST_MATCH: Final = 16  # tokens; more make a guess no surer
_MOST_NODES: Final = 1 << 16  # of a tree: more make no difference
_EVIDENCE: Final = 3  # numbers of a draw


def match_confidence(tokens: int) -> float:
    """How sure to be of a token that followed before, where the last `tokens` tokens were the same."""
    return 1 - 0.5 ** min(tokens, SUREST_MATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOptions:
    """How guesses are looked up; raises ConfigError on an option outside its range."""

    min_match: Annotated[int, "Tokens that must match, at least, before what followed them is a guess."] = 1
    max_depth: Annotated[int, "Tokens of a guess, at most."] = 16
    max_nodes: Annotated[int, "Nodes of a guessed tree, at most, the root included."] = 32
    min_probability: Annotated[float, "Of all votes the least share that a node is guessed with."] = 0.05
    depth_factor: Annotated[float, "A match of n tokens is guessed so many times n tokens deep."] = 4.0
    memory: Annotated[int, "Bytes for earlier answers, over all cache salts; 0 keeps none."] = 16 << 20

    def __post_init__(self) -> None:
        for option, good, allowed in (
            ("min_match", 1 <= self.min_match <= LONGEST_MATCH, f"1 to {LONGEST_MATCH}"),
            ("max_depth", self.max_depth >= 1, "1 or more"),
            ("max_nodes", self.max_nodes >= 1, "1 or more, the root included"),
            ("min_probability", 0 <= self.min_probability <= 1, "0 to 1"),
            ("depth_factor", 0 < self.depth_factor < math.inf, "a finite number above 0"),
            ("memory", self.memory >= 0, "0 or more bytes"),
        ):
            if not good:
                raise ConfigError(
                    f"{option} of the lookup speculator is {getattr(self, option)}; allowed: {allowed}"
                )


@dataclass(slots=True)
class _RequestText:
    """One request's own text: its prompt and what was committed."""

    key: str | None
    prompt: int  # tokens of the prompt
    text: TextIndex
    unread: list[int] = field(default_factory=list)  # committed tokens that the index comes to read


class LookupSpeculator(Speculator):
    """Guesses from the request's own text, and from answers of finished requests with its cache key.

    `params.cache_salt` is the key; requests without one share the answers of None, and nothing else.
    A request's own prompt and output are always looked at, which covers a conversation, since its
    prompt repeats the earlier turns. Its output enters the shared store when it ends, with the last
    tokens of its prompt before it, so that the beginning of an answer is found as well. A request whose
    chance is known from its seed looks at its own text alone: an earlier answer may have had the same one.

    A place that matches n tokens votes `depth_factor` * n tokens deep, at most `max_depth`, with weight
    n squared; of the own text and of earlier answers 16 places each vote, those of longer n-grams first. A
    node's probability is its share of all weights: the likeliest nodes are proposed, at most `max_nodes` with
    the root, none below `min_probability`. `memory` bounds the bytes kept of finished requests, over all
    keys, about 60 for a token; the oldest answers leave whole. A running request's text takes 52 to 100 bytes
    a token besides. The library looks up the guesses of all requests of a step in one call.
    """

    def __init__(
        self,
        library: Library,
        options: LookupOptions = LookupOptions(),
        *,
        verifier: str = "coupled",
        name: str = "lookup",
    ) -> None:
        """`verifier` is that of requests which do not say; `name` is the one in draws and figures."""
        self.name = name
        self._library = library
        self._options = options
        self._verifier = verifier
        least = options.min_match
        self._lengths = (least, *(length for length in LENGTHS if length > least))
        self._store = AnswerStore(options.memory, library, self._lengths)
        self._running: dict[str, _RequestText] = {}
        self._rules = byref(
            LookupRules(
                longest=LONGEST_MATCH,
                surest=SUREST_MATCH,
                depth_factor=options.depth_factor,
                min_probability=options.min_probability,
            )
        )
        self._make_room(256)

    def most_nodes(self, request: Request) -> int:
        """The most nodes below the root of one of its trees."""
        return self._options.max_nodes - 1

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One tree per entry, best first, all point masses; a prompt is read in step with the target.

        A draw's evidence is how many tokens matched before it, how many places vote for it, and their share.
        Raises ValueError or OverflowError where a text holds what is no token, and then reads nothing.
        """
        self._look_up(plan.entries)
        trees = self._trees(plan.entries)
        if len(plan.tree_entries) == len(trees):
            return trees
        return [tree for entry, tree in zip(plan.entries, trees, strict=True) if entry.has_tree]

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

    def _text_of(self, entry: PlanEntry) -> _RequestText:
        """The text of an entry's request; its unread tokens are those beyond this step."""
        request = entry.request
        running = self._running.get(request.request_id)
        if running is None:
            key, prompt = request.params.cache_salt, len(request.prompt_token_ids)
            text = TextIndex(self._library, self._lengths)
            running = self._running[request.request_id] = _RequestText(key, prompt, text)
        if running.unread and running.text.num_tokens < entry.end:
            del running.unread[: entry.end - running.text.num_tokens]
        return running

    def _look_up(self, entries: Sequence[PlanEntry]) -> None:
        """Have the texts read up to this step's end, and guesses looked up."""
        options = self._options
        told: list[int] = []
        tokens: list[int] = []
        grown: list[tuple[TextIndex, int]] = []
        room = len(entries)
        for entry in entries:
            running, end = self._text_of(entry), entry.end
            text, known = running.text, running.text.num_tokens
            if known < end:
                tokens += entry.token_ids[known:end]
                grown.append((text, end))
            kept = self._store.of(running.key)
            if kept is not None and entry.request.params.knows_chance(self._verifier):
                kept = None
            earlier = 0 if kept is None else kept.address
            depth, nodes = min(options.max_depth, entry.max_depth), min(options.max_nodes, entry.max_nodes)
            told += (text.address, earlier, max(0, end - known), depth, nodes)
            room += nodes
        if room > self._room:
            self._make_room(min(room, _MOST_NODES * len(entries)))
        lying, numbers = array("i", tokens), array("q", told)
        at, behind = numbers.buffer_info()[0], lying.buffer_info()[0]
        if not self._library.lookup_trees(self._rules, at, len(entries), behind, len(lying), self._to):
            for text, _ in grown:
                text.recount()  # some may have been read before memory was full
            refuse(lying)
        for text, end in grown:
            text.num_tokens = end

    def _trees(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        """The trees that were found."""
        room, nodes, name, rule = self._room, self._nodes, self.name, DrawRule.POINT_MASS
        trees: list[TokenTree] = []
        first = 0
        for entry, count in zip(entries, nodes[: len(entries)], strict=True):
            root = entry.token_ids[entry.end - 1]
            if count == 0:
                trees.append(TokenTree((root,), (-1,)))
                continue
            end = first + count
            parents = nodes[room + first : room + end].tolist()
            tokens = nodes[2 * room + first : 2 * room + end]
            confidences = self._chances[first:end].tolist()
            evidence = self._chances[room + _EVIDENCE * first : room + _EVIDENCE * end].tolist()
            run = Run(name, rule, parents, range(1, count + 1), confidences, evidence, _EVIDENCE)
            trees.append(TokenTree((root, *tokens), (-1, *parents), Runs((run,))))
            first = end
        return trees

    def _make_room(self, room: int) -> None:
        """Memory for so many nodes of trees, and as many trees, which is used again in each step."""
        self._room = room
        self._nodes = array("i", bytes(4 * 3 * room))  # counts, parents, tokens
        self._chances = array("d", bytes(8 * (1 + _EVIDENCE) * room))  # confidences, evidence
        at, chance = self._nodes.buffer_info()[0], self._chances.buffer_info()[0]
        self._to = byref(GrownArgs(room, at, at + 4 * room, at + 8 * room, chance, chance + 8 * room))
