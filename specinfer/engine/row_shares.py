"""Shares of a step's rows for prompts and trees."""

from __future__ import annotations

from collections.abc import Sequence


def prompt_rows(rows: int, missing: Sequence[int], limits: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Return how many of `rows` each prompt gets; prompts are given oldest first.

    Half of the rows go to the prompts that miss fewest tokens, the rest to the oldest. So a short prompt does
    not wait for an earlier long one, and a long one progresses however many short ones follow.

    Args:
        rows: the rows to assign.
        missing: missing tokens of each prompt.
        limits: maximum tokens of each prompt in this step.
        costs: the rows that one row of each prompt counts as.
    """
    given, used = [0] * len(missing), 0
    wanted = [*map(min, missing, limits)]
    oldest = range(len(missing))
    for budget, order in ((rows // 2, sorted(oldest, key=missing.__getitem__)), (rows, oldest)):
        for i in order:
            more = min((budget - used) // costs[i], wanted[i] - given[i])
            given[i] += more
            used += more * costs[i]
    return given


def fair_shares(rows: int, wanted: Sequence[int]) -> list[int]:
    """Divide `rows` evenly, at most `wanted` for each request; the first requests get the remainder."""
    given = [0] * len(wanted)
    unserved = sorted((i for i, count in enumerate(wanted) if count > 0), key=lambda i: wanted[i])
    while unserved:
        fair, odd = divmod(rows, len(unserved))
        if wanted[unserved[0]] > fair:  # all others need at least the fair part
            for turn, i in enumerate(sorted(unserved)):
                given[i] = fair + (turn < odd)
            break
        first = unserved.pop(0)
        given[first] = wanted[first]
        rows -= wanted[first]
    return given
