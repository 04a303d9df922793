"""An EAGLE head as a speculator: it reads the target's hidden states, and grows a tree level by level.

Row i of a text is of token i + 1 and the target's hidden states of token i, at cache position i:

    text      t0    t1    t2    root |            end = 4
    row       0     1     2          |            (t1, f0) (t2, f1) (root, f2)
    pass 1    ............last       |            -> children of the root
    pass 2                           | 3 4        nodes of depth 1: (node, what the root's row put out)

The n-th node that is run lies at position end - 2 + n. Behind a step the rows of accepted tokens are read
again, with the target's hidden states instead of the head's own: so nothing is moved in its cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.features import TextFeatures
from specinfer.runtime.flight import Flight
from specinfer.runtime.head_runner import HeadRows
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Shape, trees_first
from specinfer.speculate.drafts.head_texts import HeadText, HeadTexts
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tree import TokenTree


class EagleHeadRunner(Protocol):
    """An EAGLE head with its cache (runtime/head_runner.py)."""

    @property
    def block_size(self) -> int:
        """Cache positions of a block."""
        ...

    def fused(self, taps_TND: Tensor) -> Tensor:
        """The features of a text's rows, [T, D]."""
        ...

    def launch(self, parts: Sequence[HeadRows], feature_TD: Tensor) -> tuple[Flight, Tensor]:
        """Run rows; the flight of those that want logits, and what rows below each are fed, [T, D]."""
        ...


@dataclass(slots=True)
class _Grown:
    """A tree, and what rows below its nodes that were run are fed: [nodes, D]."""

    growth: Growth
    text: HeadText
    fed: Tensor | None = None  # in the order in which they were


class EagleDraft(LevelSpeculator):
    """A level speculator that is an EAGLE head; `shape` says how its trees grow, and how it draws."""

    def __init__(
        self,
        name: str,
        runner: EagleHeadRunner,
        shape: Shape,
        *,
        taps: tuple[int, ...],
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """`max_rows` of texts are read in one step, and kept of each text until they are."""
        self.name = name
        self.taps = taps
        self._runner = runner
        self._shape = shape
        self._max_rows = max_rows
        self._vocabulary = vocabulary  # of the head's logits; None: all ids
        self._texts = HeadTexts(block_size=runner.block_size, most_unread=max_rows)
        self._grown: list[_Grown] = []  # of the step that is open, one per entry of its plan

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's shape, or of the engine's."""
        return self._shape.most_nodes(request)

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; the rows of each text that wait to be read."""
        self._grown = [_Grown(self._growth(entry), self._texts.of(entry)) for entry in plan.entries]
        return [grown.text.unread.end - grown.text.cached for grown in self._grown]

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Draw below these nodes of these entries' trees, by one pass of the head."""
        parts: list[HeadRows] = []
        features: list[Tensor] = []
        sites: list[Site] = []
        drawing: list[tuple[int, int, int]] = []  # an entry that gets a level, its rows' place in the pass
        left, row = self._max_rows, 0
        for i in trees_first([grown.growth for grown in self._grown], below):
            grown = self._grown[i]
            part = self._chosen(grown, below[i]) if grown.growth.started else self._read(grown, left)
            if part is None:
                continue
            rows, feature_TD = part
            count = len(rows.rows.token_ids)
            parts.append(rows)
            features.append(feature_TD)
            left -= count
            if rows.rows.logits_from < count:
                drawing.append((i, row + rows.rows.logits_from, row + count))
                sites.extend(grown.growth.sites(self._shape))
            row += count
        if parts:
            flight, fed_TD = self._runner.launch(parts, torch.cat(features))
            draw_children(flight, sites, self.name, self._vocabulary)
            for i, first, behind in drawing:
                grown, new = self._grown[i], fed_TD[first:behind]
                grown.fed = new if grown.fed is None else torch.cat((grown.fed, new))
                grown.growth.descend()
        return {i: ends for i, _, _ in drawing if (ends := self._grown[i].growth.ends)}

    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number, as it has grown so far."""
        return self._grown[entry].growth.tree()

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Keep the target's hidden states of these texts until they are read."""
        for features in texts:
            self._texts.hear(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget requests that ended."""
        for outcome in outcomes:
            if outcome.finished:
                self._texts.forget(outcome.request_id)

    def _growth(self, entry: PlanEntry) -> Growth:
        return Growth.shaped(entry, self.name, self._shape)

    def _read(self, grown: _Grown, most: int) -> tuple[HeadRows, Tensor] | None:
        """At most so many of the rows that wait, and their features; the root's has logits.

        None where the step has no rows left, or none waits.
        """
        text, growth = grown.text, grown.growth
        entry, start = growth.entry, text.cached
        count = min(text.unread.end - start, most)
        if count <= 0:
            return None
        self._texts.claim(text, entry)
        feature_TD = self._runner.fused(torch.cat([part.copied() for part in text.unread.take(count)]))
        text.cached = end = start + count
        draws = end == entry.end - 1 and growth.limit > 0
        growth.started = draws
        tokens = entry.token_ids[start + 1 : end + 1]
        first = text.origin // self._runner.block_size
        rows = chain_rows(tokens, start - text.origin, entry.block_table[first:], logits=draws)
        return HeadRows(rows, text.origin), feature_TD

    def _chosen(self, grown: _Grown, nodes: Sequence[int]) -> tuple[HeadRows, Tensor]:
        """Rows of nodes that are to get children, each fed with what its parent's row put out."""
        growth, text = grown.growth, grown.text
        assert grown.fed is not None
        first = growth.choose(nodes)
        above = torch.tensor(growth.above[first:], device=grown.fed.device)
        root, block = growth.entry.end - 2 - text.origin, text.origin // self._runner.block_size
        rows = Rows(
            token_ids=[growth.builder.token_ids[node] for node in growth.frontier],
            start=root + first,
            block_table=growth.entry.block_table[block:],
            logits_from=0,
            parents=growth.above,
        )
        return HeadRows(rows, text.origin), grown.fed.index_select(0, above)
