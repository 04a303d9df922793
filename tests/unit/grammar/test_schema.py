"""Values that the library would misread, and parts that it lacks: strict schemas are exact or refused."""

import json

import pytest

from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.structured_output import structured_output
from tests.unit.grammar.vocabulary import TOKENIZER, VOCAB, accepts, grammar_of, schema_format

NUMBER, DAY = {"type": "number"}, {"type": "string", "format": "date"}
A_NULL = {"type": "object", "properties": {"a": {"type": "null"}}}
STRICT = [
    # schema, texts that it takes, texts against it
    (NUMBER | {"maximum": 1.7e308}, ["0", "-2.5"], [str(2**64)]),
    ({"type": "integer", "minimum": -(2**63)}, ["0", str(-(2**62))], [str(-(2**65))]),
    ({"type": "integer", "maximum": 2**53 + 1}, [str(2**53)], [str(2**53 + 2)]),
    ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
    (NUMBER | {"exclusiveMinimum": 1, "maximum": 1.5}, ["1.1", "1.5"], ["1", "1.0"]),
    (NUMBER | {"exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, ["-1.2"], ["-1", "-1.0"]),
    (NUMBER | {"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.001", "0.5"], ["0", "0.0"]),
    ({"allOf": [{"exclusiveMinimum": 0}, NUMBER | {"maximum": 0.5}]}, ["0.001"], ["0"]),
    (NUMBER | {"minimum": 0.5, "exclusiveMaximum": 1}, ["0.5", "0.9"], ["1", "1.0"]),
    (A_NULL, ['{"a":null}', '{"b":1}'], ['{"\\u0061":1}']),
    ({"type": "object", "patternProperties": {"^.$": {"type": "null"}}}, ['{"a":null}'], ['{"a":1}']),
    (DAY, ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"'], ['"2023-02-29"', '"1900-02-29"']),
    ({"format": "json-pointer"}, ['""', '"/a~1b"', "3"], ['"a"', '"/~2"']),
    ({"type": "string", "format": "password", "minLength": 2}, ['"ab"'], ['"a"']),
    ({"type": "array", "uniqueItems": False, "maxItems": 1}, ["[1]"], ["[1,1]"]),
]
PATTERNS = [
    # expression, texts that match it in JavaScript, and texts that do not
    (r"^.$", ["a", "\u00e9", "\x85"], ["\n", "\r", "\u2028", ""]),
    (r"^\s$", [" ", "\t", "\u00a0", "\ufeff", "\u2003"], ["a", "\x85"]),
    (r"^[^\s]\S$", ["aa", "\x85a"], ["\ufeffa", " a", "a\ufeff"]),
    (r"^\d\w$", ["1a", "0_"], ["\u0661a", "1\u00e9"]),
    (r"^[\p{Lu}\p{Nd}]\P{L}$", ["A1", "\u0661-"], ["a1", "AA"]),
    (r"^[\w-.]+$", ["a-b.c"], ["a b", "/"]),
    (r"^[a-z&&b]+$", ["a&b"], ["A"]),
    (r"^[+--]$", ["+", ",", "-"], ["."]),
    (r"^[[a]$", ["[", "a"], ["]"]),
    (r"^a|b$", ["a", "ax", "xb"], ["xa", "bx"]),
    (r"^[^]$", ["\n", "x"], ["xx"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), STRICT)
def test_strict_schemas_are_followed_exactly_where_the_library_reads_otherwise(schema, good, bad):
    grammar = grammar_of(response_format=schema_format(schema, strict=True))
    assert grammar.unenforced == ()
    found = {text: accepts(grammar, text) for text in [*good, *bad]}
    assert found == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


def test_expressions_match_where_they_do_in_javascript():
    for pattern, good, bad in PATTERNS:
        form = schema_format({"type": "string", "pattern": pattern}, strict=True)
        grammar = grammar_of(response_format=form)
        found = {text: accepts(grammar, json.dumps(text, ensure_ascii=False)) for text in [*good, *bad]}
        assert found == dict.fromkeys(good, True) | dict.fromkeys(bad, False), pattern


TEXTS = {"type": "array", "items": {"type": "string", "pattern": "a(?!b)", "maxLength": 2}}
BEHIND = {"type": "object", "patternProperties": {"(?<=a)b": {}}, "additionalProperties": False}
LEFT_OUT = [
    # schema, the keywords that are not enforced, texts that are taken, texts that are not
    (TEXTS, "pattern", '["a","bc"]', '["abc"]'),
    ({"type": "array", "uniqueItems": True, "items": {"not": {}}}, "not uniqueItems", "[1,1]", "1"),
    ({"items": {"type": "string", "format": "poem"}}, "format", '["x"]', "[1]"),
    ({"oneOf": [{"type": "integer"}, {"multipleOf": 2}]}, "oneOf", "2", "3.5"),
    ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf", "5", "1.5"),
    (NUMBER | {"multipleOf": 0.07}, "multipleOf", "0.15", '"a"'),
    ({"type": "integer", "minimum": 0, "maximum": 2**64}, "maximum", str(2**70), "-1"),
    ({"enum": [2**53 + 1]}, "enum", str(2**53 + 1), "{"),
    ({"type": "object", "minProperties": 2}, "minProperties", '{"a":1,"a":2}', "[]"),
    (A_NULL | {"minProperties": 1}, "minProperties", '{"a":null}', '{"a":1}'),
    (A_NULL | {"additionalProperties": {"$ref": "http://x.org/s"}}, "$ref", '{"b":1}', '{"a":1}'),
    (BEHIND, "patternProperties", '{"ab":1}', "[]"),
    (A_NULL | {"if": {}, "then": {"not": {}}, "else": {}}, "else if then", '{"a":null}', '{"a":1}'),
]


def test_unsupported_keywords_are_named_and_the_rest_is_enforced(caplog):
    compiler = GrammarCompiler(TOKENIZER, VOCAB)
    for schema, keywords, good, bad in LEFT_OUT:
        form = structured_output(response_format=schema_format(schema))
        caplog.clear()
        for _ in range(2):
            grammar = compiler.compile(form)
        assert sorted(grammar.unenforced) == keywords.split(), schema
        [line] = caplog.messages
        assert line == f"response_format is enforced without {', '.join(grammar.unenforced)}"
        assert (accepts(grammar, good), accepts(grammar, bad)) == (True, False), schema
        if keywords == "maximum":  # enforced up to 2^63
            continue
        with pytest.raises(RequestError, match="response_format cannot be used: "):
            grammar_of(response_format=schema_format(schema, strict=True))
    assert compiler.unenforced["minProperties"] == 4, "each request counts"
