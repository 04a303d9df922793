"""Models of a config: the target, its tokenizer and its drafts, found, planned, loaded, shared by variants.

A variant is an engine that shares an LLM's models and has its own options.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from specinfer.config import EngineConfig
from specinfer.engine.automatic_draft import FAULTS, is_automatic, left_out, with_drafts, without_faulty
from specinfer.engine.drafts import AnyDraft, FoundHead, draft_names, models_among
from specinfer.engine.found_models import FoundModels, find_models, find_target, report, short_name
from specinfer.engine.hardware import Hardware, use_threads
from specinfer.engine.loader import Loader
from specinfer.engine.memory import MemoryPlan, plan_memory
from specinfer.engine.ranks import Ranks
from specinfer.errors import ConfigError
from specinfer.hub.model_files import hash_of
from specinfer.kernels.attention import NativeAttention
from specinfer.kernels.machine import short_turns, thread_count
from specinfer.models.adapters.adapter_cache import AdapterCache, adapter_dtype
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.hosted.model import HostedModel
from specinfer.models.language_model import LanguageModel
from specinfer.models.prepared import identity
from specinfer.models.shard import Layout
from specinfer.models.weight_sizes import estimate_bytes, layer_bytes, part_bytes, table_bytes
from specinfer.parallel.processes import FollowerProcesses
from specinfer.progress import NoProgress, Progress
from specinfer.runtime.executor import Host
from specinfer.runtime.flight import torch_threads
from specinfer.runtime.kv_cache import free_bytes, gib
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, ForeignTokens
from specinfer.speculation_config import SELF, Quantization
from specinfer.support import Feature, refusal
from specinfer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
# Options that determine the loaded weights and their kernels. A variant must have the same, but may have
# fewer drafts.
_SHARED_OPTIONS: Final = (
    *("model", "model_impl", "trust_remote_code", "dtype", "kv_cache_dtype", "device", "quantization"),
    *("kernels", "threads"),
    *("tensor_parallel", "pipeline_parallel", "master", "key_file", "local_ranks", "sum_parts"),
    *("chat_template", "memory", "offload", "offload_folder", "lora", "max_loras"),
)
_KV_DIVISOR: Final = 4  # a variant's part of a planned engine's KV memory is 1 over this
_DRAFT_OPTIONS: Final = ("draft_quantization", "draft_lora")


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models: the target, its tokenizer, and the drafts by speculator name.

    `named` are draft vocabularies, by draft name, where they differ from the target's (heads have their own);
    `foreign` are the token conversions of drafts with another tokenizer.
    """

    target: LanguageModel
    tokenizer: Tokenizer
    drafts: dict[str, AnyDraft]
    named: Mapping[str, DraftVocabulary] = field(default_factory=dict)
    foreign: Mapping[str, ForeignTokens] = field(default_factory=dict)
    # Sampling parameters that the target recommends.
    sampling: Mapping[str, float] = field(default_factory=dict)
    plan: MemoryPlan | None = None  # memory plan of a streamed target
    # Identifies the target's files and their conversion.
    origin: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[Host] = ()  # hosts of ranks, this one first; empty for a single process
    # Adapters that requests may name; None for models that the caller made.
    adapters: AdapterCache | None = None
    # Memory of a `self` draft that layers get if it does not pay.
    draft_memory: DraftMemory | None = None
    # Quantizations of the target, and of the drafts by speculator name.
    quantization: Quantization = "none"
    kinds: Mapping[str, Quantization] = field(default_factory=dict)
    adapted: Mapping[str, str] = field(default_factory=dict)  # hashes of drafts' own adapters, by name
    names: tuple[str, ...] = ()  # names of the drafts in a config

    def __post_init__(self) -> None:
        kinds: dict[str, Quantization] = {name: self.kinds.get(name, "none") for name in self.drafts}
        object.__setattr__(self, "kinds", kinds)

    @property
    def have_states(self) -> bool:
        """True if a model has recurrent states."""
        return any(model.config.recurrence is not None for model in (self.target, *self.drafts.values()))

    def with_kinds(self, config: EngineConfig) -> EngineConfig:
        """Return the config with the quantizations that were chosen for "auto"."""
        if config.quantization == "auto":
            config = replace(config, quantization=self.quantization)
        speculation, kinds = config.speculation, {*self.kinds.values()}
        if speculation.draft_quantization == "auto" and len(kinds) == 1:
            config = replace(config, speculation=replace(speculation, draft_quantization=kinds.pop()))
        return config

    def settled(self, config: EngineConfig) -> EngineConfig:
        """Return the config with the decisions that loading has made for its open options."""
        if is_automatic(config):
            config = with_drafts(config, self.names)
        config = self.with_kinds(config)
        if self.plan is None:
            return config
        drafts = self.plan.drafts.names
        return replace(config.streamed, speculation=replace(config.streamed.speculation, drafts=drafts))


