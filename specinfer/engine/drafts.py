"""The drafts that a config names, whatever they are: models of their own, and heads that read the target."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specinfer.config import SpeculationConfig
from specinfer.errors import ConfigError, ModelError
from specinfer.heads.checkpoint import HeadFolder, is_head, open_head
from specinfer.heads.config import MedusaConfig
from specinfer.heads.eagle_model import EagleModel
from specinfer.heads.load import HeadModel, head_bytes
from specinfer.heads.medusa_model import MedusaModel
from specinfer.hub import ModelFiles, resolve
from specinfer.kernels.choice import Kernels
from specinfer.models.config import ModelConfig
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import OpenModel, estimate_bytes, open_model
from specinfer.progress import Progress
from specinfer.runtime.cost_curve import Timed
from specinfer.runtime.executor import LocalExecutor
from specinfer.runtime.head_runner import BlockRunner, EagleRunner, MedusaRunner
from specinfer.speculate.drafts.block import BlockDraft
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary, first_tokens, named_tokens
from specinfer.speculate.drafts.eagle import EagleDraft
from specinfer.speculate.drafts.foreign_draft import ForeignDraft
from specinfer.speculate.drafts.foreign_tokens import ForeignTokens, foreign_tokens
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.drafts.medusa import MedusaDraft
from specinfer.speculate.drafts.one_pass import OnePassTrees
from specinfer.speculate.drafts.parallel_eagle import ParallelEagleDraft
from specinfer.speculate.speculator import LevelSpeculator
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.vocabulary import Vocabulary

_LOG = logging.getLogger(__name__)
AnyDraft = LanguageModel | HeadModel


@dataclass(frozen=True, slots=True)
class Found:
    """A model that was found and opened, once, whatever is asked of it afterwards."""

    files: ModelFiles
    model: OpenModel

    @property
    def config(self) -> ModelConfig:
        """What it is."""
        return self.model.config


@dataclass(frozen=True, slots=True)
class FoundHead:
    """The same of a head."""

    files: ModelFiles
    head: HeadFolder

    @property
    def config(self) -> ModelConfig | None:
        """Its layers with attention; None: it has none."""
        config = self.head.config
        return None if isinstance(config, MedusaConfig) else config.body


def draft_names(drafts: tuple[str, ...]) -> dict[str, str]:
    """Speculator name -> model: draft for one, draft1, draft2, ... for several."""
    if len(drafts) == 1:
        return {"draft": drafts[0]}
    return {f"draft{i}": model for i, model in enumerate(drafts, start=1)}


def find(name: str, progress: Progress) -> Found:
    """The model of that name, found and opened; raises as `resolve` and `open_model`."""
    files = resolve(name, progress=progress)
    if is_head(files.path):
        raise ModelError(f"{name} is a draft head, which makes no text: name it in drafts, beside its target")
    return Found(files, open_model(files))


def find_drafts(
    names: Iterable[str], target: Found, target_name: str, progress: Progress
) -> dict[str, Found | FoundHead]:
    """Every draft by its name: found, and opened once however often it is named."""
    found: dict[str, Found | FoundHead] = {target_name: target}
    for name in names:
        if name not in found:
            files = resolve(name, progress=progress)
            head = is_head(files.path)
            found[name] = (
                FoundHead(files, open_head(files, target.model)) if head else Found(files, open_model(files))
            )
    return found


def exchanges(
    target: Found,
    drafts: Mapping[str, Found | FoundHead],
    tokenizer: Tokenizer,
    speculation: SpeculationConfig,
    kept: DraftVocabulary | None,
) -> dict[str, ForeignTokens]:
    """Of each draft for which an id is not the same token as for the target: how they exchange tokens.

    Models of one family may have logits for different numbers of ids, of which the last ones are no tokens
    (Qwen2.5's small and large ones): they need no exchange. A head has no tokenizer of its own: that its
    target has as many tokens was checked when it was opened.
    Raises ConfigError as `foreign_tokens`, and where draft_tokens is set though no draft needs it.
    """
    ours, found = Vocabulary(target.files), dict[str, ForeignTokens]()
    for name, draft in drafts.items():
        if isinstance(draft, FoundHead):
            continue
        sizes = target.config.vocab_size, draft.config.vocab_size
        # A smaller one may lack tokens that were added to the target alone.
        whole = sizes[0] <= sizes[1] or ours.last_token < sizes[1]
        if whole and ours.same_ids(Vocabulary(draft.files)):
            continue
        theirs = Tokenizer.load(draft.files)
        found[name] = foreign_tokens(tokenizer, theirs, sizes, speculation, kept, draft=draft.files.name)
        _LOG.info(
            "draft %s has another vocabulary than %s: %d of its %d tokens are shared; it guesses by '%s'",
            *(draft.files.name, target.files.name, found[name].shared, sizes[1], found[name].way),
        )
    if drafts and not found and speculation.draft_tokens != SpeculationConfig().draft_tokens:
        raise ConfigError(
            f"draft_tokens is {speculation.draft_tokens!r}, and all drafts have the target's vocabulary; "
            "leave it out"
        )
    return found


def check_options(speculation: SpeculationConfig, drafts: Sequence[Found | FoundHead]) -> None:
    """Raise ConfigError for options of drafts that none of them heeds."""
    unset = SpeculationConfig()
    for option in ("expansion", "draw", "draft_quantization", "draft_vocabulary", "draft_tokens"):
        value = getattr(speculation, option)
        if value != getattr(unset, option) and not drafts:
            raise ConfigError(
                f"{option} is {str(value)!r}, and no draft model is named; add one to drafts, or leave it out"
            )
    if speculation.draft_vocabulary is not None and all(isinstance(draft, FoundHead) for draft in drafts):
        raise ConfigError(
            f"draft_vocabulary is {speculation.draft_vocabulary!r}, and all drafts are heads, which name the "
            "tokens they were trained for; leave it out"
        )


def weight_bytes(
    found: Found | FoundHead, dtype: torch.dtype, kernels: Kernels, speculation: SpeculationConfig
) -> int:
    """The bytes that a draft's weights will take."""
    if isinstance(found, FoundHead):
        return head_bytes(found.head, dtype, speculation.draft_quantization)
    return estimate_bytes(found.model, dtype, kernels, speculation.draft_quantization)


def vocabularies(
    target: Found,
    drafts: Mapping[str, Found | FoundHead],
    foreign: Mapping[str, ForeignTokens],
    kept: DraftVocabulary | None,
) -> dict[str, DraftVocabulary]:
    """The tokens of each draft model that has logits for other ids than the target; heads know their own.

    `kept` are those of a model with the target's tokens, of which it may lack ids that are none.
    """
    size, found = target.config.vocab_size, dict[str, DraftVocabulary | None]()
    for name, draft in drafts.items():
        if isinstance(draft, FoundHead):
            continue
        if name in foreign:
            found[name] = foreign[name].vocabulary
        elif draft.config.vocab_size == size:
            found[name] = kept
        else:
            found[name] = first_tokens(min(draft.config.vocab_size, size), size, kept)
    return {name: vocabulary for name, vocabulary in found.items() if vocabulary is not None}


def kept_logits(
    draft: Found, vocabulary: DraftVocabulary | None, foreign: ForeignTokens | None
) -> Sequence[int] | None:
    """The ids that a draft model makes logits of; None: all of its own."""
    if vocabulary is None:
        return None
    ids: list[int] = (vocabulary.ids if foreign is None else foreign.logit_ids).tolist()
    return None if ids == [*range(draft.config.vocab_size)] else ids


def named_by(model: AnyDraft, vocabulary: DraftVocabulary | None) -> DraftVocabulary | None:
    """The tokens a draft can name: a head those it was trained for, a model its `vocabulary`; None: all."""
    return named_tokens(model.ids, model.config.vocab_size) if isinstance(model, HeadModel) else vocabulary


def ids_read(model: LanguageModel, vocabulary: DraftVocabulary | None) -> int | None:
    """From which id on a draft model has no embedding for the target's; None: it has all."""
    own = model.config.vocab_size
    return own if vocabulary is not None and own < vocabulary.size else None


def what_is_timed(model: AnyDraft, vocabulary: DraftVocabulary | None) -> str:
    """What a draft's pass depends on besides its layers."""
    named = named_by(model, vocabulary)
    logits = model.config.vocab_size if named is None else len(named.ids)
    head = f", {model.head}" if isinstance(model, HeadModel) else ""
    return f"{logits} logits{head}"


def make_draft(
    name: str,
    model: AnyDraft,
    executor: LocalExecutor,
    speculation: SpeculationConfig,
    vocabulary: DraftVocabulary | None,
    foreign: ForeignTokens | None = None,
    *,
    max_rows: int,
) -> tuple[Timed, LevelSpeculator]:
    """A draft over a cache of its own, and what times its passes; `vocabulary` is what a model can name."""
    num_blocks, block_size = executor.num_blocks, executor.block_size
    vocabulary = named_by(model, vocabulary)
    shape = Shape.of(speculation)
    if not isinstance(model, HeadModel):
        runner = executor.runner(model)
        if foreign is not None:
            return runner, ForeignDraft(
                name, runner, shape, max_rows=max_rows, num_blocks=num_blocks, tokens=foreign
            )
        reads = ids_read(model, vocabulary)
        return runner, DraftModel(name, runner, shape, max_rows=max_rows, vocabulary=vocabulary, reads=reads)
    if isinstance(model, MedusaModel):
        medusa = MedusaRunner(model)
        return medusa, MedusaDraft(name, medusa, shape, vocabulary=vocabulary)
    taps = model.head.taps
    if isinstance(model, EagleModel):
        eagle = EagleRunner(model, num_blocks=num_blocks, block_size=block_size)
        kind = EagleDraft if model.head.mask_token_id is None else ParallelEagleDraft
        return eagle, kind(name, eagle, shape, taps=taps, max_rows=max_rows, vocabulary=vocabulary)
    block = BlockRunner(model, num_blocks=num_blocks, block_size=block_size)
    trees = OnePassTrees.of(name, model, shape, vocabulary)
    return block, BlockDraft(name, block, trees, taps=taps, max_rows=max_rows)
