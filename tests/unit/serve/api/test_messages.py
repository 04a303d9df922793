"""POST /v1/messages: formats and events of Anthropic's API, its fields, and refusals that name them."""

from typing import Any

from specinfer.request import Delta, FinishReason
from specinfer.serve.backend.work import BackendError
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import FACTS, MODEL, says
from tests.unit.serve.api.servers import MessagesServer, more, prompt_tokens, start, stop
from tests.unit.serve.asked import HI


def test_a_message_in_one_piece_is_that_of_the_stream(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hel", "lo", cached_tokens=4))
    asked: dict[str, Any] = {"system": "Be brief.", "temperature": 0, "top_k": 3, "seed": 7}
    message = server.message(**asked, metadata={"user_id": "u"}, service_tier="auto")
    begun, *_, end, _ = server.events(**asked)
    assert message.pop("id") != begun["message"].pop("id")
    assert message == (
        begun["message"]
        | {"content": [{"type": "text", "text": "Hello"}], "usage": end["usage"], "metrics": end["metrics"]}
        | end["delta"]
    )
    assert message["usage"]["cache_read_input_tokens"] == 4
    assert message["usage"]["input_tokens"] == 34
    assert server.prompts[0] == "system: Be brief.\nuser: Hi\nassistant: "
    params = server.backend.works[0].params
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0, 3, 7, 100)


def test_a_stream_has_these_events(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hel", "lo"))
    events = server.events()
    assert events[0]["message"].pop("id").startswith("msg_")
    assert events[-2].pop("metrics")["speculative_decoding"]["num_spec_steps"] == 0
    usage = {"input_tokens": 20, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    usage |= {"output_tokens_details": {"thinking_tokens": 0}, "service_tier": "standard"}
    begun = {"type": "message", "role": "assistant", "model": MODEL, "content": []}
    begun |= {"stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    assert events == [
        *({"type": "message_start", "message": begun}, {"type": "ping"}),
        start(0, type="text", text=""),
        *(more(0, "text_delta", text=text) for text in ("Hel", "lo")),
        stop(0),
        {"type": "message_delta", "delta": ended, "usage": usage | {"output_tokens": 5}},
        {"type": "message_stop"},
    ]


def test_messages_have_a_stop_reason(tokenizer: Tokenizer) -> None:
    cases: list[tuple[list[Delta], str, str | None]] = [
        (says("Hel"), "end_turn", None),
        (says("Hel", reason=FinishReason.LENGTH), "max_tokens", None),
        (says("He", reason=FinishReason.LENGTH), "model_context_window_exceeded", None),
        (says("Hel", stopped_by="lo"), "stop_sequence", "lo"),
    ]
    for script, reason, sequence in cases:
        server = MessagesServer(tokenizer, script)
        message = server.message(max_tokens=3, stop_sequences=["lo", "x"])
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence), (script, reason)
        assert server.backend.works[0].params.stop == ("lo", "x"), (script, reason)
        *_, last, _ = server.events(max_tokens=3, stop_sequences=["lo", "x"])
        assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}, (script, reason)


