"""Every sampling parameter through engines: with any speculation the tokens are the slow oracle's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import LLM, SamplingParams
from specinfer.engine.admission import Admission
from specinfer.errors import RequestError
from specinfer.processors.pipeline import Processors
from specinfer.request import FinishReason, Request
from tests.engines import Tiny, write_tiny
from tests.exact.slow_sampling import excluded_by, is_finished
from tests.unit.engine.byte_oracle import EOS, PARAMS, PROMPTS, SPECULATION, VOCAB, Oracle, params_of, tokens

WISHES: list[Any] = [
    None,
    False,
    {"max_nodes": 3},
    {"expansion": "3,1"},
    {"speculators": ["lookup"]},
    {"speculators": ["0-similar", "lookup"], "max_nodes": 9},
    {"verifier": "coupled", "expansion": [1, 1, 1, 1]},
]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("speculation", SPECULATION)
def test_tokens_are_the_oracles_in_a_batch_and_alone(
    llms: dict[str, LLM], oracle: Oracle, speculation: str, name: str
) -> None:
    llm, params = llms[speculation], params_of(name)
    expected = [oracle.text(prompt, params) for prompt in PROMPTS]
    assert tokens(llm.generate(PROMPTS, params)) == expected
    assert tokens(llm.generate(PROMPTS[:1], params)) == expected[:1]
    llm.check_integrity()


@pytest.mark.parametrize("name", ["nothing", "temperature, filters"])
def test_a_prediction_much_longer_than_its_answer_changes_no_text(
    llms: dict[str, LLM], oracle: Oracle, name: str
) -> None:
    """It is cut; what was tried of it is still counted."""
    for speculation in SPECULATION:
        expected = oracle.text(PROMPTS[0], params_of(name))
        long = (*expected[:3], 99, *expected[4:], *range(100, 128)) * 500
        [output] = llms[speculation].generate(PROMPTS[:1], params_of(name, prediction=long))
        assert tokens([output]) == [expected]
        tried = output.figures.proposed_by.get("prediction", 0)
        assert output.accepted_prediction_tokens + output.rejected_prediction_tokens == tried
        assert output.accepted_prediction_tokens == output.figures.accepted_by.get("prediction", 0) > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "limits",
    [
        {"max_step_tokens": 9, "max_batch_size": 3},  # prompts in chunks, trees cut short
        {"block_size": 3, "max_batch_size": 2},
        {"kv_cache_memory": 3 * (2 * 2 * 2 * 8 * 4) * 160, "block_size": 4},  # 160 positions of 3 models
    ],
    ids=["chunks", "small blocks", "preemption"],
)
def test_chunks_blocks_and_preemption_change_nothing(
    letters: Tiny, oracle: Oracle, limits: dict[str, int]
) -> None:
    llm = letters.llm(**{**SPECULATION["both"], **limits})
    batch = [(PROMPTS[i % 4], params_of(name, seed=i)) for i, name in enumerate(PARAMS)]
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    assert tokens(outputs) == [oracle.text(prompt, params) for prompt, params in batch]
    assert ("kv_cache_memory" in limits) == (llm.statistics().preemptions > 0)
    llm.check_integrity()


@st.composite
def combinations(draw: st.DrawFn) -> SamplingParams:
    def maybe(values: st.SearchStrategy[Any], usual: Any) -> Any:
        return draw(st.one_of(st.just(usual), values))

    token = st.integers(0, VOCAB - 1)
    letters = st.text("abcx ", min_size=1, max_size=3).filter(str.strip)
    penalty = st.floats(-2, 2)
    return SamplingParams(
        temperature=draw(st.sampled_from([0, 0, 0.4, 0.8, 1.0, 1.6])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 50])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5])),
        min_p=draw(st.sampled_from([0.0, 0.001, 0.1])),
        seed=draw(st.integers(0, 2**62)),
        presence_penalty=maybe(penalty, 0.0),
        frequency_penalty=maybe(penalty, 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2), 1.0),
        logit_bias=maybe(st.dictionaries(token, st.floats(-100, 8), max_size=5), None),
        bad_words=maybe(st.lists(letters, max_size=4), ()),
        allowed_token_ids=maybe(st.sets(st.sampled_from([*range(95, 125), 32, EOS]), min_size=9), None),
        choice=maybe(st.sampled_from([["abc", "abca", "cab"], ["x" * 9]]), None),
        min_tokens=draw(st.sampled_from([0, 0, 2, 9])),
        stop_token_ids=maybe(st.sampled_from([(97, 98), (120,)]), ()),
        max_tokens=draw(st.sampled_from([9, 12])),
        speculation=draw(st.sampled_from(WISHES)),
    )


@pytest.mark.thorough
@settings(max_examples=40)
@given(batch=st.lists(st.tuples(st.sampled_from(PROMPTS), combinations()), min_size=1, max_size=4))
def test_any_combinations_in_one_batch(
    llms: dict[str, LLM], oracle: Oracle, batch: list[tuple[list[int], SamplingParams]]
) -> None:
    servable = []
    for prompt, params in batch:
        rules = oracle.rules(prompt, params)
        if all(excluded_by(rules, (), token) is not None for token in range(VOCAB)):
            with pytest.raises(RequestError, match="leave no token to begin with"):
                llms["both"].generate([prompt], params)
        else:
            servable.append((prompt, params))
    outputs = llms["both"].generate([prompt for prompt, _ in servable], [params for _, params in servable])
    assert tokens(outputs) == [oracle.text(prompt, params) for prompt, params in servable]


@pytest.mark.parametrize("speculation", SPECULATION)
def test_a_stop_string_ends_the_oracles_text_at_its_last_character(
    llms: dict[str, LLM], oracle: Oracle, speculation: str
) -> None:
    batch, expected = [], []
    for prompt, start, size, least in product(PROMPTS, (0, 3, 8), (1, 2, 4), (0, 6)):
        whole = oracle.text(prompt, params_of("nothing", min_tokens=least))
        text = bytes(token for token in whole if token != EOS).decode()  # a character a token
        stop = text[start : start + size]
        stops = [i for i in range(max(1, least), len(text) + 1) if text[:i].endswith(stop)] if stop else []
        if stops:
            for included in (False, True):
                ends = {"stop": [stop, "never said"], "include_stop_str_in_output": included}
                batch.append((prompt, params_of("nothing", min_tokens=least, **ends)))
                expected.append((whole[: stops[0]], text[: stops[0] - (0 if included else len(stop))]))
    assert len(batch) > 80
    outputs = llms[speculation].generate([prompt for prompt, _ in batch], [params for _, params in batch])
    assert [(list(o.token_ids), o.text) for o in outputs] == expected
    assert {o.finish_reason for o in outputs} == {FinishReason.STOP}


@pytest.mark.slow
def test_under_mss_greedy_text_is_the_oracles_and_sampled_text_obeys_its_bans(
    letters: Tiny, llms: dict[str, LLM], oracle: Oracle
) -> None:
    iid = letters.llm(**SPECULATION["both"], verifier="mss", draw="iid")
    for llm in (llms["both"], iid):
        for name in PARAMS:
            params = params_of(name, temperature=0, speculation={"verifier": "mss"})
            expected = [oracle.text(prompt, params) for prompt in PROMPTS]
            assert tokens(llm.generate(PROMPTS, params)) == expected
        for name in PARAMS:
            params = params_of(name, temperature=1.0, speculation={"verifier": "mss"})
            for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
                rules, said = oracle.rules(prompt, params), output.token_ids
                assert all(excluded_by(rules, said[:i], token) is None for i, token in enumerate(said))
                assert not any(is_finished(rules, said[:i]) for i in range(len(said)))


def test_a_request_asks_for_its_own_speculation(llms: dict[str, LLM]) -> None:
    llm = llms["both"]

    def figures(wish: Any) -> Any:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculation=wish)
        return llm.generate([PROMPTS[0]], params)[0].figures

    off = figures(False)
    assert (off.drafted_tokens, off.tokens_per_step) == (0, 1.0)
    assert set(figures({"speculators": "0-similar"}).proposed_by) == {"0-similar"}
    assert set(figures({"speculators": ["lookup", "1-stranger"]}).proposed_by) <= {"lookup", "1-stranger"}
    small = figures({"max_nodes": 3})
    assert 0 < small.drafted_tokens <= 2 * small.steps
    wide = figures({"speculators": ["1-stranger"], "expansion": "3,2"})
    assert wide.drafted_tokens == pytest.approx(9 * wide.steps, abs=18)  # 3 + 6 nodes, fewer near the end
    assert len(wide.drafted_per_depth) == 2


def test_each_requests_processors_are_made_once(llms: dict[str, LLM], monkeypatch: Any) -> None:
    made: list[str] = []
    processors = Admission.processors

    def counted(self: Admission, request: Request) -> Processors:
        made.append(request.request_id)
        return processors(self, request)

    monkeypatch.setattr(Admission, "processors", counted)
    llms["both"].generate(PROMPTS, params_of("all of them", max_tokens=3, n=2))
    assert len(made) == len(set(made)) == 2 * len(PROMPTS)


def test_an_end_of_text_id_beyond_the_logits_is_never_chosen_anyway(tmp_path: Path) -> None:
    llm = write_tiny(tmp_path, vocab_size=VOCAB, eos_token_id=VOCAB + 3).llm()
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(min_tokens=2, max_tokens=4, seed=1))
    assert len(output.token_ids) == 4
