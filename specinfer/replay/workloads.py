"""Workloads of recorded texts: which are played when, how many at once, and on how quiet a machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest

from specinfer.replay.replay import Part
from specinfer.replay.trace import Trace

Kind = Trace | Sequence[Trace]  # texts of one kind, in one trace or in several


def whole(kinds: Sequence[Kind], at_once: int = 1) -> list[Part]:
    """All texts of a kind after all of the one before: of several kinds, phases."""
    return [Part(_texts(kind), at_once) for kind in kinds]


def mixed(kinds: Sequence[Kind], at_once: int = 1) -> list[Part]:
    """Texts of all kinds in turns, as long as each lasts."""
    rounds = zip_longest(*(_texts(kind) for kind in kinds))
    return [Part([text for turn in rounds for text in turn if text is not None], at_once)]


def ramp(kinds: Sequence[Kind], sizes: Sequence[int] = (1, 2, 4, 8, 16, 8, 4, 2, 1)) -> list[Part]:
    """Texts of all kinds in turns, in parts of about equal length with so many at once in each."""
    [turns] = mixed(kinds)
    ends = [len(turns.texts) * i // len(sizes) for i in range(len(sizes) + 1)]
    parts = zip(sizes, pairwise(ends), strict=True)
    return [Part(turns.texts[start:end], size) for size, (start, end) in parts if start < end]


def disturbed(parts: Sequence[Part], slowdown: float = 1.8, texts: int = 4) -> list[Part]:
    """The same while somebody else uses the machine, from time to time: during every other few `texts`."""
    return [
        Part(part.texts[start : start + texts], part.at_once, slowdown if turn % 2 else 1.0)
        for part in parts
        for turn, start in enumerate(range(0, len(part.texts), texts))
    ]


def _texts(kind: Kind) -> list[tuple[Trace, int]]:
    return [
        (trace, i) for trace in ([kind] if isinstance(kind, Trace) else kind) for i in range(len(trace.texts))
    ]
