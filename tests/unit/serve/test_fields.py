"""What bodies may say, and what is answered to others: 400 with the field at fault, and nothing ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specinfer import SamplingParams
from specinfer.serve.api_error import ApiError
from specinfer.serve.chat import ChatFields
from specinfer.serve.completions import CompletionFields
from specinfer.serve.fields import parse
from specinfer.serve.response_fields import ResponseFields
from specinfer.serve.token_fields import DetokenizeFields
from specinfer.structured_output import structured_output
from specinfer.tokenizer.chat_template import messages_for_template

HI = [{"role": "user", "content": "Hi"}]


def error_of(kind: Any, body: Any) -> dict[str, Any]:
    """The error that a body gets, when its fields are read, checked and turned into parameters."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    def read() -> None:
        fields = parse(kind, raw)
        fields.check()
        fields.params()

    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.status == 400
    assert not isinstance(caught.value.__context__, ValidationError)  # its faults would stay in memory
    error: dict[str, Any] = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": HI, "temprature": 1}, "temprature", "no field of this endpoint"),
        ({"messages": [{"role": "user", "content": "Hi", "x": 1}]}, "messages[0].x", "no field"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid array"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "required"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content", "required"),
        *(
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}, param, said)
            for part, param, said in (
                ({"type": "text"}, "messages[0].content[1].text", "required"),
                ({"type": "text", "text": None}, "messages[0].content[1].text", "required"),
                ({"type": "text", "refusal": "No."}, "messages[0].content[1].text", "required"),
                ({"type": "refusal"}, "messages[0].content[1].refusal", "required"),
                ({"type": "refusal", "text": "a"}, "messages[0].content[1].refusal", "required"),
                ({"text": "a"}, "messages[0].content[1].type", "required"),
                (
                    {"type": "image_url", "image_url": {"url": "http://a.example/b.png"}},
                    "messages[0].content[1].type",
                    "is 'image_url'; allowed: 'text'",
                ),
                (
                    {"type": "input_audio", "input_audio": {}},
                    "messages[0].content[1].type",
                    "is 'input_audio'",
                ),
                ({"type": "file", "file": {}}, "messages[0].content[1].type", "is 'file'"),
                ("a", "messages[0].content[1]", "object"),
            )
        ),
        (
            {"messages": HI, "prediction": {"type": "content", "content": [{"type": "text"}]}},
            "prediction.content[0].text",
            "required",
        ),
        (
            {
                "messages": HI,
                "prediction": {"type": "content", "content": [{"type": "refusal", "refusal": "No."}]},
            },
            "prediction.content[0].type",
            "is 'refusal'; allowed: 'text'",
        ),
        ({"messages": []}, "messages", "empty"),
        ({}, "messages", "required"),
        ({"messages": HI, "temperature": "hot"}, "temperature", "valid number"),
        ({"messages": HI, "temperature": -1}, "temperature", ">= 0"),
        ({"messages": HI, "top_p": 0}, "top_p", "(0, 1]"),
        ({"messages": HI, "n": 0}, "n", "[1, 1024]"),
        ({"messages": HI, "seed": 1.5}, "seed", "integer"),
        ({"messages": HI, "stop": ["a"] * 65}, "stop", "at most 64"),
        ({"messages": HI, "stop": "a" * 1025}, "stop", "of at most 1024"),
        ({"messages": HI, "bad_words": ["a"] * 1025}, "bad_words", "at most 1024"),
        ({"messages": HI, "bad_words": ["a" * 1025]}, "bad_words", "of at most 1024"),
        ({"messages": HI, "logit_bias": {"1": 1000}}, "logit_bias", "[-100, 100]"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": HI, "prompt_logprobs": 1000}, "prompt_logprobs", "20"),
        (
            {"messages": HI, "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "False",
        ),
        ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"messages": HI, "tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []},
            "tool_choice",
            "needs tools",
        ),
        ({"messages": HI, "service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
        ({"messages": HI, "store": True}, "store", "allowed: false"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities", "only text"),
        ({"messages": HI, "functions": [{"name": "f"}]}, "functions", "send them as tools"),
        ({"messages": HI, "speculation": {"nodes": 3}}, "speculation", "no option 'nodes'"),
        ({"messages": HI, "speculation": {"verifier": "magic"}}, "speculation", "coupled"),
        ({"messages": HI, "regex": "a", "choice": ["b"]}, None, "regex"),
        ({"messages": HI, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ],
)
def test_a_conversation_that_cannot_be_served(body: Any, param: str | None, said: str) -> None:
    error = error_of(ChatFields, body)
    assert said in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1], "suffix": "b"}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "prediction": {"text": "b"}}, "prediction"),
    ],
)
def test_a_prompt_that_cannot_be_served(body: Any, param: str) -> None:
    def read() -> None:
        fields = parse(CompletionFields, json.dumps(body).encode())
        fields.check()
        fields.prompts()

    with pytest.raises(ApiError) as caught:
        read()
    assert caught.value.body["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "Hi"}], "response_format": ' + b'{"a":' * 50_000,
        b'{"messages": [{"role": "user", "content": "Hi"}], "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_request(raw: bytes) -> None:
    error_of(ChatFields, raw)


def test_what_fields_mean() -> None:
    fields = parse(
        ChatFields,
        json.dumps(
            {
                "messages": HI,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "seed": 3,
                "stop": "END",
                "logit_bias": {"42": -5},
                "choice": ["yes", "no"],
                "cache_salt": "me",
                "speculation": {"max_nodes": 8},
            }
        ).encode(),
    )
    assert fields.params(max_tokens=9) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=("END",),
        logit_bias={42: -5.0},
        choice=("yes", "no"),
        cache_salt="me",
        speculation={"max_nodes": 8},  # type: ignore[arg-type]
        max_tokens=9,
    )


