"""Find, check and load the models of a config."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from specinfer.attention.native import NativeAttention
from specinfer.config import EngineConfig
from specinfer.engine.drafts import (
    AnyDraft,
    FoundHead,
    FoundModel,
    check_options,
    draft_adapters,
    draft_names,
    find,
    find_drafts,
    foreign_tokens_of,
    logit_ids_of,
    models_among,
    self_kind,
    vocabularies,
    with_pool_members,
)
from specinfer.engine.loader import Loader
from specinfer.engine.memory import (
    DraftSet,
    MemoryNeeds,
    MemoryPlan,
    draft_bytes,
    offload_folder,
    plan_memory,
)
from specinfer.engine.quantization import Choice, choose
from specinfer.engine.ranks import Ranks
from specinfer.errors import ConfigError
from specinfer.hub.model_files import hash_of, sampling_defaults
from specinfer.kernels.choice import Kernels, choose_kernels
from specinfer.kernels.machine import thread_count
from specinfer.models.adapters.adapter_cache import AdapterCache, adapter_dtype
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.draft_memory import DraftMemory
from specinfer.models.hosted.folder import HostedFolder
from specinfer.models.hosted.model import HostedModel
from specinfer.models.language_model import LanguageModel
from specinfer.models.prepared import identity
from specinfer.models.weight_sizes import estimate_bytes, layer_bytes, part_bytes
from specinfer.parallel.processes import FollowerProcesses
from specinfer.parallel.shard import Layout
from specinfer.progress import NoProgress, Progress
from specinfer.runtime.executor import Host
from specinfer.runtime.flight import torch_threads
from specinfer.runtime.kv_cache import free_bytes, gib
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, ForeignTokens, draft_vocabulary
from specinfer.speculation_config import SELF, Quantization, QuantizationOption
from specinfer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


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
    # Memory of a `self` draft that layers may use while speculation is off.
    draft_memory: DraftMemory | None = None
    # Quantizations of the target, and of the drafts by speculator name.
    quantization: Quantization = "none"
    kinds: Mapping[str, Quantization] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds: dict[str, Quantization] = {name: self.kinds.get(name, "none") for name in self.drafts}
        object.__setattr__(self, "kinds", kinds)

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
    config = with_pool_members(config, show)
    device = pick_device(config.device)
    _check_quantization("quantization", config.quantization, device)
    _check_quantization("draft_quantization", config.speculation.draft_quantization, device)
    for name, asked in (
        ("tensor_parallel", config.tensor_parallel),
        ("pipeline_parallel", config.pipeline_parallel),
        ("sum_parts", config.parts_of_sums),
    ):
        if asked > 1 and device.type != "cpu":
            raise ConfigError(f"{name} is {asked} on device {device}; allowed there: 1")
    kernels, lacking = choose_kernels(config.kernels, device, show)
    dtype = pick_dtype(config.dtype, device, kernels)
    # PyTorch's threads load models.
    with torch_threads(use_threads(config.threads, kernels, config.ranks_here)):
        return _load_models(config, device, dtype, kernels, lacking, show, processes)


def _load_models(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    lacking: str | None,
    show: Progress,
    processes: FollowerProcesses | None,
) -> Models:
    trust, longest = config.trust_remote_code, config.scheduler.max_context
    target = find(config.model, show, config.model_impl, max_context=longest, trust_remote_code=trust)
    if isinstance(target.model, HostedFolder):
        _check_hosted(config, target)
        _report(f"{_name(target)}: {target.model.summary}", show)
    select = partial(
        choose,
        dtype=dtype,
        device=device,
        kernels=kernels,
        memory=config.memory,
        divided=config.tensor_parallel > 1,
        streams=config.offload != "never",
    )
    if config.quantization == "auto":
        choice = select(target.model)
        config = replace(config, quantization=choice.kind)
        _report_choice(_name(target), choice, show)
    adapters = _adapters(config, target, device, dtype, kernels)
    path = target.files.path  # hashed before it is read; the hash does not depend on the path
    origin = {**identity(path, config.kind, dtype), "model": hash_of(path)}
    if target.config.extends(longest or 0):
        origin["rope"] = "extended"  # outputs differ from those with a shorter context
    found = find_drafts(
        config.speculation.drafts,
        target,
        config.model,
        show,
        max_context=longest,
        trust_remote_code=trust,
    )
    drafts = {name: found[model] for name, model in draft_names(config.speculation.drafts).items()}
    for draft in drafts.values():
        if isinstance(draft, FoundModel) and _weights(draft) > _weights(target):
            _LOG.warning(
                "the draft %s has more weights than its target and can only slow it down; swap the two",
                _name(draft),
            )
    check_options(config.speculation, drafts)
    adapted = draft_adapters(config.speculation, drafts)
    # Read beside the weights: that takes a second of Python, and weights are read without it.
    reading = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    read_tokenizer = reading.submit(Tokenizer.load, target.files, config.chat_template)
    reading.shutdown(wait=False)
    sampling = sampling_defaults(target.files) if config.generation_config == "auto" else {}
    size = target.config.vocab_size
    foreign: Mapping[str, ForeignTokens] = {}
    named: Mapping[str, DraftVocabulary] = {}
    if drafts or config.speculation.draft_vocabulary is not None or config.chat_template is not None:
        tokenizer = read_tokenizer.result()
        kept = draft_vocabulary(config.speculation.draft_vocabulary, tokenizer, size)
        foreign = foreign_tokens_of(target, drafts, tokenizer, config.speculation, kept)
        named = vocabularies(target, drafts, foreign, kept)
    of_target, speculation, kinds = config.kind, config.speculation, dict[str, Quantization]()
    for name, model in draft_names(speculation.drafts).items():
        asked, draft = speculation.draft_quantization, drafts[name]
        if model == SELF:
            kinds[name] = self_kind(asked, of_target)
        elif asked != "auto":
            kinds[name] = asked
        elif isinstance(draft, FoundHead):
            kinds[name] = "none"
        else:
            choice = select(draft.model)
            kinds[name] = choice.kind
            _report_choice(f"{_name(draft)}, a draft", choice, show)
    if lacking is not None:
        _LOG.warning("native kernels are not used, PyTorch runs instead, slowly: %s", lacking)
    elif kernels.library is None and {of_target, *kinds.values()} != {"none"}:
        _LOG.warning("quantized products run in PyTorch, without native kernels, and slowly")
    needs = replace(
        _memory_needs(target, drafts, kinds, adapted, config, dtype, device, kernels),
        adapters=adapters.max_bytes,
    )
    layout: Layout | None = None
    reads_table = needs.reads_table or target in drafts.values()
    if config.ranks > 1:
        layers = layer_bytes(target.model, dtype, of_target)
        beside = estimate_bytes(target.model, dtype, kernels, of_target) - sum(layers)
        # Shared memory: stages are balanced by the bytes that a pass reads, without most embeddings.
        if config.master is None:
            beside -= target.config.vocab_size * target.config.embedding_size * dtype.itemsize
        sizes = config.tensor_parallel, config.pipeline_parallel
        layout = Layout.of(*sizes, layers, beside, config.parts_of_sums)
        if config.master is not None:  # memory for the ranks of this host
            parts = [
                layout.part(rank, target.config, whole_table=reads_table) for rank in range(config.ranks_here)
            ]
            here = sum(part_bytes(target.model, part, dtype, kernels, of_target) for part in parts)
            needs = replace(needs, local_weights=here)
    plan = plan_memory(needs, config, show)
    if plan is not None and plan.drafts.names != speculation.drafts:  # the `self` draft was added
        drafts = dict.fromkeys(draft_names(plan.drafts.names), target)
        kinds = dict.fromkeys(drafts, "int4")
    loader = Loader(
        dtype=dtype,
        device=device,
        kernels=kernels,
        native=config.kernels == "native",
        plan=plan,
        folder=None if plan is None else offload_folder(config),
        keep=config.prepared,
        sum_parts=config.parts_of_sums,
        progress=show,
    )
    self_drafts = [name for name, draft in drafts.items() if draft is target]
    ids = {
        name: logit_ids_of(draft, named.get(name), foreign.get(name))
        for name, draft in models_among(drafts).items()
    }
    draft_memory: DraftMemory | None = None
    if len(self_drafts) == 1 and config.ranks == 1:
        draft_memory = loader.draft_memory(target, kinds[self_drafts[0]], output=ids[self_drafts[0]] is None)
    ranks: Ranks | None = None
    loaded_drafts: dict[str, AnyDraft] = {}
    if layout is None:
        loaded = loader.target(target, of_target, reads_table=needs.reads_table, draft_memory=draft_memory)
    else:
        can = {
            name: (draft, kinds[name])
            for name, draft in models_among(drafts).items()
            if ids[name] is None and name not in foreign and name not in adapted
        }
        ranks = Ranks(target, config, layout, can, whole_table=reads_table, processes=processes)
        loaded, shared = loader.shared_out(ranks, can)
        loaded_drafts |= shared
        _report(f"{_name(target)}: {ranks}", show)
    if plan is not None:
        _report(f"{_name(target)}: {plan}", show)
    for name, draft in drafts.items():
        if name in loaded_drafts:
            continue
        if isinstance(draft, FoundHead):
            loaded_drafts[name] = loader.head(draft, target, loaded, kinds[name])
        elif draft is target:
            loaded_drafts[name] = loader.self_draft(draft, loaded, kinds[name], ids[name], draft_memory)
        else:
            loaded_drafts[name] = loader.draft(draft, kinds[name], ids[name])
    for name, adapter in adapted.items():
        loader.adapt(loaded_drafts[name], adapter, kinds[name])
    adapters.load()
    if adapters.names:
        count = f"{len(adapters.names)} named, at most {config.max_loras} in memory"
        _report(f"{_name(target)}: adapters take up to {gib(needs.adapters)} of memory ({count})", show)
    origin |= {f"lora {name}": digest for name, digest in adapters.digests.items()}
    return Models(
        target=loaded,
        tokenizer=read_tokenizer.result(),
        drafts={name: loaded_drafts[name] for name in drafts},
        named=named,
        foreign=foreign,
        sampling=sampling,
        plan=plan,
        origin=origin,
        hosts=[] if ranks is None else ranks.hosts,
        adapters=adapters,
        draft_memory=draft_memory,
        quantization=of_target,
        kinds=kinds,
    )


def _report(line: str, show: Progress) -> None:
    """Show a line to the user and log it."""
    show.say(line)
    _LOG.info(line)


def _report_choice(name: str, choice: Choice, show: Progress) -> None:
    """Report a quantization; floats, which are as usual, are only logged."""
    line = f"{name}: {choice}"
    if choice.kind == "none":
        _LOG.info(line)
    else:
        _report(line, show)


def _name(found: FoundModel) -> str:
    return Path(found.files.name).name or found.files.name


def _weights(found: FoundModel) -> int:
    """Number of elements of a model's tensors."""
    return sum(map(math.prod, found.model.shapes.values()))


