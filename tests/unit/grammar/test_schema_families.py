"""300 schemas and random ones: valid values are accepted, and strict answers are valid."""

import itertools
import json
import logging

import jsonschema
import pytest

from specinfer.errors import RequestError
from tests.unit.grammar.schema_families import cases
from tests.unit.grammar.schema_samples import Samples, texts_of
from tests.unit.grammar.schema_verdicts import validator_of, verdict, walk
from tests.unit.grammar.vocabulary import accepts, grammar_of, schema_format

CASES = cases()
IN_PART = {
    *("password lookahead", "negative lookahead", "word boundary", "unknown format", "uri-reference"),
    *("odd steps", "bounds of floats", "int64 bounds", "not a word", "not null", "distinct few"),
    *("distinct many", "distinct texts", "contains", "contains in few", "overlapping patterns"),
    *("pattern with lookahead", "names in a list", "names by pattern", "names of a length"),
    *("one property at least", "many properties", "dependent names", "dependencies of draft 7"),
    *("dependent schema", "one of required", "one of numbers", "one of numbers with bounds"),
    *("if then else", "many conditions", "condition on a pattern", "not required together"),
    "closed over all of",
}


def test_the_300_schemas_agree_with_their_values():
    assert len(CASES) >= 300
    for name, case in CASES.items():
        validator = validator_of(name, case.schema)
        assert all(map(validator.is_valid, case.valid)), name
        assert not any(map(validator.is_valid, case.invalid)), name


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_no_value_of_a_schema_is_withheld_and_no_strict_answer_is_against_it(name):
    found = verdict(name, CASES[name])
    assert found.held == ("in part" if name.partition(": ")[2] in IN_PART else "whole")
    assert found.refused_wrongly == ()
    assert found.broken == ()


def seen(root, values, strict):
    """Which values a schema's grammar takes, in some order of their properties; None where it is refused."""
    try:
        grammar = grammar_of(response_format=schema_format(root, strict))
    except RequestError as error:
        unmet = "nsatisfiable schema" in str(error) or "nothing can follow" in str(error)
        if not (unmet or strict or "circular references" in str(error)):
            raise
        return [False] * len(values) if unmet else None
    return [
        any(accepts(grammar, text) for text in itertools.islice(texts_of(value), 300)) for value in values
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 600, 50))
def test_schemas_drawn_at_random_are_held_exactly_or_loosely(first, caplog):
    caplog.set_level(logging.ERROR)
    for seed in range(first, first + 50):
        samples = Samples(seed)
        root = samples.root()
        values = [samples.value() for _ in range(8)]
        validator = jsonschema.Draft202012Validator(root)
        try:
            valid = [validator.is_valid(value) for value in values]
        except RecursionError:  # a schema that refers to itself in place means nothing
            continue
        strict, loose = (seen(root, values, strict) for strict in (True, False))
        message = f"seed {seed}: {json.dumps(root)}"
        assert strict in (None, valid), message
        if strict is not None and any(strict):
            text = walk(grammar_of(response_format=schema_format(root, strict=True)), seed)
            assert text is None or validator.is_valid(json.loads(text)), f"{message}: {text}"
        assert loose is None or all(
            taken for taken, is_valid in zip(loose, valid, strict=True) if is_valid
        ), message
