"""A block head as a speculator: all levels of a tree from one pass.

    text      t0 .. t(end-2)     root          |
    cache     K, V made of the   the block's rows: the anchor, which is the root, and mask tokens
              target's states    at positions end - 1, end, ...

The text's keys and values are made of the target's hidden states when they are there, once. The block's own
are overwritten in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specinfer.heads.block_model import BlockModel
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.features import TappedRows, TextFeatures
from specinfer.runtime.head_runner import HeadRows
from specinfer.speculate.draft_vocabulary import DraftVocabulary
from specinfer.speculate.growth import Growth, Guessed, Shape, trees_first
from specinfer.speculate.head_texts import HeadText, HeadTexts
from specinfer.speculate.one_pass import OnePassTrees
from specinfer.speculate.speculator import Outcome
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.expansion import Expansion


class BlockHeadRunner(Protocol):
    """A block head with its cache (runtime/head_runner.py)."""

    @property
    def block_size(self) -> int:
        """Cache positions of a block of the cache."""
        ...

    @property
    def model(self) -> BlockModel:
        """The head."""
        ...

    def read(self, parts: Sequence[HeadRows], states: Sequence[TappedRows]) -> Tensor:
        """Write K and V of texts' rows; what was made of their hidden states, [T, D]."""
        ...

    def guess(
        self, parts: Sequence[HeadRows], last: Sequence[Tensor], chosen: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Of chosen rows of these blocks, behind these last rows, what the output layer reads, and logits."""
        ...


class BlockDraft:
    """A level speculator that is a block head: its trees are whole after their first level.

    `expansion` shapes trees that are not grown best first, `rule` says how it draws.
    """

    def __init__(
        self,
        name: str,
        runner: BlockHeadRunner,
        expansion: Expansion,
        rule: DrawRule,
        *,
        taps: tuple[int, ...],
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """`max_rows` of texts are read in one step, and kept of each text until they are."""
        self.name = name
        self.taps = taps
        self._runner = runner
        self._model = runner.model
        self._trees = OnePassTrees(name, runner.model, Shape(expansion, rule), vocabulary)
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
            Growth.of(entry, self.name, min(entry.max_depth, self._model.head.depth))
            for entry in plan.entries
        ]
        return [text.unread.end - text.cached for text in self._seen]

    def deepen(self, which: Sequence[int]) -> list[int]:
        """Read these entries' texts, and grow the whole tree of each that has one; none has room for more."""
        order = trees_first(self._growths, which)
        self._read(order)
        blocks: list[HeadRows] = []
        last: list[Tensor] = []  # row of the text before each of them
        guessed: list[Guessed] = []
        chosen: list[int] = []  # rows of the pass that guess
        skipped = 0 if self._model.head.sample_from_anchor else 1
        row = levels = 0
        for i in order:
            rows = self._block(i, skipped)
            if rows is None:
                continue
            count = len(rows.rows.token_ids)
            blocks.append(rows)
            if (last_D := self._seen[i].last_D) is not None:
                last.append(last_D)
            guessed.append(self._trees.guessed(self._growths[i], levels, count - skipped))
            chosen.extend(range(row + skipped, row + count))
            row, levels = row + count, levels + count - skipped
        if blocks:
            self._trees.grow(guessed, *self._runner.guess(blocks, last, chosen))
        return []

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

    def _read(self, order: Sequence[int]) -> None:
        """Write K and V of what waits of these entries' texts, as far as the step has rows."""
        parts: list[HeadRows] = []
        states: list[TappedRows] = []
        read: list[HeadText] = []
        left = self._max_rows
        for i in order:
            text, entry = self._seen[i], self._growths[i].entry
            count = min(text.unread.end - text.cached, left)
            if count <= 0:
                continue
            left -= count
            self._texts.claim(text, entry)
            place, table = text.cached - text.origin, self._table(text, entry)
            parts.append(HeadRows(chain_rows([0] * count, place, table, logits=False), text.origin))
            states.extend(text.unread.take(count))
            text.cached += count
            read.append(text)
        if not parts:
            return
        made_TD = self._runner.read(parts, states)
        if not self._model.head.reads_last:
            return
        end = 0
        for part, text in zip(parts, read, strict=True):
            end += len(part.rows.token_ids)
            text.last_D = made_TD[end - 1]

    def _block(self, i: int, skipped: int) -> HeadRows | None:
        """The rows of an entry's block; None where it has no tree, or its text is not read to the end."""
        growth, text, head = self._growths[i], self._seen[i], self._model.head
        entry = growth.entry
        if growth.limit < 1 or text.cached != entry.end - 1:
            return None
        if head.reads_last and text.last_D is None:
            return None  # the token before the root was read for another request: only its K and V are there
        wanted = growth.limit + skipped if head.causal else head.block_size
        count = min(wanted, entry.max_nodes)  # for so many positions there are blocks
        if count <= skipped:
            return None
        ids = [entry.token_ids[entry.end - 1], *[head.mask_token_id] * (count - 1)]
        return HeadRows(Rows(ids, text.cached - text.origin, self._table(text, entry), 0), text.origin)

    def _table(self, text: HeadText, entry: PlanEntry) -> Sequence[int]:
        return entry.block_table[text.origin // self._runner.block_size :]
