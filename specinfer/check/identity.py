"""Checks that texts are the same with and without speculation, alone and batched, once and repeated."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Final

from specinfer.check.difference import (
    Difference,
    PlainTarget,
    TextPromise,
    Verdict,
    find_difference,
    text_promise,
)
from specinfer.llm import LLM
from specinfer.progress import Progress
from specinfer.request import RequestOutput, SpeculationFigures
from specinfer.sampling_params import SamplingParams

SAMPLING: Final = {
    "greedy": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7, top_p=0.9": SamplingParams(temperature=0.7, top_p=0.9),
}
TWICE: Final = ("greedy", "T=1")  # settings whose texts are also repeated


def check_identity(
    name: str,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    plain: LLM,
    speculative: LLM,
    *,
    num_single: int,
    progress: Progress,
) -> list[Verdict]:
    """Compare answers with and without speculation, and the first `num_single`, if any, in a batch and alone.

    Request i has seed i. `speculative` uses the coupled verifier, as `compare_texts` requires.
    """
    each = [replace(params, seed=seed) for seed in range(len(prompts))]
    num_single = min(num_single, len(prompts))

    def count(output: RequestOutput) -> None:
        progress.advance(int(output.finished))

    with progress.showing(2 * len(prompts) + num_single, name, "texts"):
        expected = plain.generate(prompts, each, on_output=count)
        together = speculative.generate(prompts, each, on_output=count)
        single = [speculative.generate([prompts[i]], each[i], on_output=count)[0] for i in range(num_single)]
    target = PlainTarget(plain.models.target, plain.models.adapters)
    verdicts = [compare_texts(f"{name}, with and without speculation", target, params, expected, together)]
    if num_single:
        name = f"{name}, in a batch and alone"
        verdicts.append(compare_texts(name, target, params, together[:num_single], single))
    return verdicts


def check_repetition(
    name: str,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    speculative: LLM,
    *,
    progress: Progress,
) -> Verdict:
    """Answer each prompt twice in one engine; the second answer reuses the first one's cached prefix.

    Request i has seed i and a new cache salt, so the first answer finds nothing in the cache. The verdict is
    undecided if prefix reuse is on and no prefix was reused.
    """
    answers: list[tuple[RequestOutput, RequestOutput]] = []
    with progress.showing(2 * len(prompts), name, "texts"):
        for seed, prompt in enumerate(prompts):
            own = replace(params, seed=seed, cache_salt=f"{name} {seed}")
            (first,) = speculative.generate([prompt], own)
            (second,) = speculative.generate([prompt], own)
            answers.append((first, second))
            progress.advance(2)
    target = PlainTarget(speculative.models.target, speculative.models.adapters)
    first_answers, second_answers = [first for first, _ in answers], [second for _, second in answers]
    verdict = compare_texts(name, target, params, first_answers, second_answers)
    cached = sum(second.cached_tokens for second in second_answers)
    total = sum(map(len, prompts))
    reuse = speculative.config.cache
    if cached:
        words = f"the second time behind {cached} of {total} prompt tokens from the cache"
    elif reuse.prefix_reuse:
        words = f"nothing came from the cache: give prompts longer than a block of {reuse.block_size} tokens"
    else:
        words = "prefix_reuse is off, so nothing came from the cache"
    untested = verdict.passed and reuse.prefix_reuse and not cached
    return replace(
        verdict,
        passed=verdict.passed and not untested,
        decided=not untested,
        words=f"{verdict.words}; {words}",
        details={**verdict.details, "cached_tokens": cached},
    )


def compare_texts(
    name: str,
    target: PlainTarget,
    params: SamplingParams,
    expected: Sequence[RequestOutput],
    got: Sequence[RequestOutput],
    judge: Callable[[Sequence[int]], PlainTarget] | None = None,
) -> Verdict:
    """Compare the answers `got` of a coupled, speculating engine with `expected`.

    If identical texts are promised, every difference fails; otherwise those that rounding does not explain. A
    run without proposed tokens fails, as it tests nothing. `judge` returns the target that answered a
    prompt, if parameters change its logits; the default is `target`.
    """
    device = target.model.device
    promised = text_promise(params, "coupled", device)
    figures = SpeculationFigures()
    differences: list[tuple[int, Difference]] = []
    misread: list[int] = []  # equal tokens, different text
    for number, (reference, other) in enumerate(zip(expected, got, strict=True), start=1):
        figures.add(other.figures)
        judged_by = target if judge is None else judge(reference.prompt_token_ids)
        if (difference := find_difference(judged_by, params, reference, other)) is not None:
            differences.append((number, difference))
        elif reference.text != other.text:
            misread.append(number)
    unexplained = [(number, d) for number, d in differences if not d.explained]
    explained = len(differences) - len(unexplained)
    failing = differences if promised is TextPromise.IDENTICAL else unexplained
    identical = len(got) - len(differences) - len(misread)
    words = (
        f"{identical} of {len(got)} texts identical, "
        f"{figures.accepted_tokens} of {figures.drafted_tokens} guesses accepted"
    )
    if differences:
        words += f"; {len(differences)} differ, rounding explains {explained} of them"
    if failing:
        number, difference = (unexplained or failing)[0]  # the first of the most informative
        words += f"; text {number}, {difference}"
    if misread:
        words += f"; {len(misread)} differ in text but not in tokens, text {misread[0]} first"
    if promised is not TextPromise.IDENTICAL:
        words += f"; identical texts are not promised on {device.type}, differences within rounding pass"
    if not figures.drafted_tokens:
        words += (
            "; nothing was guessed, so nothing was tested: raise --max-tokens or choose another speculator"
        )
    return Verdict(
        name,
        not failing and not misread and figures.drafted_tokens > 0,
        words,
        {
            "texts": len(got),
            "promised": promised.value,
            "identical": identical,
            "explained": explained,
            "drafted_tokens": figures.drafted_tokens,
            "accepted_tokens": figures.accepted_tokens,
            "tokens_per_step": figures.tokens_per_step,
            "differences": [{"text": number, **asdict(d)} for number, d in differences],
        },
    )
