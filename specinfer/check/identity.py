"""The same text with and without speculation, alone and in a batch: greedy, and seeded sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from specinfer.check.difference import Difference, find_difference
from specinfer.check.target_alone import TargetAlone
from specinfer.check.verdict import Verdict
from specinfer.llm import LLM
from specinfer.progress import Progress
from specinfer.request import RequestOutput, SpeculationFigures
from specinfer.sampling_params import SamplingParams

SAMPLING: Final = {
    "greedy": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7, top_p=0.9": SamplingParams(temperature=0.7, top_p=0.9),
}


def check_identity(
    name: str,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    plain: LLM,
    speculative: LLM,
    *,
    alone: int,
    progress: Progress,
) -> list[Verdict]:
    """Answer `prompts` without and with speculation, and the first `alone` of them one at a time.

    Request i has seed i. A text that differs fails unless rounding explains the first difference. So does
    a run in which nothing was guessed: it would have tested nothing.
    """
    each = [replace(params, seed=seed) for seed in range(len(prompts))]
    alone = min(alone, len(prompts))
    progress.start(2 * len(prompts) + alone, name, "texts")

    def count(output: RequestOutput) -> None:
        progress.advance(int(output.finished))

    try:
        expected = plain.generate(prompts, each, on_output=count)
        together = speculative.generate(prompts, each, on_output=count)
        single = [speculative.generate([prompts[i]], each[i], on_output=count)[0] for i in range(alone)]
    finally:
        progress.finish()
    target = TargetAlone(plain.models.target)
    return [
        compare_texts(f"{name}, with and without speculation", target, params, expected, together),
        compare_texts(f"{name}, in a batch and alone", target, params, together[:alone], single),
    ]


def compare_texts(
    name: str,
    target: TargetAlone,
    params: SamplingParams,
    expected: Sequence[RequestOutput],
    got: Sequence[RequestOutput],
) -> Verdict:
    """A verdict on answers `got`, by an engine that speculates, that should be `expected`."""
    figures = SpeculationFigures()
    differences: list[tuple[int, Difference]] = []
    misread: list[int] = []  # the same tokens, yet another text
    for number, (ours, theirs) in enumerate(zip(expected, got, strict=True), start=1):
        figures.add(theirs.figures)
        if (difference := find_difference(target, params, ours, theirs)) is not None:
            differences.append((number, difference))
        elif ours.text != theirs.text:
            misread.append(number)
    unexplained = [(number, d) for number, d in differences if not d.explained]
    identical = len(got) - len(differences) - len(misread)
    words = (
        f"{identical} of {len(got)} texts identical, "
        f"{figures.accepted_tokens} of {figures.drafted_tokens} guesses accepted"
    )
    if len(differences) > len(unexplained):
        words += (
            f"; {len(differences) - len(unexplained)} differ where the target's choice is within rounding"
        )
    if unexplained:
        number, difference = unexplained[0]
        words += f"; {len(unexplained)} differ beyond rounding, text {number} first, {difference}"
    if misread:
        words += f"; {len(misread)} differ in text but not in tokens, text {misread[0]} first"
    if not figures.drafted_tokens:
        words += (
            "; nothing was guessed, so nothing was tested: raise --max-tokens or choose another speculator"
        )
    return Verdict(
        name,
        not unexplained and not misread and figures.drafted_tokens > 0,
        words,
        {
            "texts": len(got),
            "identical": identical,
            "explained": len(differences) - len(unexplained),
            "drafted_tokens": figures.drafted_tokens,
            "accepted_tokens": figures.accepted_tokens,
            "tokens_per_step": figures.tokens_per_step,
            "differences": [{"text": number, **d.to_json()} for number, d in differences],
        },
    )
