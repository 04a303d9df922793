"""Drafts whose guesses are recorded, and drafts that answer from such records.

Both are the engine's own DraftModel or BlockDraft: only the pass of the model and the draws from its logits
are replaced. So what a draft has read, how its trees grow and what it keeps is decided by the code that does
in an engine. What a block head guesses below a root depends on the text alone, and the likeliest nodes of a
tree are its first ones (one_pass.py): one tree of all nodes that a head may want is recorded for each root,
and any smaller one grows from it as it did from the head's logits.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specinfer.errors import IntegrityError
from specinfer.heads.block import BlockText
from specinfer.heads.config import BlockRows
from specinfer.heads.runner import HeadPass
from specinfer.replay.guess_trie import NO_SITE, GuessRecorder, GuessTrie
from specinfer.replay.trace import RecordedDraft, Trace
from specinfer.runtime.batch import Rows
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.executor import ModelRunner, Move
from specinfer.runtime.flight import Flight
from specinfer.speculate.drafts.draft import DraftModel
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import GuessedTree, Shape
from specinfer.speculate.drafts.head_drafts import BlockDraft
from specinfer.speculate.drafts.one_pass import MIN_PATH, MOST_NODES, WIDTH, GrowTrees, OnePassTrees
from specinfer.speculate.speculator import LevelSpeculator
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.tree.token_tree import draws_by_parent


@dataclass(frozen=True, slots=True)
class DraftNotes:
    """What is taken down of a draft."""

    guesses: GuessRecorder = field(default_factory=GuessRecorder)
    measured: dict[int, tuple[int, float]] = field(default_factory=dict)  # rows -> passes, their seconds


@dataclass(slots=True)
class RecordedPasses:
    """A draft's passes that take down what they draw, and how long passes of so many rows take."""

    runner: ModelRunner
    name: str
    vocabulary: DraftVocabulary | None
    notes: DraftNotes
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        """Run the rows, draw, and note the children of each site."""
        before = [len(site.builder.draws) for site in sites]
        began = self.clock()
        draw_children(self.runner.launch(rows), sites, self.name, self.vocabulary)
        seconds = self.clock() - began
        count = num_rows(rows)
        passes, spent = self.notes.measured.get(count, (0, 0.0))
        self.notes.measured[count] = passes + 1, spent + seconds
        # Sites of one tree follow each other: the draws of one end where those of the next begin.
        for number, site in enumerate(sites):
            builder = site.builder
            draws = [draw for draw in builder.draws[before[number] :] if draw.parent == site.node]
            tokens = [builder.token_ids[draw.node] for draw in draws]
            self.notes.guesses.note(builder.path_tokens(site.node), site.width, tokens, draws)


@dataclass(frozen=True, slots=True)
class RecordedTrees:
    """Takes down the trees that others grow, as large as anybody may want them."""

    others: GrowTrees
    notes: GuessRecorder

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, most: int) -> None:
        """Grow these trees (`one_pass.GrowTrees`), of as many nodes as there may be, whatever is wanted."""
        self.others(guessed, logits_TU, MOST_NODES)
        for one in guessed:
            tree = one.growth.tree()
            for parent, draws in (draws_by_parent(tree.draws) or {0: []}).items():
                tokens = [tree.token_ids[draw.node] for draw in draws]
                self.notes.note(tree.path_tokens(parent), WIDTH, tokens, draws)


