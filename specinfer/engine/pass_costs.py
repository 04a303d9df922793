"""What passes of a target and of its drafts cost on this machine, as a policy reckons with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from specinfer.config import EngineConfig
from specinfer.engine.drafts import AnyDraft, what_is_timed
from specinfer.heads.runner import HeadModel
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve, Timed
from specinfer.runtime.executor import LocalExecutor
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Curves of the target, and of drafts by speculator name."""

    target: CostCurve
    drafts: Mapping[str, CostCurve]


@dataclass(frozen=True, slots=True)
class TimedDraft:
    """A draft and what times its passes."""

    model: AnyDraft
    runner: Timed
    vocabulary: DraftVocabulary | None = None  # what it can name; None: everything


def pass_costs(
    config: EngineConfig,
    executor: LocalExecutor,
    drafts: Mapping[str, TimedDraft],
    progress: Progress | None = None,
) -> PassCosts:
    """Measure the executor's passes and those of drafts over it, or read what was measured before.

    Writes into the caches' first slots, which nobody may use yet.
    """
    speculation = config.speculation
    # A curve that decides by itself is kept: the next run decides by it, too.
    curve = partial(
        executor.curve,
        max_rows=config.scheduler.max_step_tokens,
        keep=speculation.clock == "curve",
        progress=progress,
    )
    logits = executor.target.model.config.vocab_size
    of_target = curve(f"{config.quantization}, {logits} logits")
    of_drafts = {
        name: curve(
            f"{speculation.draft_quantization}, {what_is_timed(one.model, one.vocabulary)}",
            draft=one.runner,
            behind_target=isinstance(one.model, HeadModel),
        )
        for name, one in drafts.items()
    }
    return PassCosts(of_target, of_drafts)
