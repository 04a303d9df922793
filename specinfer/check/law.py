"""Counting what an engine says against the law the target states.

The first token of a request comes from a one-node tree; trees decide from the second on. So many seeded
requests with one short prompt each give three tokens, and the *triples* are counted: their law is the
product of the target's own laws after the prompt, after each first token, after each pair, all computed
without tree, batch or speculator. Triples are too many to expect each a few times, so a cell is the
longest beginning that is still expected: cell (a, b, *) takes what follows a, b and has no cell itself.

The chi-square statistic of the cells has a known distribution if every cell expects at least 5 counts.
A verdict fails below p = 1e-4: an honest engine does so in one of 10,000 runs, and as the seeds are fixed a
pass stays one; a verifier that lets the speculator's law through by a few percent is at 1e-10 and lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from specinfer.check.target_alone import TargetAlone
from specinfer.check.verdict import Verdict
from specinfer.llm import LLM
from specinfer.progress import Progress
from specinfer.request import SamplingParams, SpeculationFigures
from specinfer.runtime.sampling import target_law

Cell = tuple[int, ...]  # the tokens a count begins with; no other cell begins with all of them and more

THRESHOLD: Final = 1e-4
TOKENS: Final = 3  # counted of each request
# One more than is counted: a tree is never deeper than what max_tokens leaves, and the third token should
# come from below a node as often as it may.
_MAX_TOKENS: Final = TOKENS + 1
_LEAST_EXPECTED: Final = 5.0  # counts, of a cell
SAMPLING: Final = {
    "T=1": SamplingParams(temperature=1.0, max_tokens=_MAX_TOKENS, ignore_eos=True),
    "T=0.8, top_p=0.95": SamplingParams(temperature=0.8, top_p=0.95, max_tokens=_MAX_TOKENS, ignore_eos=True),
}
# Repeats itself, so that looking the last token up finds something, and leaves open what comes next.
PROMPT: Final = "red blue green red red blue blue green blue red green green red"


def check_law(
    name: str,
    params: SamplingParams,
    prompt: Sequence[int],
    engine: LLM,
    samples: int,
    progress: Progress,
) -> Verdict:
    """Count the triples of `samples` requests, seeds 0, 1, ..., against the target's law."""
    cells = expected_cells(TargetAlone(engine.models.target), prompt, params, samples)
    figures = SpeculationFigures()
    counts = dict.fromkeys(cells, 0)
    impossible = 0
    each = [replace(params, seed=seed) for seed in range(samples)]
    progress.start(samples, name, "requests")
    try:
        outputs = engine.generate(
            [prompt] * samples, each, on_output=lambda output: progress.advance(int(output.finished))
        )
    finally:
        progress.finish()
    for output in outputs:
        figures.add(output.figures)
        cell = cell_of(output.token_ids[:TOKENS], cells)
        counts[cell] += 1
        impossible += cells[cell] == 0.0
    p_value, bins = chi_square(counts, cells)
    passed = p_value > THRESHOLD and not impossible and figures.drafted_tokens > 0 and bins > 1
    words = (
        f"p = {p_value:.3g} over {bins} cells of {samples} requests, "
        f"{figures.accepted_tokens} of {figures.drafted_tokens} guesses accepted"
    )
    if impossible:
        words += f"; {impossible} requests said what the target's law forbids"
    elif p_value <= THRESHOLD:
        words += f"; below {THRESHOLD:g}, so this is not the target's law"
    if not figures.drafted_tokens or bins <= 1:
        words += "; too little was guessed or expected to test anything: raise --samples"
    return Verdict(
        name,
        passed,
        words,
        {
            "p_value": p_value,
            "cells": bins,
            "samples": samples,
            "impossible": impossible,
            "drafted_tokens": figures.drafted_tokens,
            "accepted_tokens": figures.accepted_tokens,
        },
    )


def expected_cells(
    target: TargetAlone, prompt: Sequence[int], params: SamplingParams, samples: int
) -> dict[Cell, float]:
    """The probability of each cell; they cover everything, so they sum to 1.

    A cell that is the beginning of others has what they leave over. The empty cell is always there, so
    every count has a home; it may be left with little or nothing.
    """
    least = _LEAST_EXPECTED / samples
    cells: dict[Cell, float] = {}
    level: dict[Cell, float] = {(): 1.0}
    for _ in range(TOKENS):
        rows = target.logits_after([[*prompt, *cell] for cell in level])
        following: dict[Cell, float] = {}
        for (cell, mass), logits in zip(level.items(), rows, strict=True):
            law = target_law(logits, params).dense() * mass
            likely = np.flatnonzero(law >= least).tolist()
            following |= {(*cell, token): float(law[token]) for token in likely}
            law[likely] = 0.0
            cells[cell] = float(law.sum())  # exactly 0 where the likely tokens are all there are
        level = following
        if not level:
            break
    return _without_rare(cells | level, least)


def _without_rare(cells: Mapping[Cell, float], least: float) -> dict[Cell, float]:
    """Cells that expect too little are counted with the cell they begin with; the empty one stays."""
    kept = dict(cells)
    for cell in sorted(cells, key=len, reverse=True):
        if cell and 0.0 < kept[cell] < least:
            rest = kept.pop(cell)
            kept[_home(cell[:-1], kept)] += rest
    return kept


def cell_of(tokens: Iterable[int], cells: Mapping[Cell, float]) -> Cell:
    """The cell a count belongs to: the longest that `tokens` begins with."""
    return _home(tuple(tokens), cells)


def _home(tokens: Cell, cells: Mapping[Cell, float]) -> Cell:
    return next(tokens[:n] for n in range(len(tokens), -1, -1) if tokens[:n] in cells)


def chi_square(counts: Mapping[Cell, int], cells: Mapping[Cell, float]) -> tuple[float, int]:
    """Pearson's p value of `counts` under the probabilities `cells`, and how many cells it is made of.

    A cell that still expects too little (the empty one) is put to the smallest other; impossible cells
    are left out.
    """
    samples = sum(counts.values())
    pairs = sorted((p * samples, counts[cell]) for cell, p in cells.items() if p > 0)
    if len(pairs) > 1 and pairs[0][0] < _LEAST_EXPECTED:
        (a, m), (b, n), *others = pairs
        pairs = [(a + b, m + n), *others]
    expected, seen = np.array(pairs, dtype=np.float64).T
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(pairs) - 1
    if freedom == 0:
        return 1.0, 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), len(pairs)
