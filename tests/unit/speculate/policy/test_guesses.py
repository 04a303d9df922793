"""What a draft's next level is worth beside what others have guessed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specinfer.speculate.policy.calibration import Calibration
from specinfer.speculate.policy.guesses import Guesses
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.tree import Draw, DrawRule, TokenTree, TreeBuilder, merge
from specinfer.tree.token_tree import single_node

RATE = 0.7  # of a draft's levels, before anything was seen
FRESH = LevelRate(RATE, 0.0)


def chain(
    tokens: Sequence[int], sure: float, speculator: str = "draft", rule: DrawRule = DrawRule.POINT_MASS
) -> TokenTree:
    builder = TreeBuilder(root=7)
    for node, token in enumerate(tokens):
        builder.add(node, token, speculator, rule, confidence=sure)
    return builder.build()


def rates_of(draws: Sequence[Draw], num_nodes: int) -> list[float]:
    """How likely counts that have seen nothing hold each node to be: the likeliest of its draws counts."""
    rates = [0.0] * num_nodes
    for draw, rate in zip(draws, Calibration().rates(draws), strict=True):
        rates[draw.node] = max(rate, rates[draw.node])
    return rates


def guesses_of(others: TokenTree) -> Guesses:
    return Guesses(others, rates_of(others.draws, others.num_nodes))


def grow(guesses: Guesses, draft: TokenTree) -> None:
    """Another level of a draft's tree."""
    new = guesses.grow(draft)
    guesses.estimate(new, rates_of(new, guesses.num_nodes))


def of(sure: float) -> float:
    """The rate at which a first guess is believed that was never counted."""
    return Calibration().probabilities(chain([1], sure))[1]


HALF, HIGH, SURE = of(0.5), of(0.9), of(0.998)


def gain(others: TokenTree, *levels: int, sure: float = 0.9) -> float:
    """What the level below a draft's chain of these tokens is worth, after each of them was told."""
    guesses = guesses_of(others)
    for depth in range(1, len(levels) + 1):
        grow(guesses, chain(levels[:depth], sure))
    return guesses.gain(len(levels), FRESH, 0.0)


@pytest.mark.parametrize(
    ("others", "levels", "worth"),
    [
        (single_node(7), (), RATE),
        (single_node(7), (10,), HIGH * RATE),
        (single_node(7), (10, 11), HIGH * HIGH * RATE),
        # Where others have guessed the next token, only what they miss is won.
        (chain([10, 11], 0.998, "ngram"), (), (1 - SURE) * RATE),
        (chain([10, 11], 0.5, "ngram"), (), (1 - HALF) * RATE),
        # On their way they make it likelier that the text gets there, and leave less to be won.
        (chain([10, 11], 0.998, "ngram"), (10,), SURE * (1 - SURE) * RATE),
        (chain([10, 11], 0.5, "ngram"), (10,), HIGH * (1 - HALF) * RATE),
        # Behind their last guess, and on another way, nobody else knows anything.
        (chain([10, 11], 0.998, "ngram"), (10, 11), SURE * SURE * RATE),
        (chain([10, 11], 0.998, "ngram"), (20,), HIGH * RATE),
        # Two that guess the same hold it once, two that guess different tokens hold both.
        (merge([chain([10], 0.5, "ngram"), chain([10], 0.5, "suffix")]), (), (1 - HALF) * RATE),
        (merge([chain([10], 0.5, "ngram"), chain([20], 0.5, "suffix")]), (), (1 - 2 * HALF) * RATE),
        (merge([chain([10], 0.9, "ngram"), chain([20], 0.9, "suffix")]), (), 0.0),
    ],
)
def test_a_level_is_worth_what_nobody_else_holds(
    others: TokenTree, levels: tuple[int, ...], worth: float
) -> None:
    assert gain(others, *levels) == pytest.approx(worth)


def test_a_node_is_worth_what_it_opens() -> None:
    guesses = guesses_of(single_node(7))
    builder = TreeBuilder(root=7)
    for token, sure in ((10, 0.5), (11, 0.1)):
        builder.add(0, token, "draft", confidence=sure)
    grow(guesses, builder.build())
    first, second = Calibration().probabilities(builder.build())[1:]
    gains = [guesses.gain(node, FRESH, 0.0) for node in (1, 2)]
    assert gains == [pytest.approx(first * RATE), pytest.approx(second * RATE)]


def test_all_guesses_are_one_tree() -> None:
    guesses = guesses_of(chain([10, 11], 0.5, "ngram"))
    assert guesses.parts(9, all_stay=False) == (0.0, 0, pytest.approx([HALF, HALF**2]))
    grow(guesses, chain([10], 0.9))  # the n-grams' first guess, and surer
    assert guesses.parts(9, all_stay=False) == (0.0, 0, pytest.approx([HIGH, HIGH * HALF]))
    grow(guesses, chain([10, 20], 0.9))
    probabilities = [HIGH, HIGH * HIGH, HIGH * HALF]
    assert guesses.parts(9, all_stay=False) == (0.0, 0, pytest.approx(probabilities))


@pytest.mark.parametrize(
    ("most", "all_stay", "parts"),
    [
        (9, False, (0.0, 0, [HIGH, HIGH**2, HIGH**3])),
        (3, False, (0.0, 0, [HIGH, HIGH**2])),  # the best that fit
        (1, False, (0.0, 0, [])),
        (9, True, (HIGH + HIGH**2 + HIGH**3, 3, [])),
        (3, True, (HIGH + HIGH**2, 2, [])),
    ],
)
def test_a_request_has_room_for_so_many(
    most: int, all_stay: bool, parts: tuple[float, int, list[float]]
) -> None:
    guesses = guesses_of(chain([10, 11, 12], 0.9, "ngram"))
    tokens, nodes, droppable = guesses.parts(most, all_stay=all_stay)
    assert (tokens, nodes, droppable) == (pytest.approx(parts[0]), parts[1], pytest.approx(parts[2]))


def test_samples_stay_whatever_they_are() -> None:
    guesses = guesses_of(chain([10], 0.5, "ngram"))
    assert not guesses.samples
    grow(guesses, chain([20], 0.1, rule=DrawRule.IID))
    assert guesses.samples
    assert guesses.parts(9, all_stay=False) == (pytest.approx(of(0.1)), 1, pytest.approx([HALF]))
    grow(guesses, chain([20, 21], 0.1, rule=DrawRule.IID))
    assert guesses.parts(9, all_stay=False) == (
        pytest.approx(of(0.1) + of(0.1) ** 2),
        2,
        pytest.approx([HALF]),
    )
    full = guesses_of(chain([10], 0.5, "ngram"))
    grow(full, chain([20], 0.1, rule=DrawRule.IID))
    assert full.parts(2, all_stay=False) == (pytest.approx(of(0.1)), 1, []), "and take the room"
