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
    *(table1, table2, table3, distributed, offloading, widths, attention),
    *(trees, ssms, predictors, adaptation, parallel, hybrids, heads, promise),
)
