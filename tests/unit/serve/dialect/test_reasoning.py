"""Splitting of answers into reasoning and content, and detection of reasoning models."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.serve.dialect.reasoning import Reasoning, ReasoningSplitter
from specinfer.structured_output import structured_output
from tests.unit.serve.dialect.families import FAMILIES, PLAIN, THINKING, tokenizer, verdict_of_form


def split(inside, *pieces):
    splitter = ReasoningSplitter(inside)
    found = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", last=True)]
    reasoning, content = ("".join(part) for part in zip(*found, strict=True))
    return reasoning, content


CASES = [
    (False, "", "", ""),
    (False, "hello\n", "", "hello\n"),
    (False, "\n hello", "", "\n hello"),
    (False, "<think>\nA b\n</think>\n\nC", "A b", "C"),
    (False, "\n<think>A</think>C\n", "A", "C\n"),
    (False, "<think>\n\n</think>\n\nC", "", "C"),
    (False, "<think> A\n\n B \n</think> \nC", " A\n\n B ", " \nC"),
    (False, "<think>\n<think></thin</thinks>\n</think>\nC</think>", "<think></thin</thinks>", "C</think>"),
    (False, "<think>\nA\n", "A\n", ""),
    (False, "<think>A</thin", "A</thin", ""),
    (False, "<think>", "", ""),
    (False, "<thi", "", "<thi"),
    (False, "<<think>A", "", "<<think>A"),
    (False, "C <think>A</think>", "", "C <think>A</think>"),
    (True, "A\n</think>\n\nC", "A", "C"),
    (True, "\nA", "A", ""),
    (True, "</think>C", "", "C"),
    (True, "<think>\nA</think>C", "<think>\nA", "C"),  # the prompt has the first mark already
    (True, "A <\n</think>", "A <", ""),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), CASES)
def test_an_answer_is_reasoning_and_content(inside, text, reasoning, content):
    assert split(inside, text) == (reasoning, content)
    assert split(inside, *text) == (reasoning, content)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_however_an_answer_is_cut_it_says_the_same(data):
    inside = data.draw(st.booleans())
    parts = st.sampled_from(["<think>", "</think>", "\n", " ", "<", "</", "a", "think>"])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    found = split(inside, *pieces)
    assert found == split(inside, text)
    # Nothing is lost but marks and what belongs to them.
    assert len("".join(found)) >= len(text) - text.count("\n") - text.count(" ") - len("<think></think>")


def test_reasoning_goes_out_as_it_comes():
    splitter = ReasoningSplitter(starts_inside=False)
    assert splitter.feed("<thin") == ("", "")
    assert splitter.feed("k>\nA b\n") == ("A b", "")
    assert splitter.feed("c</") == ("\nc", "")
    assert splitter.feed("b></think>\n") == ("</b>", "")
    assert splitter.feed("\nD ") == ("", "D ")
    assert splitter.feed("", last=True) == ("", "")


def test_reasoning_is_detected_from_the_template():
    assert Reasoning.of(tokenizer(PLAIN)) is None
    assert Reasoning.of(tokenizer()) is None
    assert Reasoning.of(tokenizer(PLAIN, tool_template=THINKING)) == Reasoning()
    text = tokenizer(THINKING, text=("<think>", "</think>"))
    assert Reasoning.of(text).special == {}
    special = tokenizer(THINKING, special=("<think>", "</think>"))
    assert Reasoning.of(special) == Reasoning({"<think>": 257, "</think>": 258})


# (inside, text, longest legal prefix; None: all of it)
BEFORE_A_FORM = [
    (False, "ab", None),
    (False, "<think>A b</think>ab", None),
    (False, "<think>\n\nA\n\n</think>\n\nab", None),
    (False, "\n<think>A</think>ab", ""),
    (False, "\nab", ""),
    (False, " ab", ""),
    (False, "<think>A</think> ab", "<think>A</think>"),
    (False, "<think>A</think>\n ab", "<think>A</think>\n"),
    (False, "<think>A</think>ab\n", "<think>A</think>ab"),
    (False, "<think>A</think>", "<think>A</think>..."),
    (False, "<think>A", "<think>A..."),
    (True, "ab", "ab..."),
    (True, "A\n</think>\nab", None),
    (True, "</think>abc", "</think>ab"),
]


@pytest.mark.parametrize("name", ["hermes", "hermes, text", "hermes, special"])
@pytest.mark.parametrize(("inside", "text", "legal"), BEFORE_A_FORM)
def test_blanks_around_reasoning_do_not_belong_to_the_form(name, inside, text, legal):
    """Marks may be tokens that are text, several tokens, or special ones."""
    family = FAMILIES[name]
    special = ((mark, family.tokenizer.special_id(mark)) for mark in ("<think>", "</think>"))
    reasoning = Reasoning({mark: token for mark, token in special if token is not None})
    rules = "\n".join(f"{rule}: {body}" for rule, body in reasoning.preamble_rules(inside).items())
    for form in ({"regex": "[a-z]{2}"}, {"choice": ["ab"]}, {"grammar": 'start: "a" "b"'}):
        assert verdict_of_form(family, structured_output(preamble=rules, **form), text) == legal
    if legal is None:
        assert split(inside, text)[1] == "ab"
