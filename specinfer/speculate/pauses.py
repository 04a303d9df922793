"""Pauses: the speculators, and the policy, that are left out of some steps because they raised."""

from __future__ import annotations

from typing import Final

_SHORTEST, _LONGEST = 32, 1 << 14  # steps
POLICY: Final = "policy"  # the policy's name among those that failed


class _Pause:
    """The steps that one is left out of after it raised, doubled from failure to failure.

    It has recovered after as many steps without a failure.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._length = 0
        self._left = 0  # steps
        self._good = 0  # steps since the last pause

    @property
    def active(self) -> bool:
        """True if it is left out of this step."""
        return self._left > 0

    def step(self) -> None:
        """Count the begin of a step."""
        if self._left:
            self._left -= 1
            return
        self._good += 1
        if self._good > self._length:
            self._length = 0

    def failed(self) -> bool:
        """Begin a pause; returns True for the first failure, and for the first after a recovery."""
        first = not self._length
        self.failures += 1
        self._length = min(max(2 * self._length, _SHORTEST), _LONGEST)
        self._left, self._good = self._length + 1, 0  # the running step counts
        return first


class Pauses:
    """The pauses of all that have failed, by name; the properties are readable from any thread."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Pause] = {}

    def __contains__(self, name: str) -> bool:
        """True if that one is left out of this step."""
        return name in self._by_name and self._by_name[name].active

    def step(self) -> bool:
        """Count the begin of a step; returns False if none has failed so far."""
        for pause in self._by_name.values():
            pause.step()
        return bool(self._by_name)

    def failed(self, name: str) -> bool:
        """Begin a pause; returns True if the failure is to be logged, as earlier ones were long ago."""
        return self._by_name.setdefault(name, _Pause()).failed()

    @property
    def failures(self) -> dict[str, int]:
        """Exceptions of each, by name."""
        return {name: pause.failures for name, pause in [*self._by_name.items()]}

    @property
    def num_active(self) -> int:
        """Number of pauses in this step."""
        return sum(pause.active for pause in [*self._by_name.values()])
