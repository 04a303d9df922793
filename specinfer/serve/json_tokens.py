"""The tokens of a JSON text, looked at before anything is made of them.

What is made takes memory by the token, many times as much as the text: one of short tokens would take a
gigabyte.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

# A string, ended or not, or a mark between values; numbers and names have none beside the marks around them.
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]')
_ENDS: Final = {b"[": b"]", b"{": b"}"}


def has_more_tokens(text: bytes, most: int) -> bool:
    """Whether a JSON text has more strings and marks than `most`; it may be no JSON at all."""
    if len(text) <= most:
        return False
    return next(islice(_TOKEN.finditer(_without_escapes(text)), most, None), None) is not None


def beginning(text: bytes, most: int) -> bytes:
    """A JSON text up to the last comma of its first `most` tokens, and an end for all that is open there.

    It is JSON where the text is, and b"" where there is no such comma.
    """
    ends: list[bytes] = []  # of what is open, the innermost last
    cut, missing = 0, b""
    for token in islice(_TOKEN.finditer(_without_escapes(text)), most):
        mark = token[0]
        if mark in _ENDS:
            ends.append(_ENDS[mark])
        elif mark in (b"]", b"}"):
            if not ends:
                break
            ends.pop()
        elif mark == b",":
            cut, missing = token.start(), b"".join(reversed(ends))
    return text[:cut] + missing


def _without_escapes(text: bytes) -> bytes:
    """The text with each quote that ends no string, and each backslash, replaced by as many other bytes."""
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