def load_models(
    config: EngineConfig, progress: Progress | None = None, processes: FollowerProcesses | None = None
) -> Models:
    """Find, check and load every model of a config; a pool counts as its drafts.

    `processes` are followers of this host that have been started for this config.

    Raises ModelError and its subclasses for files that cannot be used, ConfigError for a draft that shares no
    token with the target, CapacityError if the weights do not fit into memory.
    """
    show = progress or NoProgress()
    hardware = Hardware.of(config, show)

    # PyTorch's threads load models.
    with torch_threads(use_threads(config.threads, hardware.kernels, config.ranks_here)), short_turns():
        chosen, target = find_target(config, hardware, show)
        automatic = is_automatic(config)

        def plan(config: EngineConfig) -> _LoadPlan:
            return _plan(find_models(config, target, hardware, show, automatic=automatic), show)

        planned = without_faulty(chosen, plan, partial(report, show=show)) if automatic else plan(chosen)
        try:
            return _load(planned, show, processes, automatic=automatic)
        except FAULTS as error:  # the plan has memory for the draft, so a new one is needed
            if not automatic or planned.memory is None:
                raise
            reason = left_out(error)
        models = _load(plan(with_drafts(chosen, ())), show, processes, automatic=False)
        report(reason, show)
        return models


class _LoadPlan(NamedTuple):
    """Found models, and where their weights will be."""

    found: FoundModels  # with the `self` draft that the memory plan may add
    adapters: AdapterCache
    origin: dict[str, str]  # as in Models
    layout: Layout | None  # None: a single process
    memory: MemoryPlan | None  # as in Models


def _plan(found: FoundModels, show: Progress) -> _LoadPlan:
    """Divide the target among ranks, and plan the memory; only prepared files are written."""
    config, target = found.config, found.target
    _, dtype, kernels, lacking = found.hardware
    adapters = _adapters(found)
    path = target.files.path  # hashed before it is read; the hash does not depend on the path
    origin = {**identity(path, config.kind, dtype), "model": hash_of(path)}
    if target.config.extends(config.scheduler.max_context or 0):
        origin["rope"] = "extended"  # outputs differ from those with a shorter context
    if lacking is not None:
        _LOG.warning("native kernels are not used, PyTorch runs instead, slowly: %s", lacking)
    elif kernels.library is None and {config.kind, *found.kinds.values()} != {"none"}:
        _LOG.warning("quantized products run in PyTorch, without native kernels, and slowly")
    needs = found.memory_needs(adapters.max_bytes())
    layout = _layout(found) if config.ranks > 1 else None
    if layout is not None and config.master is not None:  # memory for the ranks of this host
        parts = [
            layout.part(rank, target.config, whole_table=found.whole_table)
            for rank in range(config.ranks_here)
        ]
        here = sum(part_bytes(target.model, part, dtype, kernels, config.kind) for part in parts)
        needs = replace(needs, local_weights=here)
    memory = plan_memory(needs, config, show)
    if memory is not None and memory.drafts.names != config.speculation.drafts:  # the `self` draft was added
        drafts = dict.fromkeys(draft_names(memory.drafts.names), target)
        found = replace(found, drafts=drafts, kinds=dict.fromkeys(drafts, "int4"))
    return _LoadPlan(found, adapters, origin, layout, memory)


