"""N-gram speculation on texts a person can read: each letter is a token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.speculate.lookups.lookups import PLACES
from specinfer.speculate.lookups.matches import match_confidence
from specinfer.speculate.lookups.ngram import NgramSpeculator
from specinfer.tree import DrawRule
from tests.letters import letters, spelled
from tests.operations import lines_run
from tests.plans import entry, outcome, plan

pytestmark = pytest.mark.usefixtures("looking_up")


def guess(
    text: str,
    *,
    shortest: int = 1,
    longest: int = 4,
    branches: int = 1,
    depth: int = 3,
    max_nodes: int = 64,
    max_depth: int = 100,
) -> list[str]:
    speculator = NgramSpeculator(shortest=shortest, longest=longest, branches=branches, depth=depth)
    [tree] = speculator.propose(plan(entry(letters(text), max_nodes=max_nodes, max_depth=max_depth)))
    tree.check_integrity()
    assert tree.token_ids[0] == ord(text[-1]), "the root is the last token"
    return spelled(tree)


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    assert guess("the cat sat. the c") == ["at "]


def test_text_that_never_occurred_gives_no_guess() -> None:
    assert guess("abcdef") == []
    assert guess("a") == []


def test_a_longer_match_is_better_than_a_newer_one() -> None:
    assert guess("xaby-zb!-xab", longest=3) == ["y-z"]
    assert guess("xaby-zb!-xab", longest=1) == ["!-x"]


def test_of_equal_matches_the_newest_is_taken() -> None:
    assert guess("ab1 ab2 ab3 ab") == ["3 a"]


def test_matches_shorter_than_the_shortest_do_not_count() -> None:
    assert guess("a1 xa", shortest=1) == ["1 x"]
    assert guess("a1 xa", shortest=2) == []


def test_branches_begin_with_different_tokens() -> None:
    assert guess("ab1 ab2 ab2 ab", branches=2) == ["2 a", "1 a"]
    assert guess("ab1 ab2 ab2 ab", branches=3, depth=2) == ["2 ", "1 "]
    # The third branch comes from the shorter match of "b" alone.
    assert guess("b7 ab1 ab2 ab", branches=3, depth=2) == ["2 ", "1 ", "7 "]


def test_a_loop_is_guessed_to_loop() -> None:
    assert guess("go go ", depth=7) == ["go go g"]
    assert guess("aa", depth=5) == ["aaaaa"]


def test_depth_is_limited_by_the_speculator_and_by_the_room_left() -> None:
    assert guess("abcdefab", depth=2) == ["cd"]
    assert guess("abcdefab", depth=9, max_depth=1) == ["c"]
    assert guess("abcdefab", max_depth=0) == []


def test_the_budget_counts_the_root_and_cuts_the_last_branch() -> None:
    assert guess("ab1 ab2 ab", branches=2, max_nodes=6) == ["2 a", "1 "]
    assert guess("ab1 ab2 ab", branches=2, max_nodes=2) == ["2"]
    assert guess("ab1 ab2 ab", branches=2, max_nodes=1) == []


def test_draws_are_point_masses_with_the_speculators_name() -> None:
    speculator = NgramSpeculator(shortest=1, longest=2, branches=1, depth=2, name="lookup")
    [tree] = speculator.propose(plan(entry(letters("abab"))))
    assert [(d.parent, d.node, d.speculator, d.rule, d.law) for d in tree.draws] == [
        (0, 1, "lookup", DrawRule.POINT_MASS, None),
        (1, 2, "lookup", DrawRule.POINT_MASS, None),
    ]


def test_the_index_grows_with_the_text() -> None:
    speculator = NgramSpeculator(shortest=1, longest=3, branches=1, depth=2)
    text = letters("abc")
    assert spelled(speculator.propose(plan(entry(text)))[0]) == []
    text += letters("abx")  # committed: as the engine does, to the same list
    assert spelled(speculator.propose(plan(entry(text)))[0]) == []
    text += letters("ab")
    assert spelled(speculator.propose(plan(entry(text)))[0]) == ["xa"]


def test_each_request_has_its_own_text_and_finished_ones_are_forgotten() -> None:
    speculator = NgramSpeculator(shortest=1, longest=3, branches=1, depth=1)
    first, second = letters("ab ab ab a"), letters("ac ac ac a")
    trees = speculator.propose(plan(entry(first, request_id="1"), entry(second, request_id="2")))
    assert [spelled(tree) for tree in trees] == [["b"], ["c"]]
    speculator.observe([outcome(1, request_id="1", finished=True), outcome(1, request_id="2")])
    # Another request comes with the id of the finished one, and finds nothing of its text.
    [tree] = speculator.propose(plan(entry(letters("xyxa"), request_id="1")))
    assert spelled(tree) == []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_trees_are_those_found_by_looking_everywhere(
    text: list[int], shortest: int, more: int, branches: int, max_nodes: int
) -> None:
    longest, depth = shortest + more, 4
    speculator = NgramSpeculator(shortest=shortest, longest=longest, branches=branches, depth=depth)
    # In two turns, so that the index is extended.
    speculator.propose(plan(entry(text[: len(text) // 2 + 1])))
    [tree] = speculator.propose(plan(entry(text, max_nodes=max_nodes)))
    slow = by_looking_everywhere(text, range(longest, shortest - 1, -1), branches, depth, max_nodes)
    told = [(*tree.path_tokens(draw.node), draw.confidence) for draw in tree.draws]
    assert told == slow


def by_looking_everywhere(
    text: list[int], lengths: range, branches: int, depth: int, max_nodes: int
) -> list[tuple[float, ...]]:
    """Each draw in turn: the tokens down to it, and how sure it is."""
    end = len(text)
    starts: list[int] = []
    for n in lengths:
        for stop in range(end - 1, n - 1, -1):
            if text[stop - n : stop] == text[end - n :] and text[stop] not in [text[s] for s in starts]:
                starts.append(stop)
    told: list[tuple[float, ...]] = []
    for start in starts[:branches]:
        matched = max(n for n in range(start + 1) if text[start - n : start] == text[end - n : end])
        longer = list(text)
        for i in range(depth):
            longer.append(longer[start + i])
            if len({path[:-1] for path in told}) == max_nodes - 1:
                return told
            told.append((*longer[end:], match_confidence(matched + i)))
    return told


@pytest.mark.thorough
@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("longest", [1, 4])
def test_however_often_one_token_follows_a_step_looks_at_few_places(period: int, longest: int) -> None:
    speculator = NgramSpeculator(shortest=1, longest=longest, branches=3, depth=7)
    text = [5, 6][:period] * (32_000 // period)
    # To read a token is a place in the table of each length, to look at one that a chain leads to another.
    reading = lines_run(lambda: speculator.propose(plan(entry(text))))
    assert reading <= 20 * longest * len(text), "all of it, once"
    text += text[:1]
    asked = plan(entry(text))
    assert lines_run(lambda: speculator.propose(asked)) <= 20 * longest * PLACES + 400
    [tree] = speculator.propose(asked)
    assert list(tree.token_ids) == text[:8], "whole periods and one token: what follows is what it began with"
    assert tree.parents == (-1, 0, 1, 2, 3, 4, 5, 6), "one branch"


@pytest.mark.parametrize(("between", "found"), [(PLACES - 1, ["1", "2"]), (PLACES, ["1"])])
def test_a_next_token_behind_too_many_others_is_not_looked_for(between: int, found: list[str]) -> None:
    assert guess("a2" + "a1" * between + "a", branches=2, depth=1, longest=1) == found


def test_a_longer_match_makes_a_surer_guess_and_every_token_of_it_a_longer_match() -> None:
    def sure(text: str) -> list[float]:
        speculator = NgramSpeculator(shortest=1, longest=2, branches=1, depth=3)
        return [d.confidence for d in speculator.propose(plan(entry(letters(text))))[0].draws]

    assert sure("xab-yb") == [match_confidence(n) for n in (1, 2, 3)]
    assert sure("xab-yxab") == [match_confidence(n) for n in (3, 4, 5)]  # beyond the longest n-gram
    assert sure("aaa") == [match_confidence(n) for n in (2, 3, 4)]  # the match ends where the text begins


def test_a_draws_evidence_is_how_many_tokens_matched() -> None:
    speculator = NgramSpeculator(shortest=1, longest=2, branches=1, depth=3)
    [tree] = speculator.propose(plan(entry(letters("xab-yxab"))))
    assert [draw.evidence for draw in tree.draws] == [(3.0,), (4.0,), (5.0,)]


def test_a_prompt_is_read_in_step_with_the_target_and_not_at_once() -> None:
    text = [i * i % 251 for i in range(4096)]
    chunked = NgramSpeculator(shortest=1, longest=4, branches=2, depth=3)
    costs = []
    for end in range(512, 4097, 512):
        chunk = entry(text, end=end, start=end - 512, max_nodes=64 if end == 4096 else 0)
        costs.append(lines_run(lambda chunk=chunk: chunked.propose(plan(chunk))))  # type: ignore[misc]
    assert max(costs) < 2 * sorted(costs)[len(costs) // 2]
    at_once = NgramSpeculator(shortest=1, longest=4, branches=2, depth=3)
    [tree], [whole] = (speculator.propose(plan(entry(text))) for speculator in (chunked, at_once))
    assert (tree.token_ids, tree.parents) == (whole.token_ids, whole.parents)
    assert tree.num_nodes == 7


def further(text: str, path: str, *, most: int = 9, longest: int = 4, depth: int = 3) -> list[str]:
    """What is guessed to follow `path`, if that is how the text goes on."""
    speculator = NgramSpeculator(shortest=1, longest=longest, branches=2, depth=depth)
    asked = entry(letters(text))
    speculator.propose(plan(asked))
    tree = speculator.extend(asked, letters(path), most)
    tree.check_integrity()
    assert tree.token_ids[0] == ord(path[-1]), "the root is the path's last token"
    return spelled(tree)


def test_a_guess_of_another_is_gone_on_from_as_if_it_were_text() -> None:
    assert further("the cat sat. a dog ", "the") == [" ca"]
    assert further("the cat sat. th", "e c") == ["at "], "a match that begins in the text"
    assert further("abcdef", "xyz") == []
    assert further("ab1 ab2 ", "ab") == ["2 a"], "the newest match alone"
    assert further("b7 ab1 b8 ", "ab", longest=2) == ["1 b"], "a longer match is better than a newer one"
    assert further("ab1 ", "ab", most=2) == ["1"]
    assert further("ab1 ", "ab", most=3, depth=9) == ["1 "]


def test_what_runs_into_the_end_of_the_text_goes_on_into_the_path_and_then_into_itself() -> None:
    assert further("-abc", "ab", depth=9) == ["cabcabca"]
    assert further("-abcd", "ab", depth=3) == ["cda"]


def test_a_guess_behind_a_guess_says_what_matched() -> None:
    speculator = NgramSpeculator(shortest=1, longest=2, branches=1, depth=2)
    asked = entry(letters("-xabcd-yxa"))
    speculator.propose(plan(asked))
    tree = speculator.extend(asked, letters("b"), 9)
    assert [(d.confidence, d.evidence) for d in tree.draws] == [
        (match_confidence(3), (3.0,)),
        (match_confidence(4), (4.0,)),
    ]
    assert {d.rule for d in tree.draws} == {DrawRule.POINT_MASS}
    assert {d.speculator for d in tree.draws} == {"ngram"}


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(2, 9),
)
def test_extensions_are_those_found_by_looking_everywhere(
    text: list[int], path: list[int], shortest: int, more: int, most: int
) -> None:
    longest, depth = shortest + more, 6
    speculator = NgramSpeculator(shortest=shortest, longest=longest, branches=1, depth=depth)
    asked = entry(text)
    speculator.propose(plan(asked))
    [told] = [speculator.extend(asked, path, most).token_ids[1:]]
    whole = [*text, *path]
    stops = [
        stop
        for n in range(longest, shortest - 1, -1)
        for stop in range(len(text) - 1, n - 1, -1)
        if len(whole) >= n and whole[stop - n : stop] == whole[len(whole) - n :]
    ]
    wanted = list(whole)
    for i in range(min(depth, most - 1) if stops else 0):
        wanted.append(wanted[stops[0] + i])
    assert list(told) == wanted[len(whole) :]


def test_to_go_on_from_a_guess_takes_the_same_whatever_the_text() -> None:
    speculator = NgramSpeculator(shortest=1, longest=4, branches=1, depth=7)
    costs = []
    for length in (64, 8192):
        asked = entry([i % 7 for i in range(length)], request_id=str(length))
        speculator.propose(plan(asked))
        costs.append(lines_run(lambda asked=asked: speculator.extend(asked, (0, 1, 2), 9)))  # type: ignore[misc]
    assert max(costs) <= 400
