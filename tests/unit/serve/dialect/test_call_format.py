"""Tools of requests, the call formats of chat templates, and messages for templates of each format."""

import json
import re
from typing import Any

import pytest

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_format import CallFormat, Tool, ToolChoice, for_template, format_in
from tests.unit.serve.dialect import families
from tests.unit.serve.dialect.families import FAMILIES, LLAMA, QWEN, TOOLS, WEATHER, tokenizer, tools_of
from tests.unit.serve.dialect.whole_answers import content_and_calls, events_of

CODER = "{{ tools }}<tool_call>\n<function=f>\n<parameter=a>{{ arguments }}</function>\n</tool_call>"
OTHER = "{% for t in tools %}<|tool|>{{ t }}{% endfor %}"


def test_a_template_shows_the_form():
    cases = [
        (QWEN, "hermes"),
        (LLAMA, "llama3"),
        (LLAMA.replace('"', '\\"'), "llama3"),
        (families.MISTRAL, "mistral"),
        (families.MISTRAL_ARGS, "mistral_args"),
        (families.MISTRAL_IDS, "mistral_ids"),
        ("<|start_header_id|>" + QWEN, "hermes"),  # Hermes has models of Llama's, too
        ("", None),
        (families.PLAIN, None),
        (QWEN.replace("tools", "xtools"), None),
        (CODER, "qwen3_coder"),
        (CODER.replace("<parameter=", "<argument="), None),
        (CODER.replace("<function=", "<arg_key>"), None),
        (OTHER, None),
    ]
    for template, name in cases:
        assert format_in(template) == name, template


def test_a_model_without_a_supported_format_is_refused():
    cases = [
        (None, "the model has no chat template to describe tools in; leave tools out"),
        (
            families.PLAIN,
            "the model's chat template has no tools; leave tools out, or serve with --call-format her",
        ),
        (OTHER, "the model's chat template writes tool calls in an unsupported format; leave tools out"),
    ]
    for template, begins in cases:
        with pytest.raises(RequestError) as caught:
            pytest.fail(f"{template!r}: {CallFormat.of(tokenizer(template))}")
        assert str(caught.value).startswith(begins), template
        assert caught.value.parameter == "tools", template


def test_a_format_may_be_chosen_by_name():
    assert CallFormat.of(tokenizer(LLAMA), "llama3") == CallFormat.of(tokenizer(LLAMA))
    assert CallFormat.of(tokenizer(QWEN), "hermes").native
    for template in (LLAMA, None):
        forced = CallFormat.of(tokenizer(template), "hermes")
        assert (forced.name, forced.native, forced.single) == ("hermes", False, False)
    with pytest.raises(RequestError, match="the tool format is 'llama3'; allowed: auto, hermes; auto is the"):
        CallFormat.of(tokenizer(QWEN), "llama3")


def test_marks_that_are_special_tokens_have_to_be_visible():
    visible = {name: tuple(family.format.special.values()) for name, family in FAMILIES.items()}
    assert visible["hermes, text"] == visible["hermes"] == ()  # there they are text
    assert visible["hermes, special"] == (257, 258)
    assert visible["mistral_ids"] == (257, 259, 258)
    for name, family in FAMILIES.items():
        marks = family.format.special
        assert [family.tokenizer.text_of(i) for i in visible[name]] == list(marks)


def function(**parts):
    return {"name": "f"} | parts


def test_tools_are_read():
    assert tools_of() == ()
    assert (
        Tool("get", WEATHER, "Weather."),
        Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False}),
    ) == TOOLS
    assert tools_of(function(strict=True, parameters=WEATHER)) == (Tool("f", WEATHER, strict=True),)


def test_arguments_are_always_an_object():
    cases = [
        ({}, {"type": "object"}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, None),
    ]
    for schema, read in cases:
        [tool] = tools_of(function(parameters=schema))
        assert tool.parameters == (read or schema | {"type": "object"}), schema


def test_invalid_tools_are_refused():
    cases = [
        ([function(name="")], ".name is ''; allowed: 1 to 128 letters"),
        ([function(name='a"b')], ".name is 'a\"b'; allowed"),
        ([function(), function()], "tools[1].function.name is 'f', like an earlier one's; rename it"),
        ([function()] * 129, "tools has 129 tools; allowed: at most 128"),
    ]
    deep = json.loads('{"properties":{"a":' * 150 + "{}" + "}}" * 150)
    poem = {"properties": {"a": {"format": "poem", "type": "string"}}}
    odd, none = ({"properties": {"a": one}, "required": ["a"]} for one in ({"type": "text"}, False))
    for schema, strict, message in (
        ({"x-guidance": {}}, False, ' has the key "x-guidance"'),
        ({"const": {1}}, False, " cannot be written as JSON"),
        ({"type": "string"}, False, " has the type 'string'; allowed: object"),
        (odd, False, " cannot be used: Invalid type: text; change or drop that part of the schema"),
        (none, False, " cannot be used: Unsatisfiable schema: required property 'a' is unsatisfiable"),
        (poem, True, "Unknown format: poem; change or drop that part of the schema, or leave out strict"),
        (deep, True, ' cannot be used: failed to parse "%json": recursion limit exceeded'),
    ):
        cases.append(([function(parameters=schema, strict=strict)], message))
    for given, message in cases:
        with pytest.raises(RequestError, match=re.escape(message)) as caught:
            pytest.fail(f"{given!r}: {tools_of(*given)}")
        named = "tools[0].function.parameters" if "parameters" in given[0] else "tools"
        assert caught.value.parameter == named, message
        assert "\n" not in str(caught.value), message


