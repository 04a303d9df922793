"""Whose fault it is when steps fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from specinfer.plan import StepPlan

_PATIENCE: Final = 3  # failures, until requests are run alone to find out whose they are


class Suspects:
    """After a few failures in a row each request concerned runs alone, to see whose own step fails."""

    def __init__(self) -> None:
        self._failures = 0  # steps that raised, until some in a row have not
        self._good_steps = 0  # since then
        self._waiting: deque[str] = deque()  # requests to be run alone

    @property
    def failures(self) -> int:
        """The steps that failed of late."""
        return self._failures

    @property
    def next(self) -> str | None:
        """The request that has to run alone now."""
        return self._waiting[0] if self._waiting else None

    def acquit(self) -> None:
        """Suspect nobody until another step fails."""
        self._waiting.clear()

    def succeeded(self, plan: StepPlan, known: Collection[str]) -> None:
        """Forget failures after some steps that made tokens; the suspect that ran alone is cleared.

        `known` are the requests that have not ended.
        """
        came = plan.tree_entries or any(entry.ends_with_prompt for entry in plan.entries)
        if not self._failures or not came:  # a text that is read again may fail where it did
            return
        self._good_steps += 1
        if self._waiting:
            self._waiting.popleft()
            while self._waiting and self._waiting[0] not in known:
                self._waiting.popleft()
        elif self._good_steps >= _PATIENCE:
            self._failures = 0

    def failed(self, plan: StepPlan | None, known: Collection[str]) -> list[str]:
        """Count a step that failed; the request that is at fault, if it is known by now."""
        self._failures += 1
        self._good_steps = 0
        if self._failures < _PATIENCE:
            return []
        concerned = [entry.request.request_id for entry in plan.entries] if plan else [*self._waiting][:1]
        suspects = [name for name in concerned or known if name in known]
        self._waiting = deque(name for name in self._waiting if name not in suspects)
        if len(suspects) > 1:
            self._waiting = deque(suspects)
            return []
        if not self._waiting:
            self._failures = 0
        return suspects
