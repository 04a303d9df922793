"""Model card of a trained draft: its use, training material, measurements and licence."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from specinfer.hub.catalogue import CATALOGUE
from specinfer.hub.model_files import ModelFiles
from specinfer.tune.dataset import Corpus
from specinfer.tune.draft import Description, Target
from specinfer.tune.evaluation import Figures
from specinfer.tune.trainer import Trainer
from specinfer.version import VERSION

_HUB_ID: Final = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # licence identifier on hubs
_NO_LICENCE: Final = ("other", "unknown", "none")  # values that name no licence
_MAX_FIELD: Final = 200  # characters of a licence name or link


@dataclass(frozen=True, slots=True)
class Licence:
    """A licence of a model."""

    name: str
    link: str | None
    source: str  # the place that names the licence


@dataclass(frozen=True, slots=True)
class TrainingMaterial:
    """Training material of a draft."""

    target: str
    licence: Licence | None  # the target's; None: unknown
    sources: Sequence[str]  # names of prompt files
    texts: int
    held_out: int
    tokens: int
    collecting_seconds: float

    @classmethod
    def of(cls, target: Target, sources: Sequence[str], corpus: Corpus) -> Self:
        """Describe a whole corpus."""
        counts = corpus.count(held_out=False), corpus.count(held_out=True)
        licence = licence_of(target.files)
        return cls(target.name, licence, sources, *counts, corpus.tokens, corpus.seconds)


def card(draft: Description, material: TrainingMaterial, trainer: Trainer, figures: Figures) -> str:
    """Return a README.md with the front matter that hubs read."""
    hits = " ".join(f"{hit:.3f}" for hit in figures.hits)
    state = trainer.state
    return f"""---
library_name: {draft.library}
tags: [speculative-decoding, draft-head, {draft.tag}]
{front_matter(material.licence)}
---

# A {draft.title} for {material.target}

It {draft.does}. It changes no text.

    specinfer generate --model {material.target} --draft THIS_FOLDER "..."

| | |
|---|---|
| target | {material.target} |
| kind | {draft.kind} |
| reads | {draft.reads} |
| vocabulary | {len(trainer.draft.ids)} of {trainer.draft.vocab} tokens |
| training data | {describe_material(material)} |
| collecting | {material.collecting_seconds / 60:.0f} minutes |
| training | {state.seconds / 60:.0f} minutes, {state.steps} steps, {state.blocks} blocks |
| made | {datetime.now(UTC):%Y-%m-%d} by specinfer {VERSION} |

On {figures.places} places of {material.held_out} held-out greedy answers:

- a chain of first guesses makes {figures.tokens_per_pass:.2f} tokens per target pass;
- the first guess is right with probability {hits}, level by level, given that all before it were right;
- the first level's token is among the three likeliest guesses with probability {figures.first_three:.3f}.
{licence_section(material, draft.of_target)}"""


def describe_material(material: TrainingMaterial) -> str:
    """Describe the training texts in one line."""
    names = ", ".join(material.sources)
    return f"{material.texts} answers of the target, {material.tokens} tokens; prompts: {names}"


def licence_section(material: TrainingMaterial, of_target: str) -> str:
    """The card's section on licences; `of_target` describes the target weights in the draft's files."""
    known = material.licence
    if known is None:
        named = (
            f"The licence of {material.target} is unknown: its files name none. Look it up "
            "before you distribute this draft."
        )
    else:
        link = "" if known.link is None else f" ({known.link})"
        named = f"{material.target} is licensed under {known.name}{link}, according to {known.source}."
    return f"""
## Licence

{named} It applies to the target's material in this draft: the answers it was trained on,
and these weights: {of_target}.

The prompts ({", ".join(material.sources)}) may have their own terms for models trained on them.
specinfer does not read these terms: look them up.
"""


def licence_of(files: ModelFiles) -> Licence | None:
    """The licence named by a model's file, its card or the catalogue; None if none of them names one."""
    if files.header is not None:
        found = _named(
            *(files.header.metadata.get(f"general.license{part}") for part in ("", ".name", ".link")),
            source="its GGUF file",
        )
    else:
        fields = _front_matter(files.path / "README.md")
        found = _named(
            *(fields.get(f"license{part}") for part in ("", "_name", "_link")), source="its model card"
        )
    if found is None and files.name in CATALOGUE:
        return Licence(CATALOGUE[files.name].licence, None, "specinfer's catalogue")
    return found


def front_matter(licence: Licence | None) -> str:
    """The front-matter lines that declare the licence of a card's target."""
    if licence is None:
        return "license: unknown"
    known = licence.name.lower()
    if _HUB_ID.fullmatch(known) and known not in _NO_LICENCE:
        return f"license: {known}"
    link = "" if licence.link is None else f"\nlicense_link: {json.dumps(licence.link)}"
    return f"license: other\nlicense_name: {json.dumps(licence.name)}{link}"


def _named(identifier: object, name: object, link: object, *, source: str) -> Licence | None:
    one, full, where = (_text(value) for value in (identifier, name, link))
    if one is None or one.lower() in _NO_LICENCE:
        one = full
    return None if one is None else Licence(one, where, source)


def _text(value: object) -> str | None:
    """Collapse whitespace into one line; None if the value is empty or no string; a list has one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        return None
    return " ".join(value.split())[:_MAX_FIELD] or None


def _front_matter(card: Path) -> Mapping[str, object]:
    """The fields of a model card's front matter; none if it cannot be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(card) or {}
    except Exception:  # no file, or no YAML
        return {}
