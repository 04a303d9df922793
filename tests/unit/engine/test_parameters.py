"""Every sampling parameter through engines: with any speculation the tokens are the slow oracle's.

The oracle (tests/exact/slow_sampling.py) runs the whole text again for each token: no cache, no tree, no
batch, no processors. Tokens are bytes here, so a text is its own tokenization.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer import LLM, SamplingParams
from specinfer.check.target_alone import TargetAlone
from specinfer.engine.admission import Admission
from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.processors.pipeline import Processors
from specinfer.request import FinishReason, Logprobs, Request, RequestOutput
from specinfer.verify.noise import completion_seed
from tests.engines import Tiny, assert_idle, engine_of, write_tiny
from tests.exact.slow_sampling import (
    Rules,
    bars,
    is_over,
    logprobs,
    next_law,
    processed_logits,
    seeded_text,
)

VOCAB, EOS, LENGTH = 128, 5, 16
PROMPTS = [[97, 98, 99, 97, 98, 99, 97, 98], [33], [64, 65, 66, 67] * 5, [120] * 4]
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"ngram": True, "ngram_min": 1, "ngram_branches": 2},
    "draft": {"drafts": ["similar"], "expansion": (2, 2, 1)},
    "both": {"drafts": ["similar", "stranger"], "ngram": True, "suffix": True, "expansion": (2, 1, 1)},
}
BOOLEAN = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 23]}},
            "required": ["yes", "n"],
            "additionalProperties": False,
        },
    },
}
PARAMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature, filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "greedy": {"temperature": 0},
    "presence_penalty": {"presence_penalty": 1.7},
    "frequency_penalty": {"frequency_penalty": 0.9, "temperature": 0},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.6},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition_penalty, greedy": {"repetition_penalty": 0.8, "temperature": 0},
    "logit_bias": {"logit_bias": {97: 4.0, 98: 3.5, 64: -100}},
    "bad_words": {"bad_words": ["a", "xx", "Axe", "b "], "logit_bias": {120: 6.0, 97: 3.0}},
    "allowed_token_ids": {"allowed_token_ids": [97, 98, 99, 120, EOS]},
    "min_tokens": {"min_tokens": 9, "logit_bias": {EOS: 6.0}},
    "stop_token_ids": {"min_tokens": 4, "stop_token_ids": list(range(64, 96)), "ignore_eos": True},
    "choice": {"choice": ["yes", "yesterday", "no", "abcabcabc"]},
    "regex": {"regex": "[0-9]{1,2}(ab|cd)[xyz]"},
    "json_schema": {"response_format": BOOLEAN, "max_tokens": 60},
    "choice, greedy, penalties": {"choice": ["aab", "bba"], "temperature": 0, "frequency_penalty": 2.0},
    "all of them": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.97,
        "min_p": 0.001,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {97: 2.0},
        "bad_words": ["ab", "c"],
        "allowed_token_ids": [*range(32, 128), EOS],
        "min_tokens": 3,
    },
}
WISHES: list[Any] = [
    None,
    False,
    {"max_nodes": 3},
    {"expansion": "3,1"},
    {"speculators": ["ngram"]},
    {"speculators": ["0-similar", "suffix"], "max_nodes": 9},
    {"verifier": "coupled", "expansion": [1, 1, 1, 1]},
]


class Oracle:
    """The target alone, with what parameters mean for its bytes."""

    def __init__(self, tiny: Tiny) -> None:
        self._alone = TargetAlone(tiny.target)
        self._compiler = GrammarCompiler(tiny.tokenizer, VOCAB)
        self.row: Callable[[tuple[int, ...]], list[float]] = cache(
            lambda text: [float(x) for x in self._alone.logits_after([text])[0]]
        )

    def rules(self, prompt: list[int], params: SamplingParams) -> Rules:
        return Rules(
            params,
            tuple(prompt),
            ending=(*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))),
            bad_words=tuple(tuple(word.lstrip().encode()) for word in params.bad_words),
            form=self._form(params),
        )

    def text(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The output's tokens; None last where there is a dead end."""
        rules, seed = self.rules(prompt, params), params.seed or 0
        return list(seeded_text(lambda out: self.row((*prompt, *out)), rules, seed, params.max_tokens))

    def _form(self, params: SamplingParams) -> Callable[[tuple[int, ...]], set[int]] | None:
        if params.structured_output is None:
            return None
        if params.choice is not None:
            return _one_of(params.choice)
        if params.regex == PARAMS["regex"]["regex"]:
            numbers = [f"{i}" for i in range(100)] + [f"0{i}" for i in range(10)]
            return _one_of("".join(parts) for parts in product(numbers, ["ab", "cd"], "xyz"))
        # The library itself for JSON, but asked anew at every place: no path, no rollback, nothing kept.
        grammar = self._compiler.compile(params.structured_output)

        def after(output: tuple[int, ...]) -> set[int]:
            state = grammar.state()
            state.commit(output)
            return set(np.flatnonzero(state.allowed()).tolist())

        return cache(after)


