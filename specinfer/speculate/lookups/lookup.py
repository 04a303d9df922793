"""LookupSpeculator: guesses from the request's text and from earlier answers with the same cache salt.

Every earlier occurrence of the last tokens votes for the tokens that followed there, and longer matches have
more weight. The likeliest nodes of the votes form a tree (SuffixDecoding, arXiv 2411.04975). Within one text
this is prompt lookup, also known as n-gram speculation.
"""

from array import array
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import Final

from specinfer.kernels.library import Library
from specinfer.kernels.structures import GrownArgs, LookupRules
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.speculate.lookups.answer_store import AnswerStore
from specinfer.speculate.lookups.text_index import LENGTHS, TextIndex, raise_refusal
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.speculation_config import LONGEST_MATCH
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs

SUREST_MATCH: Final = 16  # tokens; longer matches do not raise the confidence
_MAX_NODES: Final = 1 << 16  # of a tree
_EVIDENCE: Final = 3  # numbers of evidence per draw


def match_confidence(tokens: int) -> float:
    """Return the confidence of a token that followed an earlier match of `tokens` tokens."""
    return 1 - 0.5 ** min(tokens, SUREST_MATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupOptions:
    """Options of the lookup; SpeculationConfig checks those that users set."""

    min_match: int = 1  # minimum tokens that must match
    max_depth: int = 16  # maximum depth of a guess, in tokens
    max_nodes: int = 32  # maximum nodes of a tree, the root included
    min_probability: float = 0.05  # minimum part of all votes for a node
    depth_factor: float = 4.0  # depth of guesses per matching token
    memory: int = 16 << 20  # bytes for earlier answers of all cache salts; 0 keeps none


@dataclass(slots=True)
class _RequestText:
    """One request's text: its prompt and its committed tokens."""

    key: str | None
    prompt: int  # number of prompt tokens
    text: TextIndex
    unread: list[int] = field(default_factory=list)  # committed tokens that are not indexed yet


class LookupSpeculator(Speculator):
    """Guesses from the request's own text, and from answers of finished requests with its cache key.

    `params.cache_salt` is the key; requests without one share the key None. A request's prompt and output are
    always searched, which covers a conversation, as its prompt repeats the earlier turns. When a request
    ends, its output enters the shared store after the last tokens of its prompt, so that the start of an
    answer can be found, too. A request whose random numbers follow from its seed searches only its own text,
    as an earlier answer may have used the same numbers (`SamplingParams.knows_chance`).

    An occurrence that matches n tokens votes `depth_factor` * n tokens deep, at most `max_depth`, with weight
    n squared. In the own text and in earlier answers 16 occurrences each vote, longer n-grams first. A node's
    probability is its part of all weights: the likeliest nodes are proposed, at most `max_nodes` with the
    root, none below `min_probability`. `memory` limits the bytes kept of finished requests, over all keys,
    about 60 per token; whole answers are dropped, oldest first. A running request's text takes 52 to 100
    bytes per token in addition. One native call looks up the guesses of all requests of a step.
    """

    name = "lookup"

    def __init__(
        self, library: Library, options: LookupOptions = LookupOptions(), *, verifier: str = "coupled"
    ) -> None:
        """Make a speculator; `verifier` is the default of requests."""
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
        self._allocate(256)

    def max_nodes(self, request: Request) -> int:
        """Return the maximum nodes of a tree without its root."""
        return self._options.max_nodes - 1

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Return one tree per tree entry, best first, with point masses; indexes prompts with the target.

        A draw's evidence is the number of matching tokens, the number of votes, and their part of all.
        Raises ValueError or OverflowError if a text has an invalid token, and then forgets running texts.
        """
        self._look_up(plan.entries)
        trees = self._trees(plan.entries)
        if len(plan.tree_entries) == len(trees):
            return trees
        return [tree for entry, tree in zip(plan.entries, trees, strict=True) if entry.has_tree]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Add committed tokens to the texts, and move the answers of ended requests to the store."""
        for outcome in outcomes:
            running = self._running.get(outcome.request_id)
            if running is None:
                continue  # it never guessed for this request, so text and key are unknown
            running.unread += outcome.committed
            if outcome.finished:
                del self._running[outcome.request_id]
                text = running.text.newest_text()
                text.extend(running.unread)
                if len(text) > running.prompt:
                    self._store.add(running.key, text[max(0, running.prompt - LONGEST_MATCH) :])

    def _text_of(self, entry: PlanEntry) -> _RequestText:
        """Return the text of an entry's request, without tokens after this step's end."""
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
        """Index the texts up to this step's end, and look up guesses."""
        options = self._options
        requests: list[int] = []
        tokens: list[int] = []
        grown: list[tuple[TextIndex, int]] = []
        room = len(entries)
        for entry in entries:
            running, end = self._text_of(entry), entry.end
            text, known = running.text, running.text.num_tokens
            if known < end:
                tokens += entry.token_ids[known:end]
                grown.append((text, end))
            knows_chance = entry.request.params.knows_chance(self._verifier)
            kept = None if knows_chance else self._store.of(running.key)
            earlier = 0 if kept is None else kept.address
            depth, nodes = min(options.max_depth, entry.max_depth), min(options.max_nodes, entry.max_nodes)
            requests += (text.address, earlier, max(0, end - known), depth, nodes)
            room += nodes
        if room > self._capacity:
            self._allocate(min(room, _MAX_NODES * len(entries)))
        lying, numbers = array("i", tokens), array("q", requests)
        at, behind = numbers.buffer_info()[0], lying.buffer_info()[0]
        if not self._library.lookup_trees(self._rules, at, len(entries), behind, len(lying), self._to):
            self._running.clear()  # texts may have grown in part before memory ran out
            raise_refusal(lying)
        for text, end in grown:
            text.num_tokens = end

    def _trees(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        """Return the found trees."""
        room, nodes, name, rule = self._capacity, self._nodes, self.name, DrawRule.POINT_MASS
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
            confidences = self._probabilities[first:end].tolist()
            evidence = self._probabilities[room + _EVIDENCE * first : room + _EVIDENCE * end].tolist()
            run = Run(name, rule, parents, range(1, count + 1), confidences, evidence, _EVIDENCE)
            trees.append(TokenTree((root, *tokens), (-1, *parents), Runs((run,))))
            first = end
        return trees

    def _allocate(self, room: int) -> None:
        """Allocate memory for `room` trees and nodes, reused in each step."""
        self._capacity = room
        self._nodes = array("i", bytes(4 * 3 * room))  # counts, parents, tokens
        self._probabilities = array("d", bytes(8 * (1 + _EVIDENCE) * room))  # confidences, evidence
        at, probs = self._nodes.buffer_info()[0], self._probabilities.buffer_info()[0]
        self._to = byref(GrownArgs(room, at, at + 4 * room, at + 8 * room, probs, probs + 8 * room))
