"""Listeners: the callbacks of an engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from specinfer.engine.trace import TreeEvent
from specinfer.plan import StepPlan

_LOG = logging.getLogger(__name__)


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
