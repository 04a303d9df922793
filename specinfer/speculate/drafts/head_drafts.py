"""Speculators of draft heads, which read the target's hidden states.

Row i of an EAGLE head has token i + 1 and the target's hidden states of token i, at cache position i:

    text      t0    t1    t2    root |            end = 4
    row       0     1     2          |            (t1, f0) (t2, f1) (root, f2)
    pass 1    ............last       |            -> children of the root
    pass 2                           | 3 4        nodes of depth 1: (node, output of the root's row)

The n-th node that is run has position end - 2 + n. After a step the rows of accepted tokens are read again
with the target's hidden states instead of the head's outputs, so nothing is moved in its cache. A head that
guesses all levels in one pass (P-EAGLE) has rows of mask tokens after the root's, one for each level after
the first, at the positions of the tokens they represent. They are overwritten in every step.

    text      t0 .. t(end-2)     root          |
    cache     K, V from the      a block's rows: the anchor, which is the root, and mask tokens
              target's states    at positions end - 1, end, ...

A block head makes the text's keys and values once from the target's hidden states. The block's own are
overwritten in every step.

    text      ... t(end-3)  t(end-2)   root   |
    heard                      h              |   Medusa's head i guesses the token at position end + i

Medusa keeps only the last hidden state of a text. If a request starts after cached blocks up to its last
token, there is no state yet, and its first tree has only the root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from specinfer.heads.block import BlockText
from specinfer.heads.config import BlockConfig, EagleConfig, MedusaConfig
from specinfer.heads.eagle import EagleModel, EagleText
from specinfer.heads.kinds import AnyHeadModel
from specinfer.heads.medusa import MedusaText
from specinfer.heads.runner import HeadPass, HeadRunner
from specinfer.plan import PlanEntry
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.features import TappedRows, TextFeatures
from specinfer.speculate.drafts.draft import CachedText, CachedTexts, Draft, LevelDraft, frontier_rows
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, named_tokens
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.speculate.drafts.one_pass import OnePassDraft

_MEDUSA_ROWS: Final = 2  # rows that a text counts as for the cost of passes (MedusaModel.probe)


class EagleDraft(LevelDraft):
    """Draft of an EAGLE head with one pass per level."""

    def __init__(
        self,
        name: str,
        runner: HeadRunner[EagleModel],
        shape: Shape,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Make a draft that reads at most `max_rows` rows in one step, and keeps as many of each text."""
        super().__init__(
            name, shape, max_rows=max_rows, block_size=runner.block_size, taps=runner.model.head.taps
        )
        self._runner = runner
        self._vocabulary = vocabulary  # tokens of the head's logits; None: all
        # For each entry, the outputs of its nodes, which their children read.
        self._fed: dict[int, Tensor] = {}

    def _growth(self, entry: PlanEntry) -> Growth:
        return Growth.shaped(entry, self.name, self._shape)

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        self._fed = {}
        return super()._unread(entries)

    def _read(self, entry: int, max_rows: int) -> Rows | None:
        return _eagle_rows(self._texts, self._seen[entry], self._growths[entry], max_rows)

    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        growth, origin = self._growths[entry], self._seen[entry].origin
        table = growth.entry.block_table[origin // self._runner.block_size :]
        return frontier_rows(growth, nodes, growth.entry.end - 2 - origin, table)

    def _draw(self, parts: Sequence[tuple[int, Rows]], sites: Sequence[Site]) -> None:
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
        draw_children(self._runner.model.flight(made.read_RD), sites, self.name, self._vocabulary)
        for (i, _), new in zip(parts, made.made, strict=True):
            if self._growths[i].started:
                assert new is not None
                self._fed[i] = torch.cat((self._fed[i], new)) if i in self._fed else new


class ParallelEagleDraft(OnePassDraft):
    """Draft of an EAGLE head that guesses all levels in one pass."""

    def _growth(self, entry: PlanEntry) -> Growth:
        # The rows of the root and of masks use the blocks reserved for the tree.
        return Growth.of(entry, self.name, min(entry.max_depth, self._head.depth, entry.max_nodes))

    def _text(self, entry: int, max_rows: int) -> tuple[EagleText, int, int] | None:
        text, growth = self._seen[entry], self._growths[entry]
        rows = _eagle_rows(self._texts, text, growth, max_rows)
        if rows is None:
            return None
        count, levels = len(rows.token_ids), growth.limit if growth.started else 0
        states = text.unread.take(count)
        return EagleText(rows, text.origin, states=states, masks=max(0, levels - 1)), count, levels


def _eagle_rows(texts: CachedTexts, text: CachedText, growth: Growth, max_rows: int) -> Rows | None:
    """Return at most `max_rows` unread rows of a text; the root's row has logits.

    Their hidden states are the first unread ones of the text. None if the step has no rows left, or none is
    unread.
    """
    entry, start = growth.entry, text.cached
    count = min(text.unread.end - start, max_rows)
    if count <= 0:
        return None
    texts.claim(text, entry)
    text.cached = end = start + count
    growth.started = end == entry.end - 1 and growth.limit > 0
    table = entry.block_table[text.origin // texts.block_size :]
    return chain_rows(entry.token_ids[start + 1 : end + 1], start - text.origin, table, logits=growth.started)


class BlockDraft(OnePassDraft):
    """Draft of a block head."""

    def _text(self, entry: int, max_rows: int) -> tuple[BlockText, int, int] | None:
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
        if not (part.count or part.rows):
            return None
        return part, part.count, max(0, part.rows - self._head.skipped)

    def _guess(self, entries: Sequence[int], texts: Sequence[BlockText]) -> HeadPass:
        made = super()._guess(entries, texts)
        for i, last_D in zip(entries, made.made, strict=True):
            if last_D is not None:
                self._seen[i].last_D = last_D
        return made

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


class MedusaDraft(OnePassDraft):
    """Draft of Medusa heads, which have no cache."""

    def __init__(self, *args: Any, **limits: Any) -> None:
        """See OnePassDraft."""
        super().__init__(*args, **limits)
        self._last: dict[str, tuple[int, TappedRows]] = {}  # end and last state of each text

    def receive_states(self, texts: Sequence[TextFeatures]) -> None:
        """Keep the last hidden state of each text."""
        for features in texts:
            count = len(features.states)
            last = features.states.part(count - 1, count).compact()
            self._last[features.entry.request.request_id] = features.end, last

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        """See Draft; each entry with a tree counts as the rows of one text."""
        return [_MEDUSA_ROWS * (self._state(entry) is not None) for entry in entries]

    def _forget(self, request_id: str) -> None:
        self._last.pop(request_id, None)

    def _text(self, entry: int, max_rows: int) -> tuple[MedusaText, int, int] | None:
        growth = self._growths[entry]
        state = self._state(growth.entry)
        if growth.limit < 1 or state is None:
            return None
        return MedusaText(state, self._head.depth), 0, self._head.depth

    def _state(self, entry: PlanEntry) -> TappedRows | None:
        """Return the hidden state of the token before the entry's root; None without a tree or a state."""
        end, state = self._last.get(entry.request.request_id, (0, None))
        return state if entry.has_tree and end == entry.end - 1 else None


def _eagle(name: str, runner: HeadRunner[EagleModel], shape: Shape, **limits: Any) -> Draft:
    one_pass = runner.model.head.mask_token_id is not None
    return (ParallelEagleDraft.of if one_pass else EagleDraft)(name, runner, shape, **limits)


# By the names of heads/kinds.py. Each takes the arguments of EagleDraft.
HEAD_DRAFTS: Final[Mapping[str, Callable[..., Draft]]] = {
    EagleConfig.kind: _eagle,
    BlockConfig.kind: BlockDraft.of,
    MedusaConfig.kind: MedusaDraft.of,
}


def head_draft(
    name: str, model: AnyHeadModel, shape: Shape, *, num_blocks: int, block_size: int, max_rows: int
) -> tuple[HeadRunner[AnyHeadModel], Draft]:
    """Return the runner of a loaded head, with its own cache of `num_blocks` blocks, and its draft."""
    runner = HeadRunner(model, num_blocks=num_blocks, block_size=block_size)
    vocabulary = named_tokens(model.ids, model.config.vocab_size)
    return runner, HEAD_DRAFTS[model.head.kind](name, runner, shape, max_rows=max_rows, vocabulary=vocabulary)
