"""Fields of other servers: accepted, translated and ignored ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.serve.api.chat import ChatFields
from specinfer.serve.api.completions import CompletionFields
from specinfer.serve.api.message_fields import MessageFields
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.api.tokens import DetokenizeFields, TokenizeFields
from specinfer.serve.fields.body import parse
from specinfer.serve.fields.foreign import CHECKED, FORMS, NOTES, REFUSED, RENAMED, VARIABLES
from specinfer.serve.fields.policy import FieldPolicy
from specinfer.serve.http.api_error import ApiError
from tests.scripted_server import ScriptedBackend, byte_tokenizer, scripted_app

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1.0]}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PLAIN: dict[Any, dict[str, Any]] = {
    ChatFields: {"messages": HI},
    CompletionFields: {"prompt": "a"},
    ResponseFields: {"input": "Hi"},
    TokenizeFields: {"prompt": "a"},
    DetokenizeFields: {"tokens": [1]},
}
MADE = (ChatFields, CompletionFields, ResponseFields)  # those that make text
# A body of llama.cpp's own clients, which send all their settings.
LLAMA_CPP: dict[str, Any] = {
    **{"temperature": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_k": 40, "top_p": 0.95},
    **{"min_p": 0.05, "top_n_sigma": -1.0, "n_predict": -1, "n_keep": 0, "n_cmpl": 1, "stop": []},
    **{"typical_p": 1.0, "repeat_penalty": 1.1, "repeat_last_n": -1, "dry_multiplier": 0.0, "dry_base": 1.75},
    **{"xtc_probability": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "grammar": "", "json_schema": SCHEMA},
    **{"seed": -1, "logit_bias": [[15, 1.0], [16, False]], "n_probs": 0, "cache_prompt": True, "id_slot": -1},
    **{"samplers": None, "timings_per_token": True, "speculative.n_max": 16, "return_progress": True},
}


def read(kind: Any, more: dict[str, Any], policy: FieldPolicy | None = None) -> Any:
    """A body of that kind, checked."""
    fields = parse(kind, json.dumps(PLAIN[kind] | more).encode(), policy=policy or FieldPolicy("ignore"))
    if kind in MADE:
        fields.check()
    return fields


def params(kind: Any, more: dict[str, Any]) -> SamplingParams:
    """Return the request's sampling parameters; at /v1/responses with its format."""
    fields = read(kind, more)
    found = fields.sampling_params(99) if kind is ResponseFields else fields.params()
    assert isinstance(found, SamplingParams)
    return found


def documented_names() -> set[str]:
    """Return the names in code type on the page of the HTTP API."""
    page = (Path(__file__).parents[4] / "docs" / "http.md").read_text(encoding="utf-8")
    return set(re.findall(r"`([\w.]+)`", page))


def refusal(kind: Any, more: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        params(kind, more)
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body["error"]
    return error


def test_the_bodies_of_clients_that_send_all_their_settings_are_read() -> None:
    asked = params(CompletionFields, LLAMA_CPP)
    assert (asked.repetition_penalty, asked.seed, asked.top_k) == (1.1, None, 40)
    assert asked.logit_bias == {15: 1.0, 16: -100.0}
    assert asked.structured_output == params(CompletionFields, {"guided_json": SCHEMA}).structured_output
    names = "audio functions moderation prediction reasoning_effort response_format stop web_search_options"
    openai: dict[str, Any] = dict.fromkeys(names.split()) | {
        **{"frequency_penalty": 0, "logit_bias": {}, "n": 1, "temperature": 1, "stream": False, "user": "u"},
        **{"function_call": "auto", "modalities": ["text"], "prompt_cache_key": "k", "store": True},
        **{"service_tier": "flex", "tools": [], "tool_choice": "auto", "verbosity": "low", "metadata": {}},
    }
    assert params(ChatFields, openai) == SamplingParams(logit_bias={})


@pytest.mark.parametrize("kind", PLAIN)
def test_null_and_neutral_values_have_no_effect(kind: Any) -> None:
    plain, strict = read(kind, {}), FieldPolicy("error")
    nothing: dict[str, Any] = dict.fromkeys([*kind.model_fields, *NOTES, *REFUSED, *RENAMED])
    nothing = {name: one for name, one in nothing.items() if name not in PLAIN[kind]}
    assert read(kind, nothing, strict) == plain
    neutral = [(name, value) for name, (values, _) in REFUSED.items() for value in values]
    for name, value in [*neutral, *((name, "x") for name in NOTES)]:
        if name not in kind.model_fields:
            assert read(kind, {name: value}, strict) == plain, name


def test_nulls_and_notes_inside_of_objects() -> None:
    expected: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief.", "name": None, "cache_control": {"type": "ephemeral"}},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning": "Hm.",
                "reasoning_details": [],
                "provider_specific_fields": {},
                "function_call": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "index": None,
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x", "name": None},
        ],
        "tools": [
            TOOL | {"cache_control": {"type": "ephemeral"}, "defer_loading": True},
            {"type": "function", "function": {"name": "g", "description": None, "strict": None}},
        ],
        "stream_options": {"include_usage": None},
        "speculation": {"max_nodes": 8.0, "expansion": None},
        "response_format": None,
    }
    fields = read(ChatFields, expected)
    assert fields.messages[2].reasoning_content == "Hm."
    described = [one.model_dump(exclude_none=True) for one in fields.functions]
    assert described == [TOOL["function"], {"name": "g"}]
    assert described[0]["parameters"]["properties"]["a"]["enum"] == [None, 1.0]
    assert isinstance(fields.tools[0].function.parameters["properties"]["a"]["enum"][1], float)
    assert fields.speculation == {"max_nodes": 8}
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "a", "cache_control": None}],
        "id": None,
    }
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "async": None}
    assert read(ResponseFields, {"input": [item, call]}).messages[0] == {"role": "user", "content": "a"}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": None, "description": None},
    }
    assert params(ChatFields, {"response_format": form}) == params(ChatFields, {"guided_json": SCHEMA})


