"""The prediction speculator: trees, limits and state; each letter is a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.plan import PlanEntry
from specinfer.speculate.lookups.prediction import BRANCHES, SIDE_DEPTH, PredictionSpeculator
from specinfer.tree import TokenTree
from specinfer.tree.draw import Verifier
from tests import plans
from tests.engines import Tiny
from tests.letters import letters
from tests.lone_speculator import answer, expected
from tests.plans import outcome, plan


def entry(prediction: Sequence[int], output: Sequence[int] = (), **how: Any) -> PlanEntry:
    """A request whose prompt is "?" and that has said `output` so far."""
    return plans.entry([ord("?")], output, prediction=prediction, **how)


def shape(tree: TokenTree) -> tuple[str, tuple[int, ...]]:
    """The tokens as letters, and the parents."""
    tree.check_integrity()
    return "".join(map(chr, tree.token_ids)), tree.parents


def ask(
    speculator: PredictionSpeculator, prediction: str, output: str, **how: int
) -> tuple[str, tuple[int, ...]]:
    [tree] = speculator.propose(plan(entry(letters(prediction), letters(output), **how)))
    return shape(tree)


def test_an_answer_that_agrees_is_guessed_as_one_chain() -> None:
    assert ask(PredictionSpeculator(depth=3), "abcdef", "ab") == ("bcde", (-1, 0, 1, 2))


def test_after_a_difference_several_ways_to_go_on_make_a_tree() -> None:
    #          X
    #       /  |  \
    #      e   f   .      stay (inserted), skip one (replaced)
    #      |   |
    #      f   g
    assert ask(PredictionSpeculator(depth=2), "abcdefghij", "abcdX") == ("Xeffg", (-1, 0, 1, 0, 3))


def test_a_request_without_a_prediction_gets_the_root_and_keeps_no_state() -> None:
    speculator = PredictionSpeculator()
    trees = speculator.propose(
        plan(entry((), letters("abc")), entry(letters("abcd"), letters("abc"), request_id="2"))
    )
    assert [shape(tree)[0] for tree in trees] == ["c", "cd"]
    assert list(speculator._alignments) == ["2"]


def test_requests_are_followed_apart_and_forgotten_when_they_end() -> None:
    speculator = PredictionSpeculator(depth=2)
    first = entry(letters("abcdef"), letters("abc"), request_id="1")
    second = entry(letters("uvwxyz"), letters("u"), request_id="2")
    assert [shape(t)[0] for t in speculator.propose(plan(first, second))] == ["cde", "uvw"]
    speculator.observe([outcome(1, request_id="1", finished=True), outcome(1, request_id="2")])
    assert list(speculator._alignments) == ["2"]
    # Another request comes with the id of the finished one.
    assert shape(speculator.propose(plan(entry(letters("klm"), (), request_id="1")))[0])[0] == "?kl"


OLD = """\
def total(items):
    result = 0
    for item in items:
        print(item)
        result += item.price
    return result
"""
NEW = """\
def total(items, rate):
    amount = 0
    for item in items:
        amount += item.price * rate
    return amount
"""


def test_an_edited_file_takes_few_steps() -> None:
    """Letter by letter, a target that says the edited file; a step accepts at most 15 and adds one."""
    for edit, edited, steps in (
        ("nothing", OLD, 8),
        ("a line deleted", OLD.replace("        print(item)\n", ""), 8),
        ("a line inserted", OLD.replace("    return", "    print(result)\n    return"), 11),
        ("a name changed everywhere", OLD.replace("result", "amount"), 12),
        ("a fence around it", "```python\n" + OLD + "```", 21),
        ("all of it", NEW, 26),
    ):
        speculator, said, taken = PredictionSpeculator(), 0, 0
        while said < len(edited):
            asked = entry(letters(OLD), letters(edited[:said]), max_depth=len(edited) - said)
            [tree] = speculator.propose(plan(asked))
            children, node = tree.children(), 0
            while said < len(edited) and (node := children[node].get(ord(edited[said]), -1)) >= 0:
                said += 1
            said, taken = min(said + 1, len(edited)), taken + 1
        assert taken == steps, edit


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.integers(0, 3), max_size=30),
    *(st.integers(1, 9), st.integers(1, 12), st.integers(0, 9)),
)
def test_trees_keep_the_limits(
    prediction: list[int], output: list[int], depth: int, nodes: int, room: int
) -> None:
    speculator = PredictionSpeculator(depth=depth)
    [tree] = speculator.propose(plan(entry(prediction, output, max_nodes=nodes, max_depth=room)))
    tree.check_integrity()
    assert tree.num_nodes <= min(nodes, 1 + depth + (BRANCHES - 1) * SIDE_DEPTH)
    assert max(tree.depths()) <= min(depth, room)


@pytest.mark.parametrize("verifier", list(Verifier))
def test_in_an_engine_a_prediction_with_errors_saves_steps_and_the_text_is_the_targets(
    tiny: Tiny, verifier: Verifier
) -> None:
    right = expected(tiny)
    wrong = (*right[:5], 15, 15, *right[8:14], *right[20:])
    speculator = PredictionSpeculator(depth=3)
    output = answer(tiny, speculator, verifier, prediction=wrong)
    assert list(output.token_ids) == right
    assert output.figures.accepted_by == {"prediction": output.figures.accepted_tokens}
    assert output.figures.accepted_tokens < output.figures.proposed_by["prediction"]
    assert output.figures.tokens_per_step > 1.5
    assert speculator._alignments == {}
