"""JSON schemas' regular expressions match the same texts as in JavaScript, or more if they must."""

import json

import pytest

from specinfer.grammar.ecma_regex import RustRegex, UnreadableError, read_ecma
from tests.unit.grammar.vocabulary import accepts, grammar_of, schema_format


@pytest.mark.parametrize(
    ("pattern", "parts", "left_out"),
    [
        ("^a+$", ("^a+$",), ()),
        ("^(?=a)b", ("^(?:a)", "^b"), ()),
        ("^(?=.*[0-9])(?=[a-z(]).{2,}$", (r"^(?:[^\n\r\u2028\u2029]*[0-9])", "^(?:[a-z(])", None), ()),
        ("^(?=a)b|c", ("^(?:)b|c",), ("(?=",)),
        ("^(?!a)b", ("^(?:)b",), ("(?!",)),
        ("(?<=x)a(?!b)c\\b", ("(?:)a(?:)c(?:)",), ("(?<=", "(?!", "\\b")),
        ("(?:(?!ab)[a-z])+", ("(?:(?:)[a-z])+",), ("(?!",)),
        ("(?<year>\\d{4})", ("(?<year>\\d{4})",), ()),
        (r"^\p{L}[\p{Lu}\d-x]$", (r"^\p{L}[\p{Lu}\d\-x]$",), ()),
        ("a{", (r"a\{",), ()),
        ("{}]", (r"\{\}\]",), ()),
        ("{2}a", (r"\{2\}a",), ()),
        (r"[a-\d~~b]", (r"[a\-\d\~\~b]",), ()),
        ("^(?=a)*b", ("^(?:)*b",), ("(?=",)),
        ("^(?=a)b)c|d", ("^(?:)b)c|d",), ("(?=",)),
        ("[^]x[]", (r"[\x00-\u{10FFFF}]x[^\x00-\u{10FFFF}]",), ()),
        (r"\cA\0\/\-\é[\b]", (r"\x01\x00\u{2F}\u{2D}\u{E9}[\x08]",), ()),
    ],
)
def test_expressions_are_written_as_rusts(pattern, parts, left_out):
    read = read_ecma(pattern)
    assert read == RustRegex(
        tuple(b if a is None else a for a, b in zip(parts, read.parts, strict=True)), left_out
    )


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a)\1", "refers back"),
        (r"[a\B]", "is not allowed in a character class"),
        (r"(?<x>a)\k<x>", "refers back"),
        ("(?=a", "not closed"),
        ("[a", "class is not closed"),
        ("a\\", "backslash"),
    ],
)
def test_unsupported_regular_expressions_are_named(pattern, why):
    with pytest.raises(UnreadableError, match=why):
        read_ecma(pattern)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^.$", ["a", "\u00e9", "\x85"], ["\n", "\r", "\u2028", ""]),
        (r"^\s$", [" ", "\t", "\u00a0", "\ufeff", "\u2003"], ["a", "\x85"]),
        (r"^[^\s]$", ["a", "\x85"], ["\ufeff", " "]),
        (r"^\d\w$", ["1a", "0_"], ["\u0661a", "1\u00e9"]),
        (r"^\p{L}+$", ["a\u00e9\u0436"], ["1", "-"]),
        (r"^[\p{Lu}\p{Nd}]\P{L}$", ["A1", "\u0661-"], ["a1", "AA"]),
        (r"^[\w-.]+$", ["a-b.c"], ["a b", "/"]),
        (r"^[a-z&&b]+$", ["a&b"], ["A"]),
        (r"^[[a]$", ["[", "a"], ["]"]),
        (r"^a|b$", ["a", "ax", "xb"], ["xa", "bx"]),
        (r"^[^]$", ["\n", "x"], ["xx"]),
        (r"^{a}$", ["{a}"], ["a"]),
        (r"^\<a\>\"\/$", ['<a>"/'], ["a"]),
        (r"^(?=.*\d)(?=.*[A-Z]).{3,5}$", ["aA1", "1BcdE"], ["aaa", "A1", "aA1234", "AAAA"]),
        (r"^(?=[ab]{1,3}$)a", ["a", "abb"], ["abbb", "ba", "ac"]),
    ],
)
def test_a_text_matches_where_it_does_in_javascript(pattern, good, bad):
    grammar = grammar_of(response_format=schema_format({"type": "string", "pattern": pattern}))
    found = {text: accepts(grammar, json.dumps(text, ensure_ascii=False)) for text in [*good, *bad]}
    assert found == dict.fromkeys(good, True) | dict.fromkeys(bad, False)