def _load(
    planned: _LoadPlan, show: Progress, processes: FollowerProcesses | None, *, automatic: bool
) -> Models:
    """Read the weights; an `automatic` draft whose weights have a fault is left out, with a line.

    Raises its fault if there is a memory plan, which has to be made again.
    """
    found, adapters, origin, layout, memory = planned
    config, target, drafts, kinds = found.config, found.target, found.drafts, found.kinds
    ids = found.logit_ids()
    loader = Loader(config, found.hardware, memory, show)
    self_drafts = [name for name, draft in drafts.items() if draft is target]
    draft_memory: DraftMemory | None = None
    if len(self_drafts) == 1 and config.ranks == 1:
        [name] = self_drafts
        draft_memory = loader.draft_memory(target, kinds[name], output=ids[name] is None)
    hosts: Sequence[Host] = ()
    loaded_drafts: dict[str, AnyDraft] = {}
    if layout is None:
        loaded = loader.target(target, config.kind, reads_table=found.reads_table, draft_memory=draft_memory)
    else:
        can = {
            name: (draft, kinds[name])
            for name, draft in models_among(drafts).items()
            if ids[name] is None and name not in found.foreign and name not in found.adapted
        }
        ranks = Ranks(target, config, layout, can, whole_table=found.whole_table, processes=processes)
        loaded, shared = loader.shared_out(ranks, can)
        loaded_drafts |= shared
        hosts = ranks.hosts
        report(f"{short_name(target)}: {ranks.summary}", show)
    if memory is not None:
        report(f"{short_name(target)}: {memory}", show)
    names = config.speculation.drafts
    try:
        for name, draft in drafts.items():
            if name in loaded_drafts:
                continue
            if isinstance(draft, FoundHead):
                loaded_drafts[name] = loader.head(draft, loaded, kinds[name])
            elif draft is target:
                loaded_drafts[name] = loader.self_draft(draft, loaded, kinds[name], ids[name], draft_memory)
            else:
                loaded_drafts[name] = loader.draft(draft, kinds[name], ids[name])
        for name, adapter in found.adapted.items():
            loader.adapt(loaded_drafts[name], adapter, kinds[name])
    except FAULTS as error:
        if not automatic or memory is not None:
            raise
        report(left_out(error), show)
        names, drafts = (), {}
    adapters.load()
    if adapters.names:
        count = f"{len(adapters.names)} named, at most {config.max_loras} in memory"
        report(
            f"{short_name(target)}: adapters take up to {gib(adapters.max_bytes())} of memory ({count})", show
        )
    origin |= {f"lora {name}": digest for name, digest in adapters.digests.items()}
    return Models(
        target=loaded,
        tokenizer=found.tokenizer.result(),
        drafts={name: loaded_drafts[name] for name in drafts},
        named=found.named,
        foreign=found.foreign,
        sampling=found.sampling,
        plan=memory,
        origin=origin,
        hosts=hosts,
        adapters=adapters,
        draft_memory=draft_memory,
        quantization=config.kind,
        kinds=kinds,
        adapted={name: adapter.digest() for name, adapter in found.adapted.items()},
        names=names,
    )


def _layout(found: FoundModels) -> Layout:
    """Divide the target among ranks; raises ConfigError if that is impossible."""
    config, model, (_, dtype, kernels, _) = found.config, found.target.model, found.hardware
    layers = layer_bytes(model, dtype, config.kind)
    beside = estimate_bytes(model, dtype, kernels, config.kind) - sum(layers)
    # Shared memory: stages are balanced by the bytes that a pass reads, without most embeddings.
    if config.master is None:
        beside -= table_bytes(model, dtype, config.kind)
    return Layout.of(config.tensor_parallel, config.pipeline_parallel, layers, beside, config.parts_of_sums)