def test_messages_are_what_templates_know() -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": ""}, {"type": "refusal", "refusal": "No."}],
        },
    ]
    fields = parse(ChatFields, json.dumps({"messages": messages}).encode())
    assert messages_for_template([message.rendered() for message in fields.messages]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "No."},
    ]


def test_what_is_taken_for_the_sake_of_clients_changes_nothing() -> None:
    noted = {"user": "u", "metadata": {"a": "b"}}
    keyed = noted | {"safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "auto"}
    for kind, body, more in (
        (CompletionFields, {"prompt": "a", "seed": 1}, noted | {"best_of": 1}),
        (ChatFields, {"messages": HI, "seed": 1}, keyed | {"modalities": ["text"], "store": False}),
        (ResponseFields, {"input": "a", "seed": 1}, keyed | {"truncation": "disabled", "background": False}),
    ):
        plain, fields = (parse(kind, json.dumps(one).encode()) for one in (body, body | more))
        fields.check()
        assert fields.params() == plain.params()


MANY = b"[" + b"1," * 5000 + b'"a"]'


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatFields, b'{"messages": %s}'),
        (ChatFields, b'{"messages": [{"role": "user", "content": %s}]}'),
        (ChatFields, b'{"messages": [], "tools": %s}'),
        (ChatFields, b'{"messages": [], "stop": %s}'),
        (CompletionFields, b'{"prompt": %s}'),
        (CompletionFields, b'{"prompt": [[1], %s]}'),
        (ResponseFields, b'{"input": %s}'),
        (DetokenizeFields, b'{"tokens": ["a", %s]}'),
    ],
)
def test_a_list_full_of_faults_is_given_up_at_the_first(kind: type[BaseModel], body: bytes) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(body % MANY)
    assert error.value.error_count() < 5


@pytest.mark.parametrize("count", [1, 1001, 200_000])
def test_the_first_unknown_key_is_named_however_many_there_are(count: int) -> None:
    odd = {f"k{i}": i for i in range(count)}
    for kind, body, param in (
        (ChatFields, {**odd, "messages": HI}, "k0"),
        (ChatFields, {"messages": HI, **odd}, "k0"),
        (ChatFields, {"messages": [HI[0], {**HI[0], **odd}]}, "messages[1].k0"),
        (ResponseFields, {"input": [{"role": "user", "content": "a", **odd}]}, "input[0].k0"),
        (ChatFields, {"messages": HI, "metadata": odd}, "metadata.k0"),
        (
            ChatFields,
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", **odd}}]},
            "tools[0].function.k0",
        ),
    ):
        assert error_of(kind, body)["param"] == param
    assert error_of(CompletionFields, {**odd, "prompt": "a"})["code"] == "unknown_parameter"


def test_faults_that_come_late_are_counted() -> None:
    body = {"messages": HI * 3000, "metadata": {f"k{i}": i for i in range(1001)}}
    assert "the body has 1001 faults" in error_of(ChatFields, body)["message"]


def test_what_is_told_of_a_long_name_or_value_is_short() -> None:
    for body in (
        {"messages": HI, "x" * 100_000: 1},
        {"messages": [{"role": "x" * 100_000}]},
        {"messages": HI, "metadata": {"x" * 100_000: 1}},
    ):
        assert len(json.dumps(error_of(ChatFields, body))) < 1000


def test_a_body_has_only_so_many_values() -> None:
    fits = b'{"tokens": [%s1]}' % (b"1," * 500_000)
    assert len(parse(DetokenizeFields, fits).tokens) == 500_001
    for most in (1 << 20, 16 << 20):
        with pytest.raises(ApiError, match="send fewer values") as caught:
            parse(DetokenizeFields, b'{"tokens": [%s1]}' % (b"1," * 600_000), most)
        assert caught.value.status == 413
    long = json.dumps({"messages": [{"role": "user", "content": '",[{:' * 2_000_000}]}).encode()
    assert parse(ChatFields, long).messages


