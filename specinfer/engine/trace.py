"""Listeners, the callbacks of an engine's steps, and TreeEvent, their input.

Viewers depend only on the JSON form, which is stable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specinfer.plan import StepPlan
from specinfer.speculate.decision import Decision
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import proposed_by
from specinfer.verify.coupled import Acceptance

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """One request's tree in one step."""

    step: int
    request_id: str
    tree: TokenTree
    acceptance: Acceptance
    seconds: Mapping[str, float] = field(default_factory=dict)  # seconds of the step's stages so far
    decision: Decision | None = None  # the policy's reasons, if requested

    def to_json(self, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
        """Return the event as JSON values.

        `proposed_by[i]` has the speculators that drew node i, and `likelihoods[i]` their acceptance
        probability of it. With a tokenizer, `texts[i]` is the node's token as text and `next_text` that of
        the bonus token; `bytes` has, in hexadecimal by id, the bytes of tokens that are not whole characters.
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


class Listeners:
    """Callbacks that may be set at any time; LLM has their contracts."""

    def __init__(self) -> None:
        self.on_step: Callable[[Sequence[str]], None] | None = None
        self.on_tree: Callable[[TreeEvent], None] | None = None
        self.explains = False  # True if tree events include decisions
        self._on_step_failed = False  # True once its failure was logged

    @property
    def wants_decisions(self) -> bool:
        """True if `on_tree` gets decisions."""
        return self.explains and self.on_tree is not None

    def announce(self, plan: StepPlan) -> None:
        """Call `on_step` with the step's request ids; its first exception is logged, and steps continue."""
        if self.on_step is None:
            return
        try:
            self.on_step([entry.request.request_id for entry in plan.entries])
        except Exception:
            if not self._on_step_failed:
                _LOG.exception("on_step failed; steps continue, and later failures are not logged")
            self._on_step_failed = True

    def trace(self, event: TreeEvent) -> str | None:
        """Call `on_tree`; returns the text of its exception, which ends the request of the event."""
        assert self.on_tree is not None, "nobody listens"
        try:
            self.on_tree(event)
        except Exception as error:
            _LOG.exception("request %s ends, as on_tree failed", event.request_id)
            return f"on_tree failed: {error}"
        return None
