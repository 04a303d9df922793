"""What an answer's tokens were: `usage`, and what speculation did, as answers report them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specinfer.request import SpeculationFigures
from specinfer.serve.work import Delta


@dataclass(slots=True)
class Tally:
    """Counts the completions of one request, delta by delta."""

    prompt_tokens: int  # of all prompts, each counted once
    completion_tokens: int = 0
    n: int = 1  # completions of each prompt
    reasoning_tokens: int = 0
    figures: SpeculationFigures = field(default_factory=SpeculationFigures)
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafted and accepted tokens, step by step
    _cached: dict[int, int] = field(default_factory=dict)  # by prompt

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(self._cached.values())

    def add(self, delta: Delta, number: int = 0) -> None:
        """Take in a delta of the completion with that number."""
        self.completion_tokens += len(delta.token_ids)
        prompt, completion = divmod(number, self.n)
        if completion == 0:
            self._cached[prompt] = max(self._cached.get(prompt, 0), delta.cached_tokens)
        if delta.figures is not None:
            self.figures.add(delta.figures)
        self.steps.extend(delta.steps)

    def report(self, *, steps: bool) -> dict[str, Any]:
        """What an answer says of itself; `steps`: of each step, too, which may be thousands."""
        metrics = self.metrics()
        if steps:
            drafted, accepted = zip(*self.steps, strict=True) if self.steps else ((), ())
            per_step = {"per_step_accepted": list(accepted), "per_step_drafted": list(drafted)}
            metrics["speculative_decoding"] |= per_step
        return {"usage": self.usage(), "metrics": metrics}

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        credited, tried = self.figures.accepted_by, self.figures.proposed_by
        accepted = credited.get("prediction", 0)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": tried.get("prediction", 0) - accepted,
            },
        }

    def metrics(self) -> dict[str, Any]:
        """vLLM's extension, and which speculator the accepted tokens came from."""
        figures = self.figures
        at_least = [figures.steps, *figures.accepted_per_depth, 0]
        return {
            "speculative_decoding": {
                "mean_acceptance_length": round(figures.tokens_per_step, 4),
                "draft_acceptance_rate": _rate(figures.accepted_tokens, figures.drafted_tokens),
                "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
                "num_spec_steps": figures.steps,
                "num_accepted_draft_tokens": figures.accepted_tokens,
                "num_draft_tokens": figures.drafted_tokens,
                "accepted_by": dict(figures.accepted_by),
                "proposed_by": dict(figures.proposed_by),
            }
        }


def count_tokens(prompts: Iterable[tuple[int, ...]]) -> int:
    """The tokens of several prompts together."""
    return sum(len(prompt) for prompt in prompts)


def _rate(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
