"""Expansion plans: their text, their size, their errors."""

from __future__ import annotations

import pytest

from specinfer.errors import ConfigError
from specinfer.tree.token_tree import Expansion

TEXTS = ("", "a", "1,,2", "1;2", "1.5", "1,x")
WIDTHS = ((), (0,), (1, -2), (65,), (1,) * 65, (True,), (1.0,))


def test_a_plan_is_read() -> None:
    for text, widths, num_nodes in (
        ("1", (1,), 2),
        ("1,1,3,1,1", (1, 1, 3, 1, 1), 1 + 1 + 1 + 3 + 3 + 3),
        ("2,2,1", (2, 2, 1), 1 + 2 + 4 + 4),
        (" <1, 2> ", (1, 2), 1 + 1 + 2),
    ):
        plan = Expansion.parse(text)
        assert plan.widths == widths, text
        assert plan.depth == len(widths), text
        assert plan.num_nodes == num_nodes, text
        assert Expansion.parse(str(plan)) == plan, text


def test_text_that_is_no_plan_and_widths_out_of_range_are_refused() -> None:
    for make, wrong, text, allowed in (
        *((Expansion.parse, one, one, "integers >= 1 with commas between") for one in TEXTS),
        *((Expansion, one, ",".join(map(str, one)), "1 to 64 integers from 1 to 64") for one in WIDTHS),
    ):
        with pytest.raises(ConfigError) as refused:
            make(wrong)
        assert str(refused.value) == f"expansion is {text!r}; allowed: {allowed}, for example 1,1,3,1,1"