def _one_of(texts: Any) -> Callable[[tuple[int, ...]], set[int]]:
    whole = [(*text.encode(), EOS) for text in texts]
    return cache(lambda out: {w[len(out)] for w in whole if w[: len(out)] == out != w})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny(folder, vocab_size=VOCAB, max_context=96, eos_token_id=EOS, spread=0.25)


@pytest.fixture(scope="module")
def oracle(tiny: Tiny) -> Oracle:
    return Oracle(tiny)


@pytest.fixture(scope="module")
def llms(tiny: Tiny) -> dict[str, LLM]:
    return {name: tiny.llm(**options) for name, options in SPECULATION.items()}


def make(name: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "seed": 3, **PARAMS[name], **more})


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """As the oracle writes them."""
    failed = FinishReason.ERROR
    return [[*o.token_ids, *([None] if o.finish_reason is failed else [])] for o in outputs]  # type: ignore[list-item]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("speculation", SPECULATION)
def test_tokens_are_the_oracles_in_a_batch_and_alone(
    llms: dict[str, LLM], oracle: Oracle, speculation: str, name: str
) -> None:
    llm, params = llms[speculation], make(name)
    expected = [oracle.text(prompt, params) for prompt in PROMPTS]
    assert tokens(llm.generate(PROMPTS, params)) == expected
    assert tokens(llm.generate(PROMPTS[:1], params)) == expected[:1]
    llm.check_integrity()


@pytest.mark.parametrize("speculation", SPECULATION)
def test_requests_with_different_parameters_and_wishes_share_a_batch(
    llms: dict[str, LLM], oracle: Oracle, speculation: str
) -> None:
    llm = llms[speculation]
    known = engine_of(llm)._admission._limits.names
    possible = [w for w in WISHES if not isinstance(w, dict) or set(w.get("speculators", ())) <= {*known}]
    if "0-similar" not in known:
        possible = [w for w in possible if not isinstance(w, dict) or "expansion" not in w]
    wishes = cycle(possible)
    batch = [
        (prompt, make(name, seed=seed, speculation=next(wishes)))
        for seed, (name, prompt) in enumerate(product(PARAMS, PROMPTS[:2]))
    ]
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    for got, (prompt, params) in zip(tokens(outputs), batch, strict=True):
        assert got == oracle.text(prompt, params)


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
    tiny: Tiny, oracle: Oracle, limits: dict[str, int]
) -> None:
    llm = tiny.llm(**{**SPECULATION["both"], **limits})
    batch = [(PROMPTS[i % 4], make(name, seed=i)) for i, name in enumerate(PARAMS)]
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


@settings(max_examples=40)
@given(batch=st.lists(st.tuples(st.sampled_from(PROMPTS), combinations()), min_size=1, max_size=4))
def test_any_combinations_in_one_batch(
    llms: dict[str, LLM], oracle: Oracle, batch: list[tuple[list[int], SamplingParams]]
) -> None:
    servable = []
    for prompt, params in batch:
        rules = oracle.rules(prompt, params)
        if all(bars(rules, (), token) is not None for token in range(VOCAB)):
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
        whole = oracle.text(prompt, make("nothing", min_tokens=least))
        text = bytes(token for token in whole if token != EOS).decode()  # a character a token
        stop = text[start : start + size]
        stops = [i for i in range(max(1, least), len(text) + 1) if text[:i].endswith(stop)] if stop else []
        if stops:
            batch.append((prompt, make("nothing", min_tokens=least, stop=[stop, "never said"])))
            expected.append((whole[: stops[0]], text[: stops[0] - len(stop)]))
    assert len(batch) > 40
    outputs = llms[speculation].generate([prompt for prompt, _ in batch], [params for _, params in batch])
    assert [(list(o.token_ids), o.text) for o in outputs] == expected
    assert {o.finish_reason for o in outputs} == {FinishReason.STOP}


@pytest.mark.slow
def test_under_mss_greedy_text_is_the_oracles_and_sampled_text_obeys_its_bans(
    tiny: Tiny, llms: dict[str, LLM], oracle: Oracle
) -> None:
    for llm in (llms["both"], tiny.llm(**SPECULATION["both"], verifier="mss", draw="iid")):
        for name, wish in product(PARAMS, [{"verifier": "mss"}, {"verifier": "coupled"}]):
            params = make(name, temperature=0, speculation=wish)
            expected = [oracle.text(prompt, params) for prompt in PROMPTS]
            assert tokens(llm.generate(PROMPTS, params)) == expected
        for name in PARAMS:
            params = make(name, temperature=1.0, speculation={"verifier": "mss"})
            for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
                rules, said = oracle.rules(prompt, params), output.token_ids
                assert all(bars(rules, said[:i], token) is None for i, token in enumerate(said))
                assert not any(is_over(rules, said[:i]) for i in range(len(said)))


