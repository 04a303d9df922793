"""Recording of drafts, and drafts that answer from recordings.

Both use the engine's own DraftModel or BlockDraft; only the model's pass and the draws from its logits are
replaced. So the engine's code decides which rows a draft reads, how its trees grow and how much it keeps. The
proposals of a block head below a root depend only on the text, and the likeliest nodes of a tree come first
(one_pass.py). So one tree with the largest number of nodes is recorded per root, and each smaller tree is a
part of it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.replay.guess_trie import NO_SITE, GuessRecorder, GuessTrie
from benchmarks.replay.trace import RecordedDraft, Trace
from specinfer.errors import IntegrityError
from specinfer.heads.block import BlockText
from specinfer.heads.config import BlockRows
from specinfer.heads.runner import HeadPass
from specinfer.runtime.batch import Rows
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.flight import Flight
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculate.drafts.draft import DraftModel
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import GuessedTree, Shape
from specinfer.speculate.drafts.head_drafts import BlockDraft
from specinfer.speculate.drafts.one_pass import MAX_NODES, MIN_PATH, WIDTH, GrowTrees, OnePassTrees
from specinfer.speculate.speculator import LevelSpeculator
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.tree.token_tree import draws_by_parent


@dataclass(frozen=True, slots=True)
class DraftNotes:
    """Recorded data of a draft."""

    guesses: GuessRecorder = field(default_factory=GuessRecorder)
    measured: dict[int, tuple[int, float]] = field(default_factory=dict)  # rows -> number of passes, seconds


@dataclass(slots=True)
class RecordedPasses:
    """A draft's passes that record their draws and their seconds by rows."""

    runner: ModelRunner
    name: str
    vocabulary: DraftVocabulary | None
    notes: DraftNotes
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        """Run the rows, draw, and record the children of each site."""
        before = [len(site.builder.draws) for site in sites]
        began = self.clock()
        draw_children(self.runner.launch(rows), sites, self.name, self.vocabulary)
        seconds = self.clock() - began
        count = num_rows(rows)
        passes, spent = self.notes.measured.get(count, (0, 0.0))
        self.notes.measured[count] = passes + 1, spent + seconds
        # Sites of one tree are adjacent: the draws of one end where those of the next begin.
        for number, site in enumerate(sites):
            builder = site.builder
            draws = [draw for draw in builder.draws[before[number] :] if draw.parent == site.node]
            tokens = [builder.token_ids[draw.node] for draw in draws]
            self.notes.guesses.note(builder.path_tokens(site.node), site.width, tokens, draws)


@dataclass(frozen=True, slots=True)
class RecordedTrees:
    """Records best-first trees at their largest size."""

    others: GrowTrees
    notes: GuessRecorder

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, max_nodes: int) -> None:
        """Grow these trees (`one_pass.GrowTrees`) to their largest size, whatever `max_nodes` is."""
        self.others(guessed, logits_TU, MAX_NODES)
        for one in guessed:
            tree = one.growth.tree()
            for parent, draws in (draws_by_parent(tree.draws) or {0: []}).items():
                tokens = [tree.token_ids[draw.node] for draw in draws]
                self.notes.note(tree.path_tokens(parent), WIDTH, tokens, draws)


Pass = Callable[[Sequence[Rows], Sequence[Site]], None]  # runs the rows, and adds the children of the sites


class TracedDraft(DraftModel):
    """A draft model whose passes are recorded, or answered from a recording."""

    def __init__(self, draw: Pass, *options: Any, **named: Any) -> None:
        """Make a draft that draws by `draw`; the other arguments are those of DraftModel."""
        super().__init__(*options, **named)
        self._pass = draw

    def _draw(self, parts: Sequence[tuple[int, Rows]], sites: Sequence[Site]) -> None:
        self._pass([rows for _, rows in parts], sites)


