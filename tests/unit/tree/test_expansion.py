"""Expansion plans: their text, their size, their errors."""

from __future__ import annotations

import pytest

from specinfer.errors import ConfigError
from specinfer.tree.token_tree import Expansion


@pytest.mark.parametrize(
    ("text", "widths", "num_nodes"),
    [
        ("1", (1,), 2),
        ("1,1,3,1,1", (1, 1, 3, 1, 1), 1 + 1 + 1 + 3 + 3 + 3),
        ("2,2,1", (2, 2, 1), 1 + 2 + 4 + 4),
        (" <1, 2> ", (1, 2), 1 + 1 + 2),
    ],
)
def test_a_plan_is_read(text: str, widths: tuple[int, ...], num_nodes: int) -> None:
    plan = Expansion.parse(text)
    assert plan.widths == widths
    assert plan.depth == len(widths)
    assert plan.num_nodes == num_nodes
    assert Expansion.parse(str(plan)) == plan


@pytest.mark.parametrize("text", ["", "a", "1,,2", "1;2", "1.5", "1,x"])
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Expansion.parse(text)
    assert str(refused.value) == (
        f"expansion is {text!r}; allowed: integers >= 1 with commas between, for example 1,1,3,1,1"
    )


@pytest.mark.parametrize(
    "widths", [(), (0,), (1, -2), (65,), (1,) * 65, (True,), (1.0,)], ids=lambda w: str(w)[:12]
)
def test_widths_out_of_range_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        Expansion(widths)
    assert str(refused.value) == (
        f"expansion is {','.join(map(str, widths))!r}; allowed: 1 to 64 integers from 1 to 64, "
        "for example 1,1,3,1,1"
    )
