"""Speculators of draft heads, which read the target's hidden states.

Row i of an EAGLE head has token i + 1 and the target's hidden states of token i, at cache position i:

    text      t0    t1    t2    root |            end = 4
    row       0     1     2          |            (t1, f0) (t2, f1) (root, f2)
    pass 1    ............last       |            -> children of the root
    pass 2                           | 3 4        nodes of depth 1: (node, output of the root's row)

The n-th node that is run has position end - 2 + n. After a step the rows of accepted tokens are read again
with the target's hidden states instead of the head's outputs, so nothing is moved in its cache.

    text      t0 .. t(end-2)     root          |
    cache     K, V from the      a block's rows: the anchor, which is the root, and mask tokens
              target's states    at positions end - 1, end, ...

A block head makes the text's keys and values once from the target's hidden states. The block's own are
overwritten in every step. Its trees are complete after the first call: one pass guesses all levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specinfer.heads.assistant import AssistantModel
from specinfer.heads.block import BlockModel, BlockText
from specinfer.heads.checkpoint import AnyHeadModel
from specinfer.heads.eagle import EagleText, RecursiveModel
from specinfer.heads.runner import HeadRunner
from specinfer.plan import PlanEntry
from specinfer.request import Request
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.features import TextFeatures, UnreadFeatures
from specinfer.runtime.flight import Flight
from specinfer.runtime.kv_cache import KvCache
from specinfer.speculate.drafts.draft import CachedText, Draft, LevelDraft, frontier_rows
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, named_tokens
from specinfer.speculate.drafts.growth import Growth, GuessedTree, Shape, trees_first
from specinfer.speculate.drafts.one_pass import OnePassTrees
from specinfer.tree import TokenTree


class EagleDraft(LevelDraft):
    """Draft of an EAGLE head or an MTP layer, with one pass per level."""

    def __init__(
        self,
        name: str,
        runner: HeadRunner[RecursiveModel[Any]],
        shape: Shape,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Make a draft that reads at most `max_rows` rows in one step, and keeps as many of each text."""
        super().__init__(
            *(name, runner, shape),
            max_rows=max_rows,
            vocabulary=vocabulary,
            taps=runner.model.head.taps,
            cache=runner.cache.kv,
        )
        self._runner = runner
        # For each entry, the outputs of its nodes, which their children read.
        self._fed: dict[int, Tensor] = {}

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        self._fed = {}
        return super()._unread(entries)

    def _read(self, entry: int, max_rows: int) -> Rows | None:
        """See LevelDraft. The rows' hidden states are the first unread ones of the text."""
        text, growth = self._seen[entry], self._growths[entry]
        planned, start = growth.entry, text.cached
        count = min(text.unread.end - start, max_rows)
        if count <= 0:
            return None
        self._texts.claim(text, planned)
        text.cached = end = start + count
        growth.started = end == planned.end - 1 and growth.limit > 0
        table = planned.block_table[text.origin // self._texts.block_size :]
        tokens = planned.token_ids[start + 1 : end + 1]
        return chain_rows(tokens, start - text.origin, table, logits=growth.started)

    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        growth, origin = self._growths[entry], self._seen[entry].origin
        table = growth.entry.block_table[origin // self._runner.block_size :]
        return frontier_rows(growth, nodes, growth.entry.end - 2 - origin, table)

    def _run(self, parts: Sequence[tuple[int, Rows]], *, few: bool) -> Flight:
        """See LevelDraft; nodes read the outputs of their parents' rows."""
        texts: list[EagleText] = []
        for i, rows in parts:
            text, count = self._seen[i], len(rows.token_ids)
            if rows.parents is None:
                texts.append(EagleText(rows, text.origin, states=text.unread.take(count)))
            else:
                fed = self._fed[i]
                above = torch.tensor(self._growths[i].above[-count:], device=fed.device)
                texts.append(EagleText(rows, text.origin, fed_TD=fed.index_select(0, above)))
        made = self._runner.guess(texts)
        for (i, _), new in zip(parts, made.made, strict=True):
            if self._growths[i].started:
                assert new is not None
                self._fed[i] = torch.cat((self._fed[i], new)) if i in self._fed else new
        return self._runner.flight(made, few=few)


class AssistantDraft(EagleDraft):
    """Draft of an assistant, which finds the text in its target's cache, up to the root.

    It needs the hidden state of the token before the root. If that was computed for another request, whose
    blocks this one shares, it guesses from the second step on.
    """

    def receive_states(self, texts: Sequence[TextFeatures]) -> None:
        """Keep the hidden state of each text's last token."""
        for features in texts:
            count, text = len(features.states), self._texts.of(features.entry, 0)
            text.unread = UnreadFeatures(features.end - 1)
            text.unread.add(features.states.part(count - 1, count))

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        super()._unread(entries)
        return [1] * len(entries)

    def _read(self, entry: int, max_rows: int) -> Rows | None:
        text, growth = self._seen[entry], self._growths[entry]
        planned, unread = growth.entry, text.unread
        root = planned.end - 1
        known = unread.first < unread.end == root == planned.start
        growth.started = known and growth.limit > 0 and max_rows > 0
        table = planned.block_table
        return chain_rows([planned.token_ids[root]], root, table, logits=True) if growth.started else None

    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        growth = self._growths[entry]
        return frontier_rows(growth, nodes, growth.entry.end - 1, growth.entry.block_table)


class BlockDraft(Draft):
    """Draft of a block head."""

    def __init__(
        self,
        name: str,
        runner: HeadRunner[BlockModel],
        shape: Shape,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Make a draft with logits for `vocabulary` (None: all); the other arguments are those of Draft."""
        head = runner.model.head
        self._trees = OnePassTrees(name, runner.model, shape, vocabulary)
        super().__init__(
            *(name, self._trees.shape),
            max_rows=max_rows,
            block_size=runner.block_size,
            taps=head.taps,
            cache=runner.cache.kv,
        )
        self._runner = runner
        self._head = head

    def max_nodes(self, request: Request) -> int:
        """Return the nodes of a full tree of the request's expansion, or the maximum of any tree."""
        return self._trees.max_nodes(request)

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Adjust the size of trees to the number of verified nodes."""
        self._trees.see_choices(guessed, chosen)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Read these entries' texts, and grow each tree completely; returns no nodes to extend."""
        asked: list[int] = []
        texts: list[BlockText] = []
        growing: list[GuessedTree] = []
        left, first = self._max_rows, 0
        for i in trees_first(self._growths, below):
            if (text := self._text(i, left)) is None:
                continue
            asked.append(i)
            texts.append(text)
            left -= text.count
            if (levels := text.rows - self._head.skipped) > 0:
                growing.append(self._trees.open(self._growths[i], first, levels))
                first += levels
        if texts:
            made = self._runner.guess(texts)
            for i, last_D in zip(asked, made.made, strict=True):
                if last_D is not None:
                    self._seen[i].last_D = last_D
            if growing:
                self._trees.grow(growing, made)
        return {}

    def _growth(self, entry: PlanEntry) -> Growth:
        return Growth.of(entry, self.name, min(entry.max_depth, self._head.depth))

    def _text(self, entry: int, max_rows: int) -> BlockText | None:
        """Return an entry's part of the pass, which reads at most `max_rows` tokens; None: it has none."""
        text, growth = self._seen[entry], self._growths[entry]
        planned = growth.entry
        table = planned.block_table[text.origin // self._texts.block_size :]
        part = BlockText(table, text.origin, begin=text.cached - text.origin, last=text.last_D)
        if (count := min(text.unread.end - text.cached, max_rows)) > 0:
            self._texts.claim(text, planned)
            part.states, part.count = text.unread.take(count), count
            text.cached += count
        part.rows = self._block(text, growth, read=count > 0)
        part.anchor = planned.token_ids[planned.end - 1]
        return part if part.count or part.rows else None

    def _block(self, text: CachedText, growth: Growth, *, read: bool) -> int:
        """Return the number of rows of an entry's block; 0 without a tree, or if its text is not read."""
        entry, head = growth.entry, self._head
        if growth.limit < 1 or text.cached != entry.end - 1:
            return 0
        if head.reads_last and not read and text.last_D is None:
            return 0  # the token before the root was read for another request, which left only K and V
        wanted = growth.limit + head.skipped if head.causal else head.block_size
        count = min(wanted, entry.max_nodes)  # limited by the reserved blocks
        return count if count > head.skipped else 0


def head_draft(
    name: str,
    model: AnyHeadModel,
    shape: Shape,
    *,
    num_blocks: int,
    block_size: int,
    max_rows: int,
    target: KvCache,
    shortlist: int | None = None,
) -> tuple[HeadRunner[Any], Draft]:
    """Return the runner of a loaded head, with its own cache of `num_blocks` blocks, and its draft.

    `target` is the target's cache, which has as many blocks. `shortlist` is as in HeadRunner.
    """
    runner: HeadRunner[Any] = HeadRunner(
        model, num_blocks=num_blocks, block_size=block_size, target=target, shortlist=shortlist
    )
    vocabulary = named_tokens(model.ids, model.config.vocab_size)
    kind: type[EagleDraft | BlockDraft] = EagleDraft if isinstance(model, RecursiveModel) else BlockDraft
    if isinstance(model, AssistantModel):
        kind = AssistantDraft
    return runner, kind(name, runner, shape, max_rows=max_rows, vocabulary=vocabulary)