def test_a_choice_is_among_the_tools():
    assert ToolChoice("none").among(TOOLS) == ()
    assert ToolChoice("auto").among(TOOLS) == ToolChoice("required").among(TOOLS) == TOOLS
    assert ToolChoice("required", "get_time").among(TOOLS) == TOOLS[1:]
    with pytest.raises(RequestError, match="tool_choice is 'put'; allowed: a name in tools: get, ") as caught:
        ToolChoice("required", "put").among(TOOLS)
    assert caught.value.parameter == "tool_choice"


CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_a_function_is_called_with_the_parameters_that_it_declares() -> None:
    """Small models invent further names, and functions called with these fail."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"required": ["city"]}, True),
        ({"additionalProperties": False}, False),  # it is closed itself
        ({"additionalProperties": True}, False),
        ({"additionalProperties": {"type": "integer"}}, False),
        ({"patternProperties": {"^x": {}}}, False),
        ({"anyOf": [{"required": ["country"]}]}, False),
        ({"required": ["country"]}, False),  # which has no other schema, and must be there
        ({"properties": {}}, False),
    ]
    for more, closed in cases:
        given = CITY | more
        held = given | {"additionalProperties": False} if closed else given
        [tool] = tools_of({"name": "f", "parameters": given})
        assert tool.constrained_parameters == held, more
        assert tool.described()["function"]["parameters"] == given, more


def call(name, arguments, call_id="abcdefghi"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": "rain?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call("get", '{"city": "\u00d6slo"}')]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "no"}


def test_a_system_message_describes_tools_if_the_template_does_not():
    family = FAMILIES["hermes, described"]
    prompt = family.prompt([ASKED, CALLING, RESULT, RESULT], TOOLS)
    prompt = prompt.removesuffix("[assistant]").replace("[assistant]", "[user]")
    system, asked, answer, results = prompt.split("[user]")
    assert system.startswith("[system]You may call functions")
    shown = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in shown] == [tool.described() for tool in TOOLS]
    assert asked == "rain?"
    assert results == "<tool_response>\nno\n</tool_response>\n<tool_response>\nno\n</tool_response>"
    # Earlier calls, and the example, are in the form that is read, and that the grammar asks for.
    example = "\n".join(system.partition("</tools>")[2].splitlines()[2:-1])
    for text, expected in ((answer, "get"), (example, "function_name")):
        tools = tools_of({"name": expected})
        content, [(called, _)] = content_and_calls(events_of(family.format, tools, text))
        assert (content, called) == ("", expected)


def test_several_calls_and_texts_beside_them_are_kept():
    family = FAMILIES["hermes, described"]
    both = CALLING | {"tool_calls": [call("get", '{"city": "x"}'), call("get_time", "")]}
    [_, answer], _ = for_template([ASKED, both], (), family.format)
    said = content_and_calls(events_of(family.format, TOOLS, answer["content"]))
    assert said == ("", [("get", '{"city": "x"}'), ("get_time", "{}")])
    [_, answer], _ = for_template([ASKED, both | {"content": "So."}], (), family.format)
    assert answer["content"].startswith("So.\n")
    assert "tool_calls" not in answer


def test_malformed_messages_are_refused_like_in_the_template():
    with pytest.raises(RequestError, match="messages is empty"):
        for_template([], TOOLS, FAMILIES["hermes, described"].format)
    with pytest.raises(RequestError, match=r"messages\[1\].tool_calls is 'f'"):
        FAMILIES["llama3"].prompt([ASKED, CALLING | {"tool_calls": "f"}], TOOLS)


def test_parallel_calls_are_split_if_the_template_needs_it():
    both = CALLING | {"content": "So:", "tool_calls": [call("get", "{}", "a"), call("get_time", "{}", "b")]}
    results = [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in ("b", "a")]
    prompt = FAMILIES["llama3"].prompt
    once = prompt([ASKED, both, *results, ASKED], TOOLS)
    apart = [
        *(ASKED, both | {"tool_calls": both["tool_calls"][:1]}, results[1]),
        *(both | {"content": "", "tool_calls": both["tool_calls"][1:]}, results[0], ASKED),
    ]
    assert once == prompt(apart, TOOLS)
    nameless = [{"role": "tool", "content": f"of {i}"} for i in ("a", "b")]
    assert prompt([ASKED, both, *nameless, ASKED], TOOLS) == once
