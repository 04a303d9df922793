"""Queries of schemas change no state."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.grammar.vocabulary import END, SCHEMAS, VOCAB, grammar_of, legal_document, schema_format


@cache
def schema_grammar(name):
    schema = next(entry["schema"] for entry in SCHEMAS if entry["name"] == name)
    return grammar_of(response_format=schema_format(schema, strict=True)), schema


@pytest.mark.thorough
@given(
    name=st.sampled_from(["person", "tree", "tuple", "unicode_keys", "one_of_by_const", "anything"]),
    seed=st.integers(0, 3),
    cut=st.integers(0, 30),
    looks=st.lists(st.tuples(st.integers(0, 6), st.integers(0, VOCAB - 1)), max_size=6),
)
def test_looking_around_equals_a_new_matcher_that_consumed_everything(name, seed, cut, looks):
    grammar, _ = schema_grammar(name)
    document = legal_document(grammar, seed)
    text, rest = document[:cut], document[cut:]
    state = grammar.state()
    state.commit(text)
    for depth, astray in looks:
        path = rest[:depth]
        fresh = grammar.state()
        fresh.commit([*text, *path])
        assert state.permits(path, astray) == bool(fresh.allowed()[astray])
        assert not state.allowed([*path, astray]).any() or fresh.permits((), astray)
        np.testing.assert_array_equal(state.allowed(path), fresh.allowed())
        assert state.forced(path, 5) == fresh.forced((), 5)
    state.commit(rest)
    assert state.permits((), END)
