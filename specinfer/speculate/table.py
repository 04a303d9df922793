"""The speculators an engine can have: whoever adds one adds a row here, and its options to config.py.

Draft models are not among them: they are loaded with the target (engine/build.py), and asked after all of
these; then come a caller's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from specinfer.config import SpeculationConfig
from specinfer.kernels.library import Library
from specinfer.speculate.grammar import GrammarSpeculator
from specinfer.speculate.lookups.ngram import NgramSpeculator
from specinfer.speculate.lookups.prediction import PredictionSpeculator
from specinfer.speculate.lookups.suffix import SuffixSpeculator
from specinfer.speculate.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of speculator."""

    build: Callable[[SpeculationConfig, Library | None], Speculator]  # the library looks guesses up
    switch: str | None  # the option that asks for it; None: there for every request that brings what it needs


def _grammar(config: SpeculationConfig, _: Library | None) -> Speculator:
    return GrammarSpeculator(depth=config.forced_depth)


def _prediction(config: SpeculationConfig, _: Library | None) -> Speculator:
    return PredictionSpeculator(depth=config.prediction_depth, branches=config.prediction_branches)


def _suffix(config: SpeculationConfig, library: Library | None) -> Speculator:
    return SuffixSpeculator(
        max_depth=config.suffix_depth,
        max_nodes=config.suffix_nodes,
        memory=config.suffix_memory,
        library=library,
    )


def _ngram(config: SpeculationConfig, library: Library | None) -> Speculator:
    return NgramSpeculator(
        shortest=config.ngram_min,
        longest=config.ngram_max,
        branches=config.ngram_branches,
        depth=config.ngram_depth,
        library=library,
    )


# In the order they are asked, all before the drafts: they cost next to nothing, and what they know says
# whether a draft's pass is worth it. Surest first, as of equal guesses the first are verified.
TABLE: Final = (
    Row(_grammar, None),
    Row(_prediction, None),
    Row(_suffix, "suffix"),
    Row(_ngram, "ngram"),
)


def build_speculators(config: SpeculationConfig, library: Library | None = None) -> list[Speculator]:
    """Those of the table that the config asks for, in their order.

    `library` looks up guesses where there is one.
    """
    return [row.build(config, library) for row in TABLE if row.switch is None or getattr(config, row.switch)]
