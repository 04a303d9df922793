"""Earlier tool calls, as templates want to read them."""

import re

import pytest

from specinfer.errors import RequestError
from specinfer.tokenizer.chat_messages import messages_for_template


def call(arguments, **more):
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}} | more


def calling(*calls, **more):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"city": "\u00d6l", "days": [1]}', {"city": "\u00d6l", "days": [1]}),
        ({"city": "x"}, {"city": "x"}),
        ("{}", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_arguments_become_objects(given, arguments):
    [message] = messages_for_template([calling(call(given))])
    assert message["tool_calls"] == [call(arguments)]
    assert message["content"] == ""


def test_what_is_given_stays_as_it_is():
    given = [calling(call("{}"), content="so:"), {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    read = messages_for_template(given)
    assert given[0]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert (read[0]["content"], read[1]) == ("so:", given[1])


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_a_message_without_calls_has_no_list_of_them(nothing):
    [message] = messages_for_template([{"role": "assistant", "content": "a", "tool_calls": nothing}])
    assert message == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("f()", "messages[1].tool_calls is 'f()'; allowed: a list of calls"),
        ({"f": 1}, "messages[1].tool_calls is {'f': 1}; allowed: a list"),
        (["f()"], "messages[1].tool_calls[0] is 'f()'; allowed: {\"function\": "),
        ([{"function": "f"}], "messages[1].tool_calls[0] is {'function': 'f'}; allowed"),
        (
            [call("{}"), {"function": {}}],
            "messages[1].tool_calls[1].function.name is None; allowed: a string",
        ),
        ([call("{")], "messages[1].tool_calls[0].function.arguments is '{'; allowed: a JSON object"),
        ([call("[1]")], "function.arguments is '[1]'; allowed: a JSON object"),
        ([call("[" * 100_000)], "function.arguments is '[[["),
        ([call(3)], "function.arguments is 3; allowed"),
    ],
)
def test_calls_of_the_wrong_shape_are_refused(calls, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        messages_for_template([{"role": "user", "content": "hi"}, calling() | {"tool_calls": calls}])