def _adapters(
    config: EngineConfig, target: FoundModel, device: torch.device, dtype: torch.dtype, kernels: Kernels
) -> AdapterCache:
    """The adapters that a config names, checked before the weights are read, which takes longer."""
    refused: str | None = None
    if isinstance(target.model, HostedFolder):
        refused = f"models of {target.config.family} run without; merge it into the model"
    if config.ranks > 1:
        refused = "no rank has a part of one; leave tensor_parallel and pipeline_parallel out"
    adapters = AdapterCache(
        target.config,
        weights=adapter_dtype(config.kind, dtype),
        device=device,
        library=kernels.library,
        limit=config.max_loras,
        free=partial(free_bytes, device, config.memory),
        refused=refused,
    )
    for name, folder in config.adapters.items():
        adapters.register(name, Path(folder))
    return adapters


def _check_hosted(config: EngineConfig, target: FoundModel) -> None:
    """Raise ConfigError for options that a target that runs through transformers does not support."""
    usual = EngineConfig(model=config.model)
    for name in ("tensor_parallel", "pipeline_parallel", "sum_parts", "offload"):
        if (asked := getattr(config, name)) != (default := getattr(usual, name)):
            raise ConfigError(
                f"{name} is {asked!r}, and {target.files.name} runs through transformers, whose layers can "
                f"be neither divided nor streamed; allowed there: {default!r}"
            )


