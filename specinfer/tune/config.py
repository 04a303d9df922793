"""What is to be tuned, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specinfer.config import EngineConfig
from specinfer.errors import TuneError
from specinfer.hub.pool import MOST_MEMBERS
from specinfer.tune.block_kind import BlockKind
from specinfer.tune.boosting import BoostConfig
from specinfer.tune.draft import Kind
from specinfer.tune.trainer import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """One tuning; what it may be gone on with is in its folder."""

    target: EngineConfig
    out: Path
    minutes: float = 30.0  # in all, over all runs
    collect_minutes: float | None = None  # of these; None: a third
    resume: bool = False
    chat: bool | None = None  # prompts go through the chat template; None: where there is one
    max_tokens: int = 256  # of an answer
    replace: Path | None = None  # the head or pool in this folder is replaced where that is worth it
    init: str | None = None  # target, random, or an exported draft to go on from; None: as the kind allows
    kind: Kind = field(default_factory=BlockKind)
    members: int = 1  # drafts, which share the time
    boost: BoostConfig | None = None  # how the later ones are boosted; None: as usual
    training: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise TuneError(f"minutes is {self.minutes}; allowed: more than 0")
        if not 1 <= self.members <= MOST_MEMBERS:
            raise TuneError(f"members is {self.members}; allowed: 1 to {MOST_MEMBERS}")
        if self.boost is not None and self.members == 1:
            boost = f"{self.boost.form}, {'warm' if self.boost.warm else 'cold'}"
            raise TuneError(f"boost is {boost}, and a single member has nobody to be boosted by")
        if self.replace is not None:
            old, new = self.replace.expanduser().resolve(), self.out.expanduser().resolve()
            if old == new or old in new.parents or new in old.parents or not old.name:
                raise TuneError(
                    f"what is to be replaced is in {self.replace}, and what is tuned goes into {self.out}; "
                    "allowed: two folders, neither of them in the other"
                )
        if self.collect_minutes is not None and not 0 <= self.collect_minutes < self.minutes:
            raise TuneError(
                f"{self.collect_minutes} minutes are to collect in, of {self.minutes} in all; allowed: 0 or "
                "more, and fewer than these"
            )

    @property
    def boosting(self) -> BoostConfig:
        """How members are boosted."""
        return self.boost or BoostConfig()

    @property
    def work(self) -> Path:
        """What later runs go on from."""
        return self.out / "work"

    @property
    def collect_seconds(self) -> float:
        """What collecting may take, over all runs."""
        return 60 * (self.minutes / 3 if self.collect_minutes is None else self.collect_minutes)
