"""Formats that are refused in one line, and large or complex ones, which are followed or fail alone."""

import json

import numpy as np
import pytest

from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.structured_output import structured_output
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary
from tests.unit.grammar.vocabulary import accepts, byte_id, grammar_of, schema_format
from tests.unit.tokenizer.made_up import byte_level_header


def test_forms_that_cannot_be_followed_are_refused():
    for asked, message in (
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group; allowed: Rust's regex syntax"),
        ({"regex": "(?=a)b"}, "regex cannot be used: .*look-around"),
        ({"regex": r"(a)\1"}, "regex cannot be used: .*backreferences"),
        ({"regex": r"[^\x00-\x{10ffff}]"}, "regex cannot be met: nothing can follow ''"),
        ({"regex": "a{99999999999}"}, "regex cannot be used: .*decimal literal invalid"),
        ({"grammar": "start: lost"}, 'grammar cannot be used: .*unknown name: "lost"'),
        ({"grammar": "   "}, "grammar cannot be used: "),
        ({"grammar": 'start: start "a"'}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": "start: b\nb: c\nc: b"}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": 'root ::= root "a"'}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": "start: A\nA: /b/ & /c/"}, "grammar cannot be met: nothing can follow ''"),
        ({"grammar": 'start: "a" A\nA: /b/ & /c/'}, "grammar cannot be met: nothing can follow 'a'"),
        ({"grammar": "start: a\na[max_tokens=3]: /.*/"}, "rule a has the option max_tokens"),
        ({"regex": "(a", "preamble": "preamble: /x/"}, "regex cannot be used: .*unclosed group"),
        (
            {"regex": "a", "preamble": "p: /x/"},
            'preamble cannot be used: .*unknown name: "preamble"; allowed',
        ),
        ({"regex": "a", "preamble": 'preamble: preamble "b"'}, "preamble cannot be met: nothing can follow"),
        ({"regex": "a", "preamble": "preamble: a\na[stop=1]: /.*/"}, "preamble: rule a has the option stop"),
        ({"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000}, "nested too deeply"),
        ({"grammar": 'root ::= "a"' + "*" * 50_000}, "Expected name"),
        ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "too deeply nested"),
        ({"grammar": "start: " + "a[" * 50_000}, "grammar cannot be used"),
        ({"regex": "(" * 50_000 + "a" + ")" * 50_000}, "regex cannot be used"),
        ({"regex": r"\p{" * 50_000}, "regex cannot be used"),
        ({"grammar": 'other ::= "a"'}, "grammar has no rule root; add one"),
        ({"grammar": "root ::= lost"}, "grammar has no rule lost"),
        ({"grammar": 'root ::= "(" root lost ")"'}, "grammar has no rule lost"),
        ({"grammar": 'root ::= "a'}, "Unexpected end of input at line 1"),
        ({"grammar": 'root ::= "b"\n\nroot ::= ("a"'}, r"Expected '\)' at line 3"),
        ({"grammar": "root ::= [a"}, "Unexpected end of input"),
        ({"grammar": "root ::= [z-a]"}, "invalid character class range"),
        ({"grammar": r'root ::= "\q"'}, r"Invalid escape sequence \\q"),
        ({"grammar": r'root ::= "\ud800"'}, "is half of a character"),
        ({"grammar": 'root ::= "a"{,}'}, "Expected integer"),
        ({"grammar": 'root ::= "a"{3,2}'}, "invalid repetition"),
        ({"grammar": 'root ::= "a" $'}, "Expected name"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            pytest.fail(f"{message}: {grammar_of(**asked)}")
        assert "\n" not in str(caught.value), asked
        assert len(str(caught.value)) < 400, asked


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum .5. is greater than maximum .3."),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "text"}, "Invalid type: text"),
        ({"properties": {"a/b": {"minimum": "1"}}}, "Expected f64 for 'minimum', got \"1\""),
        ({"format": "date", "allOf": 3}, "allOf must be an array"),
        ({"items": [3]}, "schema must be an object or boolean"),
        (json.loads('{"items":' * 150 + "{}" + "}" * 150), "recursion limit"),
        ({"$ref": "#"}, "nothing can follow ''"),
    ],
)
def test_schemas_that_are_malformed_or_cannot_be_met_are_refused(schema, message, strict):
    with pytest.raises(RequestError, match=rf"response_format cannot be (used|met): .*({message})") as caught:
        grammar_of(response_format=schema_format(schema, strict))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_the_forced_text_is_refused():
    tokenizer = read_vocabulary(byte_level_header())
    tokenizer.eos_token_ids = frozenset({7})
    with pytest.raises(RequestError, match="response_format cannot be met: nothing can follow ''"):
        GrammarCompiler(tokenizer, 64).compile(structured_output({"type": "json_object"}))


def rules(count, rule, last, begin):
    return "\n".join([begin, *(rule.format(i, i + 1) for i in range(count)), last.format(count)])


def nested(depth, schema):
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


REFERENCES = {f"d{i}": nested(20, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(200)}
REFERENCES["d200"] = {"type": "null"}


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
            {"response_format": schema_format({"$ref": "#/$defs/d0", "$defs": REFERENCES})},
            '{"a":' * 4000 + "null" + "}" * 4000,
        ),
    ],
    ids=["rules", "parts", "terminals", "doubled", "chain", "recursive", "lines", "references"],
)
def test_large_forms_are_followed_too(asked, good):
    assert accepts(grammar_of(**asked), good)


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
