"""Checks that texts follow the target's law, by a randomized probability integral transform.

Each token has a *quantile* in the target's law after the text before it. Order the law, likeliest token
first, and let the probabilities fill the interval from 0 to 1:

    |---- p("the") = .5 ----|--- p("a") = .3 ---|- p("my") = .1 -|....|
    0                       .5                  .8               .9   1

A token's quantile is a random point of its interval. If tokens follow the law, quantiles are uniform in [0,
1) and independent, even if the laws differ from token to token. A verifier that is biased toward a
speculator's law has too many quantiles near 1 (tokens that the target finds unlikely) or near 0 (the
likeliest token too often). Quantiles are counted in ten bins and tested with Pearson's chi-square statistic.
The target's laws are computed from finished texts, without tree or batch.

The first token of a text is left out, as it comes from a one-node tree with the prompt.

A verdict fails below p = 1e-4. A correct engine fails in one of 10,000 runs; as seeds are fixed, a pass stays
a pass. With the default effort the classic bug, a top-k set taken for a sample, has p below 1e-10.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from specinfer.check.difference import PlainTarget, Verdict, rounding
from specinfer.llm import LLM
from specinfer.progress import Progress
from specinfer.request import SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.verify.target_law import target_law

THRESHOLD: Final = 1e-4
BINS: Final = 10
MIN_TOKENS: Final = 100  # with fewer tokens the bins expect too few for the test
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
    """Answer `prompts` in turn until there are `texts` answers, seeds 0, 1, ..., and test their quantiles."""
    chosen = [prompts[i % len(prompts)] for i in range(texts)]
    with progress.showing(texts, name, "texts"):
        outputs = engine.generate(
            chosen,
            [replace(params, seed=seed) for seed in range(texts)],
            on_output=lambda output: progress.advance(int(output.finished)),
        )
    target = PlainTarget(engine.models.target, engine.models.adapters)
    chance = np.random.default_rng(0)  # independent of the engine's noise
    figures = SpeculationFigures()
    found: list[float] = []
    impossible = 0
    for output in outputs:
        figures.add(output.figures)
        text_quantiles = quantiles(target, output.prompt_token_ids, output.token_ids, params, chance)
        impossible += int(np.isnan(text_quantiles).sum())
        found.extend(text_quantiles[~np.isnan(text_quantiles)].tolist())
    counts = np.histogram(found, bins=BINS, range=(0.0, 1.0))[0]
    p_value = chi_square(counts)
    broken = p_value <= THRESHOLD or impossible > 0
    enough = len(found) >= MIN_TOKENS and figures.drafted_tokens > 0
    words = (
        f"p = {p_value:.3g} for {len(found)} tokens, "
        f"{figures.accepted_tokens} of {figures.drafted_tokens} guesses accepted"
    )
    if impossible:
        words += f"; {impossible} more tokens are ones the target's law forbids"
    if p_value <= THRESHOLD:
        words += f"; below {THRESHOLD:g}, so this is not the target's law"
    if not enough:
        words += f"; too little was guessed or counted (at least {MIN_TOKENS} tokens): raise --samples"
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


def quantiles(
    target: PlainTarget,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
    chance: np.random.Generator,
) -> NDArray[np.float64]:
    """Return the quantile of every token but the first, [len(tokens) - 1], in [0, 1); nan if forbidden.

    At a filter's threshold rounding may keep a token in one computation and drop it in another. So a token is
    forbidden only if it stays forbidden after rounding raises its logit. A token that this keeps has the last
    quantile.
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
    """Return Pearson's p value of `counts` for uniform bins, or 1 without counts."""
    if not counts.sum():
        return 1.0
    expected = counts.sum() / len(counts)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
