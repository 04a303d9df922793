"""Limits of bodies, their memory, and short reports of many faults."""

import json
import subprocess
import sys

import pytest
from pydantic import BaseModel, ValidationError

from specinfer.serve.api.chat import ChatFields
from specinfer.serve.api.completions import CompletionFields
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.api.tokens import DetokenizeFields
from specinfer.serve.fields.body import FieldPolicy, has_more_tokens
from specinfer.serve.http.api_error import ApiError
from tests.unit.serve.asked import HI
from tests.unit.serve.fields.test_fields import error_of

MANY = b"[" + b"1," * 5000 + b'"a"]'


LISTS: list[tuple[type[BaseModel], bytes]] = [
    (ChatFields, b'{"messages": %s}'),
    (ChatFields, b'{"messages": [{"role": "user", "content": %s}]}'),
    (ChatFields, b'{"messages": [], "tools": %s}'),
    (ChatFields, b'{"messages": [], "stop": %s}'),
    (CompletionFields, b'{"prompt": %s}'),
    (CompletionFields, b'{"prompt": [[1], %s]}'),
    (ResponseFields, b'{"input": %s}'),
    (DetokenizeFields, b'{"tokens": ["a", %s]}'),
]


def test_validation_of_a_list_stops_at_the_first_fault() -> None:
    for kind, body in LISTS:
        with pytest.raises(ValidationError) as error:
            kind.model_validate_json(body % MANY)
        assert error.value.error_count() < 5, body


def test_the_first_unknown_key_is_named_and_too_many_are_counted() -> None:
    for count in (1, 999, 35_000):
        odd = {f"k{i}": i for i in range(count)}
        function = {"type": "function", "function": {"name": "f", **odd}}
        for kind, body, param in (
            (ChatFields, {"messages": HI, **odd}, "k0"),
            (ChatFields, {"messages": [HI[0], {**HI[0], **odd}]}, "messages[1].k0"),
            (ResponseFields, {"input": [{"role": "user", "content": "a", **odd}]}, "input[0].k0"),
            (ChatFields, {"messages": HI, "metadata": odd}, "metadata.k0"),
            (ChatFields, {"messages": HI, "tools": [function]}, "tools[0].function.k0"),
        ):
            error = error_of(kind, body)
            if count < 1000:
                assert error["param"] == param, count
            else:
                assert error["message"] == f"the body has {count} faults; send only fields of this endpoint"
        if count < 1000:
            assert error_of(CompletionFields, {**odd, "prompt": "a"})["code"] == "unknown_parameter"


def test_a_body_has_only_so_many_values() -> None:
    fits = b'{"tokens": [%s1]}' % (b"1," * 500_000)
    assert len(FieldPolicy().parse(DetokenizeFields, fits).tokens) == 500_001
    for most in (1 << 20, 16 << 20):
        with pytest.raises(ApiError, match="send fewer values") as caught:
            FieldPolicy(max_bytes=most).parse(DetokenizeFields, b'{"tokens": [%s1]}' % (b"1," * 600_000))
        assert caught.value.status == 413
    long = json.dumps({"messages": [{"role": "user", "content": '",[{:' * 2_000_000}]}).encode()
    assert FieldPolicy().parse(ChatFields, long).messages


def test_tokens_of_any_text_are_counted() -> None:
    cases: list[tuple[bytes, int]] = [
        (b'{"a": [1, "b\\"],"], "c\\\\": {}} ' + b" " * 99, 13),
        (b'"' * 1_000_001, 500_001),
        (b'\\"' * 500_000, 0),
        (b'"' + b'\\"' * 500_000, 1),
        (b'"' + b"\\" * 1_000_001, 1),
        (b"," * 1_000_000, 1_000_000),
        (b"\xff" * 1_000_000, 0),
    ]
    for text, count in cases:
        assert not has_more_tokens(text, count), text
        assert count == 0 or has_more_tokens(text, count - 1), text


# Bodies of one piece again and again, and the status where there are as many of it as there may be.
WIDE = {
    "unknown keys": ('{"messages": [], %s "a": 1}', '"%d":1,', 400),
    "metadata": ('{"messages": [], "metadata": {%s "a": "b"}}', '"%d":"x",', 200),
    "logit_bias": ('{"messages": [], "logit_bias": {%s "1": 1}}', '"%d":1,', 200),
    "lists in a form": ('{"messages": [], "response_format": {"a": [%s 1]}}', "[],", 200),
    "objects in a form": ('{"messages": [], "response_format": {"a": [%s 1]}}', '{"a":1},', 200),
    "stops": ('{"messages": [], "stop": [%s "a"]}', '"ab",', 200),
    "messages": ('{"messages": [%s {"role": "user"}]}', '{"role":"user"},', 200),
}
MEASURE = """
import json, sys
import psutil
from specinfer.serve.http.api_error import ApiError
from specinfer.serve.api.chat import ChatFields
from specinfer.serve.fields.body import FieldPolicy
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
            FieldPolicy(max_bytes=size).parse(ChatFields, body)
            status = 200
        except ApiError as error:
            status = error.status
        print(status, peak() - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_body_takes_a_few_times_its_bytes() -> None:
    size = 2 << 20
    command = [sys.executable, "-c", MEASURE, str(size), json.dumps(list(WIDE.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [[int(one) for one in line.split()] for line in done.stdout.splitlines()]
    found = dict(zip(WIDE, zip(lines[::2], lines[1::2], strict=True), strict=True))
    for name, (_, _, status) in WIDE.items():
        (fitting, low), (more, high) = found[name]
        assert (fitting, more) == (status, 413), name
        assert max(low, high) < 13 * size, (name, found)  # three of them make the body
