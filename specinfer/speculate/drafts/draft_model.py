"""A small speculative model (SSM) that grows a token tree in its own KV cache.

The i-th node that is run lies at cache position end - 1 + i, the root being the 0-th. When the target has
spoken, the K and V of the draft's nodes that lie on the committed path move to where the text has them;
the tokens that the draft did not guess itself it reads in the next first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specinfer.plan import PlanEntry
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.executor import ModelRunner, Move
from specinfer.speculate.drafts.draft import LevelDraft, frontier_rows
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.speculate.speculator import Outcome

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
            end = growth.entry.end
            text.cached = end + len(path)
            sources = [end - 1 + growth.order[node] for node in path]
            if sources != [*range(end, end + len(path))]:
                moves.append(Move(growth.entry.block_table, sources, range(end, end + len(path))))
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
