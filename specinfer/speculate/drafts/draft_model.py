"""A small speculative model (SSM) that grows a token tree in its own KV cache.

One batched forward pass per depth serves all requests and all frontier nodes:

    pass 1   the text the draft has not seen yet, up to the root     -> children of the root
    pass 2   nodes of depth 1                                        -> their children
    ...      nodes below which nobody wants guesses are never run

A prompt is read in step with the target: pass 1 holds the chunk that the target computes in this step, too. A
text that is too long for one step is read over several, and has no tree until it is read.

The i-th node that is run lives at cache position end - 1 + i, the root being the 0-th. When the target has
spoken, the K and V of the draft's nodes that lie on the committed path move to where the text has them;
what the draft did not guess itself it reads in the next first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight
from specinfer.runtime.runner import Move
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Shape, trees_first
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tree import TokenTree

Pass = Callable[[Sequence[Rows], Sequence[Site]], None]  # runs the rows, and adds the children of the sites


class DraftRunner(Protocol):
    """A model with its cache, as far as a draft is concerned: of models a ModelRunner."""

    @property
    def block_size(self) -> int:
        """Cache positions of a block."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of the longest text the model can read."""
        ...

    def launch(self, rows: Sequence[Rows]) -> Flight:
        """Run `rows`, writing their K and V."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Copy K and V of accepted nodes to where the text has them."""
        ...


@dataclass(slots=True)
class _Memory:
    """What the draft holds of one request between steps."""

    incarnation: int
    cached: int = 0  # cache positions 0..cached-1 hold the request's text
    claimed: int = 0  # blocks of its table that the draft holds for good
    growth: Growth | None = None  # the last tree, until its outcome is known


class DraftModel(LevelSpeculator):
    """A level speculator that is a language model; `shape` says how its trees grow, and how it draws."""

    def __init__(
        self,
        name: str,
        runner: DraftRunner,
        shape: Shape,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
        reads: int | None = None,
        draw: Pass | None = None,
    ) -> None:
        """`vocabulary` are the tokens the model has logits for; None: all. It has no embedding for ids from
        `reads` on; None: for all there are. They are no tokens, and it reads the last id it knows instead.

        `draw` stands in for passes and what is drawn from them: it answers from a record, or makes one.
        """
        self.name = name
        self._runner = runner
        self._shape = shape
        self._max_rows = max_rows  # of the text that is read in one step
        self._vocabulary = vocabulary
        self._last_id = None if reads is None else reads - 1
        self._stand_in = draw
        self._block_size = runner.block_size
        self._max_context = runner.max_context
        self._memory: dict[str, _Memory] = {}
        self._growths: list[Growth] = []  # of the step that is open, one per entry of its plan
        self._memories: list[_Memory] = []  # of the same
        self._holds: dict[int, bytes] = {}  # block -> hash of the text whose K and V the draft has there

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's shape, or of the engine's."""
        return self._shape.most_nodes(request)

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; the tokens of each text that the draft's cache lacks."""
        self._growths = [self._growth(entry) for entry in plan.entries]
        self._memories = [self._memory_of(entry) for entry in plan.entries]
        for entry, memory in zip(plan.entries, self._memories, strict=True):
            self._memory[entry.request.request_id] = memory
        return [
            len(entry.token_ids) - memory.cached
            for entry, memory in zip(plan.entries, self._memories, strict=True)
        ]

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Draw below these nodes of these entries' trees, by one pass of the draft."""
        rows: list[Rows] = []
        sites: list[Site] = []
        drawing: list[int] = []
        left = self._max_rows
        for i in trees_first(self._growths, below):
            growth = self._growths[i]
            if growth.started:
                part: Rows | None = _chosen_rows(growth, below[i])
            else:
                part = self._read(growth, self._memories[i], left)
            if part is None:
                continue
            rows.append(part)
            left -= len(part.token_ids)
            if growth.started:
                drawing.append(i)
                sites.extend(growth.sites(self._shape))
        if rows:
            (self._stand_in or self._draw)(rows, sites)
        for i in drawing:
            self._growths[i].descend()
        return {i: ends for i in drawing if (ends := self._growths[i].ends)}

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
            path = growth.path(outcome.committed[:-1])  # the bonus token is the next root
            end = growth.entry.end
            memory.cached = end + len(path)
            sources = [end - 1 + growth.places[node] for node in path]
            if sources != [*range(end, end + len(path))]:
                moves.append(Move(growth.entry.block_table, sources, range(end, end + len(path))))
        self._runner.move(moves)

    def _growth(self, entry: PlanEntry) -> Growth:
        """A tree that is about to grow, or a text that is about to be read."""
        return Growth.shaped(entry, self.name, self._shape, self._max_context - entry.end)

    def _read(self, growth: Growth, memory: _Memory, most: int) -> Rows | None:
        """At most so many rows of the text that the draft's cache lacks; the root's row has logits.

        None where the step has no rows left, and where the text leaves the draft no room for a guess.
        """
        entry = growth.entry
        start = memory.cached
        end = min(entry.end, start + most)
        if end <= start or len(entry.token_ids) >= self._max_context:
            return None
        self._claim(memory, entry)
        memory.cached = end
        draws = end == entry.end and growth.limit > 0
        if draws:
            memory.growth = growth
            growth.started = True
        token_ids = entry.token_ids[start:end]
        if self._last_id is not None:
            token_ids = [min(token_id, self._last_id) for token_id in token_ids]
        return Rows(token_ids, start, entry.block_table, end - start - draws)

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

    def _draw(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        draw_children(self._runner.launch(rows), sites, self.name, self._vocabulary)


def _chosen_rows(growth: Growth, nodes: Sequence[int]) -> Rows:
    """Rows of nodes that are to get children; they see the text, their ancestors and themselves."""
    first = growth.choose(nodes)
    return Rows(
        token_ids=[growth.builder.token_ids[node] for node in growth.frontier],
        start=growth.entry.end - 1 + first,
        block_table=growth.entry.block_table,
        logits_from=0,
        parents=growth.above,
    )
