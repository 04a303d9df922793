"""Earlier tool calls in the format that templates read."""

import json
import re

import pytest

from specinfer.errors import RequestError
from specinfer.tokenizer.chat_template import MessageStyle, messages_for_template


def call(arguments, **more):
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}} | more


def calling(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def test_arguments_become_objects():
    city = {"city": "\u00d6l", "days": [1]}
    for given, arguments in ((json.dumps(city), city), (city, city), ("{}", {}), ("", {}), (None, {})):
        [message] = messages_for_template([calling(call(given))])
        assert message["tool_calls"] == [call(arguments)], given
        assert message["content"] == ""


def test_input_messages_are_unchanged():
    given = [calling(call("{}"), content="so:"), {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    read = messages_for_template(given)
    assert given[0]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert (read[0]["content"], read[1]) == ("so:", given[1])


def test_a_message_without_calls_has_no_list_of_them():
    for nothing in (None, [], ()):
        [message] = messages_for_template([{"role": "assistant", "content": "a", "tool_calls": nothing}])
        assert message == {"role": "assistant", "content": "a"}


def test_calls_of_the_wrong_shape_are_refused():
    for calls, message in (
        ("f()", " is 'f()'; allowed: a list of calls"),
        ({"f": 1}, " is {'f': 1}; allowed: a list"),
        (["f()"], "[0] is 'f()'; allowed: {\"function\": "),
        ([{"function": "f"}], "[0] is {'function': 'f'}; allowed"),
        ([call("{}"), {"function": {}}], "[1].function.name is None; allowed: a string"),
        ([call("{")], "[0].function.arguments is '{'; allowed: a JSON object"),
        ([call("[1]")], "[0].function.arguments is '[1]'; allowed: a JSON object"),
        ([call("[" * 100_000)], "[0].function.arguments is '[[["),
        ([call(3)], "[0].function.arguments is 3; allowed"),
    ):
        with pytest.raises(RequestError, match=re.escape(f"messages[1].tool_calls{message}")):
            messages_for_template([{"role": "user", "content": "hi"}, calling() | {"tool_calls": calls}])


# Checks of common templates.

NINE = MessageStyle(id_length=9)


def ids(*messages, style=NINE):
    """Return the call ids of each message, or the id of its result."""
    read = messages_for_template([{"role": "user", "content": "hi"}, *messages], style)[1:]
    return [[c["id"] for c in m["tool_calls"]] if "tool_calls" in m else m.get("tool_call_id") for m in read]


def result(call_id=None, content="4"):
    return {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


def test_an_id_that_does_not_fit_becomes_one_that_does_the_same_in_every_request():
    both = calling(call("{}", id="call_0123"), call("{}", id="call_4567"))
    turn = [both, result("call_4567"), result("call_0123")]
    [[one, other], second, first] = ids(*turn)
    assert (first, second) == (one, other)
    assert one != other
    assert [(len(made), made.isalnum()) for made in (one, other)] == [(9, True)] * 2
    again = calling(call("{}", id="call_89")), result("call_89")
    later = ids(*turn, {"role": "assistant", "content": "so"}, *again)
    assert later[:3] == [[one, other], second, first]
    assert later[4] == [later[5]]
    # A hash of the id, and so the same in every process and release.
    assert one == "NyEMk40m4"


def test_ids_that_fit_stay_and_missing_ones_are_made():
    assert ids(calling(call("{}", id="abcDEF123")), result("abcDEF123")) == [["abcDEF123"], "abcDEF123"]
    given = calling(call("{}", id=None), call("{}", id=None))
    [[one, other], *results] = ids(given, result(), result())
    assert results == [one, other]
    assert one != other
    [[kept]] = ids(calling(call("{}", id="call_0123")), style=MessageStyle())
    assert kept == "call_0123"


def test_a_template_that_reads_parts_alone_gets_them():
    hi, a = ({"type": "text", "text": text} for text in ("hi", "a"))
    given = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [a]}]
    read = messages_for_template(given, MessageStyle(parts=["user", "assistant"]))
    assert [m["content"] for m in read] == [[hi], [a]]


def test_normalized_messages_are_unchanged():
    given = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
        *(calling(call('{"a": 1}', index=0)), result("c1"), {"role": "assistant", "refusal": "No."}),
        {"role": "assistant", "content": "x", "reasoning": "hm", "cache_control": {"type": "ephemeral"}},
    ]
    once = messages_for_template(given)
    assert messages_for_template(once) == once
    assert once == [
        *({"role": "system", "content": "s"}, {"role": "user", "content": "ab"}),
        *(calling(call({"a": 1})) | {"content": ""}, result("c1"), {"role": "assistant", "content": "No."}),
        {"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": "hm"},
    ]
