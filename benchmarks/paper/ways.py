"""Times several ways to decode the same questions, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

from benchmarks.paper.lab import Lab
from benchmarks.study import ask, total_figures, without_speculation
from specinfer import RequestOutput, SamplingParams
from specinfer.sampling_params import SpeculationParams
from specinfer.tree.token_tree import Expansion

HEAD: Final = "smollm2-135m-head"  # the package's block head
PLAIN: Final = "none"  # the way without speculation
ROWS: Final = 2048  # limit of a pass that cuts no tree


@dataclass(frozen=True, slots=True)
class Way:
    """Options of an LLM, and of the speculation of its requests."""

    options: Mapping[str, Any] = field(default_factory=dict)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)


def shaped(*widths: int) -> Way:
    """Return the way with trees of this expansion, which a block head cuts at its last level."""
    # Block heads follow the expansion of a request, not that of the engine.
    return Way(speculation=SpeculationParams(expansion=Expansion(widths)))


def pair(lab: Lab, name: str) -> tuple[str, list[str]]:
    """Return a target and its draft: "SmolLM2" has the package's head, "Qwen" the 0.5B."""
    if name == "Qwen":
        return lab.target, [lab.draft]
    return lab.small, [lab.pick(full=HEAD, quick=HEAD, toy=lab.draft)]


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

    `batch` requests run at once. The first round is not measured: in it the prompts enter the cache, and the
    policy learns the costs of passes. `seconds` is the median over the rounds of a request's mean time per
    token, from arrival to end.
    """
    target, drafts = pair(lab, models)
    shape = {"max_batch_size": batch, "max_context": 1024, "max_step_tokens": ROWS, "lookup_memory": 0}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    groups = [questions[at : at + batch] for at in range(0, len(questions), batch)]
    with ExitStack() as opened:
        runs = {
            name: (
                opened.enter_context(lab.llm(target, drafts, **shape, **way.options)),
                replace(params, speculation=way.speculation),
            )
            for name, way in {PLAIN: Way(), **ways}.items()
        }
        runs[PLAIN] = (opened.enter_context(without_speculation(runs[PLAIN][0])), params)
        answers: dict[str, list[list[RequestOutput]]] = {name: [] for name in runs}
        for _ in range(1 + rounds):
            for name, (llm, asked) in runs.items():
                answers[name].append([one for group in groups for one in ask(llm, group, asked)])
    texts = [one.token_ids for one in answers[PLAIN][0]]
    return {name: _figures(found[1:], texts) for name, found in answers.items()}


def _figures(rounds: Sequence[Sequence[RequestOutput]], texts: Sequence[Sequence[int]]) -> dict[str, float]:
    total = total_figures(output for outputs in rounds for output in outputs)
    tokens = sum(map(len, texts))
    times = [sum((one.timing.finished or 0) - one.timing.arrived for one in outputs) for outputs in rounds]
    return {
        "seconds": median(times) / tokens,
        "tokens_per_step": total.tokens_per_step,
        "nodes_per_step": total.drafted_tokens / max(1, total.steps),
        "texts": len(texts),
        "same": min(sum(a.token_ids == b for a, b in zip(outputs, texts, strict=True)) for outputs in rounds),
    }
