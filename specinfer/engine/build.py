"""EngineConfig -> a running Engine: find the files, check that they fit together, load, size the cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specinfer.attention.native import NativeAttention, unsupported
from specinfer.attention.sdpa import SdpaAttention
from specinfer.config import EngineConfig, Quantization
from specinfer.engine.admission import Admission
from specinfer.engine.drafts import (
    AnyDraft,
    Found,
    FoundHead,
    check_options,
    draft_names,
    exchanges,
    find,
    find_drafts,
    kept_logits,
    make_draft,
    vocabularies,
)
from specinfer.engine.engine import Engine
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.pass_costs import TimedDraft, pass_costs
from specinfer.engine.pools import with_members
from specinfer.engine.scheduler import Scheduler
from specinfer.errors import ConfigError
from specinfer.heads.load import load_head
from specinfer.heads.runner import HeadModel
from specinfer.hub.model_files import sampling_defaults
from specinfer.kernels.choice import Kernels, choose_kernels, guessing, streaming
from specinfer.kernels.machine import thread_count
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import estimate_bytes, load_model
from specinfer.progress import NoProgress, Progress
from specinfer.runtime import memory
from specinfer.runtime.cost_curve import device_name
from specinfer.runtime.executor import LocalExecutor
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, ForeignTokens, draft_vocabulary
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.guarded_policy import GuardedPolicy, sized_by_cost
from specinfer.speculate.policy.policy_memory import PolicyMemory
from specinfer.speculate.policy.trusted_policy import TrustedPolicy
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.speculate.table import build_speculators
from specinfer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models: the target, its tokenizer, and the drafts by speculator name.

    `named` are the tokens of each draft model with logits for other ids than the target's (heads know their
    own), `foreign` are drafts with other tokens.
    """

    target: LanguageModel
    tokenizer: Tokenizer
    drafts: dict[str, AnyDraft]
    named: Mapping[str, DraftVocabulary] = field(default_factory=dict)
    foreign: Mapping[str, ForeignTokens] = field(default_factory=dict)
    sampling: Mapping[str, float] = field(default_factory=dict)  # parameters that the target recommends


def load_models(config: EngineConfig, progress: Progress | None = None) -> Models:
    """Find, check and load every model the config names, of a pool its members.

    Raises ModelError and its kind for files that cannot be used, ConfigError for a draft that has no token in
    common with the target, CapacityError when the weights do not fit into memory.
    """
    show = progress or NoProgress()
    config = with_members(config, show)
    device = pick_device(config.device)
    _check_quantization("quantization", config.quantization, device)
    _check_quantization("draft_quantization", config.speculation.draft_quantization, device)
    kernels, lacking = choose_kernels(config.kernels, device, show)
    dtype = pick_dtype(config.dtype, device, kernels)
    use_threads(config.threads, kernels)
    target = find(config.model, show)
    found = find_drafts(config.speculation.drafts, target, config.model, show)
    drafts = {name: found[model] for name, model in draft_names(config.speculation.drafts).items()}
    check_options(config.speculation, drafts)
    tokenizer = Tokenizer.load(target.files, config.chat_template)
    sampling = sampling_defaults(target.files) if config.generation_config == "auto" else {}
    size = target.config.vocab_size
    kept = draft_vocabulary(config.speculation.draft_vocabulary, tokenizer, size)
    foreign = exchanges(target, drafts, tokenizer, config.speculation, kept)
    named = vocabularies(target, drafts, foreign, kept)
    of_target, of_drafts = config.quantization, config.speculation.draft_quantization
    if lacking is not None:
        _LOG.warning("native kernels are not used, PyTorch runs instead, slowly: %s", lacking)
    elif kernels.library is None and {of_target, of_drafts} != {"none"}:
        _LOG.warning("quantized products run in PyTorch, without native kernels, and slowly")
    whole = estimate_bytes(target.model, dtype, kernels, of_target)
    sizes = {name: draft.weight_bytes(dtype, kernels, of_drafts) for name, draft in drafts.items()}
    told = {f"{name} {draft.files.name}": sizes[name] for name, draft in drafts.items()}
    memory.check_weights_fit({target.files.name: whole, **told}, device)

    def fitting(found: Found | FoundHead, weights: int) -> Kernels:
        own = streaming(kernels, weights)
        return _with_attention(own, found, dtype, must=config.kernels == "native")

    loaded = _load(target, dtype, device, show, fitting(target, whole), of_target)

    def load_draft(name: str, draft: Found | FoundHead) -> AnyDraft:
        own = guessing(fitting(draft, sizes[name]))
        if isinstance(draft, Found):
            logits = kept_logits(draft, named.get(name), foreign.get(name))
            return _load(draft, dtype, device, show, own, of_drafts, logits)
        return load_head(
            draft.head,
            target.model,
            loaded,
            progress=show,
            name=draft.files.name,
            kernels=own,
            quantization=of_drafts,
        )

    models = Models(
        target=loaded,
        tokenizer=tokenizer,
        drafts={name: load_draft(name, draft) for name, draft in drafts.items()},
        named=named,
        foreign=foreign,
        sampling=sampling,
    )
    _leave_cores_to_kernels(models)
    return models


