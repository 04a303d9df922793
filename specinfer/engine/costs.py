"""Cost curves of an engine's models: measured roughly at a first start, and whole in an idle moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from specinfer.config import EngineConfig
from specinfer.engine.drafts import make_draft, timing_key
from specinfer.engine.engine import Postponed
from specinfer.engine.models import Models, threads_of_torch
from specinfer.heads.runner import HeadModel, HeadRunner
from specinfer.models.hosted.model import HostedModel
from specinfer.models.language_model import LanguageModel
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve, Stop, Timed, cost_curve, never
from specinfer.runtime.executor import Executor
from specinfer.runtime.flight import torch_threads
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.drafts.draft import Draft
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.policy.cost_policy import CostPolicy

_LOG = logging.getLogger(__name__)
_FIRST_SECONDS: Final = 0.3  # time to measure a curve before the first answer


Measure = Callable[..., CostCurve]  # cost curve of the target or of a draft; see `measuring`


@dataclass(frozen=True, slots=True)
class Curves:
    """Cost curves on this machine, of the target and of drafts by speculator name."""

    target: CostCurve
    drafts: Mapping[str, CostCurve]


def max_pass_rows(config: EngineConfig, models: Models) -> int:
    """Return the maximum rows of a pass: the option's, else the number that the memory plan allows."""
    rows, plan = config.scheduler.row_limit, models.plan
    return rows if plan is None or config.scheduler.max_step_tokens != "auto" else min(rows, plan.limits.rows)


def first_stop(config: EngineConfig, models: Models) -> Stop:
    """Return what ends a measurement at the start: the first answer does not wait for a whole one.

    It does where no step corrects the curve, and where loading takes much longer: with streamed weights and
    on several ranks.
    """
    corrected = (config.speculation.tree_size, config.speculation.clock) == ("cost", "measured")
    if not corrected or models.target.stream is not None or models.target.group is not None:
        return never
    return lambda seconds: seconds > _FIRST_SECONDS


def measuring(
    config: EngineConfig, executor: Executor, models: Models, progress: Progress | None, stop: Stop
) -> Measure:
    """Return the function that measures the curve of a variant of a model, or reads an earlier measurement.

    It overwrites the first slots of the executor's caches, which must be unused.
    """
    rows, keep = max_pass_rows(config, models), config.speculation.clock == "curve"

    def measure(variant: str, draft: Timed | None = None, *, behind_target: bool = False) -> CostCurve:
        runner: Timed = executor.target if draft is None else draft
        return cost_curve(
            runner,
            max_rows=min(rows, executor.positions, runner.model.config.max_context),
            variant=variant,
            every_row=draft is not None,
            keep=keep,  # the measurement is cached, so that later runs decide alike
            behind=executor.target if behind_target else None,
            progress=progress if stop is never else None,  # a brief measurement shows none
            stop=stop,
        )

    return measure


def target_curves(config: EngineConfig, models: Models, measure: Measure) -> tuple[CostCurve, CostCurve]:
    """Return the target's cost curve, and the one for layers that use a draft's memory.

    A pass with streamed layers takes as long as the disk or as computing, whichever is longer.
    """
    variant = f"{config.kind}, {models.target.config.vocab_size} logits"
    if config.parts_of_sums > 1:
        variant += f", sums of {config.parts_of_sums} parts"
    if isinstance(models.target, HostedModel):
        variant += f", {models.target.summary}"
    if (group := models.target.group) is not None:
        variant += f", {group.size} ranks over {group.transport}"
        if group.stages > 1:
            variant += f", stages from {group.bounds}"
    plan, stream = models.plan, models.target.stream
    if plan is None or stream is None:
        whole = measure(variant)
        return whole, whole
    with stream.still():
        computing = measure(f"{variant}, layer by layer")
    if (experts := plan.placement.experts) is not None:
        waits = [experts.read_bytes(rows) / plan.disk.bytes_per_second for rows in computing.rows]
        whole = computing + CostCurve(computing.rows, tuple(waits))
        return whole, whole
    rate, streamed = plan.disk.bytes_per_second, plan.placement.streamed_bytes
    fewer = streamed if models.draft_memory is None else models.draft_memory.streamed_bytes
    return computing.at_least(streamed / rate), computing.at_least(fewer / rate)


def draft_curves(models: Models, runners: Mapping[str, Timed], measure: Measure) -> dict[str, CostCurve]:
    """Return the cost curves of the drafts by name."""
    drafts: dict[str, CostCurve] = {}
    stream = models.target.stream
    # A head is timed after passes of the target that do not wait for weights.
    with nullcontext() if stream is None else stream.still():
        for name, runner in runners.items():
            model = models.drafts[name]
            shortlist = runner.shortlist if isinstance(runner, ModelRunner | HeadRunner) else None
            timed = timing_key(model, models.named.get(name), shortlist)
            if isinstance(model, LanguageModel) and model.group is not None:
                timed += f", {model.group.width} ranks over {model.group.transport}"
            drafts[name] = measure(
                f"{models.kinds[name]}, {timed}",
                runner,
                behind_target=isinstance(model, HeadModel),
            )
    return drafts


def timed_drafts(
    config: EngineConfig, executor: Executor, models: Models, shape: Shape
) -> dict[str, tuple[Timed, Draft]]:
    """Return the drafts by name with their own KV caches, and the probes that time their passes."""
    return {
        name: make_draft(
            *(name, model, executor, shape, models.named.get(name), models.foreign.get(name)),
            max_rows=config.scheduler.row_limit,
        )
        for name, model in models.drafts.items()
    }


def measure_curves(
    config: EngineConfig,
    models: Models,
    rows: int,
    progress: Progress | None = None,
    stop: Stop = never,
    of_drafts: EngineConfig | None = None,
) -> Curves:
    """Measure all cost curves over temporary caches of at least `rows` positions.

    The drafts' passes have the limits of `of_drafts`, by default also of `config`.
    """
    config, size = models.with_kinds(config), config.cache.block_size
    executor = Executor(models.target, num_blocks=-(-rows // size), block_size=size)
    drafts = timed_drafts(of_drafts or config, executor, models, Shape.of(config.speculation))
    with torch_threads(threads_of_torch(config, models)):
        target, _ = target_curves(config, models, measuring(config, executor, models, progress, stop))
        runners = {} if target.rough else {name: runner for name, (runner, _) in drafts.items()}
        measure = measuring(of_drafts or config, executor, models, progress, stop)
        return Curves(target, draft_curves(models, runners, measure))


def measure_later(
    config: EngineConfig, of_drafts: EngineConfig, models: Models, positions: int, policy: CostPolicy
) -> Postponed:
    """Return the measurement of curves that are rough after a first start; the policy then follows them.

    The configs are as for `measure_curves`; `positions` are those of the engine's cache.
    """

    def measure(wanted: Callable[[], bool]) -> bool:
        rows = min(positions, max_pass_rows(config, models))
        curves = measure_curves(config, models, rows, None, lambda _: wanted(), of_drafts)
        if any(one.rough for one in (curves.target, *curves.drafts.values())):
            return False
        _LOG.info("measured what a pass costs (once per model and machine)")
        policy.follow(curves.target, curves.drafts)
        return True

    return measure
