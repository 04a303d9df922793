"""Token counts of answers."""

from __future__ import annotations

from specinfer.request import Delta
from specinfer.serve.api.reports import Tally


def test_cached_tokens_of_each_prompt_are_counted_once() -> None:
    tally = Tally(30, n=2)
    for number, cached in ((0, 4), (1, 16), (2, 0), (3, 16), (2, 8), (0, 4)):
        tally.add(Delta("", token_ids=(1,), cached_tokens=cached), number)
    assert tally.usage()["prompt_tokens_details"] == {"cached_tokens": 12}
    assert tally.usage()["total_tokens"] == 36
