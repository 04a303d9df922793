"""The model card of a trained draft: what it is for, what it learnt from, what it is worth, its licence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from specinfer.hub.catalogue import CATALOGUE
from specinfer.hub.model_files import ModelFiles
from specinfer.tune.dataset import Corpus
from specinfer.tune.draft import Description, Target
from specinfer.tune.evaluation import Figures
from specinfer.tune.trainer import Trainer
from specinfer.version import VERSION

_FRONT: Final = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)  # of a card: what hubs read
_FIELD: Final = re.compile(r"^(license(?:_name|_link)?):(.*)$", re.MULTILINE)
_HUB_ID: Final = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # as hubs know licences
_UNNAMED: Final = ("other", "unknown", "none", "null", "~")  # what is no licence
_CARD: Final = 1 << 16  # characters of a card that are looked at
_LONGEST: Final = 200  # of a name or link


@dataclass(frozen=True, slots=True)
class Licence:
    """What a model is given under."""

    name: str
    link: str | None
    source: str  # what says so


@dataclass(frozen=True, slots=True)
class Material:
    """What a draft learnt from."""

    target: str
    licence: Licence | None  # the target's; None: it is not known
    sources: Sequence[str]  # names of prompt files
    texts: int
    held_out: int
    tokens: int
    collecting_seconds: float

    @classmethod
    def of(cls, target: Target, sources: Sequence[str], corpus: Corpus) -> Material:
        """All of a corpus."""
        counts = corpus.count(held_out=False), corpus.count(held_out=True)
        licence = licence_of(target.files)
        return cls(target.name, licence, sources, *counts, corpus.tokens, corpus.seconds)


def card(draft: Description, material: Material, trainer: Trainer, loss: str, figures: Figures) -> str:
    """A README.md, with the front matter that hubs read."""
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
| can name | {len(trainer.draft.ids)} of {trainer.draft.vocab} tokens |
| learnt from | {learnt_from(material)} |
| collecting | {material.collecting_seconds / 60:.0f} minutes |
| training | {state.seconds / 60:.0f} minutes, {state.steps} steps, {state.blocks} blocks, loss {loss} |
| made | {datetime.now(UTC):%Y-%m-%d} by specinfer {VERSION} |

On {figures.places} places of {material.held_out} held-out greedy answers:

- a chain of first guesses makes {figures.tokens_per_pass:.2f} tokens a pass of the target's;
- first guesses are right at {hits} of places, level by level, where all before them were right;
- the first level's token is among three at {figures.first_three:.3f}.
{licence_section(material, draft.of_target)}"""


def learnt_from(material: Material) -> str:
    """What is asked and answered, in a line."""
    names = ", ".join(material.sources)
    return f"{material.texts} answers of the target, {material.tokens} tokens; to {names}"


def licence_section(material: Material, of_target: str) -> str:
    """Whose terms apply to a draft; `of_target` is what its files hold of the target's weights."""
    known = material.licence
    if known is None:
        named = (
            f"The licence of {material.target} is not known here: what was read of it names none. Look it up "
            "before you pass this on."
        )
    else:
        link = "" if known.link is None else f" ({known.link})"
        named = f"{material.target} is given under {known.name}{link}, as {known.source} says."
    return f"""
## Licence

{named} That applies to what is the target's here: all answers that were learnt from,
and of its weights {of_target}.

What was asked ({", ".join(material.sources)}) may have terms of its own for what is learnt from it:
they are not known here, look them up.
"""


def licence_of(files: ModelFiles) -> Licence | None:
    """The licence that a model's file, its card or specinfer's catalogue names; None: none of them does."""
    if files.header is not None:
        found = _named(
            *(files.header.metadata.get(f"general.license{part}") for part in ("", ".name", ".link")),
            source="its GGUF file",
        )
    else:
        fields = _front_matter(_read(files.path / "README.md"))
        found = _named(
            *(fields.get(f"license{part}") for part in ("", "_name", "_link")), source="its model card"
        )
    if found is None and files.name in CATALOGUE:
        return Licence(CATALOGUE[files.name].licence, None, "specinfer's catalogue")
    return found


def front_matter(licence: Licence | None) -> str:
    """The lines by which hubs know the licence of a card's target."""
    if licence is None:
        return "license: unknown"
    known = licence.name.lower()
    if _HUB_ID.fullmatch(known) and known not in _UNNAMED:
        return f"license: {known}"
    link = "" if licence.link is None else f"\nlicense_link: {json.dumps(licence.link)}"
    return f"license: other\nlicense_name: {json.dumps(licence.name)}{link}"


def _named(identifier: object, name: object, link: object, *, source: str) -> Licence | None:
    one, full, where = (_text(value) for value in (identifier, name, link))
    if one is None or one.lower() in _UNNAMED:
        one = full
    return None if one is None else Licence(one, where, source)


def _text(value: object) -> str | None:
    """One line of what a file says, or None where that is nothing."""
    if not isinstance(value, str):
        return None
    return " ".join(value.split())[:_LONGEST] or None


def _read(card: Path) -> str:
    """A model card's text; nothing where there is none that can be read."""
    try:
        return card.read_text("utf-8", "replace")[:_CARD]
    except OSError:
        return ""


def _front_matter(card: str) -> Mapping[str, str]:
    found = _FRONT.match(card)
    fields = {} if found is None else dict(_FIELD.findall(found[1]))
    return {key: value.partition(" #")[0].strip().strip("\"'[]") for key, value in fields.items()}
