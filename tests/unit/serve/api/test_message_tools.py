"""Tools and reasoning as blocks of a message."""

import json
from pathlib import Path
from typing import Any

from specinfer.tokenizer import Tokenizer
from tests.scripted_server import byte_tokenizer, says
from tests.unit.serve.api.servers import OSLO, PLACE, ROME, TEMPLATE, MessagesServer, call, more, start, stop  # noqa: F401 - `tokenizer` reads it
from tests.unit.serve.asked import HI

WEATHER: Any = {"name": "weather", "description": "What it is like.", "input_schema": PLACE}
TIME: Any = {"type": "custom", "name": "time", "input_schema": {"type": "object"}, "strict": True}


def test_reasoning_text_and_calls_are_blocks(tokenizer: Tokenizer) -> None:
    written = "<think>Hm.</think>", f"Let me see.\n{call('weather', ROME)}\n{call('time', '{}')}"
    server = MessagesServer(tokenizer, says(*written))
    message = server.message(tools=[WEATHER, TIME])
    thoughts, text, first, second = message["content"]
    assert thoughts == {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert text == {"type": "text", "text": "Let me see."}
    assert first.pop("id") != second.pop("id")
    assert first == {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    assert second == {"type": "tool_use", "name": "time", "input": {}}
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 18}
    [shown, _] = json.loads(server.prompts[0].split("\n")[0].removeprefix("tools: "))
    described = {"name": "weather", "description": "What it is like.", "parameters": PLACE}
    assert shown == {"type": "function", "function": described}
    assert '"city"' in server.form()


def test_calls_are_streamed_piece_by_piece(tokenizer: Tokenizer) -> None:
    begin = '<tool_call>\n{"name": "weather", "arguments": '

    written = ("<think>Hm.</think>", f"So.\n{begin}{ROME[:5]}", f"{ROME[5:]}}}\n</tool_call>")
    server = MessagesServer(tokenizer, says(*written))
    _, _, *events, last, _ = server.events(tools=[WEATHER])
    assert events[7]["content_block"].pop("id")
    assert events == [
        start(0, type="thinking", thinking="", signature=""),
        more(0, "thinking_delta", thinking="Hm."),
        more(0, "signature_delta", signature="unsigned"),
        stop(0),
        start(1, type="text", text=""),
        more(1, "text_delta", text="So."),
        stop(1),
        start(2, type="tool_use", name="weather", input={}),
        *(more(2, "input_json_delta", partial_json=piece) for piece in (ROME[:5], ROME[5:])),
        stop(2),
    ]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_calls_and_results_are_sent_back(tokenizer: Tokenizer) -> None:
    written = f"<think>Hm.</think>{call('weather', ROME)}\n{call('weather', OSLO)}"
    server = MessagesServer(tokenizer, says(written), says("Rain."))
    first = server.message(tools=[WEATHER])
    rome, oslo = (block["id"] for block in first["content"][1:])
    results = [
        {"type": "tool_result", "tool_use_id": rome, "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": oslo, "content": "no such place", "is_error": True},
        {"type": "text", "text": "Go on."},
    ]
    turns = [*HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    server.message(tools=[WEATHER], messages=turns)
    assert server.prompts[1].split("\n", 1)[1] == (
        "user: Hi\n"
        f'assistant: <think>Hm.</think><tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>'
        f'<tool_call>{{"name": "weather", "arguments": {OSLO}}}</tool_call>\n'
        "tool!: rain\ntool!: Error: no such place\nuser: Go on.\nassistant: "
    )


def test_tool_choice_selects_the_tools(tokenizer: Tokenizer) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"type": "any"}, ("weather", "time")),
        ({"type": "tool", "name": "time"}, ("time",)),
        ({"type": "none"}, ()),
    ]
    for choice, calls in cases:
        server = MessagesServer(tokenizer, says("Rain."))
        server.message(tools=[WEATHER, TIME], tool_choice=choice)
        source = server.form().replace("\\", "")
        assert tuple(name for name in ("weather", "time") if f'"{name}"' in source) == calls, choice


