"""Bodies of requests, read as a server reads them."""

import json
from typing import Any

from specinfer import SamplingParams
from specinfer.serve.api.chat import ChatFields
from specinfer.serve.api.completions import CompletionFields
from specinfer.serve.api.response_fields import ResponseFields
from specinfer.serve.api.tokens import DetokenizeFields, TokenizeFields
from specinfer.serve.fields.body import FieldPolicy
from tests.unit.serve.asked import HI

SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1.0]}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
PLAIN: dict[Any, dict[str, Any]] = {
    ChatFields: {"messages": HI},
    CompletionFields: {"prompt": "a"},
    ResponseFields: {"input": "Hi"},
    TokenizeFields: {"prompt": "a"},
    DetokenizeFields: {"tokens": [1]},
}
MADE = (ChatFields, CompletionFields, ResponseFields)  # those that make text


def read(kind: Any, more: dict[str, Any], policy: FieldPolicy | None = None) -> Any:
    """A body of that kind, checked."""
    fields = (policy or FieldPolicy("ignore")).parse(kind, json.dumps(PLAIN[kind] | more).encode())
    if kind in MADE:
        fields.check()
    return fields


def params(kind: Any, more: dict[str, Any]) -> SamplingParams:
    """Return the request's sampling parameters; at /v1/responses with its format."""
    fields = read(kind, more)
    found = fields.sampling_params(99) if kind is ResponseFields else fields.params()
    assert isinstance(found, SamplingParams)
    return found
