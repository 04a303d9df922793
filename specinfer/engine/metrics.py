"""Where the time of the steps goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """The stages of a step."""

    SCHEDULE = "schedule"
    PROPOSE = "propose"  # speculators, their own model passes included
    FORWARD = "target_forward"  # tensors of the step and the target's pass, logits in host memory
    VERIFY = "verify"  # processed laws at the visited nodes, and the walk
    COMMIT = "commit"  # KV moves, speculators' observe, detokenizing, bookkeeping


@dataclass(slots=True)
class StageClock:
    """Adds up seconds per stage; `lap(stage)` charges what passed since the last lap."""

    seconds: dict[Stage, float] = field(default_factory=lambda: dict.fromkeys(Stage, 0.0))
    steps: int = 0
    last: dict[str, float] = field(default_factory=dict)  # of the step that runs, or ran last
    _lapped: float = 0.0

    def start(self) -> None:
        """Begin a step."""
        self.steps += 1
        self.last = {}
        self._lapped = time.perf_counter()

    def lap(self, stage: Stage) -> None:
        """Charge the time since `start` or the last lap to `stage`."""
        now = time.perf_counter()
        self.last[stage] = now - self._lapped
        self.seconds[stage] += self.last[stage]
        self._lapped = now

    def reset(self) -> None:
        """Forget everything."""
        self.seconds = dict.fromkeys(Stage, 0.0)
        self.steps = 0

    def shares(self) -> dict[str, float]:
        """The share of each stage in the time of all steps; zeros before the first."""
        total = sum(self.seconds.values())
        return {stage.value: seconds / total if total else 0.0 for stage, seconds in self.seconds.items()}