def _adapters(found: FoundModels) -> AdapterCache:
    """The adapters that a config names, checked before the weights are read, which takes longer."""
    config, target, (device, dtype, kernels, _) = found.config, found.target, found.hardware
    adapters = AdapterCache(
        target.config,
        weights=adapter_dtype(config.kind, dtype),
        device=device,
        library=kernels.library,
        limit=config.max_loras,
        free=partial(free_bytes, device, config.memory),
        unsupported_reason=refusal({**config.features, **target.features, Feature.LORA: config.lora}),
    )
    for name, folder in config.adapters.items():
        adapters.register(name, Path(folder))
    return adapters


def variant_models(variant: EngineConfig, config: EngineConfig, models: Models) -> Models:
    """Return those of `models`, loaded for `config`, that the variant's config `variant` names.

    With a memory plan, a variant's KV caches get a part of the LLM's KV memory in addition to it. Raises
    ConfigError if `variant` needs other weights.
    """
    pairs = [(name, getattr(variant, name), getattr(config, name)) for name in _SHARED_OPTIONS]
    if variant.generation_config == "auto":  # the recommendation was read with the weights, or not at all
        pairs.append(("generation_config", "auto", config.generation_config))
    if variant.speculation.drafts:
        pairs += [
            (name, getattr(variant.speculation, name), getattr(config.speculation, name))
            for name in _DRAFT_OPTIONS
        ]
    for name, value, loaded in pairs:
        if value != loaded and (value != "auto" or not name.endswith("quantization")):
            raise ConfigError(
                f"{name} is {value!r}, and a variant shares weights that were loaded with {loaded!r}; "
                "leave it out, or make a separate LLM"
            )
    lengths = [one.scheduler.max_context or 0 for one in (variant, config)]
    if len({models.target.config.extends(length) for length in lengths}) > 1:
        raise ConfigError(
            f"max_context is {lengths[0]}, and a variant shares a model whose positions are turned for "
            f"texts of {lengths[1]} tokens (LongRoPE); leave it out, or make a separate LLM"
        )
    left = list(zip(config.speculation.drafts, models.drafts.items(), strict=True))
    drafts = {}
    for draft in variant.speculation.drafts:
        found = next((one for one in left if one[0] == draft), None)
        if found is None:
            known = ", ".join(config.speculation.drafts) or "no draft"
            raise ConfigError(
                f"drafts names {draft!r}; allowed for a variant: loaded drafts ({known}); leave it out, or "
                "make another LLM"
            )
        left.remove(found)
        name, model = found[1]
        drafts[name] = model
    plan = models.plan
    if plan is not None:
        plan = replace(plan, kv_cache=plan.kv_cache // _KV_DIVISOR)
    memory = models.draft_memory
    if memory is not None and {SELF, config.model} & {*variant.speculation.drafts} and not memory.keep():
        raise ConfigError(
            "drafts names the target's copy, but its guesses did not pay, and layers got its memory; "
            "give drafts=(), or make a separate LLM"
        )
    return replace(models, drafts=drafts, plan=plan, draft_memory=None)


def threads_of_torch(config: EngineConfig, models: Models) -> int:
    """Return PyTorch's number of threads in a step: one if it computes only small operations.

    A finished PyTorch thread spins for milliseconds on a core that the native kernels need: a pass of 8 rows
    of a small model took 18 ms instead of 13 ms after one cosine.
    """
    loaded = (models.target, *models.drafts.values())
    if isinstance(models.target, HostedModel):
        return 1  # with several threads PyTorch divides rows at arbitrary places
    native = all(isinstance(model.kernels.attention, NativeAttention) for model in loaded)
    return 1 if native else thread_count(config.threads, config.ranks_here)
