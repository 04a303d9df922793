"""Suffix speculation on texts a person can read: each letter is a token."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.errors import ConfigError
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.lookups.matches import match_confidence
from specinfer.speculate.lookups.suffix import SuffixSpeculator
from specinfer.speculate.lookups.suffix_store import SuffixStore
from specinfer.tree import DrawRule
from specinfer.tree.pairs import Verifier
from tests.engines import Tiny
from tests.letters import letters, spelled
from tests.lone_speculator import answer as answer_in_engine
from tests.lone_speculator import expected
from tests.operations import lines_run
from tests.plans import entry, outcome, plan

pytestmark = pytest.mark.usefixtures("looking_up")


def salted(key: str | None) -> SamplingParams:
    return SamplingParams(cache_salt=key)


def guess(
    speculator: SuffixSpeculator, text: str, *, request_id: str = "r", salt: str | None = None, **limits: int
) -> list[str]:
    """The branches for a request whose prompt is `text`."""
    asked = entry(letters(text), request_id=request_id, params=salted(salt), **limits)
    [tree] = speculator.propose(plan(asked))
    assert tree.token_ids[0] == ord(text[-1]), "the root is the last token"
    speculator.check_integrity()
    return spelled(tree)


def answer(
    speculator: SuffixSpeculator,
    prompt: str,
    output: str,
    *,
    salt: str | None = None,
    request_id: str = "past",
) -> None:
    """A request comes, says `output`, and ends."""
    speculator.propose(plan(entry(letters(prompt), request_id=request_id, params=salted(salt))))
    speculator.observe([outcome(*letters(output), request_id=request_id, finished=True)])
    speculator.check_integrity()


def suffix(**options: Any) -> SuffixSpeculator:
    return SuffixSpeculator(**{"max_depth": 3, "min_probability": 0.0, "depth_factor": 4.0, **options})


def test_what_followed_the_last_tokens_in_this_text_is_the_guess() -> None:
    assert guess(suffix(), "the cat sat. the c") == ["at "]


def test_text_that_never_occurred_gives_no_guess() -> None:
    assert guess(suffix(), "abcdef") == []
    assert guess(suffix(), "a", request_id="other") == []


def test_all_that_followed_becomes_a_tree_with_shared_nodes() -> None:
    #        a             after "a" came twice "bc" and once "bd"
    #        |
    #        b
    #       / \
    #      c   d
    speculator = suffix(max_depth=2, depth_factor=9.0)
    asked = entry(letters("abc-abd+abc*a"))
    [tree] = speculator.propose(plan(asked))
    assert "".join(map(chr, tree.token_ids)) == "abcd"
    assert tree.parents == (-1, 0, 1, 1)


def test_the_likeliest_nodes_come_first_and_fill_the_budget() -> None:
    text = " a1x a2y a1z a"  # after " a": 1 twice, 2 once; then, each once, z, x and y
    assert guess(suffix(max_depth=2), text, max_nodes=2) == ["1"]
    assert guess(suffix(max_depth=2), text, max_nodes=3) == ["1", "2"]
    assert guess(suffix(max_depth=2), text, max_nodes=6) == ["1z", "1x", "2y"]
    assert guess(suffix(max_depth=2, max_nodes=4), text) == ["2", "1z"]


def test_nodes_below_the_least_probability_are_left_out() -> None:
    text = " a1x a2y a1z a"
    assert guess(suffix(max_depth=2, min_probability=0.4), text) == ["1"]
    assert guess(suffix(max_depth=2, min_probability=0.7), text) == []


def test_longer_matches_weigh_more_than_several_short_ones() -> None:
    # " xa" stands once before 1, "a" alone twice before 2: weights 9 and 2 * 1.
    assert guess(suffix(max_depth=1), "xa1 ya2 za2, xa")[0] == "1"


@pytest.mark.parametrize(
    ("factor", "guessed"),
    [(0.1, "d"), (0.5, "d"), (1.0, "def"), (2.0, "defghi"), (9.0, "defghijkl")],
)
def test_a_longer_match_is_guessed_deeper(factor: float, guessed: str) -> None:
    speculator = suffix(max_depth=9, depth_factor=factor)
    assert guess(speculator, "abcdefghijklmnop-abc") == [guessed]


def test_a_loop_is_guessed_to_loop() -> None:
    assert guess(suffix(max_depth=7, min_probability=0.3), "go go ") == ["go go g"]


def test_depth_is_limited_by_the_speculator_and_by_the_room_left() -> None:
    assert guess(suffix(max_depth=2), "abcdefab") == ["cd"]
    assert guess(suffix(max_depth=9), "abcdefab", max_depth=1) == ["c"]
    assert guess(suffix(), "abcdefab", max_depth=0) == []
    assert guess(suffix(), "abcdefab", max_nodes=1) == []


def test_an_answer_is_guessed_again_for_a_later_request() -> None:
    speculator = suffix(max_depth=5)
    answer(speculator, "say:", "world")
    assert guess(speculator, "say:") == ["world"]  # the prompt's end is kept before the answer
    assert guess(speculator, "do wor", request_id="2") == ["ld"]


def test_an_answer_of_several_steps_is_kept_once() -> None:
    speculator = suffix(max_depth=9)
    said = ""
    for part in ("w", "or", "ld"):
        speculator.propose(plan(entry(letters("say:" + said), request_id="past")))
        said += part
        speculator.observe([outcome(*letters(part), request_id="past", finished=said == "world")])
    assert guess(speculator, "say:") == ["world"]
    speculator.check_integrity()


def test_of_the_prompt_only_its_end_is_kept() -> None:
    speculator = suffix()
    answer(speculator, "secret" + "-" * 40, "x")
    assert guess(speculator, "sec") == []


def test_a_running_answer_is_not_shared_a_finished_or_aborted_one_is() -> None:
    speculator = suffix()
    speculator.propose(plan(entry(letters("q:"), request_id="1")))
    speculator.observe([outcome(*letters("abc"), request_id="1")])
    assert guess(speculator, "xab", request_id="2") == []
    speculator.observe([outcome(request_id="1", finished=True)])
    assert guess(speculator, "xab", request_id="3") == ["c"]


def test_a_request_that_says_nothing_leaves_nothing() -> None:
    speculator = suffix()
    answer(speculator, "abc", "")
    assert guess(speculator, "ab") == []


def test_cache_keys_do_not_see_each_other() -> None:
    speculator = suffix()
    answer(speculator, "q:", "ab1", salt="mine")
    answer(speculator, "q:", "ab2", salt="yours")
    answer(speculator, "q:", "ab3")
    assert guess(speculator, "ab", salt="mine", request_id="1") == ["1"]
    assert guess(speculator, "ab", salt="yours", request_id="2") == ["2"]
    assert guess(speculator, "ab", request_id="3") == ["3"]
    assert guess(speculator, "ab", salt="other", request_id="4") == []


def test_the_oldest_answers_leave_when_the_memory_is_full() -> None:
    two_keys = SuffixStore(1 << 20)
    for key in ("ab1", "ab2"):
        two_keys.add(key, array("i", letters(":" + key)))
    speculator = suffix(memory=two_keys.num_bytes + 200)
    for answered in ("ab1", "ab2", "ab3"):
        answer(speculator, ":", answered, salt=answered)
    assert guess(speculator, "ab", salt="ab1", request_id="1") == []
    assert guess(speculator, "ab", salt="ab2", request_id="2") == ["2"]
    assert guess(speculator, "ab", salt="ab3", request_id="3") == ["3"]


def test_without_memory_the_own_text_is_still_looked_at() -> None:
    speculator = suffix(memory=0)
    answer(speculator, ":", "xyz")
    assert guess(speculator, "x", request_id="1") == []
    assert guess(speculator, "xyz-x", request_id="2") == ["yz-"]


def test_it_may_be_asked_in_some_steps_only() -> None:
    asked_always, asked_late = suffix(), suffix()
    prompt, output = letters("p:"), letters("abcabdabcab")
    for speculator in (asked_always, asked_late):
        speculator.propose(plan(entry(prompt)))
    for step, token in enumerate(output):
        for speculator in (asked_always, asked_late):
            speculator.observe([outcome(token)])
        asked_always.propose(plan(entry(prompt, output[: step + 1])))
    trees = [s.propose(plan(entry(prompt, output)))[0] for s in (asked_always, asked_late)]
    assert spelled(trees[0]) == spelled(trees[1])
    assert spelled(trees[0])[0] == "dab"


def test_of_a_request_it_was_never_asked_about_nothing_is_learnt() -> None:
    speculator = suffix()
    speculator.observe([outcome(*letters("abc"), finished=True)])
    assert guess(speculator, "ab") == []


def test_a_finished_request_is_forgotten_and_its_id_free() -> None:
    speculator = suffix(memory=0)
    answer(speculator, "abc", "d", request_id="r")
    assert guess(speculator, "xab", request_id="r") == []


def test_draws_are_point_masses_with_the_speculators_name() -> None:
    [tree] = suffix(max_depth=2, name="memory").propose(plan(entry(letters("xab-xa"))))
    assert [(d.parent, d.node, d.speculator, d.rule, d.law) for d in tree.draws] == [
        (0, 1, "memory", DrawRule.POINT_MASS, None),
        (1, 2, "memory", DrawRule.POINT_MASS, None),
    ]


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("max_depth", 0, "1 or more"),
        ("max_nodes", 0, "1 or more, the root included"),
        ("min_probability", 1.5, "0 to 1"),
        ("min_probability", float("nan"), "0 to 1"),
        ("depth_factor", 0.0, "a finite number above 0"),
        ("depth_factor", float("inf"), "a finite number above 0"),
        ("memory", -1, "0 or more bytes"),
    ],
)
def test_an_option_outside_its_range_is_refused(option: str, value: float, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} of the suffix speculator is .*; allowed: {allowed}"):
        suffix(**{option: value})


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(st.lists(TEXT, max_size=4), TEXT, st.integers(1, 8), st.integers(1, 12), st.integers(0, 8))
@settings(deadline=None)
def test_trees_keep_the_limits_and_say_only_what_was_said_before(
    past: list[list[int]], text: list[int], depth: int, nodes: int, room: int
) -> None:
    speculator = SuffixSpeculator(max_depth=depth, max_nodes=nodes, min_probability=0.0, memory=6000)
    for i, said in enumerate(past):
        speculator.propose(plan(entry([9], request_id=str(i))))
        speculator.observe([outcome(*said, request_id=str(i), finished=True)])
    speculator.check_integrity()
    [tree] = speculator.propose(plan(entry(text, max_nodes=10, max_depth=room)))
    tree.check_integrity()
    assert tree.num_nodes <= min(nodes, 10)
    assert max(tree.depths()) <= min(depth, room)
    # Each guessed token follows the one before it somewhere: in a past answer, or in the text so continued.
    seen = {pair for said in past for pair in pairwise([9, *said])}
    seen |= set(pairwise(text))
    for node in range(1, tree.num_nodes):
        pair = (tree.token_ids[tree.parents[node]], tree.token_ids[node])
        assert pair in seen


@pytest.mark.thorough
@given(st.lists(st.tuples(st.sampled_from(["x", "y", None]), TEXT), max_size=8), TEXT)
@settings(deadline=None)
def test_no_token_of_another_key_is_ever_proposed(
    past: list[tuple[str | None, list[int]]], text: list[int]
) -> None:
    speculator = SuffixSpeculator(min_probability=0.0, memory=12_000)
    alphabet = {"x": 0, "y": 10, None: 20}  # a key's tokens are told by their tens, the matches by the units
    for i, (key, said) in enumerate(past):
        own = [token + alphabet[key] for token in said]
        speculator.propose(plan(entry([99], request_id=str(i), params=salted(key))))
        mixed = [token for said_token in own for token in (99, said_token)]  # 99 is common to all keys
        speculator.observe([outcome(*mixed, request_id=str(i), finished=True)])
    for key, first in alphabet.items():
        asked = entry([*(token + first for token in text), 99], request_id=f"asks {key}", params=salted(key))
        [tree] = speculator.propose(plan(asked))
        assert set(tree.token_ids) <= {99, *range(first, first + 4)}


@pytest.mark.parametrize("verifier", list(Verifier))
def test_in_an_engine_an_answer_asked_for_again_takes_the_fewest_steps(
    tiny: Tiny, verifier: Verifier
) -> None:
    speculator = SuffixSpeculator(max_depth=3)
    first, again = (
        answer_in_engine(tiny, speculator, verifier, request_id=request_id)
        for request_id in ("first", "again")
    )
    assert list(first.token_ids) == list(again.token_ids) == expected(tiny)
    assert again.figures.accepted_by == {"suffix": again.figures.accepted_tokens}
    assert first.figures.tokens_per_step < again.figures.tokens_per_step
    assert again.figures.tokens_per_step > 3.5  # of at most 4, the last step being cut short
    speculator.check_integrity()


def test_a_guess_is_as_sure_as_its_share_of_the_votes_and_the_length_of_its_match() -> None:
    [tree] = suffix(max_depth=2, depth_factor=9.0).propose(plan(entry(letters("abc-abd+abc*a"))))
    sure = {"".join(map(chr, tree.path_tokens(d.node))): d.confidence for d in tree.draws}
    one, two = match_confidence(1), match_confidence(2)
    assert sure == pytest.approx({"b": one, "bc": two * 2 / 3, "bd": two / 3})
    seen = {"".join(map(chr, tree.path_tokens(d.node))): d.evidence for d in tree.draws}
    assert seen == {"b": (1, 3, 1), "bc": (2, 2, 2 / 3), "bd": (2, 1, 1 / 3)}


def test_a_prompt_is_read_in_step_with_the_target() -> None:
    speculator, text = suffix(), letters("one two three one two ")
    for end in (6, 12):
        assert speculator.propose(plan(entry(text, start=end - 6, end=end, max_nodes=0))) == []
    costs = [lines_run(lambda s=s: s.propose(plan(entry(text)))) for s in (speculator, suffix())]  # type: ignore[misc]
    assert costs[0] < costs[1], "half of it was read before"
    [tree], [whole] = (s.propose(plan(entry(text))) for s in (speculator, suffix()))
    assert (tree.token_ids, tree.parents) == (whole.token_ids, whole.parents)
    assert tree.num_nodes > 3
    speculator.check_integrity()


def further(
    speculator: SuffixSpeculator, text: str, path: str, most: int = 9, salt: str | None = None
) -> list[str]:
    """What is guessed to follow `path`, if that is how the text goes on."""
    asked = entry(letters(text), params=salted(salt))
    speculator.propose(plan(asked))
    [before] = speculator.propose(plan(asked))
    tree = speculator.extend(asked, letters(path), most)
    tree.check_integrity()
    assert tree.token_ids[0] == ord(path[-1]), "the root is the path's last token"
    assert {draw.speculator for draw in tree.draws} <= {"suffix"}
    assert {draw.rule for draw in tree.draws} <= {DrawRule.POINT_MASS}
    [after] = speculator.propose(plan(asked))
    assert after.token_ids == before.token_ids, "nothing is remembered of what is no text"
    speculator.check_integrity()
    return spelled(tree)


def test_a_guess_of_another_is_gone_on_from_as_if_it_were_text() -> None:
    assert further(suffix(), "the cat sat. a dog ", "the") == [" ca"]
    assert further(suffix(), "the cat sat. th", "e c") == ["at "], "a match that begins in the text"
    assert further(suffix(), "abcdef", "xyz") == []
    assert further(suffix(max_depth=1), "ab1 ab2 ", "ab") == ["2", "1"]
    assert further(suffix(max_depth=1), "ab1 ab2 ", "ab", most=2) == ["2"]
    assert further(suffix(max_depth=9, depth_factor=9.0), "ab1", "ab", most=4) == ["1ab"]


@pytest.mark.parametrize(("salt", "found"), [("mine", ["y-t"]), ("yours", []), (None, [])])
def test_earlier_answers_of_the_same_caller_go_on_from_guesses_too(
    salt: str | None, found: list[str]
) -> None:
    speculator = suffix(min_probability=0.3)
    answer(speculator, "what?", "forty-two", salt="mine")
    assert further(speculator, "hello ", "fort", salt=salt) == found


def test_what_runs_into_the_end_of_the_text_goes_on_into_the_path_and_then_into_itself() -> None:
    speculator = suffix(max_depth=8, depth_factor=9.0)
    assert further(speculator, "-abc", "ab") == ["cabcabca"]


def test_to_go_on_from_a_guess_takes_the_same_whatever_the_text() -> None:
    speculator = SuffixSpeculator()
    costs = []
    for length in (64, 8192):
        asked = entry([i % 7 for i in range(length)], request_id=str(length))
        speculator.propose(plan(asked))
        costs.append(lines_run(lambda asked=asked: speculator.extend(asked, (0, 1, 2), 9)))  # type: ignore[misc]
    assert max(costs) <= 900