def test_parallel_calls_can_be_disabled(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Rain."))
    for parallel in (None, False, True):
        choice = {"type": "any", "disable_parallel_tool_use": parallel}
        server.message(tools=[TIME], tool_choice=choice)
    usual, several, one = (work.params.structured_output for work in server.backend.works)
    assert usual == several != one


def test_complaints_about_tools_are_in_the_words_of_this_endpoint(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Rain."))
    poem = {"type": "object", "properties": {"a": {"type": "string", "format": "poem"}}}
    for tool, begins in (
        ({"input_schema": {"type": "string"}}, "tools[0].input_schema has the type 'string'"),
        ({"name": "a b"}, "tools[0].name is 'a b'"),
        ({"input_schema": poem}, "tools[0].input_schema cannot be used: Unknown format: poem"),
    ):
        assert server.refusal(tools=[TIME | tool])[2].startswith(begins), tool
    missing = server.refusal(tools=[TIME], tool_choice={"type": "tool", "name": "x"})
    assert missing[2].startswith("tool_choice is 'x'")
    for usual in (None, False):  # the keyword is left out
        server.message(tools=[TIME | {"input_schema": poem, "strict": usual}])


def test_thinking_sets_the_templates_switch(tokenizer: Tokenizer) -> None:
    cases: list[tuple[Any, str]] = [
        ({"type": "enabled", "budget_tokens": 50}, "<think>\n"),
        ({"type": "disabled"}, "<think></think>"),
        ({"type": "adaptive"}, "assistant: "),
        (None, "assistant: "),
    ]
    for thinking, ends in cases:
        server = MessagesServer(tokenizer, says("Hm.</think>Four." if ends == "<think>\n" else "Four."))
        message = server.message(thinking=thinking)
        assert server.prompts[0].endswith(ends), thinking
        kinds = [block["type"] for block in message["content"]]
        assert kinds == (["thinking", "text"] if ends == "<think>\n" else ["text"]), thinking
        counted = server.post("/messages/count_tokens", thinking=thinking)
        assert counted.json() == {"input_tokens": len(server.prompts[0])}, thinking


def test_thinking_is_bounded_by_either_field(tokenizer: Tokenizer) -> None:
    cases: list[tuple[dict[str, Any], int | None, int | None]] = [
        ({"type": "enabled"}, 5, 5),
        ({"type": "enabled", "budget_tokens": 5}, None, 5),
        ({"type": "adaptive", "budget_tokens": 5}, 5, 5),
        ({"type": "adaptive"}, None, None),
        ({"type": "disabled"}, None, 0),
    ]
    for thinking, other, tokens in cases:
        server = MessagesServer(tokenizer, says("Four."))
        switch = {"chat_template_kwargs": {"enable_thinking": True}}  # else disabled thinking is closed
        server.message(thinking=thinking, thinking_token_budget=other, **switch)
        bound = server.backend.works[0].params.thinking
        assert (bound and bound.tokens) == tokens, thinking
    for thinking in ({"type": "enabled", "budget_tokens": 6}, {"type": "disabled"}):
        refused = server.refusal(thinking=thinking, thinking_token_budget=5)
        assert "thinking_token_budget is 5; give one of them" in refused[2], thinking


def test_reasoning_may_be_omitted(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("<think>Hm.</think>Four."))
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    thought = {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert server.message(**hidden)["content"] == [thought, {"type": "text", "text": "Four."}]
    events = server.events(**hidden)
    assert "thinking_delta" not in [one.get("delta", {}).get("type") for one in events]


def test_a_prefilled_answer_has_no_reasoning(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says(" four."))
    begun = [*HI, {"role": "assistant", "content": "It is"}]
    message = server.message(messages=begun, thinking={"type": "enabled", "budget_tokens": 50})
    assert server.prompts[0].endswith("assistant: It is")
    assert message["content"] == [{"type": "text", "text": " four."}]


def test_thinking_has_no_effect_without_a_switch(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}"
    server = MessagesServer(byte_tokenizer(tmp_path, plain), says("<think>Hm.</think>Four."))
    for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 50}):
        content = server.message(thinking=thinking)["content"]
        assert [block["type"] for block in content] == ["thinking", "text"]
    assert server.prompts == ["Hi", "Hi"]
