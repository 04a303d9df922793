"""How often a regular expression repeats its smallest part: `(x{20}){30}` has 600 of them.

The library follows nested repeats by writing them out as it goes, so what is too large shows late, in the
middle of a text. Counted repeats tell beforehand.
"""

from __future__ import annotations

import re

MAX_REPEAT = 100_000  # of a part, counted repeats in one another multiplied

_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def largest_repeat(regex: str) -> int:
    """The largest product of counted repeats (`{3}`, `{2,5}`, `{4,}`) inside one another; 1 without any.

    The expression need not be well formed.
    """
    open_groups = [1]  # the largest product so far in each group that is open, outermost first
    last = 1  # that of the part just read, to which a repeat applies
    at = 0
    while at < len(regex):
        counted = _COUNTED.match(regex, at)
        character = regex[at]
        at += 1
        if counted is not None:
            at = counted.end()
            last *= max(1, int(counted[1]), int(counted[2] or 0))
        elif character == "(":
            open_groups.append(1)
            last = 1
        elif character == ")":
            last = open_groups.pop() if len(open_groups) > 1 else last
        elif character not in "*+?":
            last = 1
            at = _end_of_part(regex, at - 1)
        open_groups[-1] = max(open_groups[-1], last)
    return max(open_groups)


def _end_of_part(regex: str, at: int) -> int:
    """Where a character, an escape (`\\d`, `\\x{41}`, `\\p{Greek}`) or a class (`[a-z]`) is over."""
    escape = re.compile(r"\\(?:[xuUpP]\{[^}]{0,64}\}|.)", re.DOTALL).match(regex, at)
    if escape is not None:
        return escape.end()
    if regex[at] == "[":
        end = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(regex, at)
        return end.end() if end is not None else len(regex)
    return at + 1
