"""DraftModel: a draft that is a language model.

In its cache the i-th node that is run has position end - 1 + i; the root is number 0. After verification the
K and V of nodes on the committed path move to their positions in the text. The next first pass reads the
committed tokens that the draft did not guess.
"""

from collections.abc import Sequence
from dataclasses import replace

from specinfer.plan import PlanEntry, StateUse
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.flight import Flight
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculate.drafts.draft import CachedText, LevelDraft, frontier_rows, moves_along
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.speculator import Outcome


class DraftModel(LevelDraft):
    """A draft that is a language model with the target's tokens."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        shape: Shape,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
        reads: int | None = None,
    ) -> None:
        """Make a draft over `runner`.

        Args:
            name: the speculator's name.
            runner: the model with its cache.
            shape: the form of its trees and its draw rule.
            max_rows: maximum rows of texts read in one step.
            vocabulary: the tokens that the model has logits for; None: all.
            reads: first token id that the draft has no embedding for, or None. Such ids are padding, and the
                draft reads the id before `reads` instead.
        """
        cache = runner.cache if runner.states is None else None
        super().__init__(name, runner, shape, max_rows=max_rows, vocabulary=vocabulary, cache=cache)
        self._runner = runner
        self._last_id = None if reads is None else reads - 1

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the K and V of committed guesses; drop the state of requests that ended."""
        super().observe(outcomes)
        self._runner.move([move for outcome in outcomes for move in self._accepted(outcome)])

    def _accepted(self, outcome: Outcome) -> list[Move]:
        """Keep the K and V of the tree's nodes that were committed; returns the needed moves."""
        text = self._texts.known(outcome.request_id)
        if text is None or text.growth is None:
            return []
        growth, text.growth = text.growth, None
        path = growth.path(outcome.committed[:-1])  # the bonus token is the next root
        text.cached = growth.entry.end + len(path)
        return moves_along(path, growth, growth.entry.end - 1, growth.entry.block_table)

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        self._seen = [self._texts.of(entry, self._limit(entry)) for entry in entries]
        return [len(entry.token_ids) - text.cached for entry, text in zip(entries, self._seen, strict=True)]

    def _limit(self, entry: PlanEntry) -> int:
        """Return the maximum positions in shared blocks that a new text may start after."""
        if self._runner.states is None:
            return entry.end - 1
        return 0 if entry.states.source is None else entry.states.source.end

    def _states(self, text: CachedText, planned: PlanEntry) -> StateUse:
        """Return the slots of the next rows; the text begins at position 0 if its states are not there."""
        cache, use = self._runner.states, planned.states
        if cache is None:
            return use
        source = None if text.begun else use.source
        if source is not None and (source.end != text.cached or not cache.holds(source)):
            source = None
        if source is None and not (text.begun and cache.reaches(use.slot, text.cached)):
            text.cached = text.claimed = 0
        text.begun = True
        saves, first = use.saves, use.source
        if first is not None and not cache.holds(first) and all(first.slot != one.slot for one in saves):
            saves = *saves, first  # other texts begin with it, too
        return replace(use, source=source, saves=saves)

    def _read(self, entry: int, max_rows: int) -> Rows | None:
        """See LevelDraft; also None if the text fills the draft's context."""
        growth, text = self._growths[entry], self._seen[entry]
        planned = growth.entry
        if max_rows <= 0:
            return None
        states = self._states(text, planned)
        start = text.cached
        end = min(planned.end, start + max_rows)
        if end <= start or len(planned.token_ids) >= self._runner.max_context:
            return None
        self._texts.claim(text, planned)
        text.cached = end
        growth.limit = min(growth.limit, self._runner.max_context - planned.end)
        draws = end == planned.end and growth.limit > 0
        if draws:
            text.growth = growth
            growth.started = True
        token_ids = planned.token_ids[start:end]
        if self._last_id is not None:
            token_ids = [min(token_id, self._last_id) for token_id in token_ids]
        rows = chain_rows(token_ids, start, planned.block_table, logits=draws)
        return replace(rows, states=states)

    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        growth = self._growths[entry]
        return frontier_rows(growth, nodes, growth.entry.end - 1, growth.entry.block_table)

    def _run(self, parts: Sequence[tuple[int, Rows]], *, few: bool) -> Flight:
        return self._runner.launch([rows for _, rows in parts], few=few)