def test_a_request_asks_for_its_own_speculation(llms: dict[str, LLM]) -> None:
    llm = llms["both"]

    def figures(wish: Any) -> Any:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculation=wish)
        return llm.generate([PROMPTS[0]], params)[0].figures

    off = figures(False)
    assert (off.drafted_tokens, off.tokens_per_step) == (0, 1.0)
    assert set(figures({"speculators": "0-similar"}).drafted) == {"0-similar"}
    assert set(figures({"speculators": ["ngram", "1-stranger"]}).drafted) <= {"ngram", "1-stranger"}
    small = figures({"max_nodes": 3})
    assert 0 < small.drafted_tokens <= 2 * small.steps
    wide = figures({"speculators": ["1-stranger"], "expansion": "3,2"})
    assert wide.drafted_tokens == pytest.approx(9 * wide.steps, abs=18)  # 3 + 6 nodes, fewer near the end
    assert len(wide.drafted_per_depth) == 2


def test_n_completions_are_what_their_seeds_give_alone(llms: dict[str, LLM], oracle: Oracle) -> None:
    for name in ("nothing", "all of them", "regex"):
        for llm in llms.values():
            (output,) = llm.generate([PROMPTS[0]], make(name, n=3))
            assert [o.index for o in output.outputs] == [0, 1, 2]
            seeds = [completion_seed(3, index) for index in range(3)]
            assert [o.seed for o in output.outputs] == seeds
            alone = [llm.generate([PROMPTS[0]], make(name, seed=seed))[0] for seed in seeds]
            assert [o.text for o in output.outputs] == [o.text for o in alone]
            expected = [oracle.text(PROMPTS[0], make(name, seed=seed)) for seed in seeds]
            assert tokens(list(output.outputs)) == expected
    assert len({o.text for o in llms["both"].generate([PROMPTS[0]], make("nothing", n=6))[0].outputs}) > 3


def reported(row: list[float], chosen: int, top: int) -> dict[int, tuple[float, int]]:
    """Token -> (log-probability, rank): the chosen one, then the likeliest."""
    order = sorted((t for t in range(VOCAB) if row[t] > -math.inf), key=lambda t: (-row[t], t))
    ids = dict.fromkeys([chosen, *order[:top]])
    return {t: (row[t], 1 + sum(x > row[t] for x in row)) for t in ids}


def assert_reports(got: Logprobs | None, expected: dict[int, tuple[float, int]], tiny: Tiny) -> None:
    assert got is not None
    assert list(got) == list(expected)
    for token, (value, rank) in expected.items():
        assert got[token].logprob == pytest.approx(value, abs=1e-5)
        assert (got[token].rank, got[token].text) == (rank, tiny.tokenizer.text_of(token))


@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 7, "max_batch_size": 4}])
@pytest.mark.parametrize("speculation", ["none", "both"])
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize(
    "name", ["nothing", "temperature, filters", "frequency_penalty", "bad_words", "choice"]
)
def test_logprobs_are_the_oracles(
    tiny: Tiny, oracle: Oracle, name: str, mode: str, speculation: str, limits: dict[str, int]
) -> None:
    params = make(name, logprobs=3, prompt_logprobs=2, logprobs_mode=mode)
    for prompt, output in zip(
        PROMPTS, tiny.llm(**{**SPECULATION[speculation], **limits}).generate(PROMPTS, params), strict=True
    ):
        text = (*prompt, *output.token_ids)
        assert output.logprobs is not None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for i in range(1, len(prompt)):
            expected = reported(logprobs(oracle.row(text[:i])), text[i], 2)
            assert_reports(output.prompt_logprobs[i], expected, tiny)
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
            assert_reports(output.logprobs[i], reported(row, token, 3), tiny)


def test_asking_for_logprobs_changes_no_text(llms: dict[str, LLM]) -> None:
    for name in PARAMS:
        plain = llms["both"].generate(PROMPTS, make(name))
        asked = llms["both"].generate(PROMPTS, make(name, logprobs=0, prompt_logprobs=0))
        assert tokens(asked) == tokens(plain)
        assert all(len(found) == 1 for o in asked for found in o.logprobs or ())


