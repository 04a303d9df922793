"""Complete tunings of tiny targets with fixed costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

from specinfer.config import EngineConfig
from specinfer.engine.costs import Curves
from specinfer.engine.drafts import draft_names
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tune.head_draft import BlockKind
from specinfer.tune.prompts import read_prompts
from specinfer.tune.selection import Costs, TuneResult
from specinfer.tune.small_model import SsmKind
from specinfer.tune.tuning import TuneConfig, Tuning

Clock = Callable[[], float]
SSM = SsmKind(layers=1, depth=3)
BLOCK = BlockKind(depth=3, vocabulary=48, markov_rank=8)
SHAPE = BlockKind(depth=4, vocabulary=48, markov_rank=8)
TARGET = CostCurve((1, 16), (0.010, 0.012))


def ticking(seconds: float = 1.0) -> Clock:
    """Return a clock that advances by `seconds` at each reading."""
    ticks = count()
    return lambda: seconds * next(ticks)


def free(config: EngineConfig, drafts: Sequence[Path], progress: Progress) -> Curves:
    """Return costs with free drafts and nodes, so that every correct guess pays."""
    names, nothing = draft_names(tuple(str(draft) for draft in drafts)), CostCurve((1, 2), (1e-9, 1e-9))
    return Curves(CostCurve((1, 2), (0.01, 0.01)), dict.fromkeys(names, nothing))


def cheap(config: EngineConfig, drafts: Sequence[Path], progress: Progress) -> Curves:
    """Return costs with drafts that cost a tenth of their target."""
    names = draft_names(tuple(str(draft) for draft in drafts))
    return Curves(TARGET, dict.fromkeys(names, CostCurve((1, 16), (0.001, 0.0012))))


def run(
    config: TuneConfig, prompts: Path, clock: Clock | None = None, costs: Costs = cheap
) -> tuple[TuneResult, list[str]]:
    """Run a tuning with fixed costs on a ticking clock; return its result and its log lines."""
    lines: list[str] = []
    tuning = Tuning(config, clock=clock or ticking(), say=lines.append, costs=costs)
    return tuning.run(read_prompts([prompts]), [prompts.name]), lines
