"""The prediction speculator: alignment, trees, limits and state; each letter is a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.plan import PlanEntry
from specinfer.speculate.lookups import prediction as predictions
from specinfer.speculate.lookups.prediction import Alignment, PredictionSpeculator, relevant_tokens
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
def test_limits_of_trees(prediction: list[int], output: list[int], depth: int, nodes: int, room: int) -> None:
    speculator = PredictionSpeculator(depth=depth)
    [tree] = speculator.propose(plan(entry(prediction, output, max_nodes=nodes, max_depth=room)))
    tree.check_integrity()
    assert tree.num_nodes <= min(nodes, 1 + depth + (predictions.BRANCHES - 1) * predictions.SIDE_DEPTH)
    assert max(tree.depths()) <= min(depth, room)


@pytest.mark.parametrize("verifier", list(Verifier))
def test_in_an_engine_a_prediction_with_errors_saves_steps(tiny: Tiny, verifier: Verifier) -> None:
    right = expected(tiny)
    wrong = (*right[:5], 15, 15, *right[8:14], *right[20:])
    speculator = PredictionSpeculator(depth=3)
    output = answer(tiny, speculator, verifier, prediction=wrong)
    assert list(output.token_ids) == right
    assert output.figures.accepted_by == {"prediction": output.figures.accepted_tokens}
    assert output.figures.accepted_tokens < output.figures.proposed_by["prediction"]
    assert output.figures.tokens_per_step > 1.5
    assert speculator._alignments == {}


def after(prediction: str, said: str, *, depth: int = 6, branches: int = 4) -> list[str]:
    """The guesses after an answer that has said this much."""
    alignment = Alignment(letters(prediction))
    alignment.advance(letters(said))
    return ["".join(map(chr, guess)) for guess in alignment.guesses(depth, branches)]


@pytest.mark.parametrize(
    ("said", "guessed"), [("", "abcdef"), ("a", "bcdefg"), ("abcde", "fghijk"), ("abcdefghijklmno", "pq")]
)
def test_while_the_two_agree_the_prediction_is_the_guess(said: str, guessed: str) -> None:
    assert after("abcdefghijklmnopq", said) == [guessed]


def test_after_the_end_of_the_prediction_there_is_nothing_to_guess() -> None:
    assert after("abcdef", "abcdef") == []
    assert after("abcdef", "abcdefxyz") == []


def test_right_after_a_difference_every_way_back_is_guessed() -> None:
    for difference, said, guessed in (
        # Prediction: abcd efgh ijkl mnop
        ("inserted: stay", "abcdX", ["efghij", "fghi"]),
        ("replaced one: skip one", "abcdX", ["efghij", "fghi"]),
        ("replaced three: skip three", "abcdXYZ", ["efghij", "hijk"]),
        ("deleted: where the last token stands", "abcdh", ["ijklmn", "efgh", "fghi"]),
        ("at the beginning", "#", ["abcdef", "bcde"]),
    ):
        assert after("abcdefghijklmnop", said) == guessed, difference


def test_the_guess_goes_on_where_the_text_meets_it_again() -> None:
    for difference, said in (
        ("inserted", "abcdXYefgh"),
        ("deleted", "abcdgh"),
        ("replaced", "abcdXYZgh"),
        ("replaced by less", "abcXgh"),
        ("replaced by more", "abcdXYZWVUgh"),
        ("a header in front", "###abcdefgh"),
        ("begins later", "efgh"),
        ("two differences", "aXcdeYfgh"),
    ):
        [first, *_] = after("abcdefghijklmnop", said)
        assert first == "ijklmn", difference


def test_a_place_that_four_tokens_confirm_is_the_only_guess() -> None:
    assert after("abcdefghijklmnop", "abcdXefg")[0] == "hijklm"
    assert len(after("abcdefghijklmnop", "abcdXefg")) > 1
    assert after("abcdefghijklmnop", "abcdXefgh") == ["ijklmn"]


def test_a_false_meeting_does_not_lose_the_place() -> None:
    # After "#" the answer inserts "bc", which stands behind, and then goes on where it left.
    prediction = "abcdefghijklmnop"
    assert "ijkl" in after(prediction, "abcdefgh#bc")
    assert after(prediction, "abcdefgh#bcij")[0] == "klmnop"


def test_what_was_replaced_is_expected_to_be_replaced_again() -> None:
    #             old is called new from the second line on
    prediction = "use old 1; and old 2; or old 3; end"
    said = "use new 1; "
    assert after(prediction, said, depth=16) == ["and new 2; or ne", "and old "]


@given(st.permutations(list(range(30))), st.data())
def test_one_edit_is_always_found_back_from(prediction: list[int], data: st.DataObject) -> None:
    """In a text of distinct tokens, four tokens after any edit the rest of the prediction is the guess."""
    first = data.draw(st.integers(0, 20), label="first changed token")
    old = data.draw(st.integers(0, 26 - first), label="tokens replaced")
    new = data.draw(st.integers(0, 12), label="by so many new ones")
    resumed = first + old
    alignment = Alignment(prediction)
    alignment.advance([*prediction[:first], *range(100, 100 + new), *prediction[resumed : resumed + 4]])
    rest = prediction[resumed + 4 :]
    assert alignment.guesses(40, 4) == ([rest] if rest else [])


def test_an_answer_that_stays_away_gets_one_short_guess_until_it_comes_back() -> None:
    prediction = "abcdefghijklmnopqrstuvwxyz"
    near, far = "abcd" + "#" * predictions.UNCERTAIN_LIMIT, "abcd" + "#" * (predictions.UNCERTAIN_LIMIT + 1)
    assert [len(guess) for guess in after(prediction, near)] == [6]
    assert [len(guess) for guess in after(prediction, far)] == [predictions.SIDE_DEPTH]
    assert after(prediction, far + "m") == ["nopq"]
    assert after(prediction, far + "mnop") == ["qrstuv"]


IDS = st.lists(st.sampled_from([0, 1, 2, (1 << 21) - 1]), max_size=30)


@given(IDS, IDS, st.integers(0, 31), st.integers(1, 4))
def test_places_near_another(prediction: list[int], said: list[int], place: int, most: int) -> None:
    index = predictions.PredictionIndex(prediction)
    for n in (3, 1):
        if n > len(said):
            continue
        tail = said[-n:]
        stops = [i for i in range(n, len(prediction) + 1) if prediction[i - n : i] == tail]
        before, behind = [i for i in stops if i < place], [i for i in stops if i >= place]
        assert index.near(tail, place, most) == [*before[-most:], *behind[:most]]


def test_a_text_is_encoded_as_far_as_it_can_matter() -> None:
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return list(text.encode())

    assert relevant_tokens("abc", 8, encode) == (97, 98, 99)
    assert relevant_tokens("a" * (2 << 20), 8, encode) == (97,) * (8 + predictions.MAX_DELETED)
    assert encoded == [3, 16 * (8 + predictions.MAX_DELETED)]
    assert relevant_tokens(tuple(range(5000)), 8, encode) == tuple(range(8 + predictions.MAX_DELETED))
    assert relevant_tokens((1, 2), -5, encode) == (1, 2)  # a prompt that leaves no room is refused elsewhere
