"""Block heads whose trees are recorded, and block heads that answer from such records.

Both are the engine's own BlockDraft. What it guesses below a root depends on the text alone, and the
likeliest nodes of a tree are its first ones (best_first.py). So one tree of all nodes that a head may want is
recorded for each root, and any smaller one grows from it as it did from the head's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.heads.block_model import BlockText
from specinfer.heads.config import BlockRows
from specinfer.heads.runner import HeadPass
from specinfer.replay.drafts import Replayed
from specinfer.replay.guess_trie import NO_SITE, GuessRecorder, GuessTrie
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight, HostFlight
from specinfer.speculate.drafts.best_first import MOST_NODES, WIDTH, Children, add_likeliest
from specinfer.speculate.drafts.draws import Site
from specinfer.speculate.drafts.growth import GuessedTree
from specinfer.speculate.drafts.one_pass import GrowTrees
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.tree.token_tree import draws_by_parent
from specinfer.verify.scan import NUMPY


@dataclass(frozen=True, slots=True)
class RecordedTrees:
    """Takes down the trees that others grow, as large as anybody may want them."""

    others: GrowTrees
    notes: GuessRecorder

    def grow(self, guessed: Sequence[GuessedTree], read_TD: Tensor, logits_TU: Tensor, most: int) -> None:
        """Grow these trees (`one_pass.GrowTrees`), of as many nodes as there may be, whatever is wanted."""
        self.others(guessed, read_TD, logits_TU, MOST_NODES)
        for one in guessed:
            tree = one.growth.tree()
            for parent, draws in (draws_by_parent(tree.draws) or {0: []}).items():
                tokens = [tree.token_ids[draw.node] for draw in draws]
                self.notes.note(tree.path_tokens(parent), WIDTH, tokens, draws)


@dataclass(slots=True, kw_only=True)
class ReplayedHead(Replayed):
    """A block head without a model: it reads texts, and its trees are answered from a record.

    It is the head's runner, and grows its trees.
    """

    block_size: int  # of the cache
    head: BlockRows
    whole: bool = (
        False  # whether trees are grown as large as they were recorded, however few nodes are wanted
    )
    partly_read: int = 0  # blocks behind a text whose beginning it has missed

    def guess(self, texts: Sequence[BlockText]) -> HeadPass:
        """Count the pass; what it makes is nothing, in the shapes that a head's has."""
        self.spend(max(1, sum(text.count for text in texts)))
        for text in texts:
            self.partly_read += text.rows > 0 and text.shift > 0
            if text.rows and text.rows < self.head.block_size and not self.head.causal:
                self.lacks = self.lacks or (
                    f"{self.name} was recorded with blocks of {self.head.block_size} rows, all of which see "
                    f"each other, and there is room for {text.rows}; replay larger trees, or fewer at once"
                )
        none = torch.empty(0, 0)
        return HeadPass([none[:0].flatten() if text.count else None for text in texts], none, none)

    def grow(self, guessed: Sequence[GuessedTree], read_TD: Tensor, logits_TU: Tensor, most: int) -> None:
        """Grow these trees (`one_pass.GrowTrees`): the first nodes of those that were recorded."""
        for one in guessed:
            guesses, root = self.root(one.site)
            if root == NO_SITE:
                self.lacks = self.lacks or (
                    f"{self.name} was not recorded below {one.site.position} tokens of request "
                    f"{one.site.request_id}; record the trace anew"
                )
                continue
            wanted = MOST_NODES if self.whole else most
            regrow(one.growth.builder, guesses, root, wanted, self.name, one.site.draws_by)

    def draw(
        self, sites: Sequence[Site], rows: Sequence[int], before: Sequence[int], logits_TU: Tensor
    ) -> None:
        """Nothing: no such trees are recorded."""
        self.lacks = self.lacks or (
            f"{self.name} would draw level by level for request {sites[0].request_id}, and was recorded best "
            "first; record the trace anew"
        )


def regrow(
    builder: TreeBuilder, guesses: GuessTrie, root: int, most: int, speculator: str, rule: DrawRule
) -> None:
    """Add the `most` likeliest nodes below a root's site, as far as the builder has room.

    In the order in which they were added when they were recorded, of equal ones too.
    """

    def children(site: int) -> Children[int]:
        tokens, confidences, below = guesses.draws(site)
        return Children(
            tokens, confidences, guesses.seen(site), [None if one == NO_SITE else one for one in below]
        )

    add_likeliest(builder, root, children, most, speculator, rule)


def without_states(rows: Sequence[Rows], taps: Sequence[int]) -> Flight:
    """The pass of a target without a model, as those who read its hidden states see it: of no width."""
    count = sum(len(part.token_ids) for part in rows)
    states = taps, torch.zeros(count, len(taps), 0)
    return HostFlight(torch.empty(0, 0), lambda hidden: hidden, 1, NUMPY, taps=states)
