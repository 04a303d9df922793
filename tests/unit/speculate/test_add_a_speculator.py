"""The code of docs/add_a_speculator.md, run: as it stands on the page, and in an engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer.speculate.speculator import Speculator
from specinfer.tree.draw import Verifier
from tests.engines import Tiny
from tests.lone_speculator import answer, expected
from tests.plans import entry, outcome, plan

PAGE = Path(__file__).parents[3] / "docs" / "add_a_speculator.md"


def page() -> dict[str, Any]:
    """The names the page's code blocks define, run in order as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    return names


def test_the_pages_own_test_passes() -> None:
    test: Callable[[Any], None] = page()["test_the_most_frequent_tokens_are_guessed"]
    test(entry, plan)


def test_it_keeps_the_budget_counts_what_is_committed_and_forgets() -> None:
    speculator: Speculator = page()["FrequentTokens"](branches=2)
    text = [3, 3, 4, 5, 5, 5]
    assert speculator.propose(plan(entry(text, max_nodes=2)))[0].token_ids == (5, 5)
    assert speculator.propose(plan(entry(text, max_depth=0)))[0].token_ids == (5,)
    speculator.observe([outcome(4, 4, 4)])
    assert speculator.propose(plan(entry([*text, 4, 4, 4])))[0].token_ids == (4, 4, 5)
    speculator.observe([outcome(finished=True)])
    assert speculator.propose(plan(entry([9])))[0].token_ids == (9, 9)


@pytest.mark.parametrize("verifier", list(Verifier))
def test_in_an_engine_it_is_believed_sometimes(tiny: Tiny, verifier: Verifier) -> None:
    output = answer(tiny, page()["FrequentTokens"](), verifier)
    assert list(output.token_ids) == expected(tiny)
    assert 0 < output.figures.accepted_tokens < output.figures.drafted_tokens
    assert output.figures.accepted_by == {"frequent": output.figures.accepted_tokens}
