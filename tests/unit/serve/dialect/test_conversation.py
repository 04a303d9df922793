"""Messages for templates of each family, and for one without tools."""

import json

import pytest

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_format import for_template
from tests.unit.serve.dialect.families import FAMILIES, TOOLS, tools_of
from tests.unit.serve.dialect.whole_answers import content_and_calls, events_of


def call(name, arguments, call_id="abcdefghi"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": "rain?"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call("get", '{"city": "\u00d6slo"}')]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "no"}


def test_a_system_message_describes_tools_if_the_template_does_not():
    family = FAMILIES["hermes, described"]
    prompt = family.prompt([ASKED, CALLING, RESULT, RESULT], TOOLS)
    system, asked, answer, results = (
        prompt.removesuffix("[assistant]").replace("[assistant]", "[user]").split("[user]")
    )
    assert system.startswith("[system]You may call functions")
    shown = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in shown] == [tool.described() for tool in TOOLS]
    assert asked == "rain?"
    assert results == "<tool_response>\nno\n</tool_response>\n<tool_response>\nno\n</tool_response>"
    # Earlier calls, and the example, are in the form that is read, and that the grammar asks for.
    for text, expected in ((answer, "get"), (system.partition("</tools>")[2].splitlines(), "function_name")):
        lines = [text] if isinstance(text, str) else ["\n".join(text[2:-1])]
        tools = tools_of({"name": expected})
        content, [(called, _)] = content_and_calls(events_of(family.format, tools, lines[0]))
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