def test_structured_texts_have_their_form(llms: dict[str, LLM]) -> None:
    unspaced = {32: -100, 10: -100}  # a random model would fill its context with spaces between JSON's parts
    for seed, llm in product(range(4), llms.values()):
        by_name = {
            name: llm.generate(PROMPTS, make(name, seed=seed, logit_bias=unspaced))
            for name in ("choice", "regex", "json_schema")
        }
        outputs = [output for several in by_name.values() for output in several]
        assert {o.finish_reason for o in outputs} == {FinishReason.STOP}
        assert {o.text for o in by_name["choice"]} <= set(PARAMS["choice"]["choice"])
        answers = [json.loads(o.text) for o in by_name["json_schema"]]
        assert all(type(a["yes"]) is bool and a["n"] in (1, 23) and len(a) == 2 for a in answers)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"choice": ["no"], "allowed_token_ids": [97, EOS]},
            "choice and allowed_token_ids leave no token to begin with; relax one of them",
        ),
        (
            {"allowed_token_ids": [97], "bad_words": ["a"]},
            "allowed_token_ids and bad_words leave no token to begin with; relax one of them",
        ),
        (
            {"allowed_token_ids": [EOS], "min_tokens": 1},
            "allowed_token_ids and min_tokens leave no token to begin with; relax one of them",
        ),
        (
            {"bad_words": ["a", "\u00e9"]},
            "bad_words has '\u00e9', for which the model has no token; take it out",
        ),
        (
            {"allowed_token_ids": [97, 128]},
            "allowed_token_ids has token id 128, outside the model's vocabulary of 128 tokens",
        ),
        (
            {"logit_bias": {"999": 1.0}},
            "logit_bias has token id 999, outside the model's vocabulary of 128 tokens",
        ),
        (
            {"stop_token_ids": [200]},
            "stop_token_ids has token id 200, outside the model's vocabulary of 128 tokens",
        ),
        (
            {"prediction": [97, 300]},
            "prediction has token id 300, outside the model's vocabulary of 128 tokens",
        ),
        (
            {"speculation": {"speculators": ["ngram", "eagle"]}},
            "speculation.speculators names 'eagle'; this engine has grammar, prediction, 0-similar, "
            "1-stranger, suffix, ngram",
        ),
        (
            {"speculation": {"max_nodes": 65}},
            "speculation.max_nodes is 65; the engine allows at most 64: lower it",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_and_costs_no_other(
    llms: dict[str, LLM], params: dict[str, Any], says: str
) -> None:
    llm = llms["both"]
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPTS[:2], [SamplingParams(), SamplingParams(**params)])
    assert str(caught.value) == says
    assert_idle(llm)


def test_each_requests_processors_are_made_once(llms: dict[str, LLM], monkeypatch: Any) -> None:
    made: list[str] = []
    processors = Admission.processors

    def counted(self: Admission, request: Request) -> Processors:
        made.append(request.request_id)
        return processors(self, request)

    monkeypatch.setattr(Admission, "processors", counted)
    llms["both"].generate(PROMPTS, make("all of them", max_tokens=3, n=2))
    assert len(made) == len(set(made)) == 2 * len(PROMPTS)


def test_a_form_needs_a_model_whose_texts_end(tmp_path: Path) -> None:
    llm = write_tiny(tmp_path, vocab_size=VOCAB).llm()
    with pytest.raises(RequestError, match="choice needs a model with an end-of-text token, which says"):
        llm.generate(PROMPTS[:2], [SamplingParams(), SamplingParams(choice=["yes"])])
    assert_idle(llm)


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
        # What the choice must say next would complete a bad word.
        ({"choice": ["abcabcx"], "bad_words": ["cx"]}, "abcabc"),
        # The text is complete, and may not end yet.
        ({"choice": ["aab"], "min_tokens": 5}, "aab"),
    ],
)
def test_a_dead_end_in_mid_text_keeps_what_was_said_and_stops_no_other(
    llms: dict[str, LLM], oracle: Oracle, speculation: str, params: dict[str, Any], said: str
) -> None:
    failing, fine = SamplingParams(seed=1, max_tokens=LENGTH, **params), make("all of them")
    prediction = replace(failing, prediction=said + "abc")
    requests = [fine, failing, fine, prediction]
    outputs = llms[speculation].generate([PROMPTS[0]] * 4, requests)
    expected = oracle.text(PROMPTS[0], fine)
    assert [list(output.token_ids) for output in outputs[::2]] == [expected, expected]
    for output in outputs[1::2]:
        assert (output.finish_reason, output.text) == (FinishReason.ERROR, said)
        assert output.error is not None
        assert output.error.startswith("choice and ")
        assert f"leave no token to choose after {len(said)} tokens; relax one of them" in output.error
    assert_idle(llms[speculation])
