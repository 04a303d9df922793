"""A small speculative model (SSM) that grows a token tree in its own KV cache.

One batched forward pass per depth serves all requests and all frontier nodes:

    pass 1   the text the draft has not seen yet, up to the root     -> children of the root
    pass 2   the nodes of depth 1                                    -> their children
    ...      the nodes of the last depth are never run

A prompt is read in step with the target: pass 1 holds the chunk that the target computes in this step, too. A
text that is too long for one step is read over several, and has no tree until it is read.

Node i of the draft's own tree lives at cache position end - 1 + i, as in plan.py. When the target has
spoken, the K and V of the draft's nodes that lie on the committed path move to where the text has them;
what the draft did not guess itself it reads in the next first pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from specinfer.config import draw_rule
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculate.draft_vocabulary import DraftVocabulary
from specinfer.speculate.draws import Site, draw_children
from specinfer.speculate.speculator import Outcome
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.expansion import Expansion
from specinfer.verify.noise import draft_stream, uniform


@dataclass(slots=True)
class _Memory:
    """What the draft holds of one request between steps."""

    incarnation: int
    cached: int = 0  # cache positions 0..cached-1 hold the request's text
    claimed: int = 0  # blocks of its table that the draft holds for good
    growth: _Growth | None = None  # the last tree, until its outcome is known


@dataclass(slots=True)
class _Growth:
    """One request's share of a step: what is read of its text, and its tree while it grows."""

    entry: PlanEntry
    memory: _Memory
    builder: TreeBuilder
    stream: int  # of the random numbers of sampled draws
    limit: int  # levels, at most; 0: the text is only read
    drawn: int = 0  # random numbers used
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes of the last depth
    depth: int = 0  # of the frontier
    in_cache: int = 0  # nodes 0..in_cache-1 have been run

    def uniform(self) -> float:
        """The next number in [0, 1) of this tree's own stream."""
        self.drawn += 1
        return uniform(self.entry.request.seed, self.entry.end - 1, self.drawn, stream=self.stream)

    @property
    def wants_more(self) -> bool:
        """Whether there is room for another level below the frontier."""
        return self.depth < self.limit and bool(self.frontier) and not self.builder.full

    def descend(self) -> None:
        """Make the nodes added below the frontier the new frontier."""
        self.frontier = list(range(self.frontier[-1] + 1, len(self.builder.parents)))
        self.depth += 1