WRITTEN: list[tuple[dict[str, Any], str, Any]] = [
    ({"max_tokens": 4.0}, "max_tokens", 4),
    ({"top_k": 3.0, "n": 2.0, "seed": 5.0, "min_tokens": 1.0}, "n", 2),
    ({"stop_token_ids": [1.0, 2]}, "stop_token_ids", [1, 2]),
    ({"prompt": [1.0, 2.0]}, "prompt", [1, 2]),
    ({"prompt": [[1.0], [2.0]]}, "prompt", [[1], [2]]),
    ({"temperature": 1}, "temperature", 1.0),
    ({"top_k": -1}, "top_k", None),
    ({"seed": -1}, "seed", None),
    ({"stop": ""}, "stop", None),
    ({"stop": []}, "stop", None),
    ({"stop": [""]}, "stop", None),
    ({"stop": [None, "", "a"]}, "stop", ["a"]),
    ({"grammar": ""}, "grammar", None),
    ({"logprobs": False}, "logprobs", None),
    ({"max_tokens": -1}, "max_tokens", -1),  # as many as there is room for, where 16 are usual
]


def test_values_that_are_written_otherwise() -> None:
    for more, name, value in WRITTEN:
        assert getattr(read(CompletionFields, more), name) == value, more


@pytest.mark.parametrize(
    ("kind", "name"), [(ChatFields, "max_tokens"), (ResponseFields, "max_output_tokens")]
)
def test_a_negative_limit_means_no_limit(kind: Any, name: str) -> None:
    for asked in (name, "max_completion_tokens", "n_predict", "max_tokens", "max_new_tokens"):
        assert getattr(read(kind, {asked: -1}), name) is None
    assert read(ChatFields, {"max_completion_tokens": -1}).max_completion_tokens is None


JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ("a",)}),
    ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"guided_json": SCHEMA}, {"response_format": JSON}),
    ({"guided_json": json.dumps(SCHEMA)}, {"response_format": JSON}),
    ({"json_schema": SCHEMA}, {"response_format": JSON}),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"response_format": JSON}),
    ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"response_format": {"type": "json_object"}, "json_whitespace": "none"},
    ),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": False}}, {"regex": "a"}),
    ({"structured_outputs": {"choice": ["a"], "backend": "auto"}}, {"choice": ("a",)}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": True}, {}),
    ({"min_new_tokens": 3, "random_seed": 4}, {"min_tokens": 3, "seed": 4}),
    ({"stop": "a", "no_stop_trim": True}, {"stop": "a", "include_stop_str_in_output": True}),
    (
        {"stop": "a", "include_stop_str_in_output": True},
        {"stop": "a", "include_stop_str_in_output": True},
    ),
    ({"logit_bias": [[5, 1.5], [6, -2], [7, False]]}, {"logit_bias": {5: 1.5, 6: -2.0, 7: -100.0}}),
    (
        {"samplers": ["penalties", "temperature", "top_k", "top_p"], "temperature": 0.5, "top_p": 0.5},
        {"temperature": 0.5, "top_p": 0.5},
    ),
    (
        {"samplers": ["top_k", "temperature"], "temperature": 0.5, "top_k": 5},
        {"temperature": 0.5, "top_k": 5},
    ),
    ({"samplers": ["top_p", "temperature"], "top_p": 0.5}, {"top_p": 0.5}),
]


