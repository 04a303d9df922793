"""The model card of a trained draft: what it is for, what it learnt from, what it is worth, whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from specinfer.tune.draft import Description, Target
from specinfer.tune.held_out import Figures
from specinfer.tune.licence import Licence, front_matter, licence_of
from specinfer.tune.shards import Corpus
from specinfer.tune.trainer import Trainer
from specinfer.version import VERSION


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