# Bodies of one piece again and again, and the status where there are as many of it as there may be.
WIDE = {
    "unknown keys": ('{"messages": [], %s "a": 1}', '"%d":1,', 400),
    "keys of a message": ('{"messages": [{"role": "user", %s "a": 1}]}', '"%d":1,', 400),
    "metadata": ('{"messages": [], "metadata": {%s "a": "b"}}', '"%d":"x",', 200),
    "metadata that is none": ('{"messages": [], "metadata": {%s "a": "b"}}', '"%d":1,', 400),
    "logit_bias": ('{"messages": [], "logit_bias": {%s "1": 1}}', '"%d":1,', 200),
    "lists in a form": ('{"messages": [], "response_format": {"a": [%s 1]}}', "[],", 200),
    "objects in a form": ('{"messages": [], "response_format": {"a": [%s 1]}}', '{"a":1},', 200),
    "tools": (
        '{"messages": [], "tools": [%s {"type": "function", "function": {"name": "a"}}]}',
        '{"type":"function","function":{"name":"a"}},',
        200,
    ),
    "parameters of a tool": (
        '{"messages": [], "tools": [{"type": "function",'
        ' "function": {"name": "a", "parameters": {%s "a": 1}}}]}',
        '"%d":{},',
        200,
    ),
    "stops": ('{"messages": [], "stop": [%s "a"]}', '"ab",', 200),
    "messages": ('{"messages": [%s {"role": "user"}]}', '{"role":"user"},', 200),
    "parts": (
        '{"messages": [{"role": "user", "content": [%s {"type":"text","text":""}]}]}',
        '{"type":"text","text":""},',
        200,
    ),
}
MEASURE = """
import json, sys
import psutil
from specinfer.serve.api_error import ApiError
from specinfer.serve.chat import ChatFields
from specinfer.serve.fields import parse
def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
size = int(sys.argv[1])
before = psutil.Process().memory_info().rss
for around, piece, _ in json.loads(sys.argv[2]):
    tokens = sum(map(piece.count, "[]{},:")) + piece.count('"') // 2
    for most in (size // 32 // tokens - 20, size // (len(piece) + 6)):  # as many as may be, and too many
        pieces = bytearray()
        for number in range(most):
            pieces += (piece % number if "%" in piece else piece).encode()
        body = around.encode().replace(b"%s", bytes(pieces))
        try:
            parse(ChatFields, body, size)
            status = 200
        except ApiError as error:
            status = error.status
        print(status, peak() - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_body_takes_a_few_times_its_bytes() -> None:
    size = 4 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(size), json.dumps(list(WIDE.values()))],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [[int(one) for one in line.split()] for line in done.stdout.splitlines()]
    found = dict(zip(WIDE, zip(lines[::2], lines[1::2], strict=True), strict=True))
    for name, (_, _, status) in WIDE.items():
        (fitting, low), (more, high) = found[name]
        assert (fitting, more) == (status, 413 if status == 200 else 400), name
        assert max(low, high) < 12 * size, (name, found)  # three of them make the body


@pytest.mark.parametrize("guess", ["a b", {"type": "content", "content": [{"type": "text", "text": "a b"}]}])
def test_a_prediction_may_be_a_text_or_as_in_conversations(guess: Any) -> None:
    fields = parse(CompletionFields, json.dumps({"prompt": "a", "prediction": guess}).encode())
    given = fields.prediction
    assert (given if isinstance(given, str) or given is None else given.text) == "a b"


@pytest.mark.parametrize("kind", [ChatFields, CompletionFields, ResponseFields])
@pytest.mark.parametrize("given", ["bounded", "any", "none", None])
def test_white_space_between_parts_of_json_is_a_field_of_every_endpoint(kind: Any, given: str | None) -> None:
    asked = {"messages": HI, "prompt": "Hi", "input": "Hi"}
    body = {name: value for name, value in asked.items() if name in kind.model_fields}
    fields = parse(kind, json.dumps(body | {"json_whitespace": given}).encode())
    assert fields.params().json_whitespace == (given or "bounded")
    error = error_of(kind, body | {"json_whitespace": "some"})
    assert error["param"] == "json_whitespace"


@pytest.mark.parametrize("kind", [ChatFields, ResponseFields])
def test_a_grammar_of_calls_takes_the_place_of_the_form(kind: Any) -> None:
    form: dict[str, Any] = {"type": "json_object"}
    body = (
        {"messages": HI, "response_format": form}
        if kind is ChatFields
        else {"input": "Hi", "text": {"format": form}}
    )
    fields = parse(kind, json.dumps(body).encode())
    assert fields.form == structured_output(form)
    params = fields.params(grammar="start: /a/")
    assert params.structured_output == structured_output(grammar="start: /a/")
