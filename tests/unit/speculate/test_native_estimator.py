"""An estimator in native code says and learns what the plain one does, to the last bit."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from specinfer.errors import KernelBuildError
from specinfer.kernels.library import Library
from specinfer.kernels.native import load_library
from specinfer.speculate.estimator import Estimates, Estimator
from specinfer.speculate.native_estimator import NativeEstimator
from specinfer.tree import Draw, DrawRule
from specinfer.tree.token_tree import draws_by_parent

NAMES = ("ngram", "suffix", "draft", "own")
ODD = (0.0, 1.0, -1.0, 2.0, math.nan, math.inf, -math.inf, 10**400, True)  # confidences
HEATS = (0.0, 0.7, 1.5, 3.0)


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library()
    except KernelBuildError as error:
        pytest.skip(f"there is no native library here: {error}")


def evidence(name: str, luck: random.Random) -> tuple[Any, ...]:
    likeliest = luck.random()
    return {
        "ngram": (float(luck.randrange(16)),),
        "suffix": (3.0, luck.choice([0.0, 1.0, 7.0, 16.0, 20.0, math.nan]), 2 * luck.random() - 0.5),
        "draft": (likeliest, luck.choice([likeliest * luck.random(), 0.0, 1.0, math.nan])),
        "own": luck.choice([(), (1.0, 2.0, 3.0, 4.0)]),
    }[name]


def guessed(luck: random.Random) -> tuple[list[Draw], int]:
    """Draws of a tree, of which several may hold one node; and how many nodes it has."""
    draws, nodes = list[Draw](), 1
    for _ in range(luck.randrange(1, 30)):
        parent = luck.randrange(nodes)
        node = luck.randrange(parent + 1, nodes + 1)
        nodes = max(nodes, node + 1)
        name = luck.choice(NAMES)
        sure = luck.choice(ODD) if luck.random() < 0.2 else luck.random()
        draws.append(Draw(parent, node, name, DrawRule.POINT_MASS, None, sure, evidence(name, luck)))
    return draws, nodes


def told(estimator: Estimates) -> dict[str, Any]:
    """What it has learnt, in an order of its own."""
    found = estimator.to_json()
    return {**found, "counts": sorted(found["counts"])}


@pytest.mark.parametrize("logistics", [True, False])
def test_it_says_and_learns_what_the_plain_one_does(library: Library, logistics: bool) -> None:
    luck, plain = random.Random(0), Estimator(logistics=logistics)
    native = NativeEstimator(library, logistics=logistics)
    for step in range(300):
        draws, nodes = guessed(luck)
        heat = luck.choice(HEATS)
        assert native.node_rates(draws, nodes, heat) == plain.node_rates(draws, nodes, heat)
        path = [(below, luck.choice([None, below[0].node])) for below in draws_by_parent(draws).values()]
        native.learn_path(path, nodes, heat)
        plain.learn_path(path, nodes, heat)
        if step % 100 == 99:
            assert told(native) == told(plain)
            again = NativeEstimator(library, logistics=logistics)
            again.recall(plain.to_json())
            assert told(again) == told(plain)
            native = again  # and goes on from there
    assert native.outcomes == plain.outcomes > 1000


def test_what_cannot_be_recalled_changes_nothing(library: Library) -> None:
    native = NativeEstimator(library)
    draws, nodes = guessed(random.Random(1))
    native.learn_path([(draws[:1], draws[0].node)], nodes, 0.0)
    before = told(native)
    wrong = {**before, "counts": [["draft", 1, True, 1e300, 5.0]]}
    with pytest.raises(ValueError, match="1e\\+300"):
        native.recall(wrong)
    assert told(native) == before


@pytest.mark.parametrize("node", [-1, 3, 1 << 20])
def test_a_guess_of_a_node_that_is_not_there_reaches_no_memory(library: Library, node: int) -> None:
    native = NativeEstimator(library)
    lost = Draw(0, node, "own", DrawRule.POINT_MASS)
    with pytest.raises(IndexError, match="3 nodes"):
        native.node_rates([lost], 3, 0.0)
    with pytest.raises(IndexError, match="3 nodes"):
        native.learn_path([([lost], None)], 3, 0.0)


def test_evidence_that_is_no_number_says_nothing(library: Library) -> None:
    native, plain = NativeEstimator(library), Estimator()
    draws = [Draw(0, 1, "own", DrawRule.POINT_MASS, None, 0.7, (None, "a", 0.5, []))]  # type: ignore[arg-type]
    assert native.node_rates(draws, 2, 0.0) == plain.node_rates(draws, 2, 0.0)


def test_trees_of_any_size_have_room(library: Library) -> None:
    native, plain = NativeEstimator(library), Estimator()
    draws = [Draw(node, node + 1, "own", DrawRule.POINT_MASS, None, 0.3) for node in range(500)]
    assert native.node_rates(draws, 501, 0.0) == plain.node_rates(draws, 501, 0.0)
    assert native.node_rates([], 3, 0.0) == [0.0, 0.0, 0.0]
    native.learn_path([], 1, 0.0)
    assert native.outcomes == 0
