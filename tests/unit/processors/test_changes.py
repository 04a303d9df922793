"""Changes of single logits: their effects, their order, and those that change no bit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specinfer import SamplingParams
from specinfer.processors import changes as made_of
from specinfer.processors.changes import NOTHING, Changes, Penalties, RowChanges, bans, biases, joined
from specinfer.processors.pipeline import Processors
from tests.exact.slow_sampling import Rules, processed_logits

NO = -np.inf
ROW = np.array([4, 2, 0, -2, -4, 1], dtype=np.float32)


def changes(*entries: tuple[int, tuple[float, float, float, float]]) -> RowChanges:
    """Return changes by id: bias, repetition penalty, and the sum of frequency and presence penalty."""
    return RowChanges(
        np.array([token for token, _ in entries], dtype=np.int64),
        np.array([terms for _, terms in entries], dtype=np.float32).reshape(-1, 4),
    )


def bits(row: NDArray[np.float32]) -> list[int]:
    return row.view(np.uint32).tolist()


def test_what_changes_make_of_a_row() -> None:
    plus_one, halved, less_one = ((0, terms) for terms in ((1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0)))
    for made, expected in (
        (NOTHING, [4, 2, 0, -2, -4, 1]),
        (bans([0, 3, 0]), [NO, 2, 0, NO, -4, 1]),
        (biases({1: 0.5, 4: -3}), [4, 2.5, 0, -2, -7, 1]),
        # Bias, then repetition, then frequency and presence: (4 + 2) / 2 - 1 - 0.5, (-4 + 2) * 2 - 1 - 0.5.
        (changes((0, (2, 2, 1, 0.5)), (4, (2, 2, 1, 0.5))), [1.5, 2, 0, -2, -5.5, 1]),
        # Changes of one id apply in order, with others in between: (4 + 1) / 2 - 1, not 4 / 2 + 1 - 1.
        (changes(plus_one, (5, (9, 1, 0, 0)), halved, less_one), [1.5, 2, 0, -2, -4, 10]),
        # Bans cannot be undone.
        (joined([bans([2]), biases({2: 100}), changes((2, (0, 0.5, -2, -2)))]), [4, 2, NO, -2, -4, 1]),
    ):
        row = ROW.copy()
        made.apply(row)
        assert row.tolist() == expected, made


def test_what_changes_nothing_leaves_every_bit() -> None:
    row = np.array([0.0, -0.0, 1e-45, -3e38, np.inf, -np.inf, np.nan], dtype=np.float32)
    same = row.copy()
    RowChanges(np.arange(7), np.tile(made_of.UNCHANGED, (7, 1))).apply(same)
    assert bits(same) == bits(row)
    bans(range(7)).apply(same)
    assert same.tolist() == [NO] * 7, "and a ban leaves nothing"


def test_the_changes_of_several_rows_are_those_of_each() -> None:
    rows = [bans([3, 1]), NOTHING, biases({2: 1.5}), NOTHING]
    both = Changes.of(rows)
    assert both.ends.tolist() == [2, 2, 3, 3]
    for place, row in enumerate(rows):
        assert both.row(place).ids.tolist() == row.ids.tolist()
        assert both.row(place).terms.tolist() == row.terms.tolist()
    both.check(4)
    with pytest.raises(IndexError, match=r"got changes of token ids 1 \.\. 3 in rows of 3 logits"):
        both.check(3)
    with pytest.raises(IndexError, match=r"got changes of token ids -1 \.\. 2 in rows of 3 logits"):
        Changes.of([bans([2, -1])]).check(3)


@pytest.mark.parametrize("committed", [0, 14, 15, 16, 40])
def test_a_token_that_occurs_often(committed: int) -> None:
    penalties = Penalties([2], repetition=2, frequency=0.5, presence=1)
    penalties.commit([3] * committed)
    for more in (1, 2, 30):
        row = np.zeros(8, dtype=np.float32)
        penalties.changes([3] * more).apply(row)
        assert row.tolist() == [0, 0, 0, -0.5 * (committed + more) - 1, 0, 0, 0, 0]


def test_what_was_given_out_stays_when_the_text_goes_on() -> None:
    penalties = Penalties([2], repetition=2, frequency=0.5, presence=1)
    before = penalties.changes([])
    ids, terms = before.ids.copy(), before.terms.copy()
    penalties.commit([2, 2, *range(5, 8)])
    assert (before.ids.tolist(), before.terms.tolist()) == (ids.tolist(), terms.tolist())


VOCAB = 8
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=9)
LOGITS = st.one_of(st.sampled_from([0.0, -0.0, 1e-45, -1e-40, NO, 30.0]), st.floats(-30, 30, width=32))


PARAMS = {
    "repetition_penalty": st.floats(0.1, 10),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([0, -0.0, -3.1, 99.9])),
    "min_tokens": st.integers(0, 20),
}


@given(
    logits=st.lists(LOGITS, min_size=VOCAB, max_size=VOCAB),
    texts=st.tuples(TOKENS, TOKENS, TOKENS),
    words=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2), max_size=4),
    asked=st.fixed_dictionaries({}, optional=PARAMS),
)
def test_what_processors_change_is_what_they_make_of_a_row_and_what_the_slow_oracle_does(
    logits: list[float], texts: tuple[list[int], ...], words: list[list[int]], asked: dict[str, Any]
) -> None:
    params, row, (prompt, output, path) = SamplingParams(**asked), np.array(logits, dtype=np.float32), texts
    processors = Processors(params, prompt, vocab=VOCAB, ending=[1, 7], bad_words=words)
    processors.commit(output)
    made = processors.changes(path)
    changed, processed = row.copy(), row.copy()
    made.apply(changed)
    processors.change(processed, path)
    assert bits(changed) == bits(processed)
    rules = Rules(params, tuple(prompt), (1, 7), tuple(map(tuple, words)))
    assert changed.tolist() == processed_logits(row, rules, (*output, *path))
