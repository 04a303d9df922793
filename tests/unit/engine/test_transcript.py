"""Text, stop conditions and figures of one request, and the search for its stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specinfer.engine.steps import TreeEvent
from specinfer.engine.transcript import StopStrings, Transcript
from specinfer.request import FinishReason, Request
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.decision import PLAIN, Contribution, Decision
from specinfer.tokenizer import Tokenizer
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.tree.token_tree import single_node
from specinfer.verify.coupled import Acceptance
from tests.tiny_models import write_tiny_llama
from tests.unit.tokenizer.made_up import write_folder

END = 3  # the byte that ends the text in these tests


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tiny_llama(tmp_path_factory.mktemp("t"), vocab_size=256, tokenizer=True))


def transcript(tokenizer: Tokenizer, **params: Any) -> Transcript:
    request = Request("r", (65,), SamplingParams(**{"temperature": 0, **params}), seed=0)
    ending = frozenset({END} if not request.params.ignore_eos else ()) | set(request.params.stop_token_ids)
    return Transcript(request, tokenizer, ending=ending, max_context=100, now=0.0)


def say(t: Transcript, text: str | Sequence[int]) -> list[str]:
    """Commit tokens, one per byte of a text, until the request ends; the pieces a stream would show."""
    pieces = []
    for token in text.encode() if isinstance(text, str) else text:
        t.commit(single_node(0), Acceptance((), token), now=1.0)
        pieces.append(t.delta().text)
        if t.finish_reason is not None:
            break
    return pieces


# Parameters, what is said, the text, and the stop string that ends it. A stop string in brackets stays.
ENDS: list[tuple[dict[str, Any], str | bytes, str, str | FinishReason]] = [
    ({"max_tokens": 3}, "hello", "hel", FinishReason.LENGTH),
    ({}, b"hi\x03there", "hi", FinishReason.STOP),
    ({"ignore_eos": True, "max_tokens": 4}, b"hi\x03t", "hi\x03t", FinishReason.LENGTH),
    ({"min_tokens": 4}, b"h\x03i\x03", "h\x03i", FinishReason.STOP),
    ({"stop_token_ids": (ord("l"),)}, "hello", "he", FinishReason.STOP),
    ({"stop": "lo"}, "hello there", "hel[lo]", "lo"),
    ({"stop": ("there", "ell")}, "hello there", "h[ell]", "ell"),
    ({"stop": "l", "min_tokens": 4}, "hello lo", "hel[l]", "l"),
    ({"stop": ("ab", "longer"), "min_tokens": 4}, "xabcdab", "xabcd[ab]", "ab"),
    ({"stop": ("ab", "longer"), "min_tokens": 5}, b"xab\x03d\x03", "xab\x03d", FinishReason.STOP),
    ({"stop": ("xl", "l"), "min_tokens": 4}, "hello lo", "hel[l]", "l"),
    ({"stop": ("lo", "ll", "ello")}, "hello", "he[ll]", "ll"),
    ({"stop": ("ab", "abc")}, "xabc", "x[ab]", "ab"),
    ({"stop": "\u00e9!"}, "n\u00e9! and", "n[\u00e9!]", "\u00e9!"),
    ({"stop": "xyz"}, b"hello\x03", "hello", FinishReason.STOP),
    ({"stop": "xyz", "max_tokens": 5}, "hexyhello", "hexyh", FinishReason.LENGTH),
    ({"stop": "xyz", "stop_token_ids": (ord("l"),)}, "hello", "he", FinishReason.STOP),
]


@pytest.mark.parametrize("included", [False, True])
def test_a_request_ends_where_it_should(tokenizer: Tokenizer, included: bool) -> None:
    for params, said, shown, end in ENDS:
        t = transcript(tokenizer, include_stop_str_in_output=included, **params)
        pieces = say(t, said)
        by = None if isinstance(end, FinishReason) else end
        text = shown.replace("[", "").replace("]", "") if included else shown.partition("[")[0]
        assert (t.output().text, t.output().stopped_by) == (text, by), params
        assert t.finish_reason is (FinishReason.STOP if by else end), params
        assert "".join(pieces) == text, "nothing comes twice or is missing, wherever a piece ends"


def test_a_stream_holds_back_what_a_stop_string_may_still_take(tokenizer: Tokenizer) -> None:
    t = transcript(tokenizer, stop="STOP")
    assert say(t, "a STO, b ST") == ["a", " ", "", "", "", "STO,", " ", "b", " ", "", ""]
    t.abort(2.0)
    assert t.delta().text == "ST"


def test_a_special_token_is_shown_to_whom_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    token = tokenizer.special_id("<s>")
    texts = []
    for visible in ((), (token,)):
        said = [ord("a"), token, ord("b")]
        texts.append("".join(say(transcript(tokenizer, visible_token_ids=visible), said)))
    assert texts == ["ab", "a<s>b"]


# Byte tokens, with <s> (256) as B and </s> (257), which ends the text, as E; stop strings, text, stopped by.
NAMED_STOPS: list[tuple[str, list[str], str, str | None]] = [
    ("aBb", ["<s>"], "a", "<s>"),
    ("aBb", ["zz", "<s>"], "a", "<s>"),
    ("aB\nb", ["<s>\n"], "a", "<s>\n"),
    ("aBbB\n", ["<s>\n"], "ab", "<s>\n"),
    ("a\nBb", ["\n<s>"], "a", "\n<s>"),
    ("a\nb\nBb", ["\n<s>"], "a\nb", "\n<s>"),
    ("aBBb", ["<s><s>"], "a", "<s><s>"),
    ("aBbE", ["b</s>"], "a", "b</s>"),  # the end of text has a name, too
    ("abE", ["</s>"], "ab", "</s>"),
    ("abE", ["<s>"], "ab", None),
    ("a<s>b", ["<s>"], "a", "<s>"),  # the name written out
    ("aBbc", ["bc"], "a", "bc"),
    ("abBc", ["bc", "c<s>"], "a", "bc"),  # as before: the text has no special tokens
    ("BBBBBBBBabBc", ["b<s>", "b"], "a", "b"),
]


def test_a_stop_string_may_have_names_of_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    for said, stop, text, stopped_by in NAMED_STOPS:
        tokens = [{"B": 256, "E": 257}.get(char, ord(char)) for char in said]
        for included, visible in product((False, True), ((), (256,))):
            case = (said, stop, included, visible)
            kept, named = text, said.replace("B", "<s>").removesuffix("E")
            if visible and stopped_by is not None:
                if stopped_by not in named:
                    continue
                kept = named[: named.index(stopped_by)]
            shows = {"include_stop_str_in_output": included, "visible_token_ids": visible}
            t = transcript(tokenizer, stop=stop, stop_token_ids=(257,), **shows)
            pieces = say(t, tokens)
            assert (t.finish_reason, t.output().stopped_by) == (FinishReason.STOP, stopped_by), case
            assert t.output().text == kept + (stopped_by or "") * included, case
            assert "".join(pieces) == t.output().text, case


def test_tokens_after_the_end_are_dropped(tokenizer: Tokenizer) -> None:
    builder = TreeBuilder(root=ord("x"))
    node = 0
    for token in b"ab\x03cd":
        node = builder.add(node, token, "guesser") or 0
    t = transcript(tokenizer)
    committed = t.commit(builder.build(), Acceptance((1, 2, 3, 4, 5), ord("e")), now=1.0)
    assert committed == (ord("a"), ord("b"), END)
    delta = t.delta()
    assert (delta.text, delta.token_ids) == ("ab", (97, 98, END))
    assert (t.output().text, t.output().token_ids) == ("ab", (97, 98, END))


def test_figures_count_steps_after_the_first_token_and_give_credit(tokenizer: Tokenizer) -> None:
    #   x - a - b      guesser: a b, other: a c
    #        \- c
    builder = TreeBuilder(root=ord("x"))
    a = builder.add(0, ord("a"), "guesser") or 0
    builder.add(a, ord("b"), "guesser")
    builder.add(0, ord("a"), "other", DrawRule.POINT_MASS)
    builder.add(a, ord("c"), "other")
    t = transcript(tokenizer)
    t.commit(single_node(ord("p")), Acceptance((), ord("x")), now=1.0)
    t.commit(builder.build(), Acceptance((1, 2), ord("z")), now=2.0)
    t.commit(builder.build(), Acceptance((), ord("z")), now=3.0)
    figures = t.output().figures
    assert (figures.steps, figures.output_tokens, figures.tokens_per_step) == (2, 4, 2.0)
    assert (figures.drafted_tokens, figures.accepted_tokens) == (6, 2)
    assert (figures.accepted_per_depth, figures.drafted_per_depth) == ([1, 1], [2, 2])
    assert figures.accepted_by == {"guesser": 2, "other": 1}
    assert figures.proposed_by == {"guesser": 4, "other": 4}
    assert t.output().timing.ttft == 1.0


def test_a_stop_string_in_the_middle_of_a_token_ends_the_text_there(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path))
    special = tokenizer.special_id("<s>")
    for included, text in ((False, "a"), (True, "a<")):
        shows = {"include_stop_str_in_output": included, "visible_token_ids": (special,)}
        t = transcript(tokenizer, stop="<", **shows)
        assert "".join(say(t, [ord("a"), special])) == text
        assert t.finish_reason is FinishReason.STOP


def slow_held(text: str, strings: Sequence[str]) -> int:
    """The longest end of the text that a string begins with, and is more than."""
    return max(
        (
            n
            for one in strings
            for n in range(1, len(one))
            if n <= len(text) and one.startswith(text[len(text) - n :])
        ),
        default=0,
    )


def slow_found(text: str, before: int, strings: Sequence[str]) -> tuple[int, int] | None:
    """The first string that ends behind `before`: the one that begins first, then the shortest."""
    found = [
        (start, start + len(one))
        for one in strings
        for start in range(len(text) - len(one) + 1)
        if text[start:].startswith(one) and start + len(one) > before
    ]
    return min(found, default=None)


@pytest.mark.parametrize("letters", ["a", "ab", "abc"])
def test_what_is_found_and_held_is_what_a_slow_search_says(letters: str) -> None:
    draw = random.Random(letters)
    for _ in range(300):
        strings = ["".join(draw.choices(letters, k=draw.randint(1, 5))) for _ in range(draw.randint(0, 4))]
        stops, text = StopStrings(strings), ""
        for _ in range(12):
            piece = "".join(draw.choices(letters, k=draw.randint(0, 4)))
            text += piece
            assert stops.feed(piece) == slow_found(text, len(text) - len(piece), strings), (strings, text)
            assert stops.held == slow_held(text, strings), (strings, text)


class Counted(str):
    """A string that counts how often a character of it is looked at."""

    looks = 0

    def __getitem__(self, place: object) -> str:
        Counted.looks += 1
        return super().__getitem__(place)  # type: ignore[index]


def test_the_work_grows_with_the_text_and_not_with_its_square() -> None:
    # Worst case: every character of the text may be a part of a long string.
    strings = [Counted("a" * (1000 + number) + "b") for number in range(4)]
    stops = StopStrings(strings)
    looks = []
    for _ in range(3):
        Counted.looks = 0
        for _ in range(2000):
            assert stops.feed("a") is None
        looks.append(Counted.looks)
    assert max(looks) < 2000 * len(strings) * 4  # a few looks for each character and string in progress
    assert stops.held == 1003


def test_strings_that_are_not_begun_cost_nothing() -> None:
    strings = [Counted(f"{chr(0x4E00 + number)} and so on") for number in range(5000)]
    stops = StopStrings(strings)
    Counted.looks = 0
    assert stops.feed("plain text " * 1000) is None
    assert Counted.looks == 0
    assert stops.feed(f"x{chr(0x4E00 + 7)} and so on.") == (11001, 11012)


# A step's tree as JSON values.


A, B = b"AB"


def step(root: int, guess: int, bonus: int) -> TreeEvent:
    builder = TreeBuilder(root=root)
    builder.add(0, guess, "lookup")
    return TreeEvent(2, "r", builder.build(), Acceptance((1,), bonus), {"propose": 0.25})


def test_an_event_says_all_of_its_step(tokenizer: Tokenizer) -> None:
    assert step(A, B, A).to_json(tokenizer) == {
        **{"step": 2, "request_id": "r", "token_ids": [A, B], "parents": [-1, 0]},
        **{"proposed_by": [[], ["lookup"]], "path": [1], "next_token": A, "likelihoods": [1.0, 0.5]},
        **{"seconds": {"propose": 0.25}, "texts": ["A", "B"], "next_text": "A"},
    }


def test_an_event_says_why_where_somebody_asked() -> None:
    decision = Decision((Contribution("lookup", PLAIN),), (1.0,), 0.0, 0.5)
    record = replace(step(A, B, A), decision=decision).to_json()
    assert record["decision"] == decision.to_json()
