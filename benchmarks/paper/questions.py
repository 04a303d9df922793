"""The questions, in the order of the index."""

from __future__ import annotations

from typing import Final

from benchmarks.paper import (
    adaptation,
    attention,
    distributed,
    heads,
    hybrids,
    offloading,
    parallel,
    predictors,
    promise,
    ssms,
    table1,
    table2,
    table3,
    trees,
    widths,
)
from benchmarks.paper.question import Question

QUESTIONS: Final[tuple[Question, ...]] = (
    table1.QUESTION,
    table2.QUESTION,
    table3.QUESTION,
    distributed.QUESTION,
    offloading.QUESTION,
    widths.QUESTION,
    attention.QUESTION,
    trees.QUESTION,
    ssms.QUESTION,
    predictors.QUESTION,
    adaptation.QUESTION,
    parallel.QUESTION,
    hybrids.QUESTION,
    heads.QUESTION,
    promise.QUESTION,
)
