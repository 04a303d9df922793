"""The model card of a trained draft: what it is for, what it learnt from, what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from specinfer.tune.draft import Description
from specinfer.tune.held_out import Figures
from specinfer.tune.shards import Corpus
from specinfer.tune.trainer import Trainer
from specinfer.version import VERSION


@dataclass(frozen=True, slots=True)
class Material:
    """What a draft learnt from."""

    target: str
    sources: Sequence[str]  # names of prompt files
    texts: int
    held_out: int
    tokens: int
    collecting_seconds: float

    @classmethod
    def of(cls, target: str, sources: Sequence[str], corpus: Corpus) -> Material:
        """All of a corpus."""
        counts = corpus.count(held_out=False), corpus.count(held_out=True)
        return cls(target, sources, *counts, corpus.tokens, corpus.seconds)


def card(draft: Description, material: Material, trainer: Trainer, loss: str, figures: Figures) -> str:
    """A README.md, with the front matter that hubs read."""
    hits = " ".join(f"{hit:.3f}" for hit in figures.hits)
    state = trainer.state
    return f"""---
library_name: {draft.library}
tags: [speculative-decoding, draft-head, {draft.tag}]
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
| learnt from | {material.texts} answers of the target, {material.tokens} tokens; to {_names(material)} |
| collecting | {material.collecting_seconds / 60:.0f} minutes |
| training | {state.seconds / 60:.0f} minutes, {state.steps} steps, {state.blocks} blocks, loss {loss} |
| made | {datetime.now(UTC):%Y-%m-%d} by specinfer {VERSION} |

On {figures.places} places of {material.held_out} held-out greedy answers:

- a chain of first guesses makes {figures.tokens_per_pass:.2f} tokens a pass of the target's;
- first guesses are right at {hits} of places, level by level, where all before them were right;
- the first level's token is among three at {figures.first_three:.3f}.

The answers are the target's own; its licence applies to them, and that of the prompts to what is learnt from
those.
"""


def _names(material: Material) -> str:
    return ", ".join(material.sources)
