import pytest

from specinfer.errors import RequestError
from specinfer.processors.lark_rules import read_lark
from specinfer.processors.rules import Choice, Literal, Reference, Repeat, Sequence, endless_rule, in_use

A = Literal("a")


@pytest.mark.parametrize(
    ("rules", "endless"),
    [
        ({"start": A}, None),
        ({"start": Sequence((A, Reference("start")))}, "start"),
        ({"start": Choice((A, Sequence((A, Reference("start")))))}, None),
        ({"start": Sequence((A, Repeat(Reference("start"), 0, None)))}, None),
        ({"start": Sequence((A, Repeat(Reference("start"), 1, None)))}, "start"),
        ({"start": Choice((A, Reference("b"))), "b": Sequence((A, Reference("b")))}, "b"),
        ({"start": Reference("b"), "b": Reference("c"), "c": Reference("b")}, "c"),
        ({"start": A, "unused": Reference("unused")}, None),
    ],
)
def test_rules_under_which_no_text_ends_are_found(rules, endless):
    assert endless_rule(rules, "start") == endless


def test_rules_in_use_are_listed_once_from_the_start():
    rules = {"start": Sequence((Reference("b"), Reference("c"))), "b": Reference("c"), "c": A, "d": A}
    assert in_use(rules, "start") == ["start", "b", "c"]


@pytest.mark.parametrize(
    ("lark", "endless"),
    [
        ('start: "a" start', "start"),
        ('start: "a" | start "b"', None),
        ('start: "a" [start]', None),
        ('start: "a" start?', None),
        ('start: "a" start~0..3 // a remark: start\n', None),
        ('start: "a" start{2,3}', "start"),
        ('start: WORD b\nb: "x"i b | /[a-z:]+/ -> word\nWORD.2: "a".."z" & ~"q"\n%ignore " "', None),
        ('start: WORD b # remark\n?b: "x" b\n | "y" b\nWORD: /w/', "b"),
        ('start: %json {"type": "object", "title": "}"} tail\ntail[lazy]: /.*;/ tail', "tail"),
        ('%llguidance {"no_forcing": true}\nstart: <|tool|> start', "start"),
    ],
)
def test_lark_rules_are_read_as_far_as_that_goes(lark, endless):
    assert endless_rule(read_lark(lark), "start") == endless


@pytest.mark.parametrize(
    "lark", ["start: lost", 'other: "a"', "start: a::b", 'start: %json {"type"', "start: ("]
)
def test_unknown_syntax_is_left_to_the_library(lark):
    assert read_lark(lark) is None


@pytest.mark.parametrize("option", ["max_tokens=3", "temperature=0.5", 'stop="x"', "lazy, max_tokens=3"])
def test_options_that_are_no_form_of_text_are_refused(option):
    with pytest.raises(RequestError, match=rf"rule a has the option {option.split('=')[0].split()[-1]}; "):
        read_lark(f"start: a\na[{option}]: /.*/ ::")
