"""Trees grown best first against all paths, counted one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specinfer.tree import DrawRule, TreeBuilder
from specinfer.verify.noise import exponentials
from tests.oracles.best_first import Level, Race, grow

TOKENS = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]])


def levels(seed: int, *, rest: float = 0.5) -> list[Level]:
    """Three levels of three candidates, each with logits of its own behind each token before."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(3):
        before = 1 if number == 0 else 3
        made.append(Level(TOKENS[number], random.normal(size=(before, 3)), rest))
    return made


def all_paths(made: list[Level]) -> dict[tuple[int, ...], float]:
    """How likely each path is, by its tokens."""
    found: dict[tuple[int, ...], float] = {}
    for depth in (1, 2, 3):
        for places in product(range(3), repeat=depth):
            likely, before = 1.0, 0
            for level, place in zip(made, places, strict=False):
                weights = np.exp(level.logits_AC[before])
                likely *= weights[place] / (weights.sum() + level.rest)
                before = place
            found[tuple(int(TOKENS[d, p]) for d, p in enumerate(places))] = float(likely)
    return found


def grown(made: list[Level], most: int, race: Race | None = None, room: int = 1 << 30) -> TreeBuilder:
    builder = TreeBuilder(5, room)
    grow(builder, made, most, "head", race)
    return builder


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_the_nodes_are_the_likeliest_paths_of_all(seed: int, most: int) -> None:
    made = levels(seed)
    tree = grown(made, most).build()
    tree.check_integrity()
    expected = sorted(all_paths(made).items(), key=lambda item: -item[1])[:most]
    assert {tree.path_tokens(node) for node in range(1, tree.num_nodes)} == {path for path, _ in expected}
    likelihoods = tree.likelihoods()
    for node in range(1, tree.num_nodes):
        assert likelihoods[node] == pytest.approx(all_paths(made)[tree.path_tokens(node)])


@pytest.mark.parametrize("seed", range(4))
def test_children_of_a_race_come_as_the_noise_has_them(seed: int) -> None:
    made = levels(seed)
    tree = grown(made, 100, Race(seed=3, position=7)).build()
    assert {draw.rule for draw in tree.draws} == {DrawRule.COUPLED}
    assert tree.num_nodes > 8
    for node, children in enumerate(tree.children()):
        path = tree.path_tokens(node)
        if not children:
            continue
        level = made[len(path)]
        before = 0 if not path else int(np.flatnonzero(TOKENS[len(path) - 1] == path[-1])[0])
        noise = exponentials(3, 7 + len(path), level.tokens_C)
        order = np.argsort(noise / np.exp(level.logits_AC[before]))
        assert list(children) == level.tokens_C[order][: len(children)].tolist()
