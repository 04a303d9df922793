"""Build an Engine from an EngineConfig and loaded models: measure passes, size the caches, join the parts."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from specinfer.config import EngineConfig
from specinfer.engine.admission import Admission
from specinfer.engine.costs import (
    draft_curves,
    first_stop,
    max_pass_rows,
    measure_later,
    measuring,
    target_curves,
    timed_drafts,
)
from specinfer.engine.engine import Engine, Postponed
from specinfer.engine.fingerprint import engine_fingerprint
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.models import Models, threads_of_torch
from specinfer.engine.prompt_files import PromptFiles
from specinfer.engine.prompt_store import PromptStore
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.state_slots import StateSlots
from specinfer.errors import ConfigError
from specinfer.hub.model_files import hash_of
from specinfer.plan import StateCounts
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import CostCurve, device_name
from specinfer.runtime.executor import Executor
from specinfer.runtime.flight import torch_threads
from specinfer.runtime.kv_cache import bytes_per_block
from specinfer.runtime.state_cache import MAX_CHECKPOINTS
from specinfer.speculate.drafts.draft import Draft
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.guard import Guard, SelfDraft
from specinfer.speculate.policy.memory import PolicyMemory
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.speculate.table import build_speculators
from specinfer.speculation_config import MAX_ROWS, SELF

# Limits of "auto": the time of a pass as a multiple of one row's, and the minimum rows.
_TREE_COST: Final = 1.5
_MIN_NODES: Final = 64
_STEP_COST: Final = 2.0
_MIN_ROWS: Final = 128
_LONG_REQUESTS: Final = 4  # requests that may fill the context at once; shorter ones take blocks as they grow


def resolved(config: EngineConfig, target: CostCurve, max_rows: int = MAX_ROWS) -> EngineConfig:
    """Return the config with numbers, at most `max_rows`, for "auto", from the target's cost curve.

    A tree gets the rows of a pass that takes 1.5 times as long as one row. A larger tree would have to yield
    half a step's tokens more, and doubling it yields a tenth (Sequoia, figure 1). A step gets the rows of a
    pass that takes twice as long: larger chunks hardly speed up a prefill, and delay the other requests.
    Neither is below a server's default, and a step has room for a row per request and for a tree.
    """
    passes = target.table(MAX_ROWS)
    nodes = config.speculation.max_nodes
    if nodes == "auto":
        nodes = min(max_rows, max(_MIN_NODES, bisect_right(passes, _TREE_COST * passes[1]) - 1))
    rows = config.scheduler.max_step_tokens
    if rows == "auto":
        rows = bisect_right(passes, _STEP_COST * passes[1]) - 1
        rows = max(min(rows, max_rows), _MIN_ROWS, config.scheduler.max_batch_size, nodes or _MIN_NODES)
    return replace(
        config,
        speculation=replace(config.speculation, max_nodes=nodes),
        scheduler=replace(config.scheduler, max_step_tokens=rows),
    )


def build_engine(
    config: EngineConfig,
    models: Models,
    extra: Sequence[Speculator] = (),
    progress: Progress | None = None,
) -> tuple[EngineConfig, Engine]:
    """Return an engine over loaded models, with the config's speculators and then the caller's `extra` ones.

    The config must name the drafts of a pool instead of the pool. The returned config has numbers for "auto".
    Raises CapacityError if the KV cache does not fit, ConfigError if options contradict each other.
    """
    config = models.with_kinds(config)
    if models.have_states and config.speculation.max_nodes == "auto":  # each node takes memory in each slot
        config = replace(config, speculation=replace(config.speculation, max_nodes=_MIN_NODES))
    max_context = _max_context(config, models)
    executor = _executor(config, models, max_context)
    config, sizing = _sizing(config, models, executor, progress)
    speculation = config.speculation
    speculators: list[Speculator | LevelSpeculator] = [
        *build_speculators(speculation, models.target.kernels.library, progress),
        *sizing.drafts,
        *extra,
    ]
    vocab, guard = models.target.config.vocab_size, sizing.guard
    in_target = models.target.config.recurrence is not None
    slots = StateSlots(executor.states, block_size=executor.block_size, in_target=in_target)
    pool = BlockPool(executor.num_blocks, executor.block_size, _max_kept(config, models))
    engine = Engine(
        executor=executor,
        speculators=Ensemble(speculators, vocab=vocab, policy=sizing.policy),
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
            config.scheduler,
            pool,
            tree_nodes=speculation.node_limit,
            max_context=max_context,
            prefix_reuse=config.cache.prefix_reuse,
            max_adapters=config.max_loras,
            fetch=None if models.adapters is None else models.adapters.fetch,
            states=slots if models.have_states else None,
            store=_store(config, models, executor, pool, slots if in_target else None, sizing.drafts),
            # A head needs the target's hidden states of all tokens after the whole blocks that it has read.
            part_blocks=not any(speculator.taps for speculator in speculators),
        ),
        verifier=speculation.verifier,
        threads=threads_of_torch(config, models),
        guard=guard,
        memory=sizing.memory,
        postponed=sizing.postponed,
    )
    return config, engine


def _max_context(config: EngineConfig, models: Models) -> int:
    """Return the maximum tokens of a text; raises ConfigError if the model has fewer."""
    asked, own = config.scheduler.max_context, models.target.config.max_context
    if asked is not None and asked > own:
        raise ConfigError(
            f"max_context is {asked}; allowed: at most {own}, the context of {config.model}; lower it"
        )
    return asked or own


def _executor(config: EngineConfig, models: Models, max_context: int) -> Executor:
    """Return an executor with KV caches that fit into memory."""
    long_requests = min(config.scheduler.max_batch_size, _LONG_REQUESTS)
    return Executor.within_memory(
        models.target,
        [*models.drafts.values()],
        block_size=config.cache.block_size,
        wanted_positions=long_requests * (max_context + config.speculation.node_limit),
        kept_blocks=_max_kept(config, models),
        needed_positions=min(max_context, 128),
        text_positions=max_context + config.speculation.node_limit,
        limit=config.cache.memory,
        planned=None if models.plan is None else models.plan.kv_cache,
        memory=config.memory if models.plan is None else None,
        hosts=models.hosts,
        adapters=models.adapters,
        states=StateCounts(
            config.scheduler.max_batch_size,
            MAX_CHECKPOINTS if config.cache.prefix_reuse else 0,
            config.speculation.node_limit,
        ),
    )


def _max_kept(config: EngineConfig, models: Models) -> int:
    """Return the number of blocks that prompt memory holds."""
    caches = [(m.config, m.kernels.kv_dtype(m.dtype)) for m in (models.target, *models.drafts.values())]
    per_block = bytes_per_block(caches, config.cache.block_size)
    return config.cache.prompt_memory // max(1, per_block) if config.cache.prefix_reuse else 0


def _store(
    config: EngineConfig,
    models: Models,
    executor: Executor,
    pool: BlockPool,
    slots: StateSlots | None,
    drafts: Sequence[Draft],
) -> PromptStore | None:
    """Return the store of prompts, if one is configured; raises ConfigError if it cannot be used."""
    options, runner = config.cache, executor.target
    if options.prompt_store is None:
        return None
    if not models.origin:
        raise ConfigError("prompt_store needs a model that was loaded from files; load it by LLM(folder)")
    least = executor.block_size * runner.cache.row_bytes
    least = max(least, 0 if runner.states is None else runner.states.slot_bytes) + 64
    if options.prompt_store_size < least:
        raise ConfigError(
            f"prompt_store_size is {options.prompt_store_size}; allowed: {least}, a block, or more"
        )
    kind = f"{engine_fingerprint(config, models)} {executor.block_size} {runner.cache.layout}"
    path = Path(options.prompt_store).expanduser()
    try:
        files = PromptFiles(path, options.prompt_store_size, hashlib.sha256(kind.encode()).hexdigest())
    except OSError as error:
        raise ConfigError(
            f"prompt_store cannot be used: {error}; choose a folder that can be written"
        ) from None
    texts = {
        _draft_key(models, model, draft): draft.texts
        for model, draft in zip(config.speculation.drafts, drafts, strict=False)
    }
    return PromptStore(files, runner, pool, slots, adapters=config.adapters.keys(), drafts=texts)


def _draft_key(models: Models, model: str, draft: Draft) -> str:
    """Return a name that differs for drafts with other numbers beside one target."""
    cache, kind = draft.texts.cache, models.kinds[draft.name]
    parts = _named(model), kind, models.adapted.get(draft.name), cache and cache.layout
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _Sizing(NamedTuple):
    """The drafts, and the policy that sizes trees by the costs of passes."""

    drafts: Sequence[Draft]
    policy: SpeculationPolicy
    guard: Guard | None = None
    memory: PolicyMemory | None = None  # the policy's state on disk
    postponed: Postponed | None = None


def _sizing(
    asked: EngineConfig, models: Models, executor: Executor, progress: Progress | None
) -> tuple[EngineConfig, _Sizing]:
    """Return the config with numbers for "auto", and what its costs of passes, if needed, determine."""
    threads, stop = threads_of_torch(asked, models), first_stop(asked, models)
    by_cost, config = asked.speculation.tree_size == "cost", asked
    curve: CostCurve | None = None
    if by_cost or "auto" in (asked.speculation.max_nodes, asked.scheduler.max_step_tokens):
        with torch_threads(threads):
            measure = measuring(asked, executor, models, progress, stop)
            curve, layers_curve = target_curves(asked, models, measure)
        config = resolved(asked, curve, max_pass_rows(asked, models))
    speculation = config.speculation
    # With streamed experts the time of a pass is an estimate, as it depends on the experts that texts need.
    streamed = models.plan is not None and models.plan.placement.experts is None
    shape = Shape.streamed(speculation) if streamed else Shape.of(speculation)
    drafting = timed_drafts(config, executor, models, shape)
    drafts = [draft for _, draft in drafting.values()]
    if curve is None or not by_cost:
        return config, _Sizing(drafts, SpeculationPolicy())
    with torch_threads(threads):
        measure = measuring(config, executor, models, progress, stop)
        costs = draft_curves(models, {name: runner for name, (runner, _) in drafting.items()}, measure)
    measured = speculation.clock == "measured"
    named = zip(models.drafts, speculation.drafts, strict=False)  # a variant's have the names of all drafts
    copies = [name for name, one in named if one in (SELF, config.model)]
    self_draft: SelfDraft | None = None  # a draft whose memory layers may get
    if models.draft_memory is not None and models.target.stream is not None:
        [name] = copies
        self_draft = SelfDraft(drafting[name][1], models.draft_memory, layers_curve)
    policy = CostPolicy.by_curves(
        *(curve, costs, speculation),
        measured=measured,
        known=streamed,
        deepest=shape.deepest,
        self_draft=self_draft,
    )
    for name in copies:
        if name in costs:
            policy.acceptance.expect_self_draft(name)
    memory: PolicyMemory | None = None
    postponed: Postponed | None = None
    if any(one.rough for one in (curve, *costs.values())):
        postponed = measure_later(asked, config, models, executor.positions, policy)
    if measured:  # clock "curve" must decide alike in every run
        memory = PolicyMemory(_policy_key(config, models), policy.acceptance, policy.guard)
        memory.recall()
    return config, _Sizing(drafts, policy, policy.guard, memory, postponed)


def _policy_key(config: EngineConfig, models: Models) -> dict[str, Any]:
    """Return the key of a policy's learned state: target, drafts and device, without paths.

    Models are told apart by their files, as fine-tunes may lie in folders of one name.
    """
    speculation, target = config.speculation, models.target
    drafts = [
        f"{name}: {_named(model)}, {models.kinds.get(name)}, by {speculation.draw_rule}"
        + (", shared tokens" if name in models.foreign else "")
        for name, model in zip(models.drafts, speculation.drafts, strict=False)
    ]
    kind = hashlib.sha256(repr(target.config).encode()).hexdigest()[:8]
    return {
        "target": f"{_named(config.model)}, {config.kind}, {kind}",
        "drafts": drafts,
        "device": device_name(target.device),
    }


def _named(model: str) -> str:
    """Return the last name of a file or folder with a hash of the model's files, or another model's name."""
    path = Path(model).expanduser()
    is_here = path.is_file() or (path / "config.json").is_file() or any(path.glob("*.gguf"))
    return f"{path.name} {hash_of(path)[:8]}" if is_here else model
