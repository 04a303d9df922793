"""Fields of other servers, translated and refused ones, and unknown ones."""

import json
import logging
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from specinfer import SamplingParams
from specinfer.serve.api.chat import ChatFields
from specinfer.serve.api.completions import CompletionFields
from specinfer.serve.api.message_fields import MessageFields
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.fields.body import FieldPolicy, own_names
from specinfer.serve.fields.foreign_fields import REFUSED, RENAMED, SCHEMAS, THINKING, translate
from specinfer.serve.http.api_error import ApiError
from tests.scripted_server import ScriptedBackend, byte_tokenizer, scripted_app
from tests.unit.serve.fields.bodies import MADE, PLAIN, SCHEMA, TOOL, params, read

DRAWN = 7  # the seed of requests without one


@pytest.fixture(autouse=True)
def drawn_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.serve.fields.sampling.secrets.randbits", lambda _: DRAWN)


# A body of llama.cpp's own clients, which send all their settings.
LLAMA_CPP: dict[str, Any] = {
    **{"temperature": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_k": 40, "top_p": 0.95},
    **{"min_p": 0.05, "top_n_sigma": -1.0, "n_predict": -1, "n_keep": 0, "n_cmpl": 1, "stop": []},
    **{"typical_p": 1.0, "repeat_penalty": 1.1, "repeat_last_n": -1, "dry_multiplier": 0.0, "dry_base": 1.75},
    **{"xtc_probability": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "grammar": "", "json_schema": SCHEMA},
    **{"seed": -1, "n_probs": 0, "cache_prompt": True, "id_slot": -1},
    **{"samplers": None, "timings_per_token": True, "speculative.n_max": 16, "return_progress": True},
}


PAGE = (Path(__file__).parents[4] / "docs" / "reference.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([\w.]+)`", PAGE))  # in code type on the page of the HTTP API


def refusal(kind: Any, more: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        params(kind, more)
    assert caught.value.status == 400
    return dict(caught.value.body["error"])


def test_the_bodies_of_clients_that_send_all_their_settings_are_read() -> None:
    asked = params(CompletionFields, LLAMA_CPP)
    assert (asked.repetition_penalty, asked.seed, asked.top_k) == (1.1, DRAWN, 40)
    assert asked.structured_output == params(CompletionFields, {"guided_json": SCHEMA}).structured_output
    names = "audio functions moderation prediction reasoning_effort response_format stop web_search_options"
    openai: dict[str, Any] = dict.fromkeys(names.split()) | {
        **{"frequency_penalty": 0, "logit_bias": {}, "n": 1, "temperature": 1, "stream": False, "user": "u"},
        **{"function_call": "auto", "modalities": ["text"], "prompt_cache_key": "k", "store": True},
        **{"service_tier": "flex", "tools": [], "tool_choice": "auto", "verbosity": "low", "metadata": {}},
    }
    assert params(ChatFields, openai) == SamplingParams(logit_bias={}, seed=DRAWN)


def test_null_and_neutral_values_have_no_effect() -> None:
    for kind in PLAIN:
        plain, strict = read(kind, {}), FieldPolicy("error")
        nothing: dict[str, Any] = dict.fromkeys([*kind.model_fields, *REFUSED, *RENAMED])
        nothing = {name: one for name, one in nothing.items() if name not in PLAIN[kind]}
        assert read(kind, nothing, strict) == plain
        for name, values in REFUSED.items():
            for value in [] if name in {**kind.model_fields, **RENAMED} else values:
                assert read(kind, {name: value}, strict) == plain, (kind, name)


def test_nulls_inside_of_objects() -> None:
    call = {"id": "1", "type": "function", "index": None, "function": {"name": "f", "arguments": "{}"}}
    said = {"content": None, "reasoning": "Hm.", "provider_specific_fields": {}, "function_call": None}
    given: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "citations": None}], "name": None},
            {"role": "assistant", **said, "tool_calls": [call]},
        ],
        "tools": [TOOL, {"type": "function", "function": {"name": "g", "description": None, "strict": None}}],
        "stream_options": {"include_usage": None},
        "speculation": {"max_nodes": 8.0, "expansion": None},
    }
    fields = read(ChatFields, given)
    assert fields.messages[1].reasoning_content == "Hm."
    described = [one.model_dump(exclude_none=True) for one in fields.functions]
    assert described == [TOOL["function"], {"name": "g"}]
    assert described[0]["parameters"]["properties"]["a"]["enum"] == [None, 1.0]
    assert isinstance(fields.tools[0].function.parameters["properties"]["a"]["enum"][1], float)
    assert fields.speculation == {"max_nodes": 8}
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}], "id": None}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "async": None}
    assert read(ResponseFields, {"input": [item, call]}).messages[0] == {"role": "user", "content": "a"}
    inner = {"name": "answer", "schema": SCHEMA, "strict": None, "description": None}
    form = {"type": "json_schema", "json_schema": inner}
    assert params(ChatFields, {"response_format": form}) == params(ChatFields, {"guided_json": SCHEMA})


