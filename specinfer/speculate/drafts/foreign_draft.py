"""A draft model that has a vocabulary of its own: it reads what the target wrote, spelled in its own tokens.

It grows trees as DraftModel does, a pass a level for all requests. What differs: its text has another length
than the target's, so it lies in blocks of its own; and the end of its text may be spelled otherwise once
there is more of it, so what its cache holds is what both spellings begin with.

    ids     0 ......... cached | to be read ......... root | the tree's nodes, node i at root + i
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import Move
from specinfer.speculate.drafts.draft_model import DraftRunner
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.foreign_tokens import ForeignTokens
from specinfer.speculate.drafts.growth import Growth, Shape, trees_first
from specinfer.speculate.drafts.retold_tree import RetoldTree
from specinfer.speculate.drafts.text_blocks import TextBlocks
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tokenizer.respelling import Respelling
from specinfer.tree import TokenTree
from specinfer.tree.pairs import draw_rule

_ENDED = 16  # texts that are kept when they have ended, for others that begin alike
_TOKENS_A_GUESS = 2  # of the target's, that a guess in tokens of the draft's may come to on the average


@dataclass(slots=True)
class _Text:
    """One request's text as the draft has it."""

    spelled: Respelling
    cached: int = 0  # places 0..cached-1 hold it
    table: list[int] = field(default_factory=list)
    key: bytes = b""  # hash of its first block of the target's; empty: nobody may go on from it
    growth: Growth | None = None  # the last tree, until its outcome is known
    root: int = 0  # the place of that tree's root


