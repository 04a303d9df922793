"""Refused fields: those that would change the text, unknown ones, and invalid values."""

from __future__ import annotations

import json
import logging
from itertools import product
from typing import Any

import pytest

from specinfer.serve.api.chat import ChatFields
from specinfer.serve.api.completions import CompletionFields
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.fields.body import parse
from specinfer.serve.fields.foreign import FORMS, NOTES, REFUSED, RENAMED, VARIABLES
from specinfer.serve.fields.policy import FieldPolicy
from specinfer.serve.http.api_error import ApiError
from tests.unit.serve.fields.test_field_policy import HI, MADE, PLAIN, TOOL, read, refusal

OTHERS: list[tuple[dict[str, Any], str, str]] = [
    ({"typical_p": 0.9}, "typical_p", "allowed: 1; this sampler is not supported; use"),
    ({"mirostat": 2}, "mirostat", "not supported"),
    ({"mirostat": True}, "mirostat", "is true; allowed: 0"),
    ({"xtc_probability": 0.5}, "xtc_probability", "not supported"),
    ({"dry_multiplier": 0.8}, "dry_multiplier", "use frequency_penalty"),
    ({"tfs_z": 0.5}, "tfs_z", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "set n and logprobs"),
    ({"best_of": 3}, "best_of", "set n and logprobs"),
    ({"best_of": 1, "n": 2}, "best_of", "set n and logprobs"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "allowed: true"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "shorten it"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n", "send -1"),
    ({"frequency_penalty": 1, "repeat_last_n": 0}, "repeat_last_n", "send -1"),
    (
        {"samplers": ["top_p", "temperature"], "top_p": 0.5, "temperature": 0.5},
        "samplers",
        "requires the order",
    ),
    ({"samplers": ["temperature"], "top_p": 0.5}, "samplers", "requires the order"),
    ({"samplers": "kpt"}, "samplers", "requires the order"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "model's own template"),
    ({"functions": [{"name": "f"}]}, "functions", "send them as tools"),
    ({"modalities": ["text", "audio"]}, "modalities", "only text"),
    ({"guided_json": "{"}, "guided_json", "a JSON schema"),
    ({"guided_json": 5}, "guided_json", "a JSON schema"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "allowed: json"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern", "allowed"),
    ({"structured_outputs": [1]}, "structured_outputs", "an object"),
    ({"logit_bias": [["Hello", 1.0]]}, "logit_bias", "a token id"),
    ({"logit_bias": [5]}, "logit_bias", "a token id"),
    ({"logit_bias": [[5, "x"]]}, "logit_bias", "a token id"),
    ({"reasoning_budget": 100}, "reasoning_budget", "use max_tokens"),
    ({"options": {"temperature": 0}}, "options", "as fields of the request"),
    ({"format": "json"}, "format", "use response_format"),
    ({"guided_json_object": True}, "guided_json_object", "use response_format"),
    ({"do_sample": False}, "do_sample", "set temperature to 0"),
]


OF_KIND: list[tuple[Any, dict[str, Any], str]] = [
    (ChatFields, {"echo": True}, "echo"),
    *((ChatFields, {name: "Be brief."}, name) for name in ("system", "instructions")),
    *((ChatFields, {name: {"format": {}}}, name) for name in ("text", "output_config", "output_format")),
    (ChatFields, {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0].images"),
    (ChatFields, {"suffix": "b"}, "suffix"),
    (ChatFields, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (ChatFields, {"reasoning": {"max_tokens": 5}}, "reasoning"),
    (ChatFields, {"reasoning": "high"}, "reasoning"),
    (ChatFields, {"thinking": {"type": "enabled", "budget_tokens": 99}}, "thinking"),
    (ChatFields, {"thinking": {"type": ["enabled"]}}, "thinking"),
    (ChatFields, {"think": 5}, "think"),
    (ResponseFields, {"enable_thinking": "yes"}, "enable_thinking"),
    (ChatFields, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (CompletionFields, {"tools": [TOOL]}, "tools"),
    (CompletionFields, {"documents": [{"text": "a"}]}, "documents"),
    (ChatFields, {"documents": ["a"]}, "documents"),
    (ResponseFields, {"background": True}, "background"),
    (ResponseFields, {"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort"),
]


def test_fields_that_would_change_the_text_are_refused_by_name() -> None:
    for kind in MADE:
        for more, param, expected in OTHERS:
            error = refusal(kind, more)
            assert error["param"].startswith(param), more
            assert expected in error["message"], more
    for kind, more, param in OF_KIND:
        assert refusal(kind, more)["param"] == param, more
    assert read(ChatFields, {"stop_sequences": ["a"]}).stop == ["a"]


def test_unknown_fields_are_ignored_with_one_line_a_name(caplog: pytest.LogCaptureFixture) -> None:
    policy = FieldPolicy("ignore")
    message = {"role": "user", "content": [{"type": "text", "text": "a", "odd part": 1}], "odd one": 2}
    more: dict[str, Any] = {
        "odd": {"deep": 1},
        "messages": [message, message | {"another": 3}],
        "tools": [TOOL | {"odd": 1}],
    }
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
            names = {f"k{number}-{'x' * 200}": 1 for number in range(batch * 2000, (batch + 1) * 2000)}
            assert read(CompletionFields, names, policy).prompt == "a"
    assert len(caplog.records) == 1000
    assert "more are left out" in caplog.records[-1].getMessage()
    assert max(len(record.getMessage()) for record in caplog.records) < 200
    assert len(policy._logged) == 1000


def test_unknown_fields_are_refused_at_every_depth() -> None:
    for more, param in (
        ({"odd": 1}, "odd"),
        ({"messages": [HI[0] | {"odd": 1}]}, "messages[0].odd"),
        ({"stream_options": {"odd": 1}}, "stream_options.odd"),
        ({"tools": [TOOL | {"odd": 1}]}, "tools[0].odd"),
    ):
        with pytest.raises(ApiError, match="--unknown-fields=ignore") as caught:
            read(ChatFields, more, FieldPolicy("error"))
        error = caught.value.body["error"]
        assert (error["param"], error["code"]) == (param, "unknown_parameter")


ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2.5, 1e300, 10**400, "", "a", "none", [], [None], [[1]], [["a", "b"]]),
    *([1, True], {}, {"a": None}, {"type": []}, {"type": "enabled"}, {"effort": {}}, {"enabled": 1}),
    *({"json": "["}, {"json": {}, "regex": 5}, {"schema": {}, "type": "json_object"}, [{"type": {}}]),
]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", PLAIN)
def test_any_value_of_a_field_is_accepted_or_refused(kind: Any) -> None:
    names = {
        *NOTES,
        *REFUSED,
        *RENAMED,
        *FORMS,
        *VARIABLES,
        *kind.model_fields,
        "prompt",
        "messages",
        "input",
    }
    statuses = set()
    for policy in (FieldPolicy(), FieldPolicy("ignore")):
        for name, value in product(sorted(names), ODD):
            for more in ({name: value}, {name: value, "temperature": 0.5, "top_p": 0.5, "text": value}):
                try:
                    fields = parse(kind, json.dumps(PLAIN[kind] | more).encode(), policy=policy)
                    if kind in MADE:
                        fields.check()
                        fields.params()
                    statuses.add(200)
                except ApiError as error:
                    statuses.add(error.status)
    assert statuses == {200, 400}
