"""Unsatisfiable and unsupported formats are refused in one line."""

import json

import pytest

from specinfer.errors import RequestError
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.structured_output import structured_output
from specinfer.tokenizer.gguf_vocabulary import read_vocabulary
from tests.unit.grammar.vocabulary import grammar_of, schema_format
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
        (
            {"regex": "a", "preamble": 'preamble: preamble "b"'},
            "preamble cannot be met: nothing can follow ''",
        ),
        ({"regex": "a", "preamble": "preamble: a\na[stop=1]: /.*/"}, "preamble: rule a has the option stop"),
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
