"""The first requests of a data set."""

from __future__ import annotations

import pytest

from specinfer.bench.load import first_requests
from specinfer.errors import ConfigError
from specinfer.report.dataset import Conversation, Dataset

TALKS = Dataset("made up", (Conversation(("a",)), Conversation(("b", "c", "d")), Conversation(("e",))), 0)


@pytest.mark.parametrize(
    ("count", "turns"),
    [
        (1, [("a",)]),
        (3, [("a",), ("b", "c")]),
        (4, [("a",), ("b", "c", "d")]),
        (5, [("a",), ("b", "c", "d"), ("e",)]),
        (None, [("a",), ("b", "c", "d"), ("e",)]),
    ],
)
def test_the_last_conversation_is_cut_short(count: int | None, turns: list[tuple[str, ...]]) -> None:
    assert [talk.turns for talk in first_requests(TALKS, count).conversations] == turns


@pytest.mark.parametrize("count", [0, -1, 6])
def test_other_counts_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"is {count}; made up has 5 to ask, each once: give at most that"):
        first_requests(TALKS, count)
