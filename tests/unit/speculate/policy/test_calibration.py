"""What speculators say of their guesses, and what came of it."""

from __future__ import annotations

import pytest

from specinfer.speculate.policy.calibration import Calibration
from specinfer.tree import Draw, DrawRule, TokenTree, TreeBuilder, merge


def draw(node: int, confidence: float, speculator: str = "s", parent: int = 0) -> Draw:
    return Draw(parent, node, speculator, DrawRule.POINT_MASS, None, confidence)


def chain(*confidences: float, speculator: str = "s") -> TokenTree:
    builder = TreeBuilder(root=9)
    for node, confidence in enumerate(confidences):
        builder.add(node, 10 + node, speculator, confidence=confidence)
    return builder.build()


def test_at_first_a_speculator_is_believed() -> None:
    #  log-odds 0, 1.1, -2.2: counted with those at 0, 1 and -2
    assert Calibration().probabilities(chain(0.5, 0.75, 0.1)) == pytest.approx(
        [1, 0.5, 0.5 * 0.731, 0.5 * 0.731 * 0.119], rel=1e-2
    )


def test_what_comes_of_guesses_decides_soon() -> None:
    calibration = Calibration()
    for i in range(100):
        calibration.learn([draw(1, 0.9)], accepted=1 if i % 5 == 0 else None)
    assert calibration.probabilities(chain(0.9))[1] == pytest.approx(0.2, abs=0.05)
    assert calibration.probabilities(chain(0.5))[1] == 0.5  # guesses it was less sure of are counted apart
    assert calibration.probabilities(chain(0.9, speculator="other"))[1] > 0.8  # and those of others


def test_old_guesses_are_forgotten() -> None:
    calibration = Calibration()
    for accepted in (None, 1):
        for _ in range(1000):
            calibration.learn([draw(1, 0.5)], accepted)
    assert calibration.probabilities(chain(0.5))[1] > 0.98


def test_second_choices_are_counted_apart() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.learn([draw(1, 0.5), draw(2, 0.5)], accepted=1)
    builder = TreeBuilder(root=9)
    for token in (10, 11):
        builder.add(0, token, "s", confidence=0.5)
    first, second = calibration.probabilities(builder.build())[1:]
    assert first > 0.9
    assert second < 0.1


def test_of_two_that_agree_the_more_hopeful_is_believed() -> None:
    tree = merge([chain(0.5, speculator="a"), chain(0.9, speculator="b")])
    assert tree.num_nodes == 2
    assert Calibration().probabilities(tree)[1] == Calibration().probabilities(chain(0.9))[1]


def test_certainty_is_not_taken_at_its_word() -> None:
    probabilities = Calibration().probabilities(chain(1.0, 0.0))
    assert 0.99 < probabilities[1] < 1
    assert 0 < probabilities[2] < 0.01


def test_a_nan_confidence_is_not_believed() -> None:
    assert 0 < Calibration().probabilities(chain(float("nan")))[1] < 0.01
