"""Per-step tree events: what was guessed, by whom, and what the target made of it.

The JSON form is a contract: viewers read it and nothing else of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specinfer.speculate.policy.decision import Decision
from specinfer.tokenizer import Tokenizer
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
    seconds: Mapping[str, float] = field(default_factory=dict)  # of the step's stages before it was told
    decision: Decision | None = None  # why so much was guessed, if somebody asked

    def to_json(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """The event as plain JSON values.

        `proposed_by[i]` names the speculators that drew node i, `likelihoods[i]` is how likely they thought
        it to become text. With a tokenizer, `texts[i]` is the node's token as text, `next_text` the bonus's,
        and `bytes` has, in hexadecimal and by id, the bytes of tokens that are no whole characters.
        """
        return (self._texts(tokenizer) if tokenizer is not None else {}) | {
            "step": self.step,
            "request_id": self.request_id,
            "token_ids": list(self.tree.token_ids),
            "parents": list(self.tree.parents),
            "proposed_by": proposed_by(self.tree),
            "path": list(self.acceptance.path),
            "next_token": self.acceptance.next_token,
            "likelihoods": [round(likely, 6) for likely in self.tree.likelihoods()],
            "seconds": {stage: round(seconds, 6) for stage, seconds in self.seconds.items()},
            **({} if self.decision is None else {"decision": self.decision.to_json()}),
        }

    def _texts(self, tokenizer: Tokenizer) -> dict[str, Any]:
        tokens = [*self.tree.token_ids, self.acceptance.next_token]
        *texts, last = map(tokenizer.text_of, tokens)
        parts = {
            str(token): tokenizer.token_bytes[token].hex()
            for token, text in zip(tokens, [*texts, last], strict=True)
            if "\ufffd" in text and not tokenizer.is_special(token)
        }
        return {"texts": texts, "next_text": last} | ({"bytes": parts} if parts else {})
