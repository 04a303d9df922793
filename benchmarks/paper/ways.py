"""Times several ways to decode the same questions, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

from benchmarks.paper.lab import Lab
from benchmarks.study import ask, total_figures, without_speculation
from specinfer import RequestOutput, SamplingParams
from specinfer.tree.token_tree import Expansion

PLAIN: Final = "none"  # the way without speculation
ROWS: Final = 2048  # limit of a pass that cuts no tree
Way = Mapping[str, Any]  # options of an LLM


def shaped(*widths: int) -> Way:
    """Return the way with trees of this expansion, which a block head cuts at its last level."""
    return {"expansion": Expansion(widths)}


def compare(
    lab: Lab,
    models: str,
    ways: Mapping[str, Way],
    questions: Sequence[str],
    *,
    batch: int,
    max_tokens: int,
    rounds: int,
) -> dict[str, dict[str, float]]:
    """Return the figures of decoding without speculation and of these ways.

    `batch` requests run at once. The first round is not measured: in it the policy learns what passes cost.
    The ways answer each batch in turn, in every other round in the other order. `seconds` is the median over
    the rounds of a request's mean time per token after the first.
    """
    target, drafts = lab.pair(models)
    shape = {"max_batch_size": batch, "max_context": 1024, "max_step_tokens": ROWS, "lookup_memory": 0}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    groups = [questions[at : at + batch] for at in range(0, len(questions), batch)]
    with ExitStack() as opened:
        runs = {
            name: opened.enter_context(lab.llm(target, **{"drafts": drafts, **shape, **way}))
            for name, way in {PLAIN: {}, **ways}.items()
        }
        runs[PLAIN] = opened.enter_context(without_speculation(runs[PLAIN]))
        answers: dict[str, list[list[RequestOutput]]] = {name: [] for name in runs}
        for number in range(1 + rounds):
            for found in answers.values():
                found.append([])
            for group in groups:
                for name, llm in list(runs.items())[:: -1 if number % 2 else 1]:
                    answers[name][-1] += ask(llm, group, params)
    texts = [one.token_ids for one in answers[PLAIN][0]]
    return {name: _figures(found[1:], texts) for name, found in answers.items()}


def _figures(rounds: Sequence[Sequence[RequestOutput]], texts: Sequence[Sequence[int]]) -> dict[str, float]:
    total = total_figures(output for outputs in rounds for output in outputs)
    tokens = sum(map(len, texts)) - len(texts)
    timings = [[one.timing for one in outputs] for outputs in rounds]
    times = [sum((t.finished or 0) - (t.first_token or 0) for t in one) for one in timings]
    return {
        "seconds": median(times) / tokens,
        "tokens_per_step": total.tokens_per_step,
        "nodes_per_step": total.drafted_tokens / max(1, total.steps),
        "texts": len(texts),
        "same": min(sum(a.token_ids == b for a, b in zip(outputs, texts, strict=True)) for outputs in rounds),
    }
