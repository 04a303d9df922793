"""The questions, in the order of the index."""

from __future__ import annotations

from typing import Final

from benchmarks.paper import hybrids, promise, table2
from benchmarks.paper import attention, table2
from benchmarks.paper import attention, table2, trees
from benchmarks.paper import attention, table2, trees, widths
from benchmarks.paper import attention, parallel, table2, trees, widths
from benchmarks.paper.question import Question

QUESTIONS: Final[tuple[Question, ...]] = (
    table2.QUESTION,
    hybrids.QUESTION,
    promise.QUESTION,
    widths.QUESTION,
    attention.QUESTION,
    trees.QUESTION,
    parallel.QUESTION,
from benchmarks.paper import table1, table2
from benchmarks.paper import table1, table2, table3
from benchmarks.paper.question import Question

QUESTIONS: Final[tuple[Question, ...]] = (
    table1.QUESTION,
    table2.QUESTION,
    table3.QUESTION,
)
