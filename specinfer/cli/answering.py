"""Figures of answers, as text and as JSON values."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, Any

from specinfer.kernels.disk import gigabytes

if TYPE_CHECKING:
    from specinfer.engine.steps import Statistics
    from specinfer.request import RequestOutput
    from specinfer.sampling_params import SamplingParams


def summary(output: RequestOutput, params: SamplingParams) -> str:
    """One line of figures about an answer; tokens per second include the prefill."""
    figures, timing = output.figures, output.timing
    end = timing.finished if timing.finished is not None else time.perf_counter()
    rate = len(output.token_ids) / (end - timing.arrived)
    parts = [f"{len(output.token_ids)} tokens", f"{rate:.1f} tokens/s"]
    if figures.drafted_tokens:
        parts.append(f"{figures.tokens_per_step:.2f} tokens per step")
        accepted_by = ", ".join(
            f"{name} {figures.accepted_by.get(name, 0)} of {n}" for name, n in figures.proposed_by.items()
        )
        parts.append(f"accepted: {accepted_by}")
    if not params.greedy:
        parts.append(f"seed {output.seed}")
    if output.finish_reason is not None:
        parts.append(f"ended by {output.finish_reason.value}")
    return " | ".join(parts)


def streamed(done: Statistics, tokens: int) -> str:
    """One line of figures about streamed weights over `tokens` tokens; "" if no weights were streamed."""
    if not done.streamed_bytes:
        return ""
    parts = [
        f"{done.steps} passes, {tokens / max(done.steps, 1):.2f} tokens per pass",
        f"{gigabytes(done.streamed_bytes)} streamed",
        f"{done.stream_wait_seconds:.1f} s waited for the disk",
    ]
    return " | ".join(parts)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """An answer as plain JSON values."""
    figures, timing = output.figures, output.timing
    assert timing.finished is not None, "the answer is finished"
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason.value if output.finish_reason else None,
        "error": output.error,
        "seed": output.seed,
        "cached_tokens": output.cached_tokens,
        **_logprobs(output),
        "seconds": timing.finished - timing.arrived,
        "ttft": timing.ttft,
        "speculation": {
            "steps": figures.steps,
            "tokens_per_step": figures.tokens_per_step,
            "drafted_tokens": figures.drafted_tokens,
            "accepted_tokens": figures.accepted_tokens,
            "accepted_per_depth": figures.accepted_per_depth,
            "drafted_per_depth": figures.drafted_per_depth,
            "credit": figures.accepted_by,
            "drafted": figures.proposed_by,
        },
    }


def _logprobs(output: RequestOutput) -> dict[str, Any]:
    if output.logprobs is None:
        return {}
    return {
        "logprobs": [
            [
                # JSON has no infinity, the log probability of an excluded token.
                {"id": i, "text": t.text, "logprob": t.logprob if t.logprob > -inf else None, "rank": t.rank}
                for i, t in position.items()
            ]
            for position in output.logprobs
        ]
    }
