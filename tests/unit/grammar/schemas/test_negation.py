"""A negated schema allows exactly the values that the schema refuses; disjoint schemas share no value."""

import re

import jsonschema
import pytest

from specinfer.grammar.schemas.document import SchemaDocument
from specinfer.grammar.schemas.negation import are_disjoint, negated, other_texts
from tests.unit.grammar.schema_samples import Samples
from tests.unit.grammar.vocabulary import accepts, grammar_of


def _pattern(validator, pattern, instance, schema):
    # `[^]` and `\u{61}` are JavaScript's alone.
    written = re.sub(r"\\u\{(\w+)\}", lambda code: re.escape(chr(int(code[1], 16))), pattern)
    if isinstance(instance, str) and not re.search(written.replace("[^]", r"[\s\S]"), instance):
        yield jsonschema.ValidationError("no match")


KIND = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def is_valid(schema, value):
    return KIND(schema).is_valid(value)


@pytest.mark.parametrize("first", range(0, 1000, 200))
def test_negated_schemas_allow_the_refused_values(first):
    written = 0
    for seed in range(first, first + 200):
        samples = Samples(seed)
        schema = samples.schema(2)
        if "$ref" in str(schema):
            continue
        opposite = negated(schema, SchemaDocument({"allOf": [schema]}))
        if opposite is None:
            continue
        written += 1
        for _ in range(10):
            value = samples.value()
            assert is_valid(schema, value) != is_valid(opposite, value), (seed, schema, opposite, value)
    assert written > 40


@pytest.mark.parametrize("first", range(0, 1000, 200))
def test_disjoint_schemas_have_no_value_in_common(first):
    disjoint = 0
    for seed in range(first, first + 200):
        samples = Samples(seed)
        one, other = samples.schema(2), samples.schema(2)
        if "$ref" in str((one, other)) or not are_disjoint(
            one, other, SchemaDocument({"allOf": [one, other]})
        ):
            continue
        disjoint += 1
        for _ in range(10):
            value = samples.value()
            assert not (is_valid(one, value) and is_valid(other, value)), (seed, one, other, value)
    assert disjoint > 20


@pytest.mark.parametrize(
    "texts", [[""], ["a"], ["a", "ab", "b"], ["", "\u00e9\n", "]^-"], ["no", "null", "none"]]
)
def test_all_texts_but_some(texts):
    pattern = other_texts(texts).replace("[^]", r"[\s\S]")
    grammar = grammar_of(regex=pattern.removeprefix("^").removesuffix("$"))
    others = ["x", "aa", "abc", "n", "nul", "nulls", "\u00e9", "]^-]", "]", "ba"]
    found = {text: accepts(grammar, text) for text in ["", *texts, *others]}
    assert found == {text: text not in texts for text in ["", *texts, *others]}
