"""Every sampling parameter through engines: tokens and log-probabilities are the slow oracle's."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import LLM, SamplingParams
from specinfer.engine.admission import Admission
from specinfer.errors import RequestError
from specinfer.request import FinishReason, Logprobs
from tests.engines import Tiny, assert_idle, write_tiny
from tests.exact.slow_sampling import excluded_by, is_finished, logprobs, next_law, processed_logits
from tests.spies import spied
from tests.unit.engine import byte_oracle
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


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Models whose tokens are bytes, for the oracle."""
    folder = tmp_path_factory.mktemp("letters")
    return write_tiny(folder, vocab_size=VOCAB, max_context=96, eos_token_id=EOS, spread=0.25)


@pytest.fixture(scope="module")
def oracle(letters: Tiny) -> Oracle:
    return Oracle(letters)


@pytest.fixture(scope="module")
def llms(letters: Tiny) -> dict[str, LLM]:
    return {name: letters.llm(**options) for name, options in SPECULATION.items()}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("speculation", SPECULATION)
def test_tokens_are_the_oracles(llms: dict[str, LLM], oracle: Oracle, speculation: str, name: str) -> None:
    llm, params = llms[speculation], params_of(name)
    expected = [oracle.text(prompt, params) for prompt in PROMPTS]
    assert tokens(llm.generate(PROMPTS, params)) == expected
    assert tokens(llm.generate(PROMPTS[:1], params)) == expected[:1]
    llm.check_integrity()


@pytest.mark.parametrize("name", ["nothing", "temperature, filters"])
def test_a_prediction_longer_than_its_answer(llms: dict[str, LLM], oracle: Oracle, name: str) -> None:
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
def test_chunks_and_blocks_change_nothing(letters: Tiny, oracle: Oracle, limits: dict[str, int]) -> None:
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
def test_stop_strings_end_the_oracles_text(llms: dict[str, LLM], oracle: Oracle, speculation: str) -> None:
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
def test_texts_of_multi_step_sampling(letters: Tiny, llms: dict[str, LLM], oracle: Oracle) -> None:
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


def test_each_requests_processors_are_made_once(llms: dict[str, LLM], monkeypatch: Any) -> None:
    made = spied(monkeypatch, Admission, "processors", lambda _, request: request.request_id)
    llms["both"].generate(PROMPTS, params_of("all of them", max_tokens=3, n=2))
    assert len(made) == len(set(made)) == 2 * len(PROMPTS)


def test_an_end_of_text_id_beyond_the_logits_is_never_chosen_anyway(tmp_path: Path) -> None:
    llm = write_tiny(tmp_path, vocab_size=VOCAB, eos_token_id=VOCAB + 3).llm()
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(min_tokens=2, max_tokens=4, seed=1))
    assert len(output.token_ids) == 4


@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize(
    ("params", "said"),
    [
        # The last letter of the only choice is not allowed.
        ({"choice": ["abc"], "allowed_token_ids": [97, 98, EOS]}, "ab"),
        # The only possible next token would complete a bad word.
        ({"choice": ["abcabcx"], "bad_words": ["cx"]}, "abcabc"),
        # The text is complete, and may not end yet.
        ({"choice": ["aab"], "min_tokens": 5}, "aab"),
    ],
)
def test_a_dead_end_in_mid_text_keeps_what_was_said_and_stops_no_other(
    llms: dict[str, LLM], oracle: Oracle, speculation: str, params: dict[str, Any], said: str
) -> None:
    failing, fine = SamplingParams(seed=1, max_tokens=byte_oracle.LENGTH, **params), params_of("all of them")
    prediction = replace(failing, prediction=said + "abc")
    requests = [fine, failing, fine, prediction]
    outputs = llms[speculation].generate([PROMPTS[0]] * 4, requests)
    expected = oracle.text(PROMPTS[0], fine)
    assert [list(output.token_ids) for output in outputs[::2]] == [expected, expected]
    for output in outputs[1::2]:
        assert (output.finish_reason, output.text) == (FinishReason.ERROR, said)
        assert output.error.startswith("choice and ")
        assert f"leave no token to choose after {len(said)} tokens; relax one of them" in output.error
        assert not output.internal_error
    assert_idle(llms[speculation])


