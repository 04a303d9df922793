"""EngineConfig and loaded models -> a running Engine: size the caches, measure passes, put parts together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specinfer.config import EngineConfig
from specinfer.engine.admission import Admission
from specinfer.engine.drafts import (
    draft_names,
    make_draft,
    what_is_timed,
)
from specinfer.engine.engine import Engine
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.models import Models, threads_of_torch
from specinfer.engine.scheduler import Scheduler
from specinfer.errors import ConfigError
from specinfer.heads.runner import HeadModel
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve, Timed
from specinfer.runtime.executor import LocalExecutor
from specinfer.runtime.flight import torch_threads
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.memory import PolicyMemory
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.speculate.table import build_speculators


@dataclass(frozen=True, slots=True)
class Curves:
    """What passes cost on this machine: of the target, and of drafts by speculator name."""

    target: CostCurve
    drafts: Mapping[str, CostCurve]


def measured_curves(
    config: EngineConfig,
    executor: LocalExecutor,
    models: Models,
    runners: Mapping[str, Timed],
    progress: Progress | None = None,
) -> Curves:
    """Measure passes of the target and of the drafts, by name, or read what was measured before.

    Writes into the caches' first slots, which nobody may use yet.
    """
    speculation = config.speculation
    curve = partial(
        executor.curve,
        max_rows=config.scheduler.max_step_tokens,
        keep=speculation.clock == "curve",  # which decides alone: the next run is to decide by it, too
        progress=progress,
    )
    target = curve(f"{config.quantization}, {models.target.config.vocab_size} logits")
    drafts: dict[str, CostCurve] = {}
    for name, runner in runners.items():
        model = models.drafts[name]
        timed = what_is_timed(model, models.named.get(name))
        drafts[name] = curve(
            f"{speculation.draft_quantization}, {timed}",
            draft=runner,
            behind_target=isinstance(model, HeadModel),
        )
    return Curves(target, drafts)


def measured_alone(
    config: EngineConfig, models: Models, rows: int, progress: Progress | None = None
) -> Curves:
    """As `measured_curves`, over caches of at least so many rows that are made for it and no engine's."""
    size = config.cache.block_size
    executor = LocalExecutor(models.target, num_blocks=-(-rows // size), block_size=size)
    runners = {
        name: make_draft(
            *(name, model, executor, config.speculation, models.named.get(name)),
            max_rows=config.scheduler.max_step_tokens,
        )[0]
        for name, model in models.drafts.items()
    }
    with torch_threads(threads_of_torch(config, models)):
        return measured_curves(config, executor, models, runners, progress)


def build_engine(
    config: EngineConfig,
    models: Models,
    extra: Sequence[Speculator] = (),
    progress: Progress | None = None,
) -> Engine:
    """An engine over loaded models, with the config's speculators and then `extra` ones of the caller's.

    The config names a pool's members, and not the pool. Raises CapacityError when the KV cache does not fit,
    ConfigError when options contradict each other.
    """
    speculation, limits = config.speculation, config.scheduler
    own_limit = models.target.config.max_context
    max_context = min(limits.max_context or own_limit, own_limit)
    if limits.max_context is not None and limits.max_context > own_limit:
        raise ConfigError(
            f"max_context is {limits.max_context}; {config.model} has a context of {own_limit}: lower it"
        )
    drafts = models.drafts.values()
    executor = LocalExecutor.within_memory(
        models.target,
        [draft for draft in drafts if not isinstance(draft, HeadModel) or draft.head.body is not None],
        block_size=config.cache.block_size,
        wanted_positions=limits.max_batch_size * (max_context + speculation.max_nodes),
        needed_positions=min(max_context, 128),
        limit=config.cache.memory,
    )
    vocab = models.target.config.vocab_size
    drafting = {
        name: make_draft(
            name,
            model,
            executor,
            speculation,
            models.named.get(name),
            models.foreign.get(name),
            max_rows=limits.max_step_tokens,
        )
        for name, model in models.drafts.items()
    }
    threads = threads_of_torch(config, models)
    policy: SpeculationPolicy = SpeculationPolicy()
    guard: Guard | None = None
    kept: PolicyMemory | None = None  # what the policy learns, over many runs
    if speculation.tree_size == "cost":
        runners = {name: runner for name, (runner, _) in drafting.items()}
        with torch_threads(threads):
            costs = measured_curves(config, executor, models, runners, progress)
        measured = speculation.clock == "measured"
        sized = CostPolicy.by_curves(costs.target, costs.drafts, speculation, measured=measured)
        policy, guard = sized, sized.guard
        if measured and guard is not None:  # a run by the curve decides as the last one did
            kept = PolicyMemory(_learned_of(config, models, executor.device_name), sized.chances, guard)
            kept.recall()
    speculators: list[Speculator | LevelSpeculator] = [
        *build_speculators(speculation, models.target.kernels.library, progress),
        *(draft for _, draft in drafting.values()),
        *extra,
    ]
    fallback = SpeculationPolicy() if guard is None else SpeculationPolicy.instead(speculation)
    pool = BlockPool(executor.num_blocks, executor.block_size)
    return Engine(
        executor=executor,
        speculators=Ensemble(speculators, vocab=vocab, policy=policy, fallback=fallback),
        tokenizer=models.tokenizer,
        admission=Admission(
            models.tokenizer,
            SpeculationLimits(speculation, speculators),
            vocab=vocab,
            max_context=max_context,
            capacity=executor.positions,
            block_size=config.cache.block_size if config.cache.prefix_reuse else None,
        ),
        scheduler=Scheduler(
            limits,
            pool,
            tree_nodes=speculation.max_nodes,
            max_context=max_context,
            prefix_reuse=config.cache.prefix_reuse,
        ),
        verifier=speculation.verifier,
        threads=threads,
        guard=guard,
        memory=kept,
    )


def _learned_of(config: EngineConfig, models: Models, device: str) -> dict[str, Any]:
    """What a policy learns of: target, drafts and device, without folders, which are nobody's business."""
    speculation, target = config.speculation, models.target
    drafts = [
        f"{name}: {Path(model).name}, {speculation.draft_quantization}, by {speculation.draw_rule}"
        + (f", {models.foreign[name].way} tokens" if name in models.foreign else "")
        for name, model in draft_names(speculation.drafts).items()
    ]
    kind = hashlib.sha256(repr(target.config).encode()).hexdigest()[:8]
    return {
        "target": f"{Path(config.model).name}, {config.quantization}, {kind}",
        "drafts": drafts,
        "device": device,
    }
