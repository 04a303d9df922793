import pytest

from specinfer.errors import RequestError
from specinfer.grammar.gbnf import (
    Alternation,
    Literal,
    Pattern,
    Reference,
    Repeat,
    Sequence,
    read_gbnf,
    to_lark,
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('"yes"', Literal("yes")),
        ('"a" "b"', Sequence((Literal("a"), Literal("b")))),
        ('"a" | "b"\n  | "c"', Alternation((Literal("a"), Literal("b"), Literal("c")))),
        ('"a"?', Repeat(Literal("a"), 0, 1)),
        ('"a"*', Repeat(Literal("a"), 0, None)),
        ('"a"+', Repeat(Literal("a"), 1, None)),
        ('"a"{3}', Repeat(Literal("a"), 3, 3)),
        ('"a"{3,}', Repeat(Literal("a"), 3, None)),
        ('"a"{3,5}', Repeat(Literal("a"), 3, 5)),
        ('"a"{,5}', Repeat(Literal("a"), 0, 5)),
        ('"a" { 3 , 5 }', Repeat(Literal("a"), 3, 5)),
        ("[a-z]{2}{3}", Repeat(Repeat(Pattern("[a-z]"), 2, 2), 3, 3)),
        ('("a" | "b")+', Repeat(Alternation((Literal("a"), Literal("b"))), 1, None)),
        ("other", Reference("other")),
        ("[a-c]", Pattern("[a-c]")),
        ("[^a-c_]", Pattern(r"[^a-c\x{5F}]")),
        ("[-a]", Pattern(r"[\x{2D}a]")),
        ("[a-]", Pattern(r"[a\x{2D}]")),
        (r"[\]\\^]", Pattern(r"[\x{5D}\x{5C}\x{5E}]")),
        (r"[\x00-\x1F\u00e9]", Pattern(r"[\x{0}-\x{1F}\x{E9}]")),
        (".", Pattern("(?s:.)")),
        (r'"\n\t\"\\\u00e9\x41\U0001F600"', Literal('\n\t"\\\u00e9A\U0001f600')),
        ('"a" # a remark\n "b"', Sequence((Literal("a"), Literal("b")))),
        ('""', Literal("")),
    ],
)
def test_a_rule_is_read(body, expected):
    assert read_gbnf(f'root ::= {body}\nother ::= "o"')["root"] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('other ::= "a"', "grammar has no rule root"),
        ("root ::= lost", "rule root uses lost, which is not defined"),
        ('root ::= "a', 'line 1: expected "'),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: rule root is defined twice"),
        ('root ::= ("a"', r"line 1: expected \)"),
        ("root ::= [a", "line 1: expected ]"),
        ("root ::= []", "line 1: an empty character class"),
        ("root ::= [z-a]", "line 1: the range z-a is reversed"),
        (r'root ::= "\q"', r"line 1: '\\\\q' is not a valid escape"),
        (r'root ::= "\ud800"', "is not a valid escape"),
        ('root ::= "a"{3,2}', "has a minimum above its maximum"),
        ('root ::= "a"{,}', "has no number"),
        ('root ::= "a"{}', r"line 1: '\{' is unexpected"),
        ('root ::= "a"{' + "9" * 5000 + "}", r"line 1: '\{' is unexpected"),
        ('root ::= "a" $', r"line 1: '\$' is unexpected"),
        ('root ::= "a" )', "line 1: expected a rule"),
    ],
)
def test_syntax_errors_name_their_line(text, message):
    with pytest.raises(RequestError, match=message) as caught:
        read_gbnf(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= ("a"{1000}){101}', "rule root repeats a part 101000 times"),
        ('root ::= a{1000}\na ::= "a"{,101}', "the grammar repeats a part 101000 times"),
        ('root ::= "(" root{2,100001} ")"', "rule root repeats a part 100001 times"),
    ],
)
def test_a_part_may_repeat_so_often_and_no_more(text, message):
    with pytest.raises(RequestError, match=message):
        to_lark(read_gbnf(text))