def test_names_of_other_servers_are_translated() -> None:
    for kind in MADE:
        more_room: dict[str, Any] = {"max_tokens": 99} if kind is ResponseFields else {}
        for more, means in TRANSLATED:
            assert params(kind, more) == SamplingParams(**means, **more_room), (kind, more)


@pytest.mark.parametrize("name", ["n_predict", "num_predict", "max_new_tokens", "max_tokens"])
def test_lengths_have_many_names(name: str) -> None:
    assert read(ChatFields, {name: 7}).max_tokens == 7
    assert read(CompletionFields, {name: 7}).max_tokens == 7
    assert read(ResponseFields, {name: 7}).max_output_tokens == 7
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
    assert refusal(ResponseFields, {"text": {"format": {"type": "json_object"}}, "guided_json": SCHEMA})


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    ],
)
def test_forms_in_llama_cpps_shapes(form: dict[str, Any]) -> None:
    for kind in (ChatFields, CompletionFields):
        assert params(kind, {"response_format": form}).structured_output == (
            params(kind, {"guided_json": SCHEMA}).structured_output
        )


def test_reasoning_options_are_translated() -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"think": True}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"enable_thinking": True, "chat_template_kwargs": {"a": 1}}, {"a": 1, "enable_thinking": True}),
        ({"thinking": {"type": "auto"}}, None),
    ]
    for more, variables in cases:
        assert read(ChatFields, more).chat_template_kwargs == variables
        if "reasoning" not in more:  # at /v1/responses a field of OpenAI's, which has no such switch
            assert read(ResponseFields, more).chat_template_kwargs == variables
    efforts: list[dict[str, Any]] = [
        {"reasoning_effort": "low"},
        {"think": "low"},
        {"reasoning": {"effort": "low", "summary": "auto", "exclude": True}},
    ]
    for asked in efforts:
        assert read(ChatFields, asked).effort == "low"
        assert read(ResponseFields, asked).effort == "low"
    for kind, name in ((ChatFields, "chat_template_kwargs"), (ResponseFields, "reasoning")):
        more = {"think": "low" if name == "reasoning" else True, name: 1}
        assert refusal(kind, more)["param"] == name
    clash = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert refusal(ChatFields, clash)["param"] == "enable_thinking"


def test_free_form_values_are_not_translated() -> None:
    body = {
        "messages": HI,
        "guided_json": SCHEMA,
        "chat_template_kwargs": {"a": [1.0, None]},
    }
    fields = read(ChatFields, body)
    assert fields.response_format["json_schema"]["schema"] == SCHEMA
    assert isinstance(fields.chat_template_kwargs["a"][0], float)
    assert fields.chat_template_kwargs["a"][1] is None


def test_the_documentation_names_every_field_there_is_a_rule_for() -> None:
    assert {*NOTES, *REFUSED, *RENAMED, *FORMS, *VARIABLES, *CHECKED} - documented_names() == set()


def test_the_documentation_names_every_field_of_every_endpoint(tmp_path: Path) -> None:
    document = scripted_app(byte_tokenizer(tmp_path), ScriptedBackend()).openapi()
    bodies = {
        path: operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }
    assert {"/v1/chat/completions", "/v1/messages", "/infill", "/tokenize", "/detokenize"} <= set(bodies)
    schemas, named = document["components"]["schemas"], documented_names()
    missing = {path: set(schemas[kind]["properties"]) - named for path, kind in bodies.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_free_form_json_is_unchanged() -> None:
    schema = {"type": "object", "properties": {"n": {"default": None, "maximum": 1.0}}}
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": None, "x": 1.0}}
    body: dict[str, Any] = {
        "messages": [{"role": "assistant", "content": [used | {"cache_control": None}]}],
        "tools": [{"name": "f", "input_schema": schema, "input_examples": [{"n": None}]}],
    }
    FieldPolicy().apply(MessageFields, body)
    assert body["messages"][0]["content"] == [used]
    assert body["tools"][0] == {"name": "f", "input_schema": schema, "input_examples": [{"n": None}]}
    assert repr(body["tools"][0]["input_schema"]["properties"]["n"]["maximum"]) == "1.0"
