"""Guesses that go on where a draft's end: looked up in texts, so they cost no pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from specinfer.tree import TokenTree
from specinfer.tree.draw import as_runs

LEAST_HOPE: Final = 0.3  # of an end that is gone on from
MOST_TOKENS: Final = 8  # behind an end: what lies further off is hardly ever reached
_MOST_ENDS: Final = 3


def likely_ends(tree: TokenTree, drafts: Collection[str]) -> list[int]:
    """The leaves that one of `drafts` guessed and that are likely to become text, likeliest first."""
    # A leaf that nobody thinks so likely behind its parent is not: of a wide tree that leaves few.
    sure, drafted = set[int](), set[int]()
    for run in as_runs(tree.draws).runs:
        sure.update([n for n, p in zip(run.nodes, run.confidences, strict=True) if p >= LEAST_HOPE])
        if run.speculator in drafts:
            drafted.update(run.nodes)
    ends = (sure & drafted).difference(tree.parents)
    if not ends:
        return []
    hopes = tree.likelihoods()
    likely = [node for node in ends if hopes[node] >= LEAST_HOPE]
    return sorted(likely, key=lambda node: (-hopes[node], node))[:_MOST_ENDS]