WRITTEN: list[tuple[dict[str, Any], str, Any]] = [
    ({"max_tokens": 4.0}, "max_tokens", 4),
    ({"top_k": 3.0, "n": 2.0, "seed": 5.0, "min_tokens": 1.0}, "n", 2),
    ({"stop_token_ids": [1.0, 2]}, "stop_token_ids", [1, 2]),
    ({"prompt": [1.0, 2.0]}, "prompt", [1, 2]),
    ({"prompt": [[1.0], [2.0]]}, "prompt", [[1], [2]]),
    ({"top_k": -1}, "top_k", None),
    ({"seed": -1}, "seed", None),
    ({"stop": ""}, "stop", None),
    ({"stop": [None, "", "a"]}, "stop", ["a"]),
    ({"grammar": ""}, "grammar", None),
    ({"logprobs": False}, "logprobs", None),
    ({"max_tokens": -1}, "max_tokens", -1),  # as many as there is room for, where 16 are usual
]


def test_values_that_are_written_otherwise() -> None:
    for more, name, value in WRITTEN:
        assert getattr(read(CompletionFields, more), name) == value, more


def test_a_negative_limit_means_no_limit() -> None:
    for kind, name in ((ChatFields, "max_tokens"), (ResponseFields, "max_output_tokens")):
        for asked in (name, "max_completion_tokens", "n_predict", "max_tokens", "max_new_tokens"):
            assert getattr(read(kind, {asked: -1}), name) is None
    assert read(ChatFields, {"max_completion_tokens": -1}).max_completion_tokens is None


JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


# For any endpoint, and for those with `response_format`.
TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2}),
    ({"repeat_last_n": 64}, {}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ("a",)}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, {"regex": "a"}),
    ({"structured_outputs": {"choice": ["a"], "backend": "auto"}}, {"choice": ("a",)}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": True}, {}),
    ({"min_new_tokens": 3, "random_seed": 4}, {"min_tokens": 3, "seed": 4}),
    ({"stop": "a", "no_stop_trim": True}, {"stop": "a", "include_stop_str_in_output": True}),
    ({"stop_sequences": ["a", ""]}, {"stop": ("a",)}),
]
OBJECT = {"response_format": {"type": "json_object"}}
NO_SPACE = {"json_object": True, "disable_any_whitespace": True}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": NO_SPACE}, {**OBJECT, "json_whitespace": "none"}),
]
JSONS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
    {"json_schema": SCHEMA, "response_format": {"type": "text"}},
    {"structured_outputs": {"json": SCHEMA, "regex": None}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
]
FORMS += [(body, {"response_format": JSON}) for body in JSONS]


def test_names_of_other_servers_are_translated() -> None:
    for kind in MADE:
        more_room: dict[str, Any] = {"max_tokens": 99} if kind is ResponseFields else {}
        for more, means in TRANSLATED + (FORMS if kind is not ResponseFields else []):
            assert params(kind, more) == SamplingParams(**{"seed": DRAWN} | means | more_room), (kind, more)
        length = "max_output_tokens" if kind is ResponseFields else "max_tokens"
        for name in ("n_predict", "num_predict", "max_new_tokens", "max_tokens", "max_output_tokens"):
            assert getattr(read(kind, {name: 7}), length) == 7
    assert read(CompletionFields, {"max_completion_tokens": 7}).max_tokens == 7
    assert read(ChatFields, {"n_cmpl": 3}).n == 3


def test_two_names_may_say_the_same_and_no_more() -> None:
    assert read(ChatFields, {"max_tokens": 4, "max_completion_tokens": 4.0}).max_tokens == 4
    assert refusal(ChatFields, {"max_tokens": 4, "max_completion_tokens": 5})["param"] == "max_tokens"
    assert read(CompletionFields, {"n_predict": 4, "max_tokens": 4}).max_tokens == 4
    assert refusal(CompletionFields, {"n_predict": 4, "max_tokens": 5})["param"] == "n_predict"
    same = {"guided_json": SCHEMA, "json_schema": SCHEMA}
    assert params(ChatFields, same) == params(ChatFields, {"guided_json": SCHEMA})
    assert refusal(ChatFields, {"guided_json": SCHEMA, "json_schema": {}})["param"] == "json_schema"
    assert refusal(ChatFields, {"guided_json": SCHEMA, "regex": "a"})["param"] in ("regex", "response_format")


