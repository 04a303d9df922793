"""What a verifier returns."""

from __future__ import annotations

from dataclasses import dataclass

from specinfer.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The path the target agrees with, plus one token of its own."""

    path: tuple[int, ...]  # accepted nodes from below the root down; empty when none was accepted
    next_token: int  # the bonus token: chosen by the target after the last node of the path

    def tokens(self, tree: TokenTree) -> tuple[int, ...]:
        """The token ids this makes text: the path's, then the bonus token."""
        return (*(tree.token_ids[node] for node in self.path), self.next_token)
