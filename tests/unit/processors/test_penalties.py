"""Penalties, on rows a person can compute: eight tokens, logits 4, 2, 0, -2, -4, 1, -1, 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specinfer import SamplingParams
from specinfer.processors.changes import Penalties

ROW = [4.0, 2.0, 0.0, -2.0, -4.0, 1.0, -1.0, 3.0]


def penalised(
    params: dict[str, Any], prompt: Sequence[int], output: Sequence[int], path: Sequence[int] = ()
) -> list[float]:
    penalties = Penalties.of(SamplingParams(**params), prompt)
    penalties.commit(output)
    row = np.array(ROW, dtype=np.float32)
    penalties.changes(path).apply(row)
    return [float(x) for x in row]


def test_what_each_takes_from_a_logit() -> None:
    for params, prompt, output, expected in (
        # Once for every token of the output, however often it occurs; the prompt does not count.
        ({"presence_penalty": 1}, [7, 7], [0, 3, 3], [3, 2, 0, -3, -4, 1, -1, 3]),
        ({"presence_penalty": -0.5}, [7], [0, 3, 3], [4.5, 2, 0, -1.5, -4, 1, -1, 3]),
        # For each time.
        ({"frequency_penalty": 0.5}, [7, 7], [0, 3, 3], [3.5, 2, 0, -3, -4, 1, -1, 3]),
        ({"frequency_penalty": -2}, [], [0, 3, 3], [6, 2, 0, 2, -4, 1, -1, 3]),
        # Divides what is above zero and multiplies what is below; once, and for the prompt's tokens too.
        ({"repetition_penalty": 2}, [7, 7], [0, 3, 3, 2], [2, 2, 0, -4, -4, 1, -1, 1.5]),
        ({"repetition_penalty": 0.5}, [4], [0], [8, 2, 0, -2, -2, 1, -1, 3]),
        # The repetition penalty comes first: 4 / 2 - 2 * 0.5 - 1, and the prompt's 3 / 2 alone.
        (
            {"repetition_penalty": 2, "frequency_penalty": 0.5, "presence_penalty": 1},
            [7],
            [0, 0],
            [0, 2, 0, -2, -4, 1, -1, 1.5],
        ),
    ):
        for cut in range(len(output) + 1):  # for every start of the path
            assert penalised(params, prompt, output[:cut], output[cut:]) == expected, params


def test_looking_at_a_path_leaves_no_trace() -> None:
    penalties = Penalties([], repetition=1, frequency=1, presence=0)
    penalties.commit([2])
    for path, expected in [([], 1), ([2, 2], 3), ([5], 1), ([], 1), ([2], 2)]:
        row = np.zeros(8, dtype=np.float32)
        penalties.changes(path).apply(row)
        assert row[2] == -expected


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
