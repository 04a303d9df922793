"""Speculators guess as configured, and trees without a shape run as many rows as the default ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specinfer.sampling_params import SpeculationParams
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.token_tree import Expansion
from tests.unit.speculate.policy.priced import entry


def wide(rule: DrawRule = DrawRule.POINT_MASS) -> TokenTree:
    """Nodes 1 and 2 below the root, 3 and 4 below 1, 5 below 2; 5 is the likeliest of the last level."""
    builder = TreeBuilder(7)
    for parent, token, sure in ((0, 10, 0.4), (0, 11, 0.6), (1, 12, 0.7), (1, 13, 0.3), (2, 14, 0.9)):
        builder.add(parent, token, "draft", rule, confidence=sure)
    return builder.build()


def below(
    shape: tuple[int, ...] | None,
    ends: Sequence[int],
    overrides: SpeculationParams | None = None,
    rule: DrawRule = DrawRule.POINT_MASS,
) -> list[int]:
    policy = SpeculationPolicy(None if shape is None else Expansion(shape))
    [chosen] = policy.worth_deepening("draft", [entry("r", overrides=overrides)], [wide(rule)], [ends])
    return [*chosen]


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (SpeculationParams(expansion=(2, 2, 2)), DrawRule.POINT_MASS),
        (SpeculationParams(max_nodes=9), DrawRule.POINT_MASS),
        (None, DrawRule.IID),
    ],
    ids=["a shape of its own", "a size of its own", "samples"],
)
def test_trees_that_have_a_shape_have_all_of_it(overrides: SpeculationParams | None, rule: DrawRule) -> None:
    assert below((1, 1, 1), [3, 4, 5], overrides, rule) == [3, 4, 5]
