"""Find and open the drafts that a config names: draft models and heads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from specinfer.config import EngineConfig, ModelImpl
from specinfer.engine.hardware import Hardware
from specinfer.errors import ConfigError, ModelError
from specinfer.heads.checkpoint import AnyHeadModel, OpenHead, is_head, open_head
from specinfer.heads.mtp import MtpFile, is_mtp
from specinfer.heads.runner import HeadModel
from specinfer.hub import ModelFiles, resolve
from specinfer.hub.model_files import pool_members
from specinfer.kernels.choice import Kernels
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.config import ModelConfig
from specinfer.models.hosted.folder import HostedFolder
from specinfer.models.hosted.model import HostedModel
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import OpenModel, open_model
from specinfer.models.prepared import PreparedFile
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.models.weights import prepare
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import Timed
from specinfer.runtime.executor import Executor
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.drafts.draft import Draft
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, ForeignTokens, foreign_tokens
from specinfer.speculate.drafts.foreign_draft import ForeignDraft
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.drafts.head_drafts import head_draft
from specinfer.speculation_config import OWN_HEAD, SELF, Quantization, QuantizationOption, SpeculationConfig
from specinfer.support import Feature, check_support
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)
_SHORTLIST: Final = 32768
AnyDraft = LanguageModel | AnyHeadModel


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that was found and opened."""

    files: ModelFiles
    model: OpenModel

    @property
    def config(self) -> ModelConfig:
        """Config of its layers."""
        return self.model.config

    @property
    def features(self) -> dict[Feature, object]:
        """Its features as a target."""
        config, name = self.config, self.files.name
        given = {
            Feature.HOSTED: isinstance(self.model, HostedFolder),
            Feature.SHARED: config.shared_layers > 0 or config.per_layer is not None,
            Feature.STREAMS: config.altup is not None,
        }
        return {feature: name for feature, there in given.items() if there}

    @property
    def has_own_head(self) -> bool:
        """True if its files have an MTP layer that can be its draft."""
        return not isinstance(self.model, HostedFolder) and self.model.next_names is not None

    def weight_bytes(self, dtype: torch.dtype, kernels: Kernels, quantization: Quantization) -> int:
        """Return the bytes that its weights will take."""
        return estimate_bytes(self.model, dtype, kernels, quantization)

    def prepare(
        self, hardware: Hardware, quantization: Quantization, folder: Path | None, progress: Progress
    ) -> PreparedFile:
        """Return its prepared file in `folder` or the user's cache, and make it if it is missing."""
        return prepare(
            self.model,
            dtype=hardware.dtype,
            kernels=hardware.kernels,
            quantization=quantization,
            cache=folder,
            progress=progress,
            name=self.files.name,
        )


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head that was found and opened."""

    files: ModelFiles
    head: OpenHead

    @property
    def config(self) -> ModelConfig:
        """Config of its layers."""
        return self.head.config.body

    @property
    def features(self) -> dict[Feature, object]:
        """Its features as a draft."""
        return {Feature.ASSISTANT: self.files.name} if self.config.keys_elsewhere else {}

    def weight_bytes(self, dtype: torch.dtype, kernels: Kernels, quantization: Quantization) -> int:
        """Return the bytes that its weights will take."""
        return self.head.weight_bytes(dtype, quantization)


def with_pool_members(config: EngineConfig) -> EngineConfig:
    """Return the config with each pool replaced by its drafts, in order.

    A pool is a folder with a pool.json. Raises ModelFileError if it is damaged.
    """
    drafts: list[str] = []
    for name in config.speculation.drafts:
        members = pool_members(Path(name).expanduser())
        drafts += [str(path) for path in members] or [name]
    return replace(config, speculation=replace(config.speculation, drafts=tuple(drafts)))


def draft_names(drafts: tuple[str, ...]) -> dict[str, str]:
    """Return drafts by speculator name: "draft" for one, "draft1", "draft2", ... for several."""
    if len(drafts) == 1:
        return {"draft": drafts[0]}
    return {f"draft{i}": model for i, model in enumerate(drafts, start=1)}


def self_kind(asked: QuantizationOption, target: Quantization) -> Quantization:
    """Return the quantization of a `self` draft: int4, or another one if that is `asked` for.

    Raises ConfigError if it would be no smaller than the target.
    """
    kind: Quantization = "int4" if asked == "auto" or asked == "none" else asked
    if target in ("int4", kind):
        check_support({Feature.SELF_DRAFT: kind, Feature.FEW_BITS: target})
    return kind


def find(
    name: str,
    progress: Progress,
    impl: ModelImpl = "auto",
    *,
    max_context: int | None = None,
    trust_remote_code: bool = False,
) -> FoundModel:
    """Find and open the model of that name; raises as `resolve` and `open_model` do."""
    files = resolve(name, progress=progress, code=trust_remote_code)
    if is_head(files):
        raise ModelError(f"{name} is a draft head, not a model: name it in drafts, with its target as model")
    return FoundModel(
        files, open_model(files, impl, max_context=max_context, trust_remote_code=trust_remote_code)
    )


def find_drafts(
    config: EngineConfig, target: FoundModel, progress: Progress
) -> dict[str, FoundModel | FoundHead]:
    """Find and open every draft, by speculator name. Opens a repeated model once.

    "self" is the target, and "mtp" the head in the target's own files.
    """
    found: dict[str, FoundModel | FoundHead] = {config.model: target, SELF: target}
    for name in config.speculation.drafts:
        if name in found:
            continue
        own = name == OWN_HEAD
        files = target.files if own else resolve(name, progress=progress, code=config.trust_remote_code)
        if own or is_mtp(files):
            check_support({**config.features, **target.features, Feature.HEAD: name, Feature.MTP: name})
            found[name] = FoundHead(files, MtpFile(files, target.config))
        elif is_head(files.path):
            check_support({**target.features, Feature.HEAD: name})
            found[name] = head = FoundHead(files, open_head(files, target.model))
            check_support({**config.features, **head.features})
        else:
            how: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
            opened = open_model(files, "auto", max_context=config.scheduler.max_context, **how)
            found[name] = draft = FoundModel(files, opened)
            both = (config.features, Feature.TENSOR), (draft.features, Feature.STREAMS)
            check_support({one: given[one] for given, one in both if one in given})
    return {name: found[model] for name, model in draft_names(config.speculation.drafts).items()}


def models_among(drafts: Mapping[str, FoundModel | FoundHead]) -> dict[str, FoundModel]:
    """Return the drafts that are models, which have their own tokenizers."""
    return {name: draft for name, draft in drafts.items() if isinstance(draft, FoundModel)}


def foreign_tokens_of(
    target: FoundModel,
    drafts: Mapping[str, FoundModel | FoundHead],
    tokenizer: Tokenizer,
) -> dict[str, ForeignTokens]:
    """Return the token conversion of each draft whose token ids differ from the target's.

    Models of one family may have logits for different numbers of ids if the last ones are padding (Qwen2.5's
    small and large models); these need no conversion. Heads have no tokenizer; opening one checks that its
    vocabulary has the target's size. Raises ConfigError as `foreign_tokens` does.
    """
    target_vocabulary, found = Vocabulary(target.files), dict[str, ForeignTokens]()
    for name, draft in models_among(drafts).items():
        sizes = target.config.vocab_size, draft.config.vocab_size
        # A smaller draft may lack tokens that were added only to the target.
        whole = sizes[0] <= sizes[1] or target_vocabulary.last_token < sizes[1]
        if whole and target_vocabulary.same_ids(Vocabulary(draft.files)):
            continue
        if draft.config.recurrence is not None:
            check_support(
                {Feature.RECURRENT_DRAFT: draft.files.name, Feature.OTHER_TOKENS: target.files.name}
            )
        draft_tokenizer = Tokenizer.load(draft.files)
        found[name] = foreign_tokens(tokenizer, draft_tokenizer, sizes, name=draft.files.name)
        _LOG.info(
            "draft %s has another vocabulary than %s: it guesses the %d of its %d tokens that both have",
            *(draft.files.name, target.files.name, len(found[name].logit_ids), sizes[1]),
        )
    return found


def check_options(speculation: SpeculationConfig, drafts: Mapping[str, FoundModel | FoundHead]) -> None:
    """Raise ConfigError for options of drafts that none of the drafts uses."""
    unset = SpeculationConfig()
    for option in ("expansion", "draw", "draft_quantization", "draft_lora"):
        value = getattr(speculation, option)
        if value != getattr(unset, option) and not drafts:
            raise ConfigError(
                f"{option} is {str(value)!r}, and no draft model is named; add one to drafts, or leave it out"
            )


def draft_adapters(
    speculation: SpeculationConfig, drafts: Mapping[str, FoundModel | FoundHead]
) -> dict[str, PeftFolder]:
    """The adapter of each draft that has one, by the draft's name; their numbers are not read.

    Raises ConfigError for one of no draft, of a head and of a model through transformers, else as PeftFolder.
    """
    found: dict[str, PeftFolder] = {}
    for given in speculation.draft_lora:
        name, sign, folder = given.partition("=")
        if not sign or (name not in drafts and len(drafts) == 1):
            name, folder = "draft", given
        if name not in drafts:
            raise ConfigError(
                f"draft_lora is {given!r}, and the drafts are {', '.join(drafts)}; allowed: NAME=FOLDER with "
                "one of these names"
            )
        if name in found:
            raise ConfigError(f"draft_lora names two adapters of {name}; a draft has one at most: merge them")
        draft = drafts[name]
        if isinstance(draft, FoundHead):
            check_support({Feature.DRAFT_LORA: folder, Feature.HEAD: draft.files.name})
        elif isinstance(draft.model, HostedFolder):
            check_support({Feature.DRAFT_LORA: folder, Feature.HOSTED_DRAFT: draft.files.name})
        found[name] = PeftFolder(name, Path(folder).expanduser().resolve(), draft.config)
    return found


def vocabularies(
    target: FoundModel,
    drafts: Mapping[str, FoundModel | FoundHead],
    foreign: Mapping[str, ForeignTokens],
) -> dict[str, DraftVocabulary]:
    """Return the vocabulary of each draft model whose logits are for other ids than the target's, by name.

    A draft may have fewer logits than the target, or more. Heads have their own vocabularies.
    """
    size, found = target.config.vocab_size, dict[str, DraftVocabulary]()
    for name, draft in models_among(drafts).items():
        if name in foreign:
            found[name] = foreign[name].vocabulary
        elif draft.config.vocab_size != size:
            found[name] = DraftVocabulary(np.arange(min(draft.config.vocab_size, size)), size)
    return found


def logit_ids_of(
    draft: FoundModel, vocabulary: DraftVocabulary | None, foreign: ForeignTokens | None
) -> Sequence[int] | None:
    """Return the ids that a draft model computes logits for; None: all of its ids."""
    if vocabulary is None:
        return None
    ids: list[int] = (vocabulary.ids if foreign is None else foreign.logit_ids).tolist()
    return None if ids == [*range(draft.config.vocab_size)] else ids


def shortlist_of(model: AnyDraft, foreign: ForeignTokens | None = None) -> int | None:
    """Return the number of tokens that a draft usually makes logits for; None: all.

    Tokens of byte pairs have the order of their merges, so the first ones are the most frequent. Guesses
    hardly get worse without the others (FR-Spec, arXiv 2502.14856), and the output layer of a small model
    has up to a half of its weights, that of a head most. A vocabulary of its own is short already.
    """
    size = model.config.vocab_size
    whole = len(model.ids) == size if isinstance(model, HeadModel) else foreign is None
    return _SHORTLIST if whole and size >= 2 * _SHORTLIST else None


def timing_key(model: AnyDraft, vocabulary: DraftVocabulary | None, shortlist: int | None = None) -> str:
    """Describe what a draft's pass depends on besides its layers, for the key of its cost curve."""
    size = model.config.vocab_size if vocabulary is None else len(vocabulary.ids)
    logits = f"{len(model.ids) if isinstance(model, HeadModel) else size} logits"
    if shortlist is not None:
        logits += f", {shortlist} as a rule"
    if isinstance(model, HeadModel):
        return f"{logits}, {model.head}"
    if model.adapter is not None:
        logits += ", an adapter"
    return f"{logits}, {model.summary}" if isinstance(model, HostedModel) else logits


def make_draft(
    name: str,
    model: AnyDraft,
    executor: Executor,
    shape: Shape,
    vocabulary: DraftVocabulary | None,
    foreign: ForeignTokens | None = None,
    *,
    max_rows: int,
) -> tuple[Timed, Draft]:
    """Return a draft with its own KV cache, and the probe that times its passes."""
    if isinstance(model, HeadModel):
        return head_draft(
            name,
            model,
            shape,
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            max_rows=max_rows,
            target=executor.target.cache,
            shortlist=shortlist_of(model),
        )
    runner = ModelRunner(
        model,
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        states=executor.states,
        shortlist=shortlist_of(model, foreign),
    )
    if foreign is not None:
        return runner, ForeignDraft(
            name, runner, shape, max_rows=max_rows, num_blocks=executor.num_blocks, tokens=foreign
        )
    own = model.config.vocab_size
    reads = own if vocabulary is not None and own < vocabulary.size else None  # ids that have an embedding
    return runner, DraftModel(name, runner, shape, max_rows=max_rows, vocabulary=vocabulary, reads=reads)
