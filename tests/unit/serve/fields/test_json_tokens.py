"""Tokens of a JSON text, counted without parsing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.serve.fields.body import has_more_tokens

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\,[{:\n\u00e9'), max_size=6),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=30,
)


def tokens(value: Any) -> int:
    """How many strings and marks a JSON value is written with."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 2 + max(0, len(value) - 1) + sum(map(tokens, value))
    if isinstance(value, dict):
        return 2 + max(0, len(value) - 1) + sum(2 + tokens(one) for one in value.values())
    return 0


@pytest.mark.thorough
@given(VALUES, st.booleans())
def test_tokens_are_counted(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = tokens(value)
    assert not has_more_tokens(text, count)
    if count:
        assert has_more_tokens(text, count - 1)


def test_tokens_of_invalid_json_are_counted() -> None:
    cases: list[tuple[bytes, int]] = [
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
