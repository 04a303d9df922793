"""What a logistic is told of a guess."""

from __future__ import annotations

import math

import pytest

from specinfer.speculate.policy.features import NAMES, features_of
from specinfer.tree import Draw, DrawRule

NAN, INF = math.nan, math.inf


def draw(
    node: int,
    speculator: str = "s",
    confidence: float = 0.5,
    evidence: tuple[float, ...] = (),
    parent: int = 0,
) -> Draw:
    return Draw(parent, node, speculator, DrawRule.POINT_MASS, None, confidence, evidence)


def told(*draws: Draw, temperature: float = 0.0) -> list[dict[str, float]]:
    return [dict(zip(NAMES, one, strict=True)) for one in features_of(draws, temperature)]


def test_a_confidence_is_told_as_log_odds() -> None:
    first, second = told(draw(1, confidence=0.5), draw(2, confidence=1 / (1 + math.exp(-4))))
    assert first["sureness"] == 0
    assert second["sureness"] == pytest.approx(1)
    assert first["one"] == second["one"] == 1


def test_of_two_likeliest_tokens_the_lead_and_what_is_left_are_told() -> None:
    [one] = told(draw(1, evidence=(1.5, 0.25)))
    assert one["support"] == one["spread"] == 0  # more than 1 is no probability
    [one] = told(draw(1, evidence=(0.8, 0.1)))
    assert one["support"] == pytest.approx(math.log(8) / 4)
    assert one["spread"] == pytest.approx(0.1)
    [sure] = told(draw(1, evidence=(1.0, 0.0)))
    assert sure["support"] == 2
    assert sure["spread"] == 0


def test_of_a_suffix_the_places_that_vote_and_the_votes_elsewhere_are_told() -> None:
    one, many = told(draw(1, evidence=(4.0, 1.0, 1.0)), draw(2, evidence=(4.0, 99.0, 0.75)))
    assert (one["support"], one["spread"]) == (0, 0)
    assert (many["support"], many["spread"]) == (1, 0.25)


def test_what_others_propose_there_is_told() -> None:
    #      0
    #     / \      n-grams and suffixes propose 1, suffixes and a draft 2
    #    1   2
    found = told(
        draw(1, "suffix"), draw(2, "suffix"), draw(1, "ngram"), draw(2, "draft"), draw(3, "ngram", parent=1)
    )
    assert [one["agreed"] for one in found] == [0.5, 0.5, 0.5, 0.5, 0]
    assert [one["against"] for one in found] == [0.5, 0.5, 0.5, 0.5, 0]  # the third; below node 1 nobody
    assert [one["later"] for one in found] == [0, 1, 0, 0, 0]


def test_a_sample_that_came_twice_is_no_disagreement() -> None:
    twice = told(draw(1, "draft"), draw(1, "draft"))
    assert [one["against"] for one in twice] == [0, 0]


def test_how_sure_the_surest_draft_is_of_something_else_is_told() -> None:
    #      0
    #    / | \    a draft proposes 1 and 2, another one 3, suffixes 1 and 3
    #   1  2  3
    two = (0.6, 0.3)  # the likeliest tokens of a model: whose evidence these are is a draft
    found = told(
        draw(1, "suffix", 0.99, (4.0, 1.0, 1.0)),
        draw(3, "suffix", 0.99, (4.0, 1.0, 1.0)),
        draw(1, "draft", 0.6, two),
        draw(2, "draft", 0.3, two),
        draw(3, "other", 0.4, two),
        draw(4, "other", 0.9, two, parent=1),
    )
    assert [one["denied"] for one in found] == [0.4, 0.6, 0.4, 0.4, 0.6, 0]


@pytest.mark.parametrize("confidence", [NAN, INF, -1.0, 1.5])
def test_what_is_no_probability_denies_nothing(confidence: float) -> None:
    [first, _] = told(draw(1, "suffix"), draw(2, "draft", confidence, (0.6, 0.3)))
    assert first["denied"] == 0


def test_the_temperature_is_told_within_bounds() -> None:
    assert [told(draw(1), temperature=t)[0]["heat"] for t in (0.0, 0.5, 1.0, 9.0)] == [0, 0.25, 0.5, 1]


@pytest.mark.parametrize("confidence", [NAN, INF, -INF, -1.0, 0.0, 1.0, 5.0, 1e300])
@pytest.mark.parametrize(
    "evidence",
    [
        *[(), (NAN,), (NAN, NAN), (INF, 0.1), (0.0, 0.0), (0.5, 1e-320), (1e300, 1e300), (-1.0, -2.0)],
        *[(NAN, NAN, NAN), (1.0, INF, 0.5), (1.0, NAN, 0.5), (1.0, 0.0, 2.0), (1.0, 1e300, 1.0), (1.0,) * 7],
    ],
)
def test_whatever_a_speculator_says_features_are_bounded(
    confidence: float, evidence: tuple[float, ...]
) -> None:
    draws = [draw(1, name, confidence, evidence) for name in "abcdef"]
    draws += [draw(2, "c", confidence, evidence), draw(3, "g", confidence, evidence)]
    for features in features_of(draws, 1.0):
        assert all(-2 <= feature <= 2 for feature in features), features