class CostTable:
    """Seconds of passes by rows, looked up: a curve is asked once for each number of rows."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._seconds = curve.seconds(range(1024)).tolist()

    def seconds(self, rows: int) -> float:
        """Seconds of one pass of so many rows."""
        if rows >= len(self._seconds):
            self._seconds = self._curve.seconds(range(2 * rows)).tolist()
        return float(self._seconds[rows])


@dataclass(slots=True)
class ReplayClock:
    """Seconds that nobody waits for: they go by as passes take them."""

    now: float = 0.0
    slowdown: float = 1.0  # of everything, by others on the machine

    def __call__(self) -> float:
        """Seconds since the clock was made."""
        return self.now

    def run(self, seconds: float) -> None:
        """Let so many seconds go by, or more where the machine is slow."""
        self.now += self.slowdown * seconds


@dataclass(slots=True)
class Replayed:
    """A draft that is answered from a record: where, and what its passes would have cost.

    What a record lacks is remembered in `lacks`, and drawn as nothing: the ensemble catches what a speculator
    raises, so whoever plays the trace has to ask.
    """

    name: str
    costs: CostTable
    clock: ReplayClock
    passes: int = 0
    lacks: str = ""
    _places: dict[str, tuple[GuessTrie, int]] = field(
        default_factory=dict
    )  # request -> guesses, place of end 0

    def follow(self, request_id: str, draft: RecordedDraft, place: int) -> None:
        """Answer for a request from now on; its text of `end` tokens has the root at `place + end`."""
        self._places[request_id] = draft.guesses, place

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._places.pop(request_id, None)

    def begin_step(self) -> None:
        """A step begins."""

    def spend(self, rows: int) -> None:
        """A pass of so many rows."""
        self.clock.run(self.costs.seconds(rows))
        self.passes += 1

    def root(self, site: Site) -> tuple[GuessTrie, int]:
        """The guesses below the root of a tree that is about to grow, and its site or NO_SITE."""
        guesses, place = self._places[site.request_id]
        return guesses, int(guesses.roots[place + site.position])


@dataclass(slots=True)
class ReplayedPasses(Replayed):
    """A draft model's passes that are answered from a record."""

    _sites: dict[int, dict[int, int]] = field(
        default_factory=dict
    )  # of the step: id of builder -> node -> site

    def begin_step(self) -> None:
        """Forget the trees of the step before."""
        self._sites.clear()

    def __call__(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        """Add what was drawn for each site when it was recorded, as many children as are wanted now."""
        self.spend(num_rows(rows))
        for site in sites:
            builder = site.builder
            if site.node == 0:
                guesses, at = self.root(site)
                known = self._sites[id(builder)] = {0: at}
            else:
                guesses, _ = self._places[site.request_id]
                known = self._sites[id(builder)]
                at = known[site.node]
            if at == NO_SITE or guesses.asked[at] < site.width:
                self.lacks = self.lacks or _what_lacks(self.name, site, at)
                continue
            tokens, confidences, below = guesses.draws(at)
            seen, rule, node, width = guesses.seen(at), site.draws_by, site.node, site.width
            for i in range(min(width, len(tokens))):
                if not site.keeps(i, confidences[i]):
                    continue
                child = builder.add(node, tokens[i], self.name, rule, None, confidences[i], seen)
                if child is not None:
                    known[child] = below[i]


class NoModel(ModelRunner):
    """A draft's runner where no model is: its K and V are nowhere, and passes are answered by others."""

    def __init__(self, block_size: int, max_context: int) -> None:
        self.block_size = block_size
        self._context = max_context

    @property
    def max_context(self) -> int:
        """Tokens of the longest text the model could read."""
        return self._context

    def launch(self, rows: Sequence[Rows], **_: object) -> Flight:
        """Never called: passes are answered from a record."""
        raise IntegrityError("a replayed draft has no model to run")

    def move(self, moves: Sequence[Move]) -> None:
        """There is nothing to move."""


@dataclass(slots=True, kw_only=True)
class ReplayedHead(Replayed):
    """A block head without a model: it reads texts, and its trees are answered from a record.

    It is the head's runner, and grows its trees.
    """

    block_size: int  # of the cache
    head: BlockRows
    whole: bool = (
        False  # whether trees are grown as large as they were recorded, however few nodes are wanted
    )
    partly_read: int = 0  # blocks behind a text whose beginning it has missed

    def guess(self, texts: Sequence[BlockText]) -> HeadPass:
        """Count the pass; what it makes is nothing, in the shapes that a head's has."""
        self.spend(max(1, sum(text.count for text in texts)))
        for text in texts:
            self.partly_read += text.rows > 0 and text.shift > 0
            if text.rows and text.rows < self.head.block_size and not self.head.causal:
                self.lacks = self.lacks or (
                    f"{self.name} was recorded with blocks of {self.head.block_size} rows, all of which see "
                    f"each other, and there is room for {text.rows}; replay larger trees, or fewer at once"
                )
        none = torch.empty(0, 0)
        return HeadPass([none[:0].flatten() if text.count else None for text in texts], none, none)

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, most: int) -> None:
        """Grow these trees (`one_pass.GrowTrees`): the first nodes of those that were recorded."""
        for one in guessed:
            guesses, root = self.root(one.site)
            if root == NO_SITE:
                self.lacks = self.lacks or (
                    f"{self.name} was not recorded below {one.site.position} tokens of request "
                    f"{one.site.request_id}; record the trace anew"
                )
                continue
            wanted = MOST_NODES if self.whole else most
            regrow(one.growth.builder, guesses, root, wanted, self.name, one.site.draws_by)

    def draw(
        self, sites: Sequence[Site], rows: Sequence[int], before: Sequence[int], logits_TU: Tensor
    ) -> None:
        """Nothing: no such trees are recorded."""
        self.lacks = self.lacks or (
            f"{self.name} would draw level by level for request {sites[0].request_id}, and was recorded best "
            "first; record the trace anew"
        )


