"""The same conversations on two engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specinfer import LLM
from specinfer.bench.run import Load, compare
from specinfer.errors import RequestError
from specinfer.report.dataset import Conversation, Dataset
from specinfer.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=1, seed=40, max_tokens=12)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_both_engines_answer_everything_alike(
    pair: Any, dataset: Dataset, params: SamplingParams, batch_size: int
) -> None:
    calls: list[None] = []
    load = Load(params=params, batch_size=batch_size, chat=False)
    comparison = compare(
        *pair(max_batch_size=batch_size), dataset, load, on_request=lambda: calls.append(None)
    )
    keys = [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0)]
    assert sorted(comparison.pairs) == keys
    assert comparison.identical == len(keys)
    assert len(calls) == 2 * len(keys)
    baseline, speculative = comparison.baseline, comparison.speculative
    assert baseline.total_output == speculative.total_output == 12 * len(keys)
    assert baseline.figures.tokens_per_step == 1
    assert speculative.figures.tokens_per_step > 1.1
    assert baseline.figures.output_tokens == 11 * len(keys)
    for run in (baseline, speculative):
        assert 0 < sum(run.done.stage_seconds.values()) < run.seconds
        assert run.peak_memory > 1 << 20
        assert len(run.group_rates) == (5 if batch_size == 1 else 1)
    assert len(comparison.group_speedups) == len(baseline.group_rates)


def test_a_second_turn_follows_the_models_own_answer(pair: Any, dataset: Dataset) -> None:
    plain, speculative = pair()
    comparison = compare(plain, speculative, dataset, Load(params=GREEDY, chat=False))
    for run in (comparison.baseline, comparison.speculative):
        first, second = run.outputs[1, 0], run.outputs[1, 1]
        asked = f"a question\n\n{first.text}\n\nanother"
        assert list(second.prompt_token_ids) == plain.tokenizer.encode(asked)


def test_a_refused_request_fails_with_the_later_turns(pair: Any) -> None:
    conversations = (Conversation(("x" * 200, "next")), Conversation(("fine",)))
    dataset = Dataset("made up", conversations, duplicates=0)
    comparison = compare(*pair(), dataset, Load(params=GREEDY, chat=False))
    for run in (comparison.baseline, comparison.speculative):
        assert sorted(run.failures) == [(0, 0), (0, 1)]
        assert "the prompt has 200 tokens; allowed: at most 159" in run.failures[0, 0]
        assert sorted(run.outputs) == [(1, 0)]
    with pytest.raises(RequestError, match="no request could be served; the first: the prompt has 200"):
        compare(*pair(), replace(dataset, conversations=conversations[:1]), Load(params=GREEDY, chat=False))


def test_the_warm_up_leaves_no_answer_to_look_up(
    pair: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts, generate = list[str | None](), LLM.generate

    def noting(self: LLM, prompts: Any, params: Any = None) -> Any:
        salts.append(params.cache_salt)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", noting)
    compare(*pair(), dataset, Load(params=SEEDED, chat=False))
    assert salts
    assert None not in salts, "requests that are measured have none"
