"""GBNF grammars are written as one expression, or as rules if they are recursive, for the same texts."""

import pytest

from specinfer.errors import RequestError
from specinfer.grammar.lark import lark_of_gbnf
from tests.unit.grammar.vocabulary import accepts, grammar_of

BODIES = [
    # the body of a rule, texts that it matches, and texts that it does not
    ('"a" "b"', ["ab"], ["a", "abb"]),
    ('"a" | "b" |\n  "c"', ["a", "b", "c"], ["ab", ""]),
    ('"a"?', ["", "a"], ["aa"]),
    ('"a"*', ["", "aaa"], ["b"]),
    ('"a"+', ["a", "aaa"], [""]),
    ('"a"{3}', ["aaa"], ["aa", "aaaa"]),
    ('"a"{2,}', ["aa", "aaaaa"], ["a"]),
    ('"a" { 2 , 3 }', ["aa", "aaa"], ["a", "aaaa"]),
    ('("a" | "b")+', ["abba"], [""]),
    ("other", ["o"], ["other"]),
    ("[a-c] [^a-c_]", ["ax", "c-"], ["xa", "a_", "ab"]),
    (r"[-a] [b-] [\]\\^]", ["-b]", "a-\\", "a-^"], ["xb]", "ab["]),
    (r"[\x00-\x1F\u00e9\U0001F600\-]", ["\n", "\u00e9", "\U0001f600", "-"], ["e", " "]),
    ("[a-z&&b] [[/]", ["a[", "&/"], ["a]"]),
    (". .", ["\n\u00e9"], ["a"]),
    (r'"\n\t\"\\\u00e9a\x41\U0001F600"', ['\n\t"\\\u00e9aA\U0001f600'], ["n"]),
    ('"a" # a remark\\\n', ["a"], ["ab"]),
    ('"" "a"', ["a"], [""]),
    ('"a" | ""', ["a", ""], ["b"]),
]


def test_a_grammar_matches_its_texts_and_no_others():
    for body, good, bad in BODIES:
        for way, start in {"/": "body", "(": 'body | "(" root ")"'}.items():
            text = f'root ::= {start}\nother ::= "o"\nbody ::= {body}\n'
            assert lark_of_gbnf(text).startswith(f"start: {way}"), "recursion makes rules"
            grammar = grammar_of(grammar=text)
            nested = [] if way == "/" else [f"(({one}))" for one in good]
            found = {one: accepts(grammar, one) for one in [*good, *nested, *bad]}
            assert found == {one: one not in bad for one in found}, text


def test_malformed_grammars_are_refused_in_the_librarys_words():
    for text, message in (
        ('other ::= "a"', "grammar has no rule root; add one"),
        ("root ::= lost", "grammar has no rule lost"),
        ('root ::= "(" root lost ")"', "grammar has no rule lost"),
        ('root ::= "a', "Unexpected end of input at line 1"),
        ('root ::= "b"\n\nroot ::= ("a"', r"Expected '\)' at line 3"),
        ("root ::= [a", "Unexpected end of input"),
        ("root ::= [z-a]", "invalid character class range"),
        (r'root ::= "\q"', r"Invalid escape sequence \\q"),
        (r'root ::= "\ud800"', "is half of a character"),
        ('root ::= "a"{,}', "Expected integer"),
        ('root ::= "a"{3,2}', "invalid repetition"),
        ('root ::= "a" $', "Expected name"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            pytest.fail(f"{text}: {grammar_of(grammar=text)}")
        assert "\n" not in str(caught.value), text