class DraftModel:
    """A level speculator that is a language model; `expansion` shapes its trees, `rule` says how it draws."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        expansion: Expansion,
        rule: DrawRule,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.name = name
        self._runner = runner
        self._expansion = expansion
        self._rule = rule
        self._max_rows = max_rows  # of the text that is read in one step
        self._vocabulary = vocabulary  # of the model's logits; None: all ids
        self._block_size = runner.block_size
        self._max_context = runner.model.config.max_context
        self._memory: dict[str, _Memory] = {}
        self._growths: list[_Growth] = []  # of the step that is open, one per entry of its plan
        self._holds: dict[int, bytes] = {}  # block -> hash of the text whose K and V the draft has there

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or of the engine's."""
        return (request.params.speculation.expansion or self._expansion).num_nodes - 1

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; the tokens of each text that the draft's cache lacks."""
        self._growths = [self._growth(entry) for entry in plan.entries]
        return [len(growth.entry.token_ids) - growth.memory.cached for growth in self._growths]

    def deepen(self, which: Sequence[int]) -> list[int]:
        """One more level for these entries, by one pass of the draft; those that have room for another."""
        rows: list[Rows] = []
        sites: list[Site] = []
        drawing: list[int] = []
        left = self._max_rows
        for i in sorted(
            which, key=lambda i: not self._growths[i].entry.has_tree
        ):  # prompts take what is left
            growth = self._growths[i]
            part = _frontier_rows(growth) if growth.in_cache else self._read(growth, left)
            if part is None:
                continue
            rows.append(part)
            left -= len(part.token_ids)
            if part.logits_from < len(part.token_ids):
                drawing.append(i)
                sites.extend(self._sites(growth))
        if rows:
            draw_children(self._runner.launch(rows), sites, self.name, self._vocabulary)
        for i in drawing:
            self._growths[i].descend()
        return [i for i in drawing if self._growths[i].wants_more]

    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number, as it has grown so far."""
        return self._growths[entry].builder.build()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the K and V of guessed nodes that were committed; forget requests that ended."""
        moves: list[Move] = []
        for outcome in outcomes:
            if outcome.finished:
                self._memory.pop(outcome.request_id, None)
                continue
            memory = self._memory.get(outcome.request_id)
            if memory is None or memory.growth is None:
                continue
            growth, memory.growth = memory.growth, None
            path = _path_of(growth, outcome.committed[:-1])  # the bonus token is the next root
            end = growth.entry.end
            memory.cached = end + len(path)
            if any(node != depth for depth, node in enumerate(path, start=1)):
                sources = [end - 1 + node for node in path]
                moves.append(Move(growth.entry.block_table, sources, range(end, end + len(path))))
        self._runner.move(moves)

    def _growth(self, entry: PlanEntry) -> _Growth:
        """A tree that is about to grow, or a text that is about to be read."""
        memory = self._memory[entry.request.request_id] = self._memory_of(entry)
        grows = min(entry.max_depth, self._expansion_for(entry).depth, self._max_context - entry.end)
        return _Growth(
            entry,
            memory,
            TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes),
            draft_stream(self.name, entry.end - 1),
            limit=grows if entry.max_nodes > 1 else 0,
        )

    def _read(self, growth: _Growth, most: int) -> Rows | None:
        """At most so many rows of the text that the draft's cache lacks; the root's has logits.

        None where the step has no rows left, and where the text leaves the draft no room for a guess.
        """
        entry, memory = growth.entry, growth.memory
        start = memory.cached
        end = min(entry.end, start + most)
        if end <= start or len(entry.token_ids) >= self._max_context:
            return None
        self._claim(memory, entry)
        memory.cached = end
        draws = end == entry.end and growth.limit > 0
        if draws:
            memory.growth = growth
            growth.in_cache = 1
        return chain_rows(entry.token_ids[start:end], start, entry.block_table, logits=draws)

    def _memory_of(self, entry: PlanEntry) -> _Memory:
        """What is held of the entry's request, or what a new memory of it would start with."""
        memory = self._memory.get(entry.request.request_id)
        return (
            memory if memory is not None and memory.incarnation == entry.incarnation else self._start(entry)
        )

    def _start(self, entry: PlanEntry) -> _Memory:
        """The memory of a request that is new here: it starts behind the blocks whose text the draft has."""
        held = 0
        for block, key in zip(entry.block_table, entry.block_hashes, strict=False):
            if self._holds.get(block) != key or (held + 1) * self._block_size >= entry.end:
                break
            held += 1
        return _Memory(entry.incarnation, cached=held * self._block_size, claimed=held)

    def _claim(self, memory: _Memory, entry: PlanEntry) -> None:
        """Note which blocks hold text for good, and that the others are about to be written to."""
        full = min(memory.cached // self._block_size, len(entry.block_hashes))
        for block in range(memory.claimed, full):
            self._holds[entry.block_table[block]] = entry.block_hashes[block]
        for number in entry.block_table[full:]:
            self._holds.pop(number, None)
        memory.claimed = full

    def _sites(self, growth: _Growth) -> list[Site]:
        entry, builder = growth.entry, growth.builder
        request, params = entry.request, entry.request.params
        processors = entry.active_processors
        return [
            Site(
                builder,
                node,
                width=self._expansion_for(entry).widths[growth.depth],
                params=params,
                seed=request.seed,
                position=entry.end + growth.depth,
                uniforms=growth.uniform,
                rule=draw_rule(params.speculation.verifier, self._rule),
                processed=partial(processors.apply, path=builder.path_tokens(node)) if processors else None,
            )
            for node in growth.frontier
        ]

    def _expansion_for(self, entry: PlanEntry) -> Expansion:
        return entry.request.params.speculation.expansion or self._expansion


def _frontier_rows(growth: _Growth) -> Rows:
    """Rows of the last depth's nodes; they see the text, their ancestors and themselves."""
    builder, first, root = growth.builder, growth.frontier[0], growth.entry.end - 1
    growth.in_cache = len(builder.parents)
    return Rows(
        token_ids=builder.token_ids[first:],
        start=root + first,
        block_table=growth.entry.block_table,
        logits_from=0,
        parents=builder.parents,
    )


def _path_of(growth: _Growth, accepted: Sequence[int]) -> list[int]:
    """The nodes of the draft's own tree along the accepted tokens, as far as they have been run."""
    path: list[int] = []
    node = 0
    for token in accepted:
        child = growth.builder.child(node, token)
        if child is None or child >= growth.in_cache:
            break
        node = child
        path.append(node)
    return path