class ForeignDraft(LevelSpeculator):
    """A level speculator; `tokens` says what its guesses are to the target."""

    def __init__(
        self,
        name: str,
        runner: DraftRunner,
        shape: Shape,
        *,
        max_rows: int,
        num_blocks: int,
        tokens: ForeignTokens,
    ) -> None:
        self.name = name
        self._runner = runner
        self._shape = shape
        self._max_rows = max_rows  # of the texts that are read in one step
        self._tokens = tokens
        self._blocks = TextBlocks(num_blocks, runner.block_size)
        self._texts: dict[str, _Text] = {}
        self._ended: list[_Text] = []  # oldest first
        self._growths: list[Growth] = []  # of the step that is open, one per entry of its plan
        self._retold: list[RetoldTree] = []  # of the same, where guesses are told again

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's shape, or of the engine's; text may come to more tokens."""
        return self._shape.most_nodes(request) * (_TOKENS_A_GUESS if self._tokens.by_text else 1)

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; about how many tokens of each text the draft's cache lacks."""
        self._growths = [Growth.shaped(entry, self.name, self._shape) for entry in plan.entries]
        if self._tokens.by_text:
            self._retold = [
                RetoldTree(self._tokens, growth.builder, growth.entry.max_depth) for growth in self._growths
            ]
        unread = list[int]()
        for entry in plan.entries:
            text, length = self._texts.get(entry.request.request_id), len(entry.token_ids)
            if text is None:
                unread.append(length)
            else:
                unread.append(max(1, length - text.spelled.taken + len(text.spelled.ids) - text.cached))
        return unread

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Draw below these nodes of these entries' trees, by one pass of the draft."""
        rows, sites, drawing, left = list[Rows](), list[Site](), list[int](), self._max_rows
        for i in trees_first(self._growths, below):
            growth = self._growths[i]
            if growth.started:
                part: Rows | None = self._chosen(growth, self._own(i, below[i]))
            else:
                part = self._read(growth, left)
            if part is None:
                continue
            rows.append(part)
            left -= len(part.token_ids)
            if part.logits_from < len(part.token_ids):
                drawing.append(i)
                sites.extend(self._sites(i))
        if rows:
            draw_children(self._runner.launch(rows), sites, self.name, self._tokens.vocabulary)
        for i in drawing:
            self._growths[i].descend()
        return {i: self._ends(i) for i in drawing if self._growths[i].ends}

    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number, as it has grown so far, in the target's tokens."""
        return self._retold[entry].tree() if self._tokens.by_text else self._growths[entry].builder.build()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Spell what was committed, and keep what the cache has of it; forget requests that ended."""
        moves = list[Move]()
        for outcome in outcomes:
            text = self._texts.get(outcome.request_id)
            if text is None:
                continue
            growth, text.growth = text.growth, None
            if outcome.finished:
                del self._texts[outcome.request_id]
                self._keep(text)
            elif growth is not None:
                kept = text.spelled.extend(outcome.committed)
                text.cached = min(text.cached, kept)
                if kept > text.root:
                    moves.extend(self._accept(text, growth))
        self._runner.move(moves)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or one text's."""
        self._blocks.check_integrity([text.table for text in (*self._texts.values(), *self._ended)])

    def _accept(self, text: _Text, growth: Growth) -> list[Move]:
        """Keep the nodes of the draft's tree along which the text went on."""
        path = growth.path(map(self._tokens.name, text.spelled.ids[text.root + 1 :]))
        first = text.root + 1
        text.cached = first + len(path)
        sources = [text.root + growth.places[node] for node in path]
        if sources == [*range(first, text.cached)]:
            return []
        return [Move(text.table, sources, range(first, text.cached))]

    def _read(self, growth: Growth, most: int) -> Rows | None:
        """At most so many rows of the text that the draft's cache lacks; the root's has logits.

        None where the step has no rows left, where the text leaves the draft no room, and where blocks are
        short.
        """
        entry = growth.entry
        text = self._text_of(entry)
        ids = text.spelled.ids
        if not ids or len(ids) >= self._runner.max_context:
            return None
        if not text.spelled.whole:  # a guess would go on behind half a character
            growth.limit = 0
        growth.limit = min(growth.limit, self._runner.max_context - len(ids))
        start = min(text.cached, len(ids) - 1)  # the root is always run
        end = min(len(ids), start + most)
        nodes = growth.builder.max_nodes if growth.limit else 1
        if end <= start or not self._has_blocks(text, len(ids) - 1 + nodes):
            return None
        text.cached = end
        draws = end == len(ids) and growth.limit > 0
        if draws:
            text.growth, text.root = growth, len(ids) - 1
            growth.started = True
        return chain_rows(ids[start:end], start, text.table, logits=draws)

    def _chosen(self, growth: Growth, nodes: Sequence[int]) -> Rows:
        """Rows of nodes that are to get children; they see the text, their ancestors and themselves."""
        text = self._texts[growth.entry.request.request_id]
        first = growth.choose(nodes)
        return Rows(
            token_ids=self._tokens.spelled([growth.builder.token_ids[node] for node in growth.frontier]),
            start=text.root + first,
            block_table=text.table,
            logits_from=0,
            parents=growth.above,
        )

    def _own(self, entry: int, ends: Sequence[int]) -> Sequence[int]:
        """The nodes of the draft's own tree that end in these of the target's."""
        return self._retold[entry].ending(self._growths[entry].ends, ends) if self._tokens.by_text else ends

    def _ends(self, entry: int) -> Sequence[int]:
        """The nodes of the target's tree below which the draft can go on."""
        growth = self._growths[entry]
        return self._retold[entry].ends(growth.ends) if self._tokens.by_text else growth.ends

    def _sites(self, entry: int) -> list[Site]:
        """The frontier's nodes, each as a place where children are drawn."""
        growth = self._growths[entry]
        sites = growth.sites(self._shape)
        if not self._tokens.by_text:
            return sites
        # Parameters that change logits know the target's tokens alone: what they exclude is pruned later.
        verifier = growth.entry.request.params.speculation.verifier
        rule = self._tokens.rule(draw_rule(verifier, self._shape.rule))
        end, retold = growth.entry.end, self._retold[entry]
        return [
            replace(site, rule=rule, processed=None, position=end + retold.length(site.node))
            for site in sites
        ]

    def _text_of(self, entry: PlanEntry) -> _Text:
        """The text up to where the step computes it, spelled."""
        text = self._texts.get(entry.request.request_id)
        if text is None:
            text = self._texts[entry.request.request_id] = _Text(self._tokens.respelling())
            text.spelled.extend(entry.token_ids[: entry.end])
            text.key = entry.block_hashes[0] if entry.block_hashes else b""
            self._take_over(text)
        else:
            if not text.key and entry.block_hashes:
                text.key = entry.block_hashes[0]
            kept = text.spelled.extend(entry.token_ids[text.spelled.taken : entry.end])
            text.cached = min(text.cached, kept)
        return text

    def _take_over(self, text: _Text) -> None:
        """Let a new text have the blocks of an ended one that begins alike, if there is one.

        Only of those whose first block has the same hash: it holds the salt, within which texts are shared.
        """
        best, longest = None, 0
        for ended in self._ended:
            if text.key and ended.key == text.key:
                same = map(eq, ended.spelled.ids[: ended.cached], text.spelled.ids)
                length = sum(1 for _ in takewhile(bool, same))
                if length > longest:
                    best, longest = ended, length
        if best is not None:
            self._ended = [ended for ended in self._ended if ended is not best]
            text.table, text.cached = best.table, longest

    def _keep(self, text: _Text) -> None:
        """Keep the blocks of a text that has ended, while there is room and somebody may go on from it."""
        if not text.key:
            self._blocks.release(text.table)
            return
        self._ended.append(text)
        if len(self._ended) > _ENDED:
            self._blocks.release(self._ended.pop(0).table)

    def _has_blocks(self, text: _Text, positions: int) -> bool:
        """Make a text's table long enough, at the cost of ended texts and of those that do not run now."""
        while not self._blocks.lengthen(text.table, positions):
            if self._ended:
                self._blocks.release(self._ended.pop(0).table)
                continue
            running = {growth.entry.request.request_id for growth in self._growths}
            idle = [one for name, one in self._texts.items() if one.table and name not in running]
            if not idle:
                return False
            self._blocks.release(idle[0].table)
            idle[0].cached = 0
        return True
