"""The model card of a trained head: what it is for, what it learnt from, what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.tune.held_out import Figures
from specinfer.tune.trainer import Trained
from specinfer.version import VERSION


@dataclass(frozen=True, slots=True)
class Material:
    """What a head learnt from."""

    target: str
    sources: Sequence[str]  # names of prompt files
    texts: int
    held_out: int
    tokens: int
    collecting_seconds: float


def card(
    config: BlockConfig | EagleConfig, material: Material, state: Trained, loss: str, figures: Figures
) -> str:
    """A README.md, with the front matter that hubs read."""
    hits = " ".join(f"{hit:.3f}" for hit in figures.hits)
    body = config.body
    if isinstance(config, BlockConfig):
        tag, kind, how = "dspark", "causal block head", f"guesses {config.depth} tokens in one pass"
    else:
        tag, kind, how = "eagle3", "EAGLE-3 head", "guesses a level of a tree in each pass"
    ours = isinstance(config, BlockConfig) and config.reads_last
    layout = "that specinfer alone reads" if ours else f"`speculators` layout, {tag}"
    return f"""---
library_name: speculators
tags: [speculative-decoding, draft-head, {tag}]
---

# A draft head for {material.target}

It reads the hidden states of its target and {how}. It changes no text.

    specinfer generate --model {material.target} --draft THIS_FOLDER "..."

| | |
|---|---|
| target | {material.target} |
| kind | {kind} ({layout}), {body.num_layers} layer(s) of {body.hidden_size} |
| reads | what the target's layers {", ".join(str(tap) for tap in config.taps)} are given |
| can name | {config.draft_vocab_size} of {body.vocab_size} tokens |
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
