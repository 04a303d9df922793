"""A policy trace: texts, what drafts would have guessed at every place of them, and what everything costs.

Under the coupled rule, and greedily, a text does not depend on what was guessed. So a trace tells what any
policy would have made of these texts, without a model (engine.py). Speculators that need none guess
again when a trace is played, so their guesses are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specinfer.config import SpeculationConfig
from specinfer.heads.config import BlockRows
from specinfer.replay.guess_trie import GuessTrie
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SamplingParams

DEPTH: Final = 8  # levels of drafts' trees that are recorded, at least


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One answer: what was asked, what the target wrote, and the parameters its guesses depend on."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams
    seed: int
    prediction: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RecordedDraft:
    """What one draft guesses along all texts, and what its passes cost.

    Of a head the sites of a root are one tree, grown best first; so any smaller one is a part of it.
    """

    model: str
    max_context: int
    curve: CostCurve
    guesses: GuessTrie
    measured: Mapping[int, tuple[int, float]] = field(default_factory=dict)  # rows -> passes, their seconds
    head: BlockRows | None = None  # where it is one; None: a model


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEngine:
    """The limits of the engine that wrote the texts, by which its steps are planned."""

    vocab: int
    max_context: int
    max_step_tokens: int
    block_size: int
    prefix_reuse: bool
    ending: tuple[int, ...]  # token ids after which no text follows, unless a request ignores them


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Texts of one target with one set of drafts."""

    model: str
    engine: RecordedEngine
    speculation: SpeculationConfig  # with the speculators, shapes and limits that were switched on
    texts: tuple[RecordedText, ...]
    drafts: Mapping[str, RecordedDraft]  # by speculator name, in the order they are asked
    curve: CostCurve  # of the target
    stages: Mapping[str, float]  # seconds of each stage of a step without speculation, on average
    likeliest: NDArray[np.float32]  # [places, 2]: the target's two highest log-probabilities; NaN: not known
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def starts(self) -> list[int]:
        """The place of each text's first output token among those of all texts; one more, for the end."""
        return [0, *accumulate(len(text.output) for text in self.texts)]

    @property
    def places(self) -> int:
        """Output tokens of all texts."""
        return self.starts[-1]
