"""Re-alignment of an answer with its prediction; each letter is a token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specinfer.speculate.lookups.prediction import (
    MAX_DELETED,
    SIDE_DEPTH,
    UNCERTAIN_LIMIT,
    Alignment,
    PredictionIndex,
    relevant_tokens,
)
from tests.letters import letters


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
    near, far = "abcd" + "#" * UNCERTAIN_LIMIT, "abcd" + "#" * (UNCERTAIN_LIMIT + 1)
    assert [len(guess) for guess in after(prediction, near)] == [6]
    assert [len(guess) for guess in after(prediction, far)] == [SIDE_DEPTH]
    assert after(prediction, far + "m") == ["nopq"]
    assert after(prediction, far + "mnop") == ["qrstuv"]


IDS = st.lists(st.sampled_from([0, 1, 2, (1 << 21) - 1]), max_size=30)


@given(IDS, IDS, st.integers(0, 31), st.integers(1, 4))
def test_the_places_near_another_are_those_of_a_plain_search(
    prediction: list[int], said: list[int], place: int, most: int
) -> None:
    index = PredictionIndex(prediction)
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
    assert relevant_tokens("a" * (2 << 20), 8, encode) == (97,) * (8 + MAX_DELETED)
    assert encoded == [3, 16 * (8 + MAX_DELETED)]
    assert relevant_tokens(tuple(range(5000)), 8, encode) == tuple(range(8 + MAX_DELETED))
    assert relevant_tokens((1, 2), -5, encode) == (1, 2)  # a prompt that leaves no room is refused elsewhere
