"""What passes of a target and of its drafts cost on this machine, as a policy reckons with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specinfer.config import EngineConfig
from specinfer.engine.drafts import AnyDraft, what_is_timed
from specinfer.heads.load import HeadModel
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve, Timed, cost_curve
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary


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
    target: Timed,
    drafts: Mapping[str, TimedDraft],
    *,
    positions: int,
    progress: Progress | None = None,
) -> PassCosts:
    """Measure these passes, or read what was measured before.

    `positions` is the room of the caches. Writes into their first slots, which nobody may use yet.
    """
    speculation = config.speculation

    def curve(runner: Timed, variant: str, behind: Timed | None = None) -> CostCurve:
        context = runner.model.config.max_context
        return cost_curve(
            runner,
            max_rows=min(config.scheduler.max_step_tokens, positions, context),
            variant=variant,
            every_row=runner is not target,  # a draft's level asks for all of its nodes
            # Whatever it takes to measure: the next run decides by it, too.
            keep=speculation.clock == "curve",
            behind=behind,
            progress=progress,
        )

    of_target = curve(target, f"{config.quantization}, {target.model.config.vocab_size} logits")
    of_drafts = {
        name: curve(
            one.runner,
            f"{speculation.draft_quantization}, {what_is_timed(one.model, one.vocabulary)}",
            behind=target if isinstance(one.model, HeadModel) else None,
        )
        for name, one in drafts.items()
    }
    return PassCosts(of_target, of_drafts)