def test_max_tokens_may_exceed_the_context(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hello"))
    server.message(max_tokens=10**9)
    assert server.backend.works[0].params.max_tokens == FACTS.max_length - 20


def test_a_message_of_no_text_has_no_blocks(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says(""))
    assert server.message()["content"] == []
    types = [one["type"] for one in server.events()]
    assert types == ["message_start", "ping", "message_delta", "message_stop"]


def test_turns_become_the_conversation(tokenizer: Tokenizer) -> None:
    marked = {"cache_control": {"type": "ephemeral"}}

    def text(value: str, **more: Any) -> dict[str, Any]:
        return {"type": "text", "text": value} | more

    turns = [
        by_user(text("One"), text("two", **marked)),
        {"role": "user", "content": "three"},
        by_assistant(text("Four", **marked, citations=None)),
        *({"role": "system", "content": "Count on."}, {"role": "user", "content": "Five"}),
    ]
    server = MessagesServer(tokenizer, says("Six"))
    server.message(system=[text("Be brief."), text("Be kind.", **marked)], messages=turns, **marked)
    assert server.prompts == [
        "system: Be brief.\nBe kind.\nuser: One\ntwo\nthree\nassistant: Four\nsystem: Count on.\n"
        "user: Five\nassistant: "
    ]


def test_an_answer_goes_on_from_a_turn_of_the_assistants(tokenizer: Tokenizer) -> None:
    prefilled = [*HI, {"role": "assistant", "content": "The answer is ("}]
    server = MessagesServer(tokenizer, says("B)"))
    message = server.message(messages=prefilled)
    assert message["content"] == [{"type": "text", "text": "B)"}]
    assert server.prompts == ["user: Hi\nassistant: The answer is ("]
    form = {"type": "json_schema", "schema": {"type": "object"}}
    refused = server.refusal(messages=prefilled, output_config={"format": form})
    assert refused[:2] == (400, "invalid_request_error")
    assert "output_config.format" in refused[2]


def test_a_form_holds_the_text(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form = {"type": "json_schema", "schema": schema}
    where = "response_format.json_schema.schema"
    refused = Delta("", finish_reason=FinishReason.ERROR, error=f"{where} cannot be used", parameter=where)
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        server = MessagesServer(tokenizer, says('{"city": "Rome"}'), [refused])
        server.message(**body)
        assert '"city"' in server.form()
        refusal = (400, "invalid_request_error", "output_config.format.schema cannot be used")
        assert server.refusal(**body) == refusal


def test_extensions_are_those_of_the_other_endpoints(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("hello"))
    guess = {"type": "content", "content": "hello"}
    server.message(regex="[a-z]+", speculation={"max_nodes": 4}, prediction=guess, cache_salt="me")
    params = server.backend.works[0].params
    assert server.form()
    assert (params.speculation.max_nodes, params.cache_salt) == (4, "me")
    assert len(params.prediction) == len("hello")


def test_a_conversation_is_counted(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hello"))
    answer = server.post("/messages/count_tokens", system="Be brief.")
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 38})
    assert server.backend.works == []
    refused = server.refusal(path="/messages/count_tokens", messages=[])
    assert refused[:2] == (400, "invalid_request_error")


def test_a_failed_answer_has_an_error(tokenizer: Tokenizer) -> None:
    for trouble, status, kind in (
        (BackendError("the engine died"), 500, "api_error"),
        (Delta("", finish_reason=FinishReason.ERROR, error="none is left"), 400, "invalid_request_error"),
        (Delta("", finish_reason=FinishReason.ABORT), 500, "api_error"),
    ):
        server = MessagesServer(tokenizer, [trouble], [trouble], [Delta("", "Hel", (72, 101, 108)), trouble])
        assert server.refusal()[:2] == (status, kind), trouble
        assert server.refusal(stream=True)[:2] == (status, kind), trouble  # nothing has been said yet
        *events, last = server.events()
        assert events[-1]["delta"]["text"] == "Hel", trouble
        assert (last["type"], last["error"]["type"]) == ("error", kind), trouble


def test_refusals_before_the_endpoint_have_the_same_format(tokenizer: Tokenizer) -> None:
    cases: list[tuple[str, dict[str, str], int, str]] = [
        ("/messages", {}, 401, "authentication_error"),
        ("/messages/batches", {"Authorization": "Bearer key"}, 404, "not_found_error"),
        ("/messages", {"Authorization": "Bearer key"}, 413, "request_too_large"),
    ]
    for path, headers, status, kind in cases:
        server = MessagesServer(tokenizer, says("Hello"), keys=["key"], max_body=1024)
        body = {"system": "x" * 2000} if status == 413 else {}
        answer = server.http.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), (path, headers)
        assert answer.json()["type"] == "error", (path, headers)
        elsewhere = server.http.post("/chat/completions", json=body, headers=headers)
        assert "type" not in elsewhere.json(), (path, headers)