def build_engine(
    config: EngineConfig,
    models: Models,
    extra: Sequence[Speculator] = (),
    progress: Progress | None = None,
) -> Engine:
    """An engine over loaded models, with the config's speculators and then `extra` ones of the caller's.

    The config names a pool's members, and not the pool (pools.with_members). Raises CapacityError when the KV
    cache does not fit, ConfigError when options contradict each other.
    """
    speculation, limits = config.speculation, config.scheduler
    own_limit = models.target.config.max_context
    max_context = min(limits.max_context or own_limit, own_limit)
    if limits.max_context is not None and limits.max_context > own_limit:
        raise ConfigError(
            f"max_context is {limits.max_context}; {config.model} has a context of {own_limit}: lower it"
        )
    loaded = (models.target, *models.drafts.values())
    blocks = memory.num_blocks(
        [(m.config, m.dtype) for m in loaded if not isinstance(m, HeadModel) or m.head.body is not None],
        block_size=config.cache.block_size,
        wanted_positions=limits.max_batch_size * (max_context + speculation.max_nodes),
        needed_positions=min(max_context, 128),
        limit=config.cache.memory,
        device=models.target.device,
    )

    vocab = models.target.config.vocab_size
    executor = LocalExecutor(models.target, num_blocks=blocks, block_size=config.cache.block_size)
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
    guard: GuardedPolicy | None = None
    kept: PolicyMemory | None = None  # what the policy learns, over many runs
    if speculation.tree_size == "cost":
        timed = {
            name: TimedDraft(models.drafts[name], runner, models.named.get(name))
            for name, (runner, _) in drafting.items()
        }
        costs = pass_costs(config, executor, timed, progress)
        measured = speculation.clock == "measured"
        guard, learned = sized_by_cost(
            *(costs.target, costs.drafts, speculation),
            measured=measured,
            library=models.target.kernels.library,
        )
        if measured:  # a run by the curve decides what the last one decided
            kept = PolicyMemory(_learned_of(config, models), learned)
            kept.recall()
    speculators: list[Speculator | LevelSpeculator] = [
        *build_speculators(speculation, models.target.kernels.library, progress),
        *(draft for _, draft in drafting.values()),
        *extra,
    ]
    policy = FixedPolicy() if guard is None else TrustedPolicy(guard, FixedPolicy.of(speculation))
    pool = BlockPool(blocks, config.cache.block_size)
    return Engine(
        executor=executor,
        speculators=Ensemble(speculators, vocab=vocab, policy=policy),
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
        guard=guard,
        memory=kept,
    )


def _learned_of(config: EngineConfig, models: Models) -> dict[str, Any]:
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
        "device": device_name(target.device),
    }


def pick_device(name: str) -> torch.device:
    """The device an option names; raises ConfigError when it is not there."""
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
    """The dtype an option names; auto is bfloat16 on GPUs and with native kernels, else float32."""
    if name == "auto":
        native = device.type == "cuda" or kernels.library is not None
        return torch.bfloat16 if native else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def use_threads(wanted: int | None, kernels: Kernels) -> None:
    """Let so many threads compute, in this process: the native kernels' and PyTorch's.

    Never more than OMP_NUM_THREADS says. PyTorch's load models, and run where kernels are its own.
    """
    count = thread_count(wanted)
    torch.set_num_threads(count)
    if kernels.library is not None:
        kernels.library.set_threads(count)


def _leave_cores_to_kernels(models: Models) -> None:
    """PyTorch computes with one thread from here on, in this process, where only small things are left to it.

    A thread of its own that has done its part looks for more for milliseconds, on a core that the kernels'
    threads need: a pass of 8 rows of a small model took 18 ms instead of 13 after one cosine.
    """
    loaded = (models.target, *models.drafts.values())
    if all(isinstance(model.kernels.attention, NativeAttention) for model in loaded):
        torch.set_num_threads(1)


def _check_quantization(option: str, value: Quantization, device: torch.device) -> None:
    if value != "none" and device.type != "cpu":
        raise ConfigError(
            f"{option} is {value!r} on device {device}; quantized products run on the CPU only: "
            f"use device cpu, or {option} none"
        )


def _with_attention(kernels: Kernels, found: Found | FoundHead, dtype: torch.dtype, *, must: bool) -> Kernels:
    """`kernels`, with PyTorch's attention where the native one cannot serve a model's heads."""
    name, heads = found.files.name, found.config
    if heads is None:
        return kernels
    reason = unsupported(heads.head_dim, heads.num_heads // heads.num_kv_heads, dtype)
    if reason is None or not isinstance(kernels.attention, NativeAttention):
        return kernels
    if must:
        raise ConfigError(f"kernels is 'native', whose attention cannot run {name}: {reason}; use auto")
    _LOG.warning("native attention is not used for %s, PyTorch runs instead: %s", name, reason)
    return replace(kernels, attention=SdpaAttention())


def _load(
    found: Found,
    dtype: torch.dtype,
    device: torch.device,
    show: Progress,
    kernels: Kernels,
    quantization: Quantization,
    logit_ids: Sequence[int] | None = None,
) -> LanguageModel:
    return load_model(
        found.model,
        dtype=dtype,
        device=device,
        progress=show,
        name=found.files.name,
        logit_ids=logit_ids,
        kernels=kernels,
        quantization=quantization,
    )