class CostTable:
    """Seconds of a pass by its rows; evaluates a curve once per number of rows."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._seconds = curve.seconds(range(1024)).tolist()

    def seconds(self, rows: int) -> float:
        """Return the seconds of one pass of `rows` rows."""
        if rows >= len(self._seconds):
            self._seconds = self._curve.seconds(range(2 * rows)).tolist()
        return float(self._seconds[rows])


@dataclass(slots=True)
class ReplayClock:
    """A virtual clock that advances by the seconds of replayed passes."""

    now: float = 0.0
    slowdown: float = 1.0  # factor on all seconds, caused by other processes

    def __call__(self) -> float:
        """Return the seconds since the clock was made."""
        return self.now

    def run(self, seconds: float) -> None:
        """Advance by `seconds`, times the slowdown."""
        self.now += self.slowdown * seconds


@dataclass(slots=True)
class Replayed:
    """A draft that answers from a recording and charges its passes to the clock.

    Missing sites are recorded in `lacks` and drawn as no children, because the ensemble catches exceptions of
    speculators. The caller of the replay checks `lacks`.
    """

    name: str
    costs: CostTable
    clock: ReplayClock
    passes: int = 0
    lacks: str = ""
    # request -> proposals, index of the text's start.
    _places: dict[str, tuple[GuessTrie, int]] = field(default_factory=dict)

    def follow(self, request_id: str, draft: RecordedDraft, place: int) -> None:
        """Answer for a request from now on; after `end` tokens the root is at index `place + end`."""
        self._places[request_id] = draft.guesses, place

    def forget(self, request_id: str) -> None:
        """Forget a finished request."""
        self._places.pop(request_id, None)

    def begin_step(self) -> None:
        """Start a step."""

    def spend(self, rows: int) -> None:
        """Charge a pass of `rows` rows."""
        self.clock.run(self.costs.seconds(rows))
        self.passes += 1

    def root(self, site: Site) -> tuple[GuessTrie, int]:
        """Return the proposals below the root of a new tree, and its site or NO_SITE."""
        guesses, place = self._places[site.request_id]
        return guesses, int(guesses.roots[place + site.position])


@dataclass(slots=True)
class ReplayedPasses(Replayed):
    """A draft model's passes, answered from a recording."""

    # Current step: id of builder -> node -> site.
    _sites: dict[int, dict[int, int]] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Forget the trees of the previous step."""
        self._sites.clear()

    def __call__(self, rows: Sequence[Rows], sites: Sequence[Site]) -> None:
        """Add the recorded draws of each site, up to the requested number of children."""
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
    """The runner of a draft without a model: it has no KV and runs no passes."""

    def __init__(self, block_size: int, max_context: int) -> None:
        self.block_size = block_size
        self._context = max_context

    @property
    def max_context(self) -> int:
        """Largest number of tokens of a text."""
        return self._context

    def launch(self, rows: Sequence[Rows], **_: object) -> Flight:
        """Raise an error: passes are answered from a recording."""
        raise IntegrityError("a replayed draft has no model to run")

    def move(self, moves: Sequence[Move]) -> None:
        """Do nothing."""


@dataclass(slots=True, kw_only=True)
class ReplayedHead(Replayed):
    """A block head without a model, whose trees are answered from a recording.

    It is the head's runner and its tree growth.
    """

    block_size: int  # slots per KV block
    head: BlockRows
    whole: bool = False  # grow trees to their recorded size, whatever the requested number of nodes
    partly_read: int = 0  # blocks after a text whose beginning the head has not read

    def guess(self, texts: Sequence[BlockText]) -> HeadPass:
        """Charge the pass; return empty results in the shapes of a head."""
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

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, max_nodes: int) -> None:
        """Grow these trees (`one_pass.GrowTrees`): the first nodes of the recorded ones."""
        for one in guessed:
            guesses, root = self.root(one.site)
            if root == NO_SITE:
                self.lacks = self.lacks or (
                    f"{self.name} was not recorded below {one.site.position} tokens of request "
                    f"{one.site.request_id}; record the trace anew"
                )
                continue
            wanted = MAX_NODES if self.whole else max_nodes
            regrow(one.growth.builder, guesses, root, wanted, self.name, one.site.draws_by)

    def draw(
        self, sites: Sequence[Site], rows: Sequence[int], before: Sequence[int], logits_TU: Tensor
    ) -> None:
        """Do nothing: level-by-level trees of heads are not recorded."""
        self.lacks = self.lacks or (
            f"{self.name} would draw level by level for request {sites[0].request_id}, and was recorded best "
            "first; record the trace anew"
        )


AnyReplayed = ReplayedPasses | ReplayedHead


def regrow(
    builder: TreeBuilder, guesses: GuessTrie, root: int, max_nodes: int, speculator: str, rule: DrawRule
) -> None:
    """Add the `max_nodes` likeliest nodes below a root's site, as far as the builder has space.

    Nodes come in their recorded order. Equally likely paths come in order of discovery; a node's next
    sibling comes before its first child.
    """
    known: dict[int, tuple[list[int], list[float], list[int]]] = {}
    # a queued path: its probability and the parent of its last node
    waiting: list[tuple[float, int, int, int, int, float]] = []

    def wait(above: float, parent: int, site: int, rank: int) -> None:
        """Queue the child of that rank, if it exists and is likely enough."""
        if site not in known:
            known[site] = guesses.draws(site)
        _, likely, _ = known[site]
        if rank < len(likely) and (path := above * likely[rank]) >= MIN_PATH:
            heapq.heappush(waiting, (-path, len(builder.parents), parent, site, rank, above))

    wait(1.0, 0, root, 0)
    added = 0
    while waiting and added < max_nodes and not builder.full:
        path, _, parent, site, rank, above = heapq.heappop(waiting)
        tokens, likely, below = known[site]
        seen = guesses.seen(site)
        node = builder.add(parent, tokens[rank], speculator, rule, confidence=likely[rank], evidence=seen)
        added += 1
        wait(above, parent, site, rank + 1)
        if node is not None and below[rank] != NO_SITE:
            wait(-path, node, below[rank], 0)


def replayed_drafts(trace: Trace, clock: ReplayClock, *, whole_trees: bool = False) -> dict[str, AnyReplayed]:
    """Return the drafts of a trace, answered from it; heads grow `whole_trees` or their usual size."""
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
    """Return the speculator of a replayed draft, as an engine makes it."""
    name, engine, shape = replayed.name, trace.engine, Shape.of(speculation)
    if isinstance(replayed, ReplayedHead):
        trees = OnePassTrees(name, shape, replayed.grow, replayed.draw)
        # The layer does not matter: hidden states have width 0.
        return BlockDraft(
            *(name, replayed.guess, replayed.head, trees),
            max_rows=engine.max_step_tokens,
            block_size=engine.block_size,
            taps=(0,),
        )
    runner = NoModel(engine.block_size, trace.drafts[name].max_context)
    return TracedDraft(replayed, name, runner, shape, max_rows=engine.max_step_tokens)


def num_rows(rows: Sequence[Rows]) -> int:
    """Return the number of rows of one pass."""
    return sum(len(part.token_ids) for part in rows)


def _what_lacks(name: str, site: Site, at: int) -> str:
    depth = len(site.builder.path_tokens(site.node))
    what = f"as deep as {depth + 1}" if at == NO_SITE else f"of {site.width} children at depth {depth}"
    return (
        f"{name} was not recorded {what} below {site.position - depth} tokens of request {site.request_id}; "
        "record the trace with a deeper or wider --expansion, or replay a smaller tree"
    )
