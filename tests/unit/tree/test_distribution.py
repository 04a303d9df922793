"""A distribution over a support is the dense one without its zeros."""

from __future__ import annotations

import numpy as np
import pytest

from specinfer.tree.distribution import Distribution

SPARSE = Distribution(np.array([0.5, 0.2, 0.3]), np.array([1, 4, 6]), 8)
WHOLE = Distribution(np.array([0.1, 0.2, 0.7]), None, 3)


def test_dense_has_zeros_for_the_others() -> None:
    assert SPARSE.dense().tolist() == [0, 0.5, 0, 0, 0.2, 0, 0.3, 0]
    assert WHOLE.dense().tolist() == [0.1, 0.2, 0.7]


@pytest.mark.parametrize(("token", "place"), [(0, None), (1, 0), (4, 1), (5, None), (6, 2), (7, None)])
def test_a_token_has_a_place_in_the_support_or_none(token: int, place: int | None) -> None:
    assert SPARSE.index_of(token) == place
    assert place is None or SPARSE.id_at(place) == token
