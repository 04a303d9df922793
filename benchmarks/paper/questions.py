"""The questions, in the order of the index."""

from __future__ import annotations

from typing import Final

from benchmarks.paper import (
    attention,
    hybrids,
    parallel,
    promise,
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
    widths.QUESTION,
    attention.QUESTION,
    trees.QUESTION,
    parallel.QUESTION,
    hybrids.QUESTION,
    promise.QUESTION,
from benchmarks.paper import distributed, table2
from benchmarks.paper import distributed, offloading, table2
from benchmarks.paper import heads, hybrids, promise, table2
from benchmarks.paper.question import Question

QUESTIONS: Final[tuple[Question, ...]] = (
    table2.QUESTION,
    distributed.QUESTION,
    offloading.QUESTION,
    hybrids.QUESTION,
    heads.QUESTION,
    promise.QUESTION,
from benchmarks.paper import ssms, table2
from benchmarks.paper import predictors, ssms, table2
from benchmarks.paper import adaptation, predictors, ssms, table2
from benchmarks.paper.question import Question

QUESTIONS: Final[tuple[Question, ...]] = (
    table2.QUESTION,
    ssms.QUESTION,
    predictors.QUESTION,
    adaptation.QUESTION,
)