AnyReplayed = ReplayedPasses | ReplayedHead


def regrow(
    builder: TreeBuilder, guesses: GuessTrie, root: int, most: int, speculator: str, rule: DrawRule
) -> None:
    """Add the `most` likeliest nodes below a root's site, as far as the builder has room.

    In the order in which they were added when they were recorded: of equally likely paths that one comes
    first that was found first, and of a node's next sibling and its first child the sibling.
    """
    known: dict[int, tuple[list[int], list[float], list[int]]] = {}
    # A path that waits: its probability, and where its last node would hang.
    waiting: list[tuple[float, int, int, int, int, float]] = []

    def wait(above: float, parent: int, site: int, rank: int) -> None:
        """Let the child of that rank wait, if there is one and it is likely enough."""
        if site not in known:
            known[site] = guesses.draws(site)
        _, likely, _ = known[site]
        if rank < len(likely) and (path := above * likely[rank]) >= MIN_PATH:
            heapq.heappush(waiting, (-path, len(builder.parents), parent, site, rank, above))

    wait(1.0, 0, root, 0)
    added = 0
    while waiting and added < most and not builder.full:
        path, _, parent, site, rank, above = heapq.heappop(waiting)
        tokens, likely, below = known[site]
        seen = guesses.seen(site)
        node = builder.add(parent, tokens[rank], speculator, rule, confidence=likely[rank], evidence=seen)
        added += 1
        wait(above, parent, site, rank + 1)
        if node is not None and below[rank] != NO_SITE:
            wait(-path, node, below[rank], 0)


def replayed_drafts(trace: Trace, clock: ReplayClock, *, whole_trees: bool = False) -> dict[str, AnyReplayed]:
    """The drafts of a trace, to be answered from it; heads grow `whole_trees`, or what they would."""
    return {
        name: ReplayedPasses(name, CostTable(draft.curve), clock)
        if draft.head is None
        else ReplayedHead(
            name=name,
            costs=CostTable(draft.curve),
            clock=clock,
            block_size=trace.engine.block_size,
            head=draft.head,
            whole=whole_trees,
        )
        for name, draft in trace.drafts.items()
    }


def speculator_of(replayed: AnyReplayed, speculation: SpeculationConfig, trace: Trace) -> LevelSpeculator:
    """The speculator of a replayed draft, as an engine makes it."""
    name, engine, shape = replayed.name, trace.engine, Shape.of(speculation)
    if isinstance(replayed, ReplayedHead):
        trees = OnePassTrees(name, shape, replayed.grow, replayed.draw)
        # Which layer it is told of is all the same: their states have no width.
        return BlockDraft(
            *(name, replayed.guess, replayed.head, trees),
            max_rows=engine.max_step_tokens,
            block_size=engine.block_size,
            taps=(0,),
        )
    runner = NoModel(engine.block_size, trace.drafts[name].max_context)
    return DraftModel(name, runner, shape, max_rows=engine.max_step_tokens, draw=replayed)


def num_rows(rows: Sequence[Rows]) -> int:
    """The rows of one pass."""
    return sum(len(part.token_ids) for part in rows)


def _what_lacks(name: str, site: Site, at: int) -> str:
    depth = len(site.builder.path_tokens(site.node))
    what = f"as deep as {depth + 1}" if at == NO_SITE else f"of {site.width} children at depth {depth}"
    return (
        f"{name} was not recorded {what} below {site.position - depth} tokens of request {site.request_id}; "
        "record the trace with a deeper or wider --expansion, or replay a smaller tree"
    )
