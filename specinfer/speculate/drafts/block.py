"""A block head as a speculator: all levels of a tree from one pass.

    text      t0 .. t(end-2)     root          |
    cache     K, V made of the   the block's rows: the anchor, which is the root, and mask tokens
              target's states    at positions end - 1, end, ...

The text's keys and values are made of the target's hidden states when they are there, once. The block's own
are overwritten in every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from specinfer.plan import StepPlan
from specinfer.request import Request
from specinfer.runtime.features import TextFeatures
from specinfer.runtime.head_runner import BlockGuesses, BlockText
from specinfer.speculate.drafts.growth import Growth, Guessed, trees_first
from specinfer.speculate.drafts.head_texts import HeadText, HeadTexts
from specinfer.speculate.drafts.one_pass import OnePassTrees
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tree import TokenTree


class GuessedBlock(Protocol):
    """What of a block head decides which rows its blocks have (heads/config.py)."""

    @property
    def block_size(self) -> int:
        """Rows of a block, the anchor among them."""
        ...

    @property
    def skipped(self) -> int:
        """Rows of a block, from its first on, that guess nothing."""
        ...

    @property
    def depth(self) -> int:
        """Tokens of a block that are guessed."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a row of the block sees those before it alone."""
        ...

    @property
    def reads_last(self) -> bool:
        """Whether a row begins with what was made of the token before the anchor."""
        ...


class BlockHeadRunner(Protocol):
    """A block head with its cache (runtime/head_runner.py)."""

    @property
    def block_size(self) -> int:
        """Cache positions of a block of the cache."""
        ...

    @property
    def head(self) -> GuessedBlock:
        """The head."""
        ...

    def step(self, texts: Sequence[BlockText]) -> BlockGuesses:
        """Read these texts, and one pass over the blocks behind them; writes K and V of all their rows."""
        ...


class BlockDraft(LevelSpeculator):
    """A level speculator that is a block head: its trees are whole after their first level."""

    def __init__(
        self,
        name: str,
        runner: BlockHeadRunner,
        trees: OnePassTrees,
        *,
        taps: tuple[int, ...],
        max_rows: int,
    ) -> None:
        """`max_rows` of texts are read in one step, and kept of each text until they are.

        `trees` are grown of what the runner makes, and of this head alone.
        """
        self.name = name
        self.taps = taps
        self._runner = runner
        self._head = runner.head
        self._trees = trees
        self._max_rows = max_rows
        self._texts = HeadTexts(block_size=runner.block_size, most_unread=max_rows)
        self._growths: list[Growth] = []  # of the step that is open, one per entry of its plan
        self._seen: list[HeadText] = []  # of the same

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or the most that is grown of any."""
        return self._trees.most_nodes(request)

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; the tokens of each text that wait to be read."""
        self._seen = [self._texts.of(entry) for entry in plan.entries]
        self._growths = [
            Growth.of(entry, self.name, min(entry.max_depth, self._head.depth)) for entry in plan.entries
        ]
        return [text.unread.end - text.cached for text in self._seen]

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Guess about as much as is verified."""
        self._trees.see_choices(guessed, chosen)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Read these entries' texts, and grow the whole tree of each that has one; none has room for more."""
        texts: list[BlockText] = []
        known: list[HeadText] = []
        guessed: list[Guessed] = []
        left, first, skipped = self._max_rows, 0, self._head.skipped
        for i in trees_first(self._growths, below):
            text, growth = self._seen[i], self._growths[i]
            part = self._part(text, growth, left)
            if not (part.count or part.rows):
                continue
            left -= part.count
            texts.append(part)
            known.append(text)
            if part.rows:
                levels = part.rows - skipped
                guessed.append(self._trees.guessed(growth, first, levels))
                first += levels
        if not texts:
            return {}
        made = self._runner.step(texts)
        for text, last_D in zip(known, made.last, strict=True):
            if last_D is not None:
                text.last_D = last_D
        if guessed:
            self._trees.grow(guessed, made.read_RD, made.logits_RU)
        return {}

    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number."""
        return self._growths[entry].tree()

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Keep the target's hidden states of these texts until they are read."""
        for features in texts:
            self._texts.hear(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget requests that ended."""
        for outcome in outcomes:
            if outcome.finished:
                self._texts.forget(outcome.request_id)

    def _part(self, text: HeadText, growth: Growth, most: int) -> BlockText:
        """At most so many of the rows that wait to be read, and the block behind them."""
        entry = growth.entry
        table = entry.block_table[text.origin // self._runner.block_size :]
        part = BlockText(table, text.origin, begin=text.cached - text.origin, last=text.last_D)
        if (count := min(text.unread.end - text.cached, most)) > 0:
            self._texts.claim(text, entry)
            part.states, part.count = text.unread.take(count), count
            text.cached += count
        part.rows = self._rows(text, growth, read=count > 0)
        part.anchor = entry.token_ids[entry.end - 1]
        return part

    def _rows(self, text: HeadText, growth: Growth, *, read: bool) -> int:
        """The rows of an entry's block; 0 where it has no tree, or its text is not read to the end."""
        entry, head = growth.entry, self._head
        if growth.limit < 1 or text.cached != entry.end - 1:
            return 0
        if head.reads_last and not read and text.last_D is None:
            return 0  # the token before the root was read for another request: only its K and V are there
        wanted = growth.limit + head.skipped if head.causal else head.block_size
        count = min(wanted, entry.max_nodes)  # for so many positions there are blocks
        return count if count > head.skipped else 0