REASONING: list[tuple[dict[str, Any], Any, str | None]] = [
    ({"enable_thinking": False}, {"enable_thinking": False}, None),
    ({"think": True}, {"enable_thinking": True}, None),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
    ({"thinking": {"type": "auto"}}, None, None),
    ({"enable_thinking": True, "chat_template_kwargs": {"a": 1}}, {"a": 1, "enable_thinking": True}, None),
    ({"reasoning_effort": "low"}, None, "low"),
    ({"think": "low"}, None, "low"),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, None, "low"),
]


def test_reasoning_options_are_translated() -> None:
    for more, variables, effort in REASONING:
        for kind in (ChatFields, ResponseFields):
            fields = read(kind, more)
            assert (fields.chat_template_kwargs, fields.effort) == (variables, effort), (kind, more)
    # At /v1/responses OpenAI's field, which has no such switch.
    switch = {"reasoning": {"enabled": True, "exclude": True}}
    assert read(ChatFields, switch).chat_template_kwargs == {"enable_thinking": True}
    for kind, name in ((ChatFields, "chat_template_kwargs"), (ResponseFields, "reasoning")):
        more = {"think": "low" if name == "reasoning" else True, name: 1}
        assert refusal(kind, more)["param"] == name
    clash = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert refusal(ChatFields, clash)["param"] == "enable_thinking"


def test_the_documentation_names_every_field_there_is_a_rule_for() -> None:
    names = {*REFUSED, *RENAMED, *SCHEMAS, *THINKING, "structured_outputs"}
    assert names - NAMED == set()


def test_the_documentation_names_every_path_and_every_field_of_it(tmp_path: Path) -> None:
    app = scripted_app(byte_tokenizer(tmp_path), ScriptedBackend())
    document = TestClient(app).get("/openapi.json").json()
    bodies = {
        path: operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }
    assert {"/v1/chat/completions", "/v1/messages", "/infill", "/tokenize", "/detokenize"} <= set(bodies)
    schemas = document["components"]["schemas"]
    missing = {path: set(schemas[kind]["properties"]) - NAMED for path, kind in bodies.items()}
    assert {path: names for path, names in missing.items() if names} == {}
    paths = {path for path in document["paths"] if "{" not in path} - {"/v1/embeddings"}
    rows = "".join(re.findall(r"^\| (`/.*?) \|", PAGE, re.M))
    assert set(re.findall(r"`(/[\w/-]*)`", rows)) - {"/"} == paths


def test_free_form_json_is_unchanged() -> None:
    schema = {"type": "object", "properties": {"n": {"default": None, "maximum": 1.0}}}
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": None, "x": 1.0}}
    body: dict[str, Any] = {
        "messages": [{"role": "assistant", "content": [used | {"extra": None}]}],
        "tools": [{"name": "f", "input_schema": schema, "input_examples": [{"n": None}]}],
        "chat_template_kwargs": {"a": [1.0, None]},
    }
    translate(body, own_names(MessageFields))
    assert body["messages"][0]["content"] == [used]
    assert body["tools"][0] == {"name": "f", "input_schema": schema, "input_examples": [{"n": None}]}
    assert repr(body["tools"][0]["input_schema"]["properties"]["n"]["maximum"]) == "1.0"
    assert repr(body["chat_template_kwargs"]) == "{'a': [1.0, None]}"


