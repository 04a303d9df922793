"""The same conversations on two engines, and reports of the comparison as JSON and as text."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specinfer import LLM
from specinfer.bench.report import as_json, lines, table
from specinfer.bench.run import Load, compare
from specinfer.errors import RequestError
from specinfer.report.dataset import Conversation, Dataset
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, tiny_of

tiny = tiny_of(vocab_size=256, max_context=160)


@pytest.fixture
def dataset() -> Dataset:
    turns = [("one two one two",), ("a question", "another"), ("red red blue",), ("xyz xyz",), ("last",)]
    return Dataset("made up", tuple(Conversation(t) for t in turns), duplicates=0)


@pytest.fixture
def pair(tiny: Tiny) -> Any:
    """Makes (without, with) speculation; options go to the second, max_batch_size to both."""

    def make(**options: Any) -> tuple[LLM, LLM]:
        batch = {"max_batch_size": options.pop("max_batch_size", 1)}
        return tiny.llm(**batch), tiny.llm(**{"drafts": ["similar"], "lookup": True, **batch, **options})

    return make


GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=1, seed=40, max_tokens=12)
LOAD = Load(params=GREEDY, chat=False)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_both_engines_agree(pair: Any, dataset: Dataset, params: SamplingParams, batch_size: int) -> None:
    calls: list[None] = []
    load = Load(params=params, batch_size=batch_size, chat=False)
    both = pair(max_batch_size=batch_size)
    comparison = compare(*both, dataset, load, on_request=lambda: calls.append(None))
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
    comparison = compare(plain, speculative, dataset, LOAD)
    for run in (comparison.baseline, comparison.speculative):
        first, second = run.outputs[1, 0], run.outputs[1, 1]
        asked = f"a question\n\n{first.text}\n\nanother"
        assert list(second.prompt_token_ids) == plain.tokenizer.encode(asked)


def test_a_refused_request_fails_with_the_later_turns(pair: Any) -> None:
    conversations = (Conversation(("x" * 200, "next")), Conversation(("fine",)))
    dataset = Dataset("made up", conversations, duplicates=0)
    comparison = compare(*pair(), dataset, LOAD)
    for run in (comparison.baseline, comparison.speculative):
        assert sorted(run.failures) == [(0, 0), (0, 1)]
        assert "the prompt has 200 tokens; allowed: at most 159" in run.failures[0, 0]
        assert sorted(run.outputs) == [(1, 0)]
    with pytest.raises(RequestError, match="no request could be served; the first: the prompt has 200"):
        compare(*pair(), replace(dataset, conversations=conversations[:1]), LOAD)


def test_the_warm_up_leaves_no_answer(pair: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    salts, generate = list[str | None](), LLM.generate

    def noting(self: LLM, prompts: Any, params: Any = None) -> Any:
        salts.append(params.cache_salt)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", noting)
    compare(*pair(), dataset, Load(params=SEEDED, chat=False))
    assert salts
    assert None not in salts, "requests that are measured have none"


def result_of(pair: Any, dataset: Dataset) -> dict[str, Any]:
    plain, speculative = pair()
    result = as_json(compare(plain, speculative, dataset, LOAD), speculative, dataset, LOAD)
    return dict(json.loads(json.dumps(result)))


def test_the_json_has_figures_and_settings(pair: Any, dataset: Dataset) -> None:
    result = result_of(pair, dataset)
    baseline, speculative = result["baseline"], result["speculative"]
    assert (result["requests"], result["identical"]) == (6, 6)
    assert result["speedup"] == speculative["output_throughput"] / baseline["output_throughput"]
    assert result["tokens_per_step"] == speculative["tokens_per_step"] > baseline["tokens_per_step"] == 1
    for run in (baseline, speculative):
        assert (run["completed"], run["failed"], run["total_output"]) == (6, 0, 72)
        assert run["output_throughput"] == pytest.approx(72 / run["duration"])
        assert run["request_throughput"] == pytest.approx(6 / run["duration"])
        assert 0 < run["ttft_ms"]["median"] <= run["ttft_ms"]["p99"]
        assert 0 < run["tpot_ms"]["mean"] < run["e2el_ms"]["mean"]
        assert sum(stage["share"] for stage in run["stages"].values()) == pytest.approx(1)
        assert run["preemptions"] == 0
    assert set(speculative["credit"]) == {"0-similar", "lookup"}
    assert speculative["credit"]["0-similar"]["accepted"] > 0
    assert 0 < speculative["acceptance_per_depth"][0] <= 1
    assert baseline["credit"] == {}
    assert baseline["acceptance_per_depth"] == []
    assert result["versions"]["specinfer"]
    assert result["hardware"]["memory_bytes"] > 1 << 28
    assert result["options"]["speculation"]["expansion"] == "1,1,3,1,1"


def test_the_table_never_shows_a_speed_without_the_one_it_compares_with(pair: Any, dataset: Dataset) -> None:
    result = result_of(pair, dataset)
    rows = {name: (without, with_) for name, without, with_ in table(result)}
    speeds = [f"{result[run]['output_throughput']:.1f}" for run in ("baseline", "speculative")]
    assert [*rows["output tokens/s"]] == speeds
    assert rows["tokens per step"][0] == "1.00"
    text = "\n".join(lines(result))
    assert "identical texts: 6 of 6" in text
    assert f"{result['speculative']['credit']['0-similar']['accepted']} of" in text


def test_a_difference_is_excused_only_where_texts_may_differ(pair: Any, dataset: Dataset) -> None:
    result = result_of(pair, dataset)
    result["options"]["device"] = "cuda:0"
    for promised, identical, words in (
        ("identical", 6, "identical texts: 6 of 6"),
        ("identical", 5, "5 of 6, but here all must be identical; run `specinfer check`, and please report"),
        ("rounding", 6, "identical texts: 6 of 6"),
        ("rounding", 5, "5 of 6; they are not promised on cuda:0: `specinfer check` tells rounding from"),
        ("law", 2, "2 of 6 (sampling with mss keeps the law of the text"),
    ):
        shown = lines({**result, "promised": promised, "identical": identical})
        [text] = [line for line in shown if line.startswith("identical texts")]
        assert words in text, (promised, identical)
        assert ("please report" in text) == (promised == "identical" and identical < 6)
