"""ForeignDraft: a draft model with another tokenizer, which reads the target's text in its own tokens.

It grows trees as DraftModel does. Its text differs in length from the target's, so it has its own blocks.
More text may change the tokenization of the last tokens, so its cache keeps the common prefix of the old and
new tokens.

    ids     0 ......... cached | to be read ......... root | the tree's nodes, node i at root + i
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specinfer.plan import PlanEntry
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.speculate.drafts.draft import frontier_rows, moves_along
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.draft_tokens import ForeignTokens
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.speculate.speculator import Outcome
from specinfer.tokenizer.detokenizer import Respelling


@dataclass(slots=True)
class _Text:
    """One request's text in the draft's tokens."""

    spelled: Respelling
    cached: int = 0  # positions 0..cached-1 hold it
    table: list[int] = field(default_factory=list)
    growth: Growth | None = None  # the last tree, until its outcome is known
    root: int = 0  # position of that tree's root


class ForeignDraft(DraftModel):
    """A draft model with another tokenizer; `tokens` converts between its tokens and the target's."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        shape: Shape,
        *,
        max_rows: int,
        num_blocks: int,
        tokens: ForeignTokens,
    ) -> None:
        """Make a draft over `runner`, whose cache has `num_blocks` blocks."""
        super().__init__(name, runner, shape, max_rows=max_rows, vocabulary=tokens.vocabulary)
        self._tokens = tokens
        self._free = list(range(num_blocks - 1, -1, -1))  # blocks of its cache
        self._spelled: dict[str, _Text] = {}  # in place of the base's, which use the target's blocks

    def _accepted(self, outcome: Outcome) -> list[Move]:
        """See DraftModel; converts the committed tokens."""
        text = self._spelled.get(outcome.request_id)
        if text is None or text.growth is None:
            return []
        growth, text.growth = text.growth, None
        kept = text.spelled.extend(outcome.committed)
        text.cached = min(text.cached, kept)
        if kept <= text.root:
            return []
        path = growth.path(map(self._tokens.to_target, text.spelled.ids[text.root + 1 :]))
        text.cached = text.root + 1 + len(path)
        return moves_along(path, growth, text.root, text.table)

    def _unread(self, entries: Sequence[PlanEntry]) -> list[int]:
        unread = list[int]()
        for entry in entries:
            text, length = self._spelled.get(entry.request.request_id), len(entry.token_ids)
            if text is None:
                unread.append(length)
            else:
                unread.append(max(1, length - text.spelled.taken + len(text.spelled.ids) - text.cached))
        return unread

    def _forget(self, request_id: str) -> None:
        if (text := self._spelled.pop(request_id, None)) is not None:
            self._release(text)

    def _read(self, entry: int, max_rows: int) -> Rows | None:
        """See LevelDraft; also None if the text fills the context or no block is free."""
        growth = self._growths[entry]
        text = self._text_of(growth.entry)
        ids = text.spelled.ids
        if not ids or len(ids) >= self._runner.max_context:
            return None
        if not text.spelled.whole:  # the text ends inside a character
            growth.limit = 0
        growth.limit = min(growth.limit, self._runner.max_context - len(ids))
        start = min(text.cached, len(ids) - 1)  # the root is always run
        end = min(len(ids), start + max_rows)
        nodes = growth.builder.max_nodes if growth.limit else 1
        if end <= start or not self._has_blocks(text, len(ids) - 1 + nodes):
            return None
        text.cached = end
        draws = end == len(ids) and growth.limit > 0
        if draws:
            text.growth, text.root = growth, len(ids) - 1
            growth.started = True
        return chain_rows(ids[start:end], start, text.table, logits=draws)

    def _chosen(self, entry: int, nodes: Sequence[int]) -> Rows:
        growth = self._growths[entry]
        text = self._spelled[growth.entry.request.request_id]
        rows = frontier_rows(growth, nodes, text.root, text.table)
        return replace(rows, token_ids=self._tokens.to_draft(rows.token_ids))

    def _text_of(self, entry: PlanEntry) -> _Text:
        """Return the entry's text up to the end of this step's tokens, in the draft's tokens."""
        text = self._spelled.get(entry.request.request_id)
        if text is None:
            text = self._spelled[entry.request.request_id] = _Text(self._tokens.respelling())
        kept = text.spelled.extend(entry.token_ids[text.spelled.taken : entry.end])
        text.cached = min(text.cached, kept)
        return text

    def _has_blocks(self, text: _Text, positions: int) -> bool:
        """Extend a text's table, taking blocks from texts that do not run now; returns False without any.

        A text that loses its blocks is read again later, which costs guesses but never changes the output.
        """
        missing = -(-positions // self._runner.block_size) - len(text.table)
        running = {growth.entry.request.request_id for growth in self._growths}
        while missing > len(self._free):
            idle = [one for name, one in self._spelled.items() if one.table and name not in running]
            if not idle:
                return False
            self._release(idle[0])
        text.table.extend(self._free.pop() for _ in range(missing))
        return True

    def _release(self, text: _Text) -> None:
        self._free.extend(reversed(text.table))
        text.table.clear()
        text.cached = 0
