"""FoundModels: the models of a config, opened and checked, and what is decided before weights are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from specinfer.config import EngineConfig
from specinfer.engine.automatic_draft import automatic_drafts, is_automatic, with_drafts
from specinfer.engine.drafts import (
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
from specinfer.engine.hardware import Choice, Hardware, choose_quantization
from specinfer.engine.memory import DraftSet, MemoryNeeds, draft_bytes
from specinfer.errors import ConfigError, ModelError
from specinfer.heads.mtp import MtpFile
from specinfer.hub.model_files import sampling_defaults
from specinfer.models.adapters.adapter_cache import adapter_dtype
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.hosted.folder import HostedFolder
from specinfer.progress import Progress
from specinfer.runtime.kv_cache import free_bytes, gib
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, ForeignTokens
from specinfer.speculation_config import SELF, Quantization
from specinfer.support import check_support
from specinfer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_SELF_SHARE: Final = 0.8  # part of the target's bytes; a larger `self` draft gains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModels:
    """The target and the drafts of a config, by speculator name."""

    config: EngineConfig  # with the members of pools as drafts, and with the target's quantization
    hardware: Hardware
    target: FoundModel
    drafts: Mapping[str, FoundModel | FoundHead]
    kinds: Mapping[str, Quantization]  # of the drafts
    adapted: Mapping[str, PeftFolder]  # adapters of drafts
    tokenizer: Future[Tokenizer]
    # As in Models.
    named: Mapping[str, DraftVocabulary]
    foreign: Mapping[str, ForeignTokens]
    sampling: Mapping[str, float]

    @property
    def reads_table(self) -> bool:
        """True if a head reads the target's embedding table."""
        return any(isinstance(draft, FoundHead) for draft in self.drafts.values())

    @property
    def whole_table(self) -> bool:
        """True if the first stage's ranks need the whole embedding table."""
        return self.reads_table or self.target in self.drafts.values()

    def logit_ids(self) -> dict[str, Sequence[int] | None]:
        """Return the ids that each draft model computes logits for; None: all of its ids."""
        return {
            name: logit_ids_of(draft, self.named.get(name), self.foreign.get(name))
            for name, draft in models_among(self.drafts).items()
        }

    def memory_needs(self, adapters: int) -> MemoryNeeds:
        """Return the models to plan memory for: the named ones, or a `self` draft if no draft is named.

        `adapters` is the maximum bytes of the target's adapters.
        """
        config, target, drafts, kinds = self.config, self.target, self.drafts, self.kinds
        _, dtype, kernels, _ = self.hardware
        of_adapters = {
            name: adapter.bytes(adapter_dtype(kinds[name], dtype)) for name, adapter in self.adapted.items()
        }
        sizes = {
            name: draft.weight_bytes(dtype, kernels, kinds[name]) + of_adapters.get(name, 0)
            for name, draft in drafts.items()
        }
        needs = MemoryNeeds(
            target=target,
            quantization=config.kind,
            hardware=self.hardware,
            draft_weights={f"{name} {draft.files.name}": sizes[name] for name, draft in drafts.items()},
            draft_sets=(),
            reads_table=self.reads_table,
            adapters=adapters,
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
        caches = [(draft.config, dtype) for draft in drafts.values()]
        may = config.offload == "auto" and config.kind != "int4" and config.speculation.node_limit > 1
        added = needs.self_drafts() if may and not names else []
        return replace(needs, draft_sets=[DraftSet(names, weights, weights, caches), *added])


def find_target(config: EngineConfig, hardware: Hardware, show: Progress) -> tuple[EngineConfig, FoundModel]:
    """Find, open and check the target, and choose its quantization and an automatic draft.

    Returns the config with both choices made, and the target; raises as load_models.
    """
    config = with_pool_members(config)
    trust, longest = config.trust_remote_code, config.scheduler.max_context
    target = find(config.model, show, config.model_impl, max_context=longest, trust_remote_code=trust)
    check_support(config.features | target.features)
    if isinstance(target.model, HostedFolder):
        report(f"{short_name(target)}: {target.model.summary}", show)
    if config.quantization == "auto":
        share = config.ranks_here / config.ranks
        select = _selection(config, hardware)
        choice = select(target.model, streams=config.offload != "never", share=share)
        config = replace(config, quantization=choice.kind)
        _report_choice(short_name(target), choice, show)
    if is_automatic(config):
        room = free_bytes(hardware.device, config.memory) - (config.cache.memory or 0)
        room -= target.weight_bytes(*hardware[1:3], config.kind)
        say = partial(report, show=show)
        own_head = _own_head_bytes(config, target, hardware) if target.has_own_head else None
        names = automatic_drafts(config, target.files, room, say, own_head=own_head)
        config = with_drafts(config, names)
    return config, target


def _own_head_bytes(config: EngineConfig, target: FoundModel, hardware: Hardware) -> int:
    """Return the bytes of the MTP head in the target's files; 0 for one with a fault, refused later."""
    with suppress(ModelError):
        head, kind = MtpFile(target.files, target.config), config.speculation.draft_quantization
        return head.weight_bytes(hardware.dtype, head.fitting(config.kind) if kind == "auto" else kind)
    return 0


def find_models(
    config: EngineConfig, target: FoundModel, hardware: Hardware, show: Progress, *, automatic: bool = False
) -> FoundModels:
    """Find, open and check the drafts of a config of find_target, and choose their quantizations.

    An `automatic` draft must have the target's vocabulary. Raises as load_models.
    """
    speculation = config.speculation
    drafts = find_drafts(config, target, show)
    for draft in drafts.values():
        if isinstance(draft, FoundModel) and _weights(draft) > _weights(target):
            _LOG.warning(
                "the draft %s has more weights than its target and can only slow it down; swap the two",
                short_name(draft),
            )
    check_options(speculation, drafts)
    adapted = draft_adapters(speculation, drafts)
    # Read beside the weights: that takes a second of Python, and weights are read without it.
    reading = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    read_tokenizer = reading.submit(Tokenizer.load, target.files, config.chat_template)
    reading.shutdown(wait=False)
    foreign: Mapping[str, ForeignTokens] = {}
    named: Mapping[str, DraftVocabulary] = {}
    if drafts or config.chat_template is not None:
        tokenizer = read_tokenizer.result()
        foreign = foreign_tokens_of(target, drafts, tokenizer)
        named = vocabularies(target, drafts, foreign)
    if automatic and foreign:
        raise ConfigError(
            f"{config.speculation.drafts[0]} has another vocabulary than {target.files.name}; name it with "
            "--draft to use the tokens that both have"
        )
    kinds = dict[str, Quantization]()
    for name, model in draft_names(speculation.drafts).items():
        asked, draft = speculation.draft_quantization, drafts[name]
        if model == SELF:
            kinds[name] = self_kind(asked, config.kind)
            check_self(target, config.kind, kinds[name], hardware)
        elif asked != "auto":
            kinds[name] = asked
        elif isinstance(draft, FoundHead):
            kinds[name] = draft.head.fitting(config.kind)
        else:
            choice = _selection(config, hardware)(draft.model, streams=False)  # drafts stay in memory
            kinds[name] = choice.kind
            _report_choice(f"{short_name(draft)}, a draft", choice, show)
    return FoundModels(
        config=config,
        hardware=hardware,
        target=target,
        drafts=drafts,
        kinds=kinds,
        adapted=adapted,
        tokenizer=read_tokenizer,
        named=named,
        foreign=foreign,
        sampling=sampling_defaults(target.files) if config.generation_config == "auto" else {},
    )


def check_self(
    target: FoundModel, of_target: Quantization, of_draft: Quantization, hardware: Hardware
) -> None:
    """Log a warning if a `self` draft reads hardly fewer bytes than its target, and so guesses no faster."""
    _, dtype, kernels, _ = hardware
    own, whole = (draft_bytes(target.model, dtype, kernels, kind) for kind in (of_draft, of_target))
    if own > _SELF_SHARE * whole:
        _LOG.warning(
            "the draft self, the target in %s, takes %s where the target takes %s, so it can hardly speed it "
            "up; name a smaller model or a head, or leave it out",
            *(of_draft, gib(own), gib(whole)),
        )


def report(line: str, show: Progress) -> None:
    """Show a line to the user and log it."""
    show.say(line)
    _LOG.info(line)


def short_name(found: FoundModel) -> str:
    """Return the last part of a model's name."""
    return Path(found.files.name).name or found.files.name


def _selection(config: EngineConfig, hardware: Hardware) -> partial[Choice]:
    """Return choose_quantization with the options of a config."""
    divided = config.tensor_parallel > 1
    return partial(choose_quantization, hardware=hardware, memory=config.memory, divided=divided)


def _report_choice(name: str, choice: Choice, show: Progress) -> None:
    """Report a quantization; floats, which are as usual, are only logged."""
    line = f"{name}: {choice}"
    if choice.kind == "none":
        _LOG.info(line)
    else:
        report(line, show)


def _weights(found: FoundModel) -> int:
    """Number of elements of a model's tensors."""
    return sum(map(math.prod, found.model.shapes.values()))
