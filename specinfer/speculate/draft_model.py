"""A small speculative model (SSM) that grows a token tree in its own KV cache.

One batched forward pass per depth serves all requests and all frontier nodes:

    pass 1   the text the draft has not seen yet, up to the root     -> children of the root
    pass 2   the nodes of depth 1                                    -> their children
    ...      the nodes of the last depth are never run

Node i of the draft's own tree lives at cache position end - 1 + i, as in plan.py. When the target has
spoken, the K and V of the draft's nodes that lie on the committed path move to where the text has them;
what the draft did not guess itself it reads in the next first pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from specinfer.config import draw_rule
from specinfer.plan import PlanEntry
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import LogitRows, ModelRunner, Move
from specinfer.speculate.draft_vocabulary import DraftVocabulary
from specinfer.speculate.draws import Site, draw_children
from specinfer.speculate.speculator import Outcome
from specinfer.speculate.tree_size import TreeSize
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
    """One request's tree while it grows."""

    entry: PlanEntry
    builder: TreeBuilder
    stream: int  # of the random numbers of sampled draws
    limit: int  # levels, at most
    drawn: int = 0  # random numbers used
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes of the last depth
    depth: int = 0  # of the frontier
    in_cache: int = 1  # nodes 0..in_cache-1 have been run

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
    """A Speculator that is a language model; `expansion` shapes its trees, `rule` says how it draws."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        expansion: Expansion,
        rule: DrawRule,
        *,
        max_rows: int,
        size: TreeSize,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.name = name
        self._runner = runner
        self._expansion = expansion
        self._rule = rule
        self._max_rows = max_rows  # of one pass over text
        self._size = size
        self._vocabulary = vocabulary  # of the model's logits; None: all ids
        self._scan = runner.model.kernels.scan
        self._block_size = runner.block_size
        self._max_context = runner.model.config.max_context
        self._memory: dict[str, _Memory] = {}
        self._holds: dict[int, bytes] = {}  # block -> hash of the text whose K and V the draft has there

    def propose(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        """One tree per entry; at most `len(expansion)` passes of the draft, however many entries."""
        growths = [
            _Growth(
                e,
                TreeBuilder(e.token_ids[e.end - 1], e.max_nodes),
                draft_stream(self.name, e.end - 1),
                limit=min(e.max_depth, self._expansion_for(e).depth, self._max_context - e.end),
            )
            for e in entries
        ]
        growing = self._started([g for g in growths if g.wants_more])
        rows = [self._read_text(g) for g in growing]
        while growing:
            logits = self._runner.forward(rows)
            sites = [site for growth in growing for site in self._sites(growth)]
            draw_children(LogitRows(logits), sites, self.name, self._vocabulary, self._scan)
            for growth in growing:
                growth.descend()
            growing = self._deeper([g for g in growing if g.wants_more])
            rows = [_frontier_rows(g) for g in growing]
        return [g.builder.build() for g in growths]

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

    def _started(self, growths: list[_Growth]) -> list[_Growth]:
        """Those for which the draft is worth running."""
        entries = [g.entry for g in growths]
        unread = [entry.end - self._memory_of(entry).cached for entry in entries]
        worth = self._size.starts(self.name, entries, unread)
        return [g for g, starts in zip(growths, worth, strict=True) if starts]

    def _deeper(self, growing: list[_Growth]) -> list[_Growth]:
        """Those for which another level is worth it."""
        if not growing:
            return []
        trees = [g.builder.build() for g in growing]
        worth = self._size.deeper(self.name, [g.entry for g in growing], trees)
        return [g for g, goes_on in zip(growing, worth, strict=True) if goes_on]

    def _read_text(self, growth: _Growth) -> Rows:
        """Rows of the text the draft's cache lacks, up to the root; all but the last chunk is run here."""
        entry = growth.entry
        request = entry.request
        memory = self._memory[request.request_id] = self._memory_of(entry)
        self._claim(memory, entry)
        start = memory.cached
        while entry.end - start > self._max_rows:
            chunk = entry.token_ids[start : start + self._max_rows]
            self._runner.forward([chain_rows(chunk, start, entry.block_table, logits=False)])
            start += self._max_rows
        memory.growth = growth
        memory.cached = entry.end
        return chain_rows(entry.token_ids[start : entry.end], start, entry.block_table, logits=True)

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
