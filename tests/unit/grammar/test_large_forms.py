"""Large, deep and complex formats: followed, refused at once, or failing alone."""

import numpy as np
import pytest

from specinfer.errors import RequestError
from tests.unit.grammar.vocabulary import accepts, byte_id, grammar_of, schema_format


def rules(count, rule, last, begin):
    return "\n".join([begin, *(rule.format(i, i + 1) for i in range(count)), last.format(count)])


def nested(depth, schema):
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("asked", "good"),
    [
        ({"grammar": rules(15_000, "r{}: r{}", 'r{}: "x"', "start: r0")}, "x"),
        ({"grammar": rules(200, "r{}: " + "(" * 25 + "r{}" + ")" * 25, 'r{}: "x"', "start: r0")}, "x"),
        ({"grammar": rules(15_000, "R{}: R{}", 'R{}: "x"', "start: R0")}, "x"),
        ({"grammar": rules(40, "r{0} ::= r{1} r{1}", 'r{} ::= "x"?', "root ::= r0")}, "xxx"),
        ({"grammar": rules(5_000, "r{} ::= r{}", 'r{} ::= "x"', "root ::= r0")}, "x"),
        ({"grammar": rules(200, "r{} ::= r{} root?", 'r{} ::= "x"', "root ::= r0")}, "xxx"),
        ({"grammar": "\n" * 200_000 + 'start: "x"'}, "x"),
        (
            {
                "response_format": schema_format(
                    {
                        "$ref": "#/$defs/d0",
                        "$defs": {
                            **{f"d{i}": nested(20, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(200)},
                            "d200": {"type": "null"},
                        },
                    }
                )
            },
            '{"a":' * 4000 + "null" + "}" * 4000,
        ),
    ],
    ids=["rules", "parts", "terminals", "doubled", "chain", "recursive", "lines", "references"],
)
def test_large_forms_are_followed_too(asked, good):
    assert accepts(grammar_of(**asked), good)


def test_forms_too_deep_or_too_broken_are_refused_at_once():
    for asked, message in (
        ({"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000}, "nested too deeply"),
        ({"grammar": 'root ::= "a"' + "*" * 50_000}, "Expected name"),
        ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "too deeply nested"),
        ({"grammar": "start: " + "a[" * 50_000}, "grammar cannot be used"),
        ({"regex": "(" * 50_000 + "a" + ")" * 50_000}, "regex cannot be used"),
        ({"regex": r"\p{" * 50_000}, "regex cannot be used"),
    ):
        with pytest.raises(RequestError, match=message):
            pytest.fail(f"{message}: {grammar_of(**asked)}")


EXPLODES = "(.{0,90}a.{0,90}b){9}"  # after some 80 characters of a and b


def visit_every_node(state, path):
    for depth in range(len(path)):
        state.allowed(path[:depth])


def test_a_grammar_that_becomes_too_complex_fails_one_request_and_no_other():
    grammar = grammar_of(regex=EXPLODES)
    rng = np.random.default_rng(0)
    text = [byte_id(byte) for byte in rng.choice([ord("a"), ord("b")], 400)]
    greedy, modest = grammar.state(), grammar.state()
    modest.commit(text[:20])
    expected = modest.allowed(text[20:25]).copy()
    with pytest.raises(RequestError, match="regex is too complex to follow"):
        visit_every_node(greedy, text)
    modest.commit(text[20:25])
    np.testing.assert_array_equal(modest.allowed(), expected)
    np.testing.assert_array_equal(grammar.state().allowed(), greedy.allowed())


def test_a_worn_automaton_does_not_affect_other_requests():
    grammar, a = grammar_of(regex="((a|ab|ba){1,50}){50}"), byte_id(ord("a"))
    greedy, modest = grammar.state(), grammar.state()
    with pytest.raises(RequestError, match="regex is too complex to follow"):
        visit_every_node(greedy, [a] * 600)
    modest.commit([a])  # into an automaton that is full
    np.testing.assert_array_equal(modest.allowed([a]), grammar.state().allowed([a, a]))
    assert modest.permits([a], a)
