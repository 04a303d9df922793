"""What is known of a guess before the target has seen it, as a few numbers that a logistic can weigh.

All of them lie between -2 and 2, whatever a speculator says, and are 0 where there is nothing to say:

    one         always 1
    sureness    the log-odds of its confidence
    support     a draft: by how much the likeliest token leads the second; suffixes: how many places vote
    spread      a draft: the mass of neither of the two likeliest; suffixes: of votes for something else
    later       whether it is not its speculator's first choice below that node
    agreed      how many others propose the same token there
    against     how many others propose something else there
    denied      how likely the surest of the other drafts finds something else there
    heat        the request's temperature

A speculator's evidence is read by its length: two numbers are the probabilities of the two likeliest tokens,
three are the tokens that matched, places that vote, and their share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import log, log2
from typing import Final

from specinfer.tree import Draw

NAMES: Final = ("one", "sureness", "support", "spread", "later", "agreed", "against", "denied", "heat")

# The value of each feature, in the order of NAMES.
Features = tuple[float, float, float, float, float, float, float, float, float]

_LEAST: Final = 1 / (1 + math.exp(8.0))  # what is less likely has log-odds of -8
_MOST: Final = 1 - _LEAST
_LARGEST_LEAD: Final = math.exp(8.0)  # times
_MOST_VOTERS: Final = 16  # have the support of 1
_HOTTEST: Final = 2.0  # temperature
_OTHERS: Final = (0.0, 0.5, 1.0)  # by how many there are; more are as many as two


def features_of(draws: Sequence[Draw], temperature: float) -> list[Features]:
    """The features of each of these draws, [len(draws)]; `temperature` is the request's.

    They are all there are below their parents, in the order in which they were made.
    """
    held: dict[int, int] = {}  # how many propose a node
    guessing: dict[int, int] = {}  # how many speculators propose anything below one
    drafted: dict[int, list[Draw]] = {}  # what drafts propose below one
    later = list[float]()
    seen: set[tuple[int, str]] = set()
    for draw in draws:
        parent, node = draw.parent, draw.node
        held[node] = held[node] + 1 if node in held else 1
        place = (parent, draw.speculator)
        if place in seen:
            later.append(1.0)
        else:
            seen.add(place)
            later.append(0.0)
            guessing[parent] = guessing[parent] + 1 if parent in guessing else 1
        if len(draw.evidence) == 2:
            drafted.setdefault(parent, []).append(draw)
    heat = 0.5 * temperature if temperature < _HOTTEST else 1.0
    found = list[Features]()
    for draw, another in zip(draws, later, strict=True):
        confidence, evidence = draw.confidence, draw.evidence
        if _LEAST < confidence < _MOST:
            sureness = 0.25 * log(confidence / (1 - confidence))
        else:
            sureness = 2.0 if confidence > 0.5 else -2.0  # nor is it sure if it is no number
        support = spread = 0.0
        if len(evidence) == 3:
            _, voters, share = evidence
            if voters >= 1 and 0 <= share <= 1:
                support, spread = 0.25 * log2(voters) if voters < _MOST_VOTERS else 1.0, 1.0 - share
        elif len(evidence) == 2:
            support, spread = _of_likeliest(*evidence)
        same = held[draw.node]
        others = guessing[draw.parent] - same  # several samples of one speculator may be the same token
        agreed = _OTHERS[same - 1] if same < 4 else 1.0
        against = _OTHERS[others] if 0 <= others < 3 else 1.0 if others > 0 else 0.0
        denied = _denied(draw, drafted[draw.parent]) if draw.parent in drafted else 0.0
        found.append((1.0, sureness, support, spread, another, agreed, against, denied, heat))
    return found


def _denied(draw: Draw, drafted: Sequence[Draw]) -> float:
    """How likely the surest of these, of other speculators, finds another token than this one."""
    most = 0.0
    for other in drafted:
        if other.speculator != draw.speculator and other.node != draw.node and most < other.confidence <= 1:
            most = other.confidence
    return most


def _of_likeliest(best: float, second: float) -> tuple[float, float]:
    """Support and spread of a guess where the two likeliest tokens have these probabilities."""
    if not 0 <= second <= best <= 1 or not best:
        return 0.0, 0.0
    lead = best / second if second * _LARGEST_LEAD > best else _LARGEST_LEAD
    return 0.25 * log(lead), max(0.0, 1.0 - best - second)