def test_marks_pin_the_prefix_that_they_end(tokenizer: Tokenizer) -> None:
    def asked(ttl: str, where: str, **more: Any) -> dict[str, Any]:
        marks = {where: {"cache_control": {"type": "ephemeral", "ttl": ttl}}}
        turns = [("user", "One", "first"), ("assistant", "Two", "answer"), ("user", "Three", "last")]
        return {
            "system": [{"type": "text", "text": "Be brief."} | marks.get("system", {})],
            "messages": [
                {"role": role, "content": [{"type": "text", "text": text} | marks.get(name, {})]}
                for role, text, name in turns
            ],
        } | more

    begin = len("system: Be brief.\n")
    whole = begin + len("user: One\nassistant: Two\nuser: Three\n")
    top = {"cache_control": {"type": "ephemeral"}}
    for body, pins, read, created in (
        (asked("1h", "nowhere"), (), 4, 0),
        (asked("1h", "system"), ((begin, 3600),), 4, begin - 4),
        (asked("5m", "first"), ((begin + len("user: One\n"), 300),), 4, begin + len("user: One\n") - 4),
        (asked("1h", "system", **top), ((begin, 3600), (whole, 300)), begin, whole - begin),
        (asked("5m", "system"), ((begin, 300),), whole, 0),
    ):
        server = MessagesServer(tokenizer, says("Hel", "lo", cached_tokens=read))
        usage = server.message(**body)["usage"]
        assert server.backend.works[0].params.cache_pins == pins
        assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (read, created)
        assert prompt_tokens(usage) == len(server.prompts[0])
    image = {"type": "image", "source": {}} | top
    for refused, message in (
        ({"messages": [by_user(image)]}, "messages[0].content[0] is of type 'image'"),
        ({"system": [{"type": "text", "text": "a"} | top] * 5}, "5 blocks have cache_control; allowed: at m"),
    ):
        assert server.refusal(**refused)[2].startswith(message)


def test_a_prompt_that_is_too_long_has_the_message_that_clients_match(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hello"))
    for path in ("/messages", "/messages/count_tokens"):
        refusal = server.refusal(path=path, messages=[{"role": "user", "content": "x" * 7_000_000}])
        assert refusal[:2] == (400, "invalid_request_error")
        assert refusal[2].startswith("prompt is too long: the prompt has 109375 tokens or more")


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
IMAGE_TYPE = str({"type": "image"})[1:-1]
USE = {"type": "tool_use", "id": "toolu_1", "name": "time", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}
PICTURED = RESULT | {"content": [IMAGE]}
TIME = {"name": "time", "input_schema": {"type": "object"}}


def by_user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def by_assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"tools": []},
    {"tool_choice": {"type": "auto"}},
    {"tool_choice": {"type": "none"}, "tools": [TIME]},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "adaptive"}},
    {"thinking": {"type": "enabled", "budget_tokens": 4}},  # the model does not reason
    {"stop_sequences": []},
    {"stop_sequences": [""]},
    {"speed": "fast", "inference_geo": "us", "service_tier": "standard_only"},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"mcp_servers": []},
    {"n": 1},
    {"output_config": {}},
    {"stream_options": {"include_usage": False}, "stream": True},  # the usage comes in any case
    {"output_config": {"effort": "low"}},
    {"reasoning_effort": "low"},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
]


def test_fields_without_effect_are_accepted(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hello"))
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    usual = {"max_tokens": 5, "messages": HI}
    for body in WITHOUT_EFFECT:
        answer = server.http.post("/messages?beta=true", json=usual | body, headers=headers)
        assert answer.status_code == 200, (body, answer.text)
        assert server.prompts[-1] == "user: Hi\nassistant: ", body


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"context_management": {"edits": 5}}, "context_management"),
    ({"messages": []}, "messages"),
    ({"messages": [by_user(IMAGE)]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [by_user(USE)]}, "messages[0].content[0]"),
    ({"messages": [by_assistant(RESULT)]}, "messages[0].content[0]"),
    ({"messages": [by_user(RESULT)]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [by_assistant(USE), by_user(PICTURED)]}, "messages[1].content[0].content[0]"),
    ({"messages": [*HI, by_assistant(USE)]}, "messages"),
    ({"messages": [*HI, by_assistant({"type": "thinking", "thinking": "Hm"})]}, "messages"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [{"name": "time"}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [TIME]}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "name": "time"}, "tools": [TIME]}, "tool_choice"),
    ({"tools": [TIME]}, "tools"),  # the template has no calls
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"stop": "x", "stop_sequences": ["y"]}, "stop"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"guided_json": {"type": "object"}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"trace": True}, "trace"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    ({"regex": "a", "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "regex"),
]


def test_unsupported_values_are_refused_with_their_path(tokenizer: Tokenizer) -> None:
    server = MessagesServer(tokenizer, says("Hello"))
    for body, place in REFUSED:
        status, kind, message = server.refusal(**body)
        assert (status, kind) == (400, "invalid_request_error"), body
        assert place in message, body
        assert ("image input is not supported by this server" in message) == (IMAGE_TYPE in str(body)), body
    assert server.backend.works == []
