"""EngineConfig -> a running Engine: find the files, check that they fit together, load, size the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from specinfer.attention.native import NativeAttention, unsupported
from specinfer.attention.sdpa import SdpaAttention
from specinfer.config import EngineConfig, Quantization, SpeculationConfig
from specinfer.engine.admission import Admission
from specinfer.engine.engine import Engine
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.scheduler import Scheduler
from specinfer.errors import ConfigError
from specinfer.hub import ModelFiles, resolve
from specinfer.kernels.choice import Kernels, choose_kernels, guessing
from specinfer.kernels.machine import thread_count
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import OpenModel, estimate_bytes, load_model, open_model
from specinfer.progress import NoProgress, Progress
from specinfer.runtime import memory
from specinfer.runtime.cost_curve import CostCurve, cost_curve
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.cost_policy import CostPolicy
from specinfer.speculate.draft_costs import DraftCosts
from specinfer.speculate.draft_model import DraftModel
from specinfer.speculate.draft_vocabulary import DraftVocabulary, draft_vocabulary
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy import FixedPolicy, SpeculationPolicy
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.speculate.table import AFTER_DRAFTS, BEFORE_DRAFTS, build_speculators
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.vocabulary import Vocabulary
from specinfer.verify.pairs import Verifier

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """Loaded models: the target, its tokenizer, and the drafts by speculator name with what they can name."""

    target: LanguageModel
    tokenizer: Tokenizer
    drafts: dict[str, LanguageModel]
    draft_vocabulary: DraftVocabulary | None = None  # None: every token


@dataclass(frozen=True, slots=True)
class _Found:
    """A model that was found and opened, once, whatever is asked of it afterwards."""

    files: ModelFiles
    model: OpenModel


def load_models(config: EngineConfig, progress: Progress | None = None) -> Models:
    """Find, check and load every model the config names.

    Raises ModelError and its kind for files that cannot be used, ConfigError for a draft whose vocabulary
    is not the target's, CapacityError when the weights do not fit into memory.
    """
    show = progress or NoProgress()
    device = pick_device(config.device)
    _check_quantization("quantization", config.quantization, device)
    _check_quantization("draft_quantization", config.speculation.draft_quantization, device)
    _check_drafts(config.speculation)
    kernels, lacking = choose_kernels(config.kernels, device, show)
    dtype = pick_dtype(config.dtype, device, kernels)
    use_threads(config.threads, kernels)
    found = _find((config.model, *config.speculation.drafts), show)
    target = found[config.model]
    drafts = {name: found[model] for name, model in _draft_names(config.speculation.drafts).items()}
    _check_vocabularies(target, drafts.values())
    tokenizer = Tokenizer.load(target.files)
    named = draft_vocabulary(config.speculation.draft_vocabulary, tokenizer, target.model.config.vocab_size)
    logit_ids = None if named is None else named.ids.tolist()
    of_target, of_drafts = config.quantization, config.speculation.draft_quantization
    if lacking is not None:
        _LOG.warning("native kernels are not used, PyTorch runs instead, slowly: %s", lacking)
    elif kernels.library is None and {of_target, of_drafts} != {"none"}:
        _LOG.warning("quantized products run in PyTorch, without native kernels, and slowly")
    sizes = {target.files.name: estimate_bytes(target.model, dtype, kernels, of_target)}
    sizes |= {
        f"{name} {f.files.name}": estimate_bytes(f.model, dtype, kernels, of_drafts)
        for name, f in drafts.items()
    }
    memory.check_weights_fit(sizes, device)

    def fitting(found: _Found) -> Kernels:
        return _with_attention(kernels, found, dtype, must=config.kernels == "native")

    models = Models(
        target=_load(target, dtype, device, show, fitting(target), of_target),
        tokenizer=tokenizer,
        drafts={
            name: _load(draft, dtype, device, show, guessing(fitting(draft)), of_drafts, logit_ids)
            for name, draft in drafts.items()
        },
        draft_vocabulary=named,
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

    Raises CapacityError when the KV cache does not fit, ConfigError when options contradict each other.
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
        [(m.config, m.dtype) for m in loaded],
        block_size=config.cache.block_size,
        wanted_positions=limits.max_batch_size * (max_context + speculation.max_nodes),
        needed_positions=min(max_context, 128),
        limit=config.cache.memory,
        device=models.target.device,
    )

    def runner(model: LanguageModel) -> ModelRunner:
        return ModelRunner(model, num_blocks=blocks, block_size=config.cache.block_size)

    def curve(runner: ModelRunner, quantization: Quantization, logits: int) -> CostCurve:
        model = runner.model
        rows = min(limits.max_step_tokens, blocks * config.cache.block_size, model.config.max_context)
        every_row = runner is not target  # a draft's level asks for all of its nodes
        variant = f"{quantization}, {logits} logits"
        return cost_curve(runner, max_rows=rows, variant=variant, every_row=every_row, progress=progress)

    target = runner(models.target)
    drafting = {name: runner(model) for name, model in models.drafts.items()}
    policy: SpeculationPolicy = FixedPolicy()
    if speculation.tree_size == "cost":
        vocab = models.target.config.vocab_size
        named = vocab if models.draft_vocabulary is None else len(models.draft_vocabulary.ids)
        policy = CostPolicy(
            curve(target, config.quantization, vocab),
            {
                name: DraftCosts(curve(draft, speculation.draft_quantization, named), speculation.expansion)
                for name, draft in drafting.items()
            },
        )
    drafts = [
        DraftModel(
            name,
            runner,
            speculation.expansion,
            speculation.draw_rule,
            max_rows=limits.max_step_tokens,
            vocabulary=models.draft_vocabulary,
        )
        for name, runner in drafting.items()
    ]
    speculators: list[Speculator | LevelSpeculator] = [
        *build_speculators(BEFORE_DRAFTS, speculation),
        *drafts,
        *build_speculators(AFTER_DRAFTS, speculation),
        *extra,
    ]
    pool = BlockPool(blocks, config.cache.block_size)
    return Engine(
        target=target,
        speculators=Ensemble(speculators, vocab=models.target.config.vocab_size, policy=policy),
        tokenizer=models.tokenizer,
        admission=Admission(
            models.tokenizer,
            SpeculationLimits(speculation, speculators),
            vocab=models.target.config.vocab_size,
            max_context=max_context,
            capacity=blocks * config.cache.block_size,
        ),
        scheduler=Scheduler(
            limits,
            pool,
            tree_nodes=speculation.max_nodes,
            max_context=max_context,
            prefix_reuse=config.cache.prefix_reuse,
        ),
        verifier=Verifier(speculation.verifier),
    )


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


def _check_drafts(speculation: SpeculationConfig) -> None:
    unset = SpeculationConfig()
    for option in ("expansion", "draw", "draft_quantization", "draft_vocabulary"):
        value = getattr(speculation, option)
        if value != getattr(unset, option) and not speculation.drafts:
            raise ConfigError(
                f"{option} is {str(value)!r}, and no draft model is named; add one to drafts, or leave it out"
            )


def _with_attention(kernels: Kernels, found: _Found, dtype: torch.dtype, *, must: bool) -> Kernels:
    """`kernels`, with PyTorch's attention where the native one cannot serve a model's heads."""
    name, heads = found.files.name, found.model.config
    reason = unsupported(heads.head_dim, heads.num_heads // heads.num_kv_heads, dtype)
    if reason is None or not isinstance(kernels.attention, NativeAttention):
        return kernels
    if must:
        raise ConfigError(f"kernels is 'native', whose attention cannot run {name}: {reason}; use auto")
    _LOG.warning("native attention is not used for %s, PyTorch runs instead: %s", name, reason)
    return replace(kernels, attention=SdpaAttention())


def _draft_names(drafts: tuple[str, ...]) -> dict[str, str]:
    """Speculator name -> model: draft for one, draft1, draft2, ... for several."""
    if len(drafts) == 1:
        return {"draft": drafts[0]}
    return {f"draft{i}": model for i, model in enumerate(drafts, start=1)}


def _find(names: Iterable[str], progress: Progress) -> dict[str, _Found]:
    """Every named model by its name: found, and opened once however often it is named."""
    found = {name: resolve(name, progress=progress) for name in dict.fromkeys(names)}
    return {name: _Found(files, open_model(files)) for name, files in found.items()}


def _check_vocabularies(target: _Found, drafts: Iterable[_Found]) -> None:
    """Raise ConfigError unless an id stands for the same token in every model."""
    ours = Vocabulary(target.files)
    for draft in drafts:
        theirs = Vocabulary(draft.files)
        sizes = target.model.config.vocab_size, draft.model.config.vocab_size
        if sizes[0] != sizes[1] or not ours.same_ids(theirs):
            raise ConfigError(
                f"draft {draft.files.name} has another vocabulary "
                f"({theirs.size} tokens, logits of {sizes[1]}) than the target {target.files.name} "
                f"({ours.size}, {sizes[0]}); use one of its family"
            )


def _load(
    found: _Found,
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
