"""Callers' values become requests, or errors that name the parameter."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specinfer import sampling_params, structured_output
from specinfer.engine import admission, intake
from specinfer.engine.admission import Admission
from specinfer.engine.intake import Intake
from specinfer.errors import RequestError
from specinfer.processors import changes
from specinfer.request import LoRARequest
from specinfer.sampling_params import SamplingParams, ThinkingBudget
from specinfer.speculate import limits
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.lookups.prediction import MAX_DELETED, IndexedPrediction
from specinfer.speculate.table import build_speculators
from specinfer.speculation_config import SpeculationConfig
from specinfer.tokenizer import Tokenizer, chat_encoder, chat_template, tokenizer
from specinfer.verify.noise import completion_seed
from tests.spies import spied
from tests.tiny_models import write_byte_tokenizer
from tests.unit.test_sampling_params import WRONG, WRONG_WISHES
from tests.unit.test_structured_output import WRONG as WRONG_FORMS
from tests.unit.tokenizer.made_up import write_folder

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ m.content }}]{% endfor %}"
)
VOCAB = 258  # 256 bytes, <s> and </s>
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
Ask = Callable[[Intake], object]


def desk(tokenizer: Tokenizer, **options: Any) -> Intake:
    shape = {"vocab": VOCAB, "max_context": 64, "capacity": 64, **options}
    config = SpeculationConfig(lookup=True)
    speculators = build_speculators(config)
    return Intake(Admission(tokenizer, SpeculationLimits(config, speculators), **shape))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    """Intake of a model with all bytes, a chat template and an end of text."""
    config = {"chat_template": TEMPLATE, "eos_token": "</s>", "bos_token": "<s>"}
    folder = write_folder(
        tmp_path_factory.mktemp("full"), tokenizer_config=config, config={"eos_token_id": 257}
    )
    return desk(Tokenizer.load(folder))


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    """Intake of a model without letters, chat template and end of text."""
    write_byte_tokenizer(folder := tmp_path_factory.mktemp("poor"), 64)
    return desk(Tokenizer.load(folder), vocab=64)


@pytest.fixture(scope="module")
def models(full: Intake, poor: Intake) -> dict[str, Intake]:
    long = desk(full.tokenizer, max_context=1 << 13, capacity=1 << 13)
    return {"full": full, "poor": poor, "small": desk(full.tokenizer, capacity=48), "long": long}


# Requests.


def test_a_prompt_is_its_n_requests_each_with_a_seed_of_its_own(full: Intake) -> None:
    params = SamplingParams(n=3, seed=5, prediction="ok", max_tokens=4)
    [one, other] = full.prompts(["ab", [1, 2]], params)
    for group, prompt in ((one, (97, 98)), (other, (1, 2))):
        assert [a.request.prompt_token_ids for a in group] == [prompt] * 3
        assert [a.request.index for a in group] == [0, 1, 2]
        assert [a.request.seed for a in group] == [completion_seed(5, i) for i in range(3)]
        assert {a.request.prediction for a in group} == {(111, 107)}
        assert [a.sequence.request for a in group] == [a.request for a in group]
        assert [a.sequence.token_ids for a in group] == [list(prompt)] * 3
    ids = [a.request.request_id for a in (*one, *other)]
    assert len(set(ids)) == 6


def test_none_among_parameters_is_the_usual_ones(full: Intake) -> None:
    own = SamplingParams(max_tokens=3)
    [one], [other] = full.prompts(["ab", "ab"], [None, own])
    assert one.request.params == full.usual
    assert other.request.params == own


def test_a_prediction_is_encoded_once(models: dict[str, Intake], monkeypatch: pytest.MonkeyPatch) -> None:
    intake = models["long"]
    encoded = spied(monkeypatch, Tokenizer, "encode", lambda _, text, **__: len(text))
    params = SamplingParams(n=8, prediction="ab" * (1 << 20), max_tokens=8)
    [group] = intake.prompts([[1, 2]], params)
    assert encoded == [16 * (8 + MAX_DELETED)]
    predictions = [one.request.prediction for one in group]
    assert {len(one) for one in predictions} == {8 + MAX_DELETED}
    assert all(isinstance(one, IndexedPrediction) for one in predictions)
    assert group[0].sequence.request is group[0].request


def test_a_seed_is_drawn_where_none_is_given(full: Intake) -> None:
    seeds = {group[0].request.seed for group in full.prompts(["a"] * 8)}
    assert len(seeds) == 8


def test_conversations_go_through_the_template(full: Intake) -> None:
    both = [HI, [*HI, {"role": "assistant", "content": "yo"}]]
    texts = [bytes(group[0].request.prompt_token_ids) for group in full.conversations(both)]
    assert texts == [b"[hi]", b"[hi][yo]"]
    assert bytes(full.conversations(HI)[0][0].request.prompt_token_ids) == b"[hi]"
    assert full.conversations([]) == full.prompts([]) == []


def test_a_form_is_compiled_and_every_request_has_a_place_of_its_own_in_it(full: Intake) -> None:
    [[one, other]] = full.prompts(["a"], SamplingParams(choice=("yes", "no"), n=2))
    for admitted in (one, other):
        allowed = admitted.sequence.processors.apply(np.zeros(VOCAB, dtype=np.float32), ())
        assert {chr(i) for i in np.flatnonzero(allowed == 0)} == {"y", "n"}
        admitted.sequence.processors.commit(b"n" if admitted is one else b"y")
    assert one.sequence.processors is not other.sequence.processors


def test_a_request_that_failed_has_a_last_output_that_says_why(full: Intake) -> None:
    [[request]] = full.prompts(["a"])
    output = request.fail("no room")
    assert (output.finish_reason, output.error, output.text) == ("error", "no room", "")


# Refusals. A row for every line that raises one; the test finds lines that have none.


def prompt(value: Any, **params: Any) -> Ask:
    return lambda intake: intake.prompts(value, SamplingParams(**params))


def adapted(lora: Any) -> Ask:
    return lambda intake: intake.prompts("a", lora=lora)


def served(adapter: str) -> Ask:
    return lambda intake: intake.completion([1], SamplingParams(), adapter=adapter)


def chat(value: Any, **more: Any) -> Ask:
    return lambda intake: intake.conversations(value, **more)


def a_form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


def with_params(params: Any) -> Ask:
    return lambda intake: intake.prompts("a", params)


def thinking(**more: Any) -> ThinkingBudget:
    return ThinkingBudget(**{"tokens": 3, "open": "<", "close": ">", "ending": (1,), **more})


REFUSALS: dict[str, list[Ask]] = {
    "prompt": [
        *map(prompt, ["", [""], [[]], None, 5.5, b"a", {"a": 1}, [None], [[1.5]], ["a", ["b"]], "\ud800"]),
        *map(prompt, [[True], [["a"]], [b"ab"], [{1: 2}]]),
        *map(prompt, [[[VOCAB]], [[-1]], "x" * 64, ["fine", "x" * 64]]),
    ],
    "messages": [
        *map(chat, [None, 5, "hi", [5], {"role": "user"}, [[]], [{"role": 1}], [HI, 5]]),
        chat([{"role": "robot", "content": ""}]),
        *(chat([{"role": "assistant", "tool_calls": calls}]) for calls in ("f", ["f"], [{"function": {}}])),
        chat(
            [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]
        ),
        *(chat([{"role": "user", "content": content}]) for content in (None, 5, b"a", {"a": 1})),
        *(
            chat([{"role": "user", "content": [part]}])
            for part in (5, {"type": "image_url"}, {"type": "text"})
        ),
        chat([{"role": "user", "content": "\ud800"}]),
        chat([{"role": "user", "content": "x" * 64}]),
    ],
    "tools": [chat(HI, tools=given) for given in (None, 5, "f", TOOL, [5], [TOOL])],  # known to no template
    "model": [served("tidy")],
    "lora_request": [*map(adapted, ("tidy", [None, None], LoRARequest("tidy", 1)))],
    "special_tokens_in_messages": [chat(HI, special_tokens="plain")],
    "preamble": [prompt("a", regex="a", preamble="p: /x/")],
    "params": [with_params("x"), with_params([{}]), with_params([SamplingParams()] * 2)],
    "logit_bias": [prompt("a", logit_bias={VOCAB: 1})],
    "bad_words": [prompt("a", bad_words=value) for value in ({"a": 1}, ["\ud800"])],
    "allowed_token_ids": [prompt("a", allowed_token_ids=[VOCAB])],
    "stop_token_ids": [prompt("a", stop_token_ids=[VOCAB])],
    "thinking": [
        prompt("a", thinking={"tokens": 1}),
        lambda intake: thinking(tokens=-1),
        lambda intake: thinking(ending=()),
        prompt("a", thinking=thinking(ending=(VOCAB,))),
    ],
    "visible_token_ids": [prompt("a", visible_token_ids=value) for value in ([-1], [VOCAB])],
    "prediction": [prompt("a", prediction=value) for value in ([VOCAB], "\ud800")],
    "response_format": [
        prompt("a", response_format=value)
        for value in (
            *(a_form({}, description=3), a_form({"const": "x" * (1 << 19)}), a_form({"type": "nothing"})),
            a_form({"type": "string", "pattern": "(?=a)"}, strict=True),
        )
    ],
    "json_whitespace": [prompt("a", json_whitespace="some")],
    "regex": [prompt("a", regex="(")],
    "choice": [
        prompt("a", choice=["\0"]),
        prompt("a", choice=["z"], allowed_token_ids=[1]),
        lambda intake: structured_output.structured_output(choice="yes"),
    ],
    "grammar": [prompt("a", grammar=value) for value in ("start: oops", "root ::= oops")],
    "speculation": [
        prompt("a", speculation=value)
        for value in ({"expansion": 5}, {"speculators": "draft"}, {"expansion": "2,1"}, {"max_nodes": 1000})
    ],
}
POOR: dict[str, list[Ask]] = {
    "messages": [chat(HI)],
    "bad_words": [prompt([[1]], bad_words="a")],
    "regex": [prompt([[1]], regex="1")],
    "allowed_token_ids": [prompt([[1]], allowed_token_ids=[5], bad_words=["\x05"])],
}
SMALL: dict[str, list[Ask]] = {"max_tokens": [prompt("a", max_tokens=60)]}
LONG: dict[str, list[Ask]] = {"prompt_logprobs": [prompt("a" * 4191, prompt_logprobs=1000)]}


def refusals() -> Iterator[tuple[str, str, Ask]]:
    """The model, the invalid parameter, and the call; the tests of values have more tables."""
    for values, line in WRONG:
        yield "full", line.split()[0], prompt("a", **values)
    for values, _ in WRONG_FORMS:
        yield "full", next(iter(values)), prompt("a", **values)
    for value, _ in WRONG_WISHES:
        yield "full", "speculation", prompt("a", speculation=value)
    for model, table in (("full", REFUSALS), ("poor", POOR), ("small", SMALL), ("long", LONG)):
        yield from ((model, parameter, ask) for parameter, asks in table.items() for ask in asks)


def test_the_parameters_are_those_there_are() -> None:
    known = {field.name for field in fields(SamplingParams)} | {"prompt", "messages", "tools", "params"}
    known |= {"special_tokens_in_messages", "lora_request", "model"}
    assert {parameter for _, parameter, _ in refusals()} <= known
    never_wrong = {"structured_output"}  # not given: made of four others
    assert known - {parameter for _, parameter, _ in refusals()} == never_wrong


def test_every_line_that_refuses_is_in_the_table_and_names_its_parameter(models: dict[str, Intake]) -> None:
    modules: list[ModuleType] = [
        *(sampling_params, structured_output, limits, changes),
        *(admission, intake, chat_encoder, chat_template, tokenizer),
    ]
    raised: set[tuple[str, int]] = set()
    for model, parameter, ask in refusals():
        with pytest.raises(RequestError) as caught:
            ask(models[model])
        assert caught.value.parameter == parameter, caught.value
        assert "\n" not in str(caught.value)
        # An error may be raised `from None` in place of another: its own last frame is what counts.
        *_, last = chain(caught.traceback)
        raised.add((str(last.path), last.lineno + 1))
    missing = []
    for module in modules:
        path = Path(inspect.getsourcefile(module) or "")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or "RequestError" not in ast.unparse(node):
                continue
            # Only the server offers the first two (test_fill_in.py, test_foreign_clients.py); the last needs
            # tokenizers of its own (test_special_names.py).
            elsewhere = "fill-in-the-middle|continue_final_message|names of special tokens"
            if re.search(elsewhere, ast.unparse(node)):
                continue
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not any((str(path), line) in raised for line in lines):
                missing.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert missing == []


def test_a_refusal_survives_being_sent_to_another_process() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=-1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.parameter) == (str(caught.value), "max_tokens")
    json.dumps({"message": str(again), "param": again.parameter})