def _memory_needs(
    target: FoundModel,
    drafts: Mapping[str, FoundModel | FoundHead],
    kinds: Mapping[str, Quantization],
    adapted: Mapping[str, PeftFolder],
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> MemoryNeeds:
    """Return the models to plan memory for: the named ones, or a `self` draft if no draft is named."""
    of_adapters = {
        name: adapter.bytes(adapter_dtype(kinds[name], dtype)) for name, adapter in adapted.items()
    }
    sizes = {
        name: draft.weight_bytes(dtype, kernels, kinds[name]) + of_adapters.get(name, 0)
        for name, draft in drafts.items()
    }
    needs = MemoryNeeds(
        name=target.files.name,
        target=target.model,
        quantization=config.kind,
        dtype=dtype,
        device=device,
        kernels=kernels,
        draft_weights={f"{name} {draft.files.name}": sizes[name] for name, draft in drafts.items()},
        draft_sets=(),
        reads_table=any(isinstance(draft, FoundHead) for draft in drafts.values()),
    )
    names = config.speculation.drafts
    if names == (SELF,) and kinds["draft"] == "int4":
        return replace(needs, draft_sets=needs.self_drafts(of_adapters.get("draft", 0)))
    weights = sum(
        draft_bytes(draft.model, dtype, kernels, kinds[name]) + of_adapters.get(name, 0)
        if isinstance(draft, FoundModel)
        else sizes[name]
        for name, draft in drafts.items()
    )
    caches = [(draft.config, dtype) for draft in drafts.values() if draft.config is not None]
    may = config.offload == "auto" and config.kind != "int4" and config.speculation.node_limit > 1
    added = needs.self_drafts() if may and not names else []
    return replace(needs, draft_sets=[DraftSet(names, weights, weights, caches), *added])


def pick_device(name: str) -> torch.device:
    """Return the device that an option names; raises ConfigError if it is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device is {name!r}, which this PyTorch does not have; use auto or cpu")
    return device


def pick_dtype(name: str, device: torch.device, kernels: Kernels) -> torch.dtype:
    """Return the dtype of an option; auto is bfloat16 on GPUs and with native kernels, else float32."""
    if name == "auto":
        native = device.type == "cuda" or kernels.library is not None
        return torch.bfloat16 if native else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def use_threads(wanted: int | None, kernels: Kernels, processes: int = 1) -> int:
    """Set the number of threads of this process's native kernels, and return it.

    None takes the cores divided by `processes`. It is at most OMP_NUM_THREADS.
    """
    count = thread_count(wanted, processes)
    if kernels.library is not None:
        kernels.library.set_threads(count)
    return count


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


def _check_quantization(option: str, value: QuantizationOption, device: torch.device) -> None:
    if value not in ("auto", "none") and device.type != "cpu":
        raise ConfigError(
            f"{option} is {value!r} on device {device}; quantized products run on the CPU only: "
            f"use device cpu, or {option} none"
        )