OTHERS: list[tuple[dict[str, Any], str, str]] = [
    ({"typical_p": 0.9}, "typical_p", "allowed: 1; remove it"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "allowed: true"),
    ({"samplers": ["top_k"]}, "samplers", "remove it"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "is '{{ 1 }}', and"),
    ({"modalities": ["text", "audio"]}, "modalities", '["text"]'),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "allowed: json"),
    ({"structured_outputs": [1]}, "structured_outputs", "an object"),
    ({"format": "json"}, "format", "remove it"),
]
OF_KIND: list[tuple[Any, dict[str, Any], str]] = [
    (ChatFields, {"guided_json": "{"}, "guided_json"),
    (ChatFields, {"guided_json": 5}, "guided_json"),
    (ResponseFields, {"guided_json": SCHEMA}, "response_format"),
    *((ChatFields, {name: "Be brief."}, name) for name in ("system", "instructions")),
    *((ChatFields, {name: {"format": {}}}, name) for name in ("text", "output_config", "output_format")),
    (ChatFields, {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0].images"),
    (ChatFields, {"suffix": "b"}, "suffix"),
    (ChatFields, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (ChatFields, {"reasoning": {"max_tokens": -2}}, "thinking_token_budget"),
    (ChatFields, {"thinking": {"type": "enabled", "budget_tokens": "99 "}}, "thinking_token_budget"),
    (ChatFields, {"think": 5}, "think"),
    (ResponseFields, {"enable_thinking": [1]}, "enable_thinking"),
    (ChatFields, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (ChatFields, {"documents": "a"}, "documents"),
    (CompletionFields, {"tools": [TOOL]}, "tools"),
    (CompletionFields, {"documents": [{"text": "a"}]}, "documents"),
    (ResponseFields, {"background": True}, "background"),
    (ResponseFields, {"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort"),
]


def test_fields_that_would_change_the_text_are_refused_by_name() -> None:
    for kind in MADE:
        for more, param, expected in OTHERS:
            error = refusal(kind, more)
            assert error["param"] == param, more
            assert expected in error["message"], more
        for name in REFUSED.keys() - kind.model_fields.keys() - RENAMED.keys() - {"documents"}:
            assert refusal(kind, {name: "odd"})["param"] == name
    for kind, more, param in OF_KIND:
        assert refusal(kind, more)["param"] == param, more


ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2.5, 1e300, 10**400, "", "a", "none", [], [None], [[1]], [["a", "b"]]),
    *([1, True], {}, {"a": None}, {"type": []}, {"type": "enabled"}, {"effort": {}}, {"enabled": 1}),
    *({"json": "["}, {"json": {}, "regex": 5}, {"schema": {}, "type": "json_object"}, [{"type": {}}]),
]


@pytest.mark.thorough
def test_any_value_of_a_field_is_accepted_or_refused() -> None:
    for kind in PLAIN:
        names = {*REFUSED, *RENAMED, *SCHEMAS, *THINKING, *kind.model_fields}
        names |= {"structured_outputs", "reasoning_effort", "prompt", "messages", "input"}
        statuses = set()
        policy = FieldPolicy("ignore")
        for name, value in product(sorted(names), ODD):
            for more in ({name: value}, {name: value, "temperature": 0.5, "top_p": 0.5, "text": value}):
                try:
                    fields = policy.parse(kind, json.dumps(PLAIN[kind] | more).encode())
                    if kind in MADE:
                        fields.check()
                        fields.params() if kind is CompletionFields else fields.sampling_params(9)
                    statuses.add(200)
                except ApiError as error:
                    statuses.add(error.status)
        assert statuses == {200, 400}, kind


def test_unknown_fields_are_ignored_with_one_line_a_name(caplog: pytest.LogCaptureFixture) -> None:
    policy = FieldPolicy("ignore")
    message = {"role": "user", "content": [{"type": "text", "text": "a", "odd part": 1}], "odd one": 2}
    more: dict[str, Any] = {"odd": {"deep": 1}, "messages": [message, message | {"another": 3}]}
    more["tools"] = [TOOL | {"odd": 1}]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fields = read(ChatFields, more, policy)
    assert [one.model_dump(exclude_none=True) for one in fields.functions] == [TOOL["function"]]
    part = {"type": "text", "text": "a"}
    assert [one.rendered()["content"] for one in fields.messages] == [[part], [part]]
    logged = [record.getMessage() for record in caplog.records]
    names = ("another", "odd", "odd one", "odd part")
    assert sorted(logged) == sorted(f"the unknown field {name!r} is ignored" for name in names)
    for wrong in ({"temperature": -1}, {"typical_p": 0.5}, {"messages": [{"role": "robot", "odd": 1}]}):
        with pytest.raises(ApiError):
            read(ChatFields, more | wrong, policy).params()


def test_names_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    policy = FieldPolicy("ignore")
    shadows = {"__class__": 1, "_x": 1, "check": 2, "model_config": 3, "__pydantic_extra__": {}}
    assert read(CompletionFields, shadows, FieldPolicy("ignore")) == read(CompletionFields, {})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for batch in range(3):
            names = {f"k{number}-{'x' * 200}": 1 for number in range(batch * 600, (batch + 1) * 600)}
            assert read(CompletionFields, names, policy).prompt == "a"
    assert len(caplog.records) == 1000
    assert "more are left out" in caplog.records[-1].getMessage()
    assert max(len(record.getMessage()) for record in caplog.records) < 200
    assert len(policy._logged) == 1000
