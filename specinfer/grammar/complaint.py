"""What the library says against a grammar, in one line for whoever asked for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_OURS = re.compile(r"at \d+\(\d+\): (failed to compile JSON schema: )?")  # places in what we wrote


def complaint(matcher: LLMatcher) -> str:
    """What the library says of a matcher that is in error."""
    return in_one_line(matcher.get_error())


def in_one_line(said: str) -> str:
    """What the library says, without the excerpt of our own notation below it."""
    said = said.replace("<non-verbose/>", "").partition("\n   1 |")[0]
    return shortened(" ".join(said.split()))


def without_places(said: str) -> str:
    """What the library says, without lines and columns of a grammar that the caller never saw."""
    return _OURS.sub("", said)


def shortened(text: str) -> str:
    """A text that is short enough for a message."""
    return text if len(text) <= 160 else text[:157] + "..."
