"""POST /v1/responses, read by OpenAI's client; its fields, and refusals that name them."""

from typing import Any

import openai
import pytest
from openai.types.responses import Response

from specinfer.request import Delta, FinishReason
from specinfer.serve.api.responses import ResponseStore
from specinfer.serve.backend.work import BackendError
from specinfer.serve.http.api_error import ApiError
from specinfer.tokenizer import Tokenizer
from tests.scripted_server import FACTS, MODEL, says
from tests.unit.serve.api.servers import EVENT, ResponsesServer, item


def test_a_whole_answer_is_valid_for_the_client(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("Hel", "lo", cached_tokens=4))
    given: Any = {"instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0}
    answer = server.create(**given, extra_body={"seed": 7, "top_k": 3})
    reply = answer.model_dump()
    Response.model_validate(reply)
    assert (answer.output_text, answer.status) == ("Hello", "completed")
    assert {name: reply[name] for name in given} == given
    assert answer.usage.to_dict() == {
        **{"input_tokens": 38, "output_tokens": 5, "total_tokens": 43},
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    assert reply["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert server.prompts == ["system: Be brief.\nuser: Hi\nassistant: "]
    params = server.backend.works[0].params
    assert (params.temperature, params.seed, params.top_k) == (0, 7, 3)
    assert params.max_tokens == FACTS.max_length - 38


def test_a_stream_has_the_events_that_the_client_knows(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("Hel", "lo"))
    events, types = server.stream(model=MODEL, input="Hi")
    assert types == ["created", "in_progress", *item("output_text", 2), "completed"]
    assert [one["delta"] for one in events if "delta" in one] == ["Hel", "lo"]
    assert events[3]["part"]["text"] == ""
    created, last = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    [said] = last["output"]
    assert said == events[-2]["item"]
    assert said["content"][0] == events[-3]["part"]
    assert said["content"][0]["text"] == events[-4]["text"] == "Hello"
    assert {one["item_id"] for one in events if "item_id" in one} == {said["id"]}
    assert server.http.get(f"/responses/{last['id']}").json() == last


def test_an_answer_that_is_cut_is_incomplete(tokenizer: Tokenizer) -> None:
    cut = FinishReason.LENGTH
    server = ResponsesServer(tokenizer, says("Hel", reason=cut), says("Hel", reason=cut), says("lo"))
    answer = server.create(max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    events = server.events(model=MODEL, input="Hi", max_output_tokens=3)
    assert EVENT.validate_python(events[-1]).type == "response.incomplete"
    server.create("Go on.", previous_response_id=answer.id)
    assert server.prompts[-1] == "user: Hi\nassistant: Hel\nuser: Go on.\nassistant: "


def test_a_failed_answer_has_an_error_and_is_not_stored(tokenizer: Tokenizer) -> None:
    for trouble, status, code in (
        (BackendError("the engine died"), 500, "server_error"),
        (Delta("", finish_reason=FinishReason.ERROR, error="no token is left"), 400, "invalid_prompt"),
        (Delta("", finish_reason=FinishReason.ABORT), 500, "server_error"),
    ):
        server = ResponsesServer(tokenizer, [trouble], [trouble], [Delta("", "Hel", (72, 101, 108)), trouble])
        assert server.refusal(input="Hi")[0] == status, trouble
        assert server.refusal(input="Hi", stream=True)[0] == status, trouble  # nothing has been said yet
        *_, last = server.events(input="Hi")
        failed = EVENT.validate_python(last)
        assert (failed.type, failed.response.status) == ("response.failed", "failed"), trouble
        assert (failed.response.error.code, failed.response.output_text) == (code, "Hel"), trouble
        assert server.http.get(f"/responses/{failed.response.id}").status_code == 404, trouble


def test_a_conversation_goes_on_by_the_answers_id(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("two"), says("four"), says("SIX"))
    first = server.create("One", instructions="Count.")
    second = server.create("Three", previous_response_id=first.id)
    server.responses.delete(first.id)
    parts = [{"type": "input_text", "text": "Fi"}, {"type": "input_text", "text": "ve"}]
    asked = [{"role": "developer", "content": "Odd."}, {"role": "user", "content": parts}]
    third = server.create(asked, instructions="Shout.", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    assert server.prompts == [
        "system: Count.\nuser: One\nassistant: ",
        "user: One\nassistant: two\nuser: Three\nassistant: ",
        "system: Shout.\nuser: One\nassistant: two\nuser: Three\nassistant: four\n"
        "system: Odd.\nuser: Five\nassistant: ",
    ]
    gone = server.refusal(input="x", previous_response_id=first.id)
    assert gone[:2] == (400, "previous_response_id")
    with pytest.raises(openai.NotFoundError):
        server.responses.retrieve(first.id)
    assert server.responses.retrieve(second.id).output_text == "four"
    odd = server.http.get(f"/responses/{second.id}?stream=true")
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "stream")


def test_an_answer_belongs_to_the_key_of_its_request(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, keys=["own", "other"])

    def status_and_body(method: str, path: str, key: str, **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = server.http.request(method, f"/responses{path}", headers=headers, json=body or None)
        return answer.status_code, answer.json()

    _, first = status_and_body("POST", "", "own", input="One")
    place = f"/{first['id']}"
    for method, more in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
        status, reply = status_and_body(method, place + more, "other")
        assert (status, reply["error"]["code"]) == (404, "response_not_found")
    later: dict[str, Any] = {"input": "Two", "previous_response_id": first["id"]}
    status, reply = status_and_body("POST", "", "other", **later)
    assert (status, reply["error"]["code"]) == (400, "previous_response_not_found")
    assert status_and_body("GET", place, "own") == (200, first)
    assert status_and_body("POST", "", "own", **later)[0] == 200
    assert status_and_body("DELETE", place, "own")[0] == 200


def test_store_false_is_honoured(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, stored_responses=2)
    answers = [server.create(store=store) for store in (True, False, None, None)]
    found = [server.http.get(f"/responses/{answer.id}").status_code for answer in answers]
    assert found == [404, 404, 200, 200]  # two have room
    without = ResponsesServer(tokenizer, stored_responses=0)
    assert without.create().to_dict()["store"] is False
    assert without.refusal(input="Hi", store=True)[:2] == (400, "store")


def test_log_probabilities_come_with_the_text(tokenizer: Tokenizer) -> None:
    wanted: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    server = ResponsesServer(tokenizer, says("o", "k", logprobs=True))
    events = server.events(input="Hi", **wanted)
    deltas = [EVENT.validate_python(one) for one in events if one["type"] == "response.output_text.delta"]
    assert [[p.token for p in one.logprobs] for one in deltas] == [["o"], ["k"]]
    assert [p.logprob for p in deltas[0].logprobs[0].top_logprobs] == [-0.5]
    answer = Response.model_validate(events[-1]["response"])
    reply = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert [(p.token, p.bytes, len(p.top_logprobs)) for p in reply] == [("o", [111], 1), ("k", [107], 1)]
    assert server.backend.works[0].params.logprobs == 1


def test_a_finished_answer_is_not_cancelled(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer, says("ok"))
    answer = server.create("One")
    with pytest.raises(openai.BadRequestError, match="only background responses can be cancelled"):
        server.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        server.responses.cancel("resp_" + "x" * 10_000)


def test_the_oldest_leave_where_all_are_too_large() -> None:
    store = ResponseStore(10, max_bytes=250)
    for name, size in (("a", 30), ("b", 30), ("c", 30), ("d", 300)):
        store.keep(name, {}, [{"role": "user", "content": "x" * size}])
        if name == "c":
            assert store.get("a").body == b"{}"
    for gone in "abc":
        with pytest.raises(ApiError):
            store.get(gone)
    assert store.get("d").body == b"{}"  # the newest stays, whatever its size
    store.forget("d")
    store.keep("e", {}, [])
    assert store.conversation("e") == ()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({}, "input"),
    ({"input": [{"id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal"),
    ({"input": [{"role": "user", "content": [{"text": "a"}]}]}, "input[0].content[0].type"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"n": 2}, "n"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"trace": True}, "trace"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
]


def test_unsupported_values_are_refused_by_name(tokenizer: Tokenizer) -> None:
    server = ResponsesServer(tokenizer)
    for body, param in REFUSED:
        whole = {"input": "Hi"} | body if body else {}
        status, named, message = server.refusal(**whole)
        assert (status, named) == (400, param), body
        assert "response_format.json" not in message
        assert ("image input is not supported by this server" in message) == ("input_image" in str(body))
    assert server.backend.works == []


def test_values_without_effect_are_accepted(tokenizer: Tokenizer) -> None:
    nothing: dict[str, Any] = {
        **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tool_calls": 2},
        "reasoning": {"effort": "low", "summary": "detailed"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        **{"truncation": "auto", "service_tier": "flex", "n": 1, "trace": False, "background": False},
        **{"user": "u", "prompt_cache_key": "k", "top_logprobs": 0, "conversation": None},
        "include": ["web_search_call.results"],
    }
    server = ResponsesServer(tokenizer, says("a"))
    answer = server.http.post("/responses", json=nothing | {"input": "Hi"})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    assert server.backend.works[0].params.structured_output is None
    assert server.backend.works[0].params.logprobs is None


def test_the_engines_complaint_names_this_endpoints_field(tokenizer: Tokenizer) -> None:
    error = "7 prompt tokens and max_tokens 9 need 16 KV cache positions; lower max_tokens"
    complaint = Delta("", finish_reason=FinishReason.ERROR, error=error, parameter="max_tokens")
    server = ResponsesServer(tokenizer, [complaint])
    _, param, message = server.refusal(input="Hi")
    assert param == "max_output_tokens"
    assert message.endswith("lower max_output_tokens")
