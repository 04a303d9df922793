"""Whether texts follow the law the target states, token by token.

Every token of a text has a *place* in the law it should come from. Order the target's law after the text
before it, likeliest token first, and let the probabilities fill the interval from 0 to 1:

    |---- p("the") = .5 ----|--- p("a") = .3 ---|- p("my") = .1 -|....|
    0                       .5                  .8               .9   1

A token's place is a random point of its own piece. If tokens follow the law, places are even in [0, 1) and
independent, whatever the laws are and however they differ from token to token; a verifier that lets a
speculator's law through puts too many places somewhere: near 1 for guesses the target finds unlikely, near
0 for guesses that are the likeliest token too often. Ten bins are counted and Pearson's chi-square statistic
compared with its distribution. The target's laws are computed from finished texts, without tree or batch.

The first token of a text comes from a one-node tree, with the prompt; so only the others are counted.

A verdict fails below p = 1e-4: an honest engine does so in one of 10,000 runs, and as the seeds are fixed a
pass stays a pass. With the default effort a top-k taken for a sample, the classic mistake, is below 1e-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.check.difference import TargetAlone, Verdict, rounding
from specinfer.llm import LLM
from specinfer.progress import Progress
from specinfer.request import SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.verify.target_law import target_law

THRESHOLD: Final = 1e-4
BINS: Final = 10
LEAST: Final = 100  # tokens; with fewer, bins would expect too little and the test would show nothing
SAMPLING: Final = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.8, top_p=0.95": SamplingParams(temperature=0.8, top_p=0.95),
}


def check_law(
    name: str,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    engine: LLM,
    texts: int,
    progress: Progress,
) -> Verdict:
    """Answer `prompts` in turn until there are `texts` answers, seeds 0, 1, ..., and count their places."""
    asked = [prompts[i % len(prompts)] for i in range(texts)]
    with progress.showing(texts, name, "texts"):
        outputs = engine.generate(
            asked,
            [replace(params, seed=seed) for seed in range(texts)],
            on_output=lambda output: progress.advance(int(output.finished)),
        )
    target = TargetAlone(engine.models.target)
    chance = np.random.default_rng(0)  # has nothing in common with the engine's noise
    figures = SpeculationFigures()
    found: list[float] = []
    impossible = 0
    for output in outputs:
        figures.add(output.figures)
        text_places = places(target, output.prompt_token_ids, output.token_ids, params, chance)
        impossible += int(np.isnan(text_places).sum())
        found.extend(text_places[~np.isnan(text_places)].tolist())
    counts = np.histogram(found, bins=BINS, range=(0.0, 1.0))[0]
    p_value = chi_square(counts)
    broken = p_value <= THRESHOLD or impossible > 0
    enough = len(found) >= LEAST and figures.drafted_tokens > 0
    words = (
        f"p = {p_value:.3g} for {len(found)} tokens, "
        f"{figures.accepted_tokens} of {figures.drafted_tokens} guesses accepted"
    )
    if impossible:
        words += f"; {impossible} more tokens are ones the target's law forbids"
    if p_value <= THRESHOLD:
        words += f"; below {THRESHOLD:g}, so this is not the target's law"
    if not enough:
        words += f"; too little was guessed or counted (at least {LEAST} tokens): raise --samples"
    return Verdict(
        name,
        enough and not broken,
        words,
        {
            "p_value": p_value,
            "tokens": len(found),
            "counts": counts.tolist(),
            "impossible": impossible,
            "texts": texts,
            "drafted_tokens": figures.drafted_tokens,
            "accepted_tokens": figures.accepted_tokens,
        },
        decided=enough or broken,
    )


def places(
    target: TargetAlone,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
    chance: np.random.Generator,
) -> NDArray[np.float64]:
    """The place of every token but the first, [len(tokens) - 1], in [0, 1); nan for a forbidden token.

    Where a filter cuts, rounding may keep a token in one computation and not in the other: a token is
    forbidden only when a logit higher by as much as rounding can do would not save it. Such a saved token
    has its place at the end.
    """
    if len(tokens) < 2:
        return np.empty(0)
    rows = target.logits_along([*prompt, *tokens[:-1]], len(prompt) + 1)
    found = np.empty(len(tokens) - 1)
    for i, (token, logits) in enumerate(zip(tokens[1:], rows, strict=True)):
        law = target_law(logits, params).dense()
        if law[token] == 0.0:
            raised = logits.copy()
            raised[token] += np.float32(rounding(logits, target.model.dtype))
            saved = target_law(raised, params).dense()[token] > 0
            found[i] = np.nextafter(1.0, 0.0) if saved else np.nan
            continue
        likelier = law > law[token]
        likelier[:token] |= law[:token] == law[token]  # equal ones in order of their ids
        found[i] = min(float(law[likelier].sum()) + chance.random() * law[token], np.nextafter(1.0, 0.0))
    return found


def chi_square(counts: NDArray[np.int64]) -> float:
    """Pearson's p value of `counts` for even bins; 1 when there is nothing."""
    if not counts.sum():
        return 1.0
    expected = counts.sum() / len(counts)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
