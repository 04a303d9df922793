"""Draft and LevelDraft: level speculators over a cache of texts.

    0 ............ origin ............ cached ............ end of the text
    not in cache   in the cache        to be read

A draft writes K and V to the blocks that the scheduler gave the request. Requests that share blocks share
what was written there.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specinfer.heads.runner import HeadRunner
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows
from specinfer.runtime.features import TextFeatures, UnreadFeatures
from specinfer.runtime.flight import Flight
from specinfer.runtime.kv_cache import KvCache
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculate.drafts.draft_tokens import CommonTokens, DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Shape, trees_first
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tree import TokenTree


@dataclass(slots=True)
class CachedText:
    """A draft's state for one request between steps."""

    generation: int
    cached: int  # positions origin..cached-1 are in its cache
    claimed: int  # leading blocks of the table whose contents are final
    unread: UnreadFeatures  # the target's hidden states that a head has not read
    origin: int = 0  # the first position it sees, at the start of a block
    growth: Growth | None = None  # the last tree, until its outcome is known; draft models only
    begun: bool = False  # True once a draft model has read rows of it
    last_D: Tensor | None = None  # a head's output for the last row it read, if it needs that


class CachedTexts:
    """One draft's state for all requests.

    Shared blocks that another request has filled are usable if the draft has read their text. A head also
    needs the target's hidden states, which exist only for tokens that the target computes. If some are
    missing, the head reads from the next block on and does not see the text before it: its guesses get worse,
    and the output does not change.
    """

    def __init__(self, *, block_size: int, max_unread: int = 0, cache: KvCache | None = None) -> None:
        """`cache` is the draft's; None if its rows are useless without recurrent states."""
        self.block_size = block_size
        self.cache = cache
        # Called with each final block of a request's text and its hash.
        self.keep: Callable[[Request, int, bytes], None] | None = None
        self._max_unread = max_unread  # maximum tokens of a text whose hidden states are kept
        self._texts: dict[str, CachedText] = {}
        self._holds: dict[int, bytes] = {}  # block -> hash of the text whose K and V the draft has there

    def of(self, entry: PlanEntry, limit: int) -> CachedText:
        """Return the state of the entry's request; a preemption discards it.

        A new text starts after the shared blocks that the draft has read, up to `limit` positions.
        """
        name = entry.request.request_id
        text = self._texts.get(name)
        if text is None or text.generation != entry.generation:
            text = self._texts[name] = self._start(entry, limit)
        return text

    def known(self, request_id: str) -> CachedText | None:
        """Return the state of a request, or None."""
        return self._texts.get(request_id)

    def receive_states(self, features: TextFeatures) -> None:
        """Keep a text's new hidden states until they are read."""
        entry = features.entry
        text = self.of(entry, entry.start)
        unread = text.unread
        if features.start > unread.end:  # a gap: these tokens were computed without this head
            self._miss(text, features.start)
        # Tokens in shared blocks, and those before `origin`, are not read.
        known, count = max(0, unread.end - features.start), len(features.states)
        if known < count:
            unread.add(features.states.part(known, count) if known else features.states)
        if unread.end - unread.first > self._max_unread:
            self._miss(text, unread.end - self._max_unread)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that ended."""
        self._texts.pop(request_id, None)

    def holds(self, block: int, key: bytes) -> bool:
        """Return whether a block has the rows of the text with hash `key`."""
        return self._holds.get(block) == key

    def load(self, block: int, key: bytes, rows: bytearray) -> None:
        """Write a block's rows that another engine had read, of the text with hash `key`."""
        assert self.cache is not None
        self.cache.write_rows(block * self.block_size, self.block_size, rows)
        self._holds[block] = key

    def claim(self, text: CachedText, entry: PlanEntry) -> None:
        """Record the hashes of blocks whose contents are final, and forget those about to be written."""
        full = min(text.cached // self.block_size, len(entry.block_hashes))
        written = full
        if text.origin:  # these blocks do not depend on the whole text before them
            written = text.origin // self.block_size
        else:
            for block in range(text.claimed, full):
                number, key = entry.block_table[block], entry.block_hashes[block]
                self._holds[number] = key
                if self.keep is not None:
                    self.keep(entry.request, number, key)
            text.claimed = max(text.claimed, full)
        for number in entry.block_table[written:]:
            self._holds.pop(number, None)

    def _start(self, entry: PlanEntry, limit: int) -> CachedText:
        held = 0
        for block, key in zip(entry.block_table, entry.block_hashes, strict=False):
            if not self.holds(block, key) or (held + 1) * self.block_size > limit:
                break
            held += 1
        cached = held * self.block_size
        return CachedText(entry.generation, cached, held, UnreadFeatures(cached))

    def _miss(self, text: CachedText, first: int) -> None:
        """Restart at the first block whose tokens, from position `first` on, have hidden states."""
        size = self.block_size
        text.origin = text.cached = -(-first // size) * size
        text.unread.drop_before(text.origin)


class Draft(LevelSpeculator):
    """A level speculator with a model; `shape` gives the form of its trees and its draw rule."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        *,
        max_rows: int,
        block_size: int,
        taps: tuple[int, ...] = (),
        cache: KvCache | None = None,
    ) -> None:
        """Make a draft that reads at most `max_rows` rows of texts in one step.

        If it reads hidden states (`taps`), as many rows are kept per text until then. Blocks of its cache
        have `block_size` positions; `cache` is for `CachedTexts`.
        """
        self.name = name
        self.taps = taps
        self._shape = shape
        self._max_rows = max_rows
        self._texts = CachedTexts(block_size=block_size, max_unread=max_rows, cache=cache)
        self._growths: list[Growth] = []  # one per entry of the step's plan
        self._seen: list[CachedText] = []  # likewise

    @property
    def texts(self) -> CachedTexts:
        """Its state for all requests."""
        return self._texts

    def max_nodes(self, request: Request) -> int:
        """Return the nodes of a full tree of the request's or the engine's shape, without its root."""
        return self._shape.max_nodes(request)

    def begin(self, plan: StepPlan) -> list[int]:
        """Start a step; returns about how many tokens of each text the draft has not read."""
        self._growths = [self._growth(entry) for entry in plan.entries]
        return self._unread(plan.entries)

    def tree(self, entry: int) -> TokenTree:
        """Return the present tree of an entry, given by its number in the plan."""
        return self._growths[entry].tree()

    def receive_states(self, texts: Sequence[TextFeatures]) -> None:
        """Keep the target's hidden states of these texts until they are read."""
        for features in texts:
            self._texts.receive_states(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Drop the state of requests that ended."""
        for outcome in outcomes:
            if outcome.finished:
                self._forget(outcome.request_id)

    def _growth(self, entry: PlanEntry) -> Growth:
        """Return an entry's initial tree, or its text to read."""
        return Growth.shaped(entry, self.name, self._shape)

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        """Look up the state of these texts; returns about how many tokens of each the draft can read."""
        self._seen = [self._texts.of(entry, entry.start) for entry in entries]
        return [text.unread.end - text.cached for text in self._seen]

    def _forget(self, request_id: str) -> None:
        """Drop the state of a request that ended."""
        self._texts.forget(request_id)


class LevelDraft(Draft):
    """A draft that runs one pass per level.

    One batched pass per depth serves all requests and all frontier nodes:

        pass 1   the unread text, up to the root     -> children of the root
        pass 2   nodes of depth 1                    -> their children
        ...      only nodes that the policy selects are run

    The draft prefills a prompt together with the target: pass 1 includes the chunk that the target computes
    in this step. A text that is too long for one step is read over several, and has no tree before that is
    done.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner | HeadRunner[Any],
        shape: Shape,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
        taps: tuple[int, ...] = (),
        cache: KvCache | None = None,
    ) -> None:
        """Make a draft with logits for `vocabulary` (None: all); the other arguments are those of Draft."""
        super().__init__(name, shape, max_rows=max_rows, block_size=runner.block_size, taps=taps, cache=cache)
        self._vocabulary = vocabulary
        self._shortlist: CommonTokens | None = None
        if runner.shortlist is not None:
            size = runner.model.config.vocab_size if vocabulary is None else vocabulary.size
            self._shortlist = CommonTokens(runner.shortlist, size)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Draw children below these nodes of these entries' trees in one pass."""
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
                sites.extend(growth.sites(self._shape))
        if parts:
            texts, short = (self._growths[i].entry.token_ids for i, _ in parts), self._shortlist
            few = short is not None and all(map(short.has_most_of, texts))
            draw_children(self._run(parts, few=few), sites, short if few else self._vocabulary)
        for i in drawing:
            self._growths[i].descend()
        return {i: ends for i in drawing if (ends := self._growths[i].ends)}

    @abstractmethod
    def _read(self, entry: int, max_rows: int) -> Rows | None:
        """Return at most `max_rows` rows of the unread text; the root's row has logits if there is a tree.

        None if the step has no rows left or there is nothing to read.
        """

    @abstractmethod
    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        """Return rows of nodes to extend; they attend to the text, their ancestors and themselves."""

    @abstractmethod
    def _run(self, parts: Sequence[tuple[int, Rows]], *, few: bool) -> Flight:
        """Run the rows of these entries; with `few`, make the logits of the shortlist alone."""


def moves_along(path: Sequence[int], growth: Growth, root: int, block_table: Sequence[int]) -> list[Move]:
    """Return the moves of accepted nodes' K and V to their positions in the text; none if they are there.

    The cache has the root's row at position `root`.
    """
    sources = [root + growth.order[node] for node in path]
    targets = range(root + 1, root + 1 + len(path))
    return [] if sources == [*targets] else [Move(block_table, sources, targets, growth.entry.states)]


def frontier_rows(growth: Growth, nodes: Sequence[int], root: int, block_table: Sequence[int]) -> Rows:
    """Return rows of nodes to extend, in a cache that has the root's row at position `root`.

    The n-th node that is run has position `root` + n, in any order of growth.
    """
    first = growth.choose(nodes)
    return Rows(
        token_ids=[growth.builder.token_ids[node] for node in growth.frontier],
        start=root + first,
        block_table=block_table,
        logits_from=0,
        parents=growth.above,
        states=growth.entry.states,
    )
