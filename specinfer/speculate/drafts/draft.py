"""What all drafts share: texts in a cache, trees that grow over them, and requests that end.

    0 ............ origin ............ cached ............ end of the text
    never seen     in the cache        to be read

A draft writes K and V to the blocks that the scheduler gave the request. Blocks that two requests share hold
for both of them what was written there for one.

A small speculative model (SSM) is one of them: the i-th node that is run lies at cache position end - 1 + i,
the root being the 0-th. When the target has spoken, the K and V of the draft's nodes that lie on the
committed path move to where the text has them; the tokens that the draft did not guess itself it reads in the
next first pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.executor import ModelRunner, Move
from specinfer.runtime.features import TextFeatures, UnreadFeatures
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Shape, trees_first
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tree import TokenTree


@dataclass(slots=True)
class CachedText:
    """What a draft holds of one request between steps."""

    incarnation: int
    cached: int  # positions origin..cached-1 are in its cache
    claimed: int  # blocks of the table that it holds for good
    unread: UnreadFeatures  # the target's hidden states of what a head has not read
    origin: int = 0  # the first position it sees, which begins a block
    growth: Growth | None = None  # the last tree, until its outcome is known, where a draft asks for that
    last_D: Tensor | None = None  # what a head made of the last row it read, where it needs that


class CachedTexts:
    """The texts of all requests, as far as one draft knows them.

    A text that another request left in shared blocks is there if the draft has read it then. A head needs the
    target's hidden states besides, and these come only of what the target computes. So where some are missing
    it reads from the next block on, and does not see what stands before that: its guesses get worse, and
    nothing else.
    """

    def __init__(self, *, block_size: int, most_unread: int = 0) -> None:
        self.block_size = block_size
        self._most_unread = most_unread  # tokens of a text whose hidden states are kept
        self._texts: dict[str, CachedText] = {}
        self._holds: dict[int, bytes] = {}  # block -> hash of the text whose K and V the draft has there

    def of(self, entry: PlanEntry, most: int) -> CachedText:
        """What is held of the entry's request; blocks written before it was preempted are not.

        A text that is new here starts behind the blocks that the draft has read for another, of `most`
        positions at the most.
        """
        name = entry.request.request_id
        text = self._texts.get(name)
        if text is None or text.incarnation != entry.incarnation:
            text = self._texts[name] = self._start(entry, most)
        return text

    def known(self, request_id: str) -> CachedText | None:
        """What is held of a request, if anything is."""
        return self._texts.get(request_id)

    def hear(self, features: TextFeatures) -> None:
        """Keep a text's new hidden states until they are read."""
        entry = features.entry
        text = self.of(entry, entry.start)
        unread = text.unread
        if features.start > unread.end:  # there is a gap: nobody computed these tokens with this head there
            self._miss(text, features.start)
        # What it found in shared blocks it need not read again; so is a part before the next block.
        known, count = max(0, unread.end - features.start), len(features.states)
        if known < count:
            unread.add(features.states.part(known, count) if known else features.states)
        if unread.end - unread.first > self._most_unread:
            self._miss(text, unread.end - self._most_unread)

    def forget(self, request_id: str) -> None:
        """A request that ended."""
        self._texts.pop(request_id, None)

    def claim(self, text: CachedText, entry: PlanEntry) -> None:
        """Note which blocks hold text for good, and that the others are about to be written to."""
        full = min(text.cached // self.block_size, len(entry.block_hashes))
        written = full
        if text.origin:  # what stands there is not made of the whole text before it
            written = text.origin // self.block_size
        else:
            for block in range(text.claimed, full):
                self._holds[entry.block_table[block]] = entry.block_hashes[block]
            text.claimed = max(text.claimed, full)
        for number in entry.block_table[written:]:
            self._holds.pop(number, None)

    def _start(self, entry: PlanEntry, most: int) -> CachedText:
        held = 0
        for block, key in zip(entry.block_table, entry.block_hashes, strict=False):
            if self._holds.get(block) != key or (held + 1) * self.block_size > most:
                break
            held += 1
        cached = held * self.block_size
        return CachedText(entry.incarnation, cached, held, UnreadFeatures(cached))

    def _miss(self, text: CachedText, first: int) -> None:
        """Go on at the first block whose tokens from position `first` on have hidden states."""
        size = self.block_size
        text.origin = text.cached = -(-first // size) * size
        text.unread.drop_before(text.origin)


class Draft(LevelSpeculator):
    """A level speculator that is a model; `shape` says how its trees grow, and how it draws."""

    def __init__(
        self, name: str, shape: Shape, *, max_rows: int, block_size: int, taps: tuple[int, ...] = ()
    ) -> None:
        """`max_rows` of texts are read in one step; of texts whose hidden states at `taps` the draft reads so
        many are kept until then. Blocks of its cache have `block_size` positions.
        """
        self.name = name
        self.taps = taps
        self._shape = shape
        self._max_rows = max_rows
        self._texts = CachedTexts(block_size=block_size, most_unread=max_rows)
        self._growths: list[Growth] = []  # of the step that is open, one per entry of its plan
        self._seen: list[CachedText] = []  # of the same

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's shape, or of the engine's."""
        return self._shape.most_nodes(request)

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; about how many tokens of each text the draft has not read."""
        self._growths = [self._growth(entry) for entry in plan.entries]
        return self._unread(plan.entries)

    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number, as it has grown so far."""
        return self._growths[entry].tree()

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Keep the target's hidden states of these texts until they are read."""
        for features in texts:
            self._texts.hear(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget requests that ended."""
        for outcome in outcomes:
            if outcome.finished:
                self._forget(outcome.request_id)

    @abstractmethod
    def _growth(self, entry: PlanEntry) -> Growth:
        """A tree that is about to grow, or a text that is about to be read."""

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        """Find what is known of these texts; about how many tokens of each the draft can read."""
        self._seen = [self._texts.of(entry, entry.start) for entry in entries]
        return [text.unread.end - text.cached for text in self._seen]

    def _forget(self, request_id: str) -> None:
        """A request that ended."""
        self._texts.forget(request_id)


class LevelDraft(Draft):
    """A draft whose levels are a pass each.

    One batched pass per depth serves all requests and all frontier nodes:

        pass 1   the text the draft has not seen yet, up to the root     -> children of the root
        pass 2   nodes of depth 1                                        -> their children
        ...      nodes below which nobody wants guesses are never run

    A prompt is read in step with the target: pass 1 holds the chunk that the target computes in this step,
    too. A text that is too long for one step is read over several, and has no tree until it is read.
    """

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Draw below these nodes of these entries' trees, by one pass."""
        parts: list[tuple[int, Rows]] = []
        sites: list[Site] = []
        drawing: list[int] = []
        left = self._max_rows
        for i in trees_first(self._growths, below):
            growth = self._growths[i]
            rows = self._chosen(i, below[i]) if growth.started else self._read(i, left)
            if rows is None:
                continue
            parts.append((i, rows))
            left -= len(rows.token_ids)
            if growth.started:
                drawing.append(i)
                sites.extend(self._sites(i))
        if parts:
            self._draw(parts, sites)
        for i in drawing:
            self._growths[i].descend()
        return {i: ends for i in drawing if (ends := self._ends(i))}

    def _sites(self, entry: int) -> list[Site]:
        """The frontier's nodes, each as a place where children are drawn."""
        return self._growths[entry].sites(self._shape)

    def _ends(self, entry: int) -> Sequence[int]:
        """The nodes of the entry's tree below which the draft can go on."""
        return self._growths[entry].ends

    @abstractmethod
    def _read(self, entry: int, most: int) -> Rows | None:
        """At most so many rows of the text that the draft's cache lacks; the root's, if it has a tree, draws.

        None where the step has no rows left, and where there is nothing to read.
        """

    @abstractmethod
    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        """Rows of nodes that are to get children; they see the text, their ancestors and themselves."""

    @abstractmethod
    def _draw(self, parts: Sequence[tuple[int, Rows]], sites: Sequence[Site]) -> None:
        """Run the rows of these entries, and add the children of the sites, one for each row that draws."""


def moves_along(path: Sequence[int], growth: Growth, root: int, block_table: Sequence[int]) -> list[Move]:
    """What moves the K and V of accepted nodes to where the text has them; nothing where they are there.

    The cache has the root's row at position `root`.
    """
    sources = [root + growth.order[node] for node in path]
    targets = range(root + 1, root + 1 + len(path))
    return [] if sources == [*targets] else [Move(block_table, sources, targets)]


def frontier_rows(growth: Growth, nodes: Sequence[int], root: int, block_table: Sequence[int]) -> Rows:
    """Rows of nodes that are to get children, in a cache that has the root's row at position `root`.

    The n-th node that is run lies n positions behind it, in whatever order the tree grows.
    """
    first = growth.choose(nodes)
    return Rows(
        token_ids=[growth.builder.token_ids[node] for node in growth.frontier],
        start=root + first,
        block_table=block_table,
        logits_from=0,
        parents=growth.above,
    )


Pass = Callable[[Sequence[Rows], Sequence[Site]], None]  # runs the rows, and adds the children of the sites


class DraftModel(LevelDraft):
    """A level speculator that is a language model with the target's tokens."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
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
        super().__init__(name, shape, max_rows=max_rows, block_size=runner.block_size)
        self._runner = runner
        self._vocabulary = vocabulary
        self._last_id = None if reads is None else reads - 1
        self._stand_in = draw

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the K and V of guessed nodes that were committed; forget requests that ended."""
        super().observe(outcomes)
        moves: list[Move] = []
        for outcome in outcomes:
            text = self._texts.known(outcome.request_id)
            if text is None or text.growth is None:
                continue
            growth, text.growth = text.growth, None
            path = growth.path(outcome.committed[:-1])  # the bonus token is the next root
            text.cached = growth.entry.end + len(path)
            moves += moves_along(path, growth, growth.entry.end - 1, growth.entry.block_table)
        self._runner.move(moves)

    def _growth(self, entry: PlanEntry) -> Growth:
        return Growth.shaped(entry, self.name, self._shape, self._runner.max_context - entry.end)

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        self._seen = [self._texts.of(entry, entry.end - 1) for entry in entries]
        return [len(entry.token_ids) - text.cached for entry, text in zip(entries, self._seen, strict=True)]

    def _read(self, entry: int, most: int) -> Rows | None:
        """As LevelDraft says; None, too, where the text leaves the draft no room for a guess."""
        growth, text = self._growths[entry], self._seen[entry]
        planned, start = growth.entry, text.cached
        end = min(planned.end, start + most)
        if end <= start or len(planned.token_ids) >= self._runner.max_context:
            return None
        self._texts.claim(text, planned)
        text.cached = end
        draws = end == planned.end and growth.limit > 0
        if draws:
            text.growth = growth
            growth.started = True
        token_ids = planned.token_ids[start:end]
        if self._last_id is not None:
            token_ids = [min(token_id, self._last_id) for token_id in token_ids]
        return chain_rows(token_ids, start, planned.block_table, logits=draws)

    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        growth = self._growths[entry]
        return frontier_rows(growth, nodes, growth.entry.end - 1, growth.entry.block_table)

    def _draw(self, parts: Sequence[tuple[int, Rows]], sites: Sequence[Site]) -> None:
        rows = [part for _, part in parts]
        if self._stand_in is not None:
            self._stand_in(rows, sites)
        else:
            draw_children(self._runner.launch(rows), sites, self.name, self._vocabulary)
