"""Per-step tree events: what was guessed, by whom, and what the target made of it.

The JSON form is a contract: viewers read it and nothing else of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specinfer.tree import TokenTree
from specinfer.tree.token_tree import proposed_by
from specinfer.verify.acceptance import Acceptance


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """One request's tree in one step."""

    step: int
    request_id: str
    tree: TokenTree
    acceptance: Acceptance

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON values; `proposed_by[i]` names the speculators that drew node i."""
        return {
            "step": self.step,
            "request_id": self.request_id,
            "token_ids": list(self.tree.token_ids),
            "parents": list(self.tree.parents),
            "proposed_by": proposed_by(self.tree),
            "path": list(self.acceptance.path),
            "next_token": self.acceptance.next_token,
        }