def reported(row: list[float], chosen: int, top: int) -> dict[int, tuple[float, int]]:
    """Token -> (log-probability, rank): the chosen one, then the likeliest."""
    order = sorted((t for t in range(VOCAB) if row[t] > -math.inf), key=lambda t: (-row[t], t))
    ids = dict.fromkeys([chosen, *order[:top]])
    return {t: (row[t], 1 + sum(x > row[t] for x in row)) for t in ids}


def assert_reports(got: Logprobs | None, expected: dict[int, tuple[float, int]], letters: Tiny) -> None:
    assert list(got) == list(expected)
    for token, (value, rank) in expected.items():
        assert got[token].logprob == pytest.approx(value, abs=1e-5)
        assert (got[token].rank, got[token].text) == (rank, letters.tokenizer.text_of(token))


@pytest.mark.thorough
@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 7, "max_batch_size": 4}])
@pytest.mark.parametrize("speculation", ["none", "both"])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize(
    "name", ["nothing", "temperature, filters", "frequency_penalty", "bad_words", "choice"]
)
def test_logprobs_are_the_oracles(
    letters: Tiny, oracle: Oracle, name: str, mode: str, speculation: str, limits: dict[str, int]
) -> None:
    params = params_of(name, logprobs=3, prompt_logprobs=2, logprobs_mode=mode)
    for prompt, output in zip(
        PROMPTS, letters.llm(**{**SPECULATION[speculation], **limits}).generate(PROMPTS, params), strict=True
    ):
        text = (*prompt, *output.token_ids)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for i in range(1, len(prompt)):
            expected = reported(logprobs(oracle.row(text[:i])), text[i], 2)
            assert_reports(output.prompt_logprobs[i], expected, letters)
        assert len(output.logprobs) == len(output.token_ids)
        rules = oracle.rules(prompt, params)
        for i, token in enumerate(output.token_ids):
            row = oracle.row((*prompt, *output.token_ids[:i]))
            if mode == "processed":
                processed = processed_logits(row, rules, output.token_ids[:i])
                if params.greedy:
                    row = logprobs(processed)
                else:
                    law = next_law(row, rules, output.token_ids[:i])
                    row = [math.log(p) if p > 0 else -math.inf for p in law]
            else:
                row = logprobs(row)
            assert_reports(output.logprobs[i], reported(row, token, 3), letters)


@pytest.mark.thorough
def test_asking_for_logprobs_changes_no_text(llms: dict[str, LLM]) -> None:
    for name in PARAMS:
        plain = llms["both"].generate(PROMPTS, params_of(name))
        asked = llms["both"].generate(PROMPTS, params_of(name, logprobs=0, prompt_logprobs=0))
        assert tokens(asked) == tokens(plain)
        assert all(len(found) == 1 for o in asked for found in o.logprobs or ())


@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 7, "max_batch_size": 4}])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_of_a_prompt(letters: Tiny, oracle: Oracle, max_tokens: int, limits: dict[str, int]) -> None:
    params = params_of("nothing", max_tokens=max_tokens, prompt_logprobs=1, n=2)
    outputs = letters.llm(**{**SPECULATION["both"], **limits}).generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        for one in output.outputs:
            assert len(one.token_ids) == max_tokens
            assert len(one.prompt_logprobs) == len(prompt)
            assert one.prompt_logprobs[0] is None
            for i in range(1, len(prompt)):
                expected = reported(logprobs(oracle.row(tuple(prompt[:i]))), prompt[i], 1)
                assert_reports(one.prompt_logprobs[i], expected, letters)
