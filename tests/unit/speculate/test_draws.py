"""What each draw rule adds to a tree."""

from __future__ import annotations

import numpy as np
import pytest

from specinfer.runtime.sampling import target_law
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.draws import Site, draw_children
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.verify.coupled import coupled_choice

LOGITS = np.log(np.array([[0.05, 0.4, 0.3, 0.2, 0.05]], dtype=np.float32))


def draw(
    rule: DrawRule, width: int, uniforms: list[float] | None = None, *, max_nodes: int = 99, seed: int = 0,
    temperature: float = 1.0,
) -> TreeBuilder:  # fmt: skip
    builder = TreeBuilder(root=0, max_nodes=max_nodes)
    source = iter(uniforms or [])
    params = SamplingParams(temperature=temperature)
    site = Site(builder, 0, width, params, seed, 17, lambda: next(source), rule)
    draw_children(LOGITS, [site], "draft")
    return builder


def drawn(builder: TreeBuilder) -> list[int]:
    return [builder.token_ids[d.node] for d in builder.draws]


def test_top_k_is_a_point_mass() -> None:
    builder = draw(DrawRule.POINT_MASS, 3)
    assert drawn(builder) == [1, 2, 3]
    assert {d.rule for d in builder.draws} == {DrawRule.POINT_MASS}


@pytest.mark.parametrize("rule", list(DrawRule))
def test_greedy_is_top_k_whatever_the_rule(rule: DrawRule) -> None:
    builder = draw(rule, 2, temperature=0.0)
    assert drawn(builder) == [1, 2]
    assert {d.rule for d in builder.draws} == {DrawRule.POINT_MASS}


def test_iid_draws_may_repeat_and_keep_their_law() -> None:
    builder = draw(DrawRule.IID, 3, [0.06, 0.44, 0.99])  # cumulated: .05 .45 .75 .95 1
    assert drawn(builder) == [1, 1, 4]
    assert builder.token_ids == [0, 1, 4]  # two draws share a node
    for d in builder.draws:
        assert d.law is not None
        np.testing.assert_allclose(d.law, [0.05, 0.4, 0.3, 0.2, 0.05], atol=1e-7)


def test_draws_without_replacement_take_from_what_is_left() -> None:
    # Without 1 the masses cumulate to .05 .05 .35 .55 .6 of .6: a uniform of .9 is .54, token 3.
    assert drawn(draw(DrawRule.WITHOUT_REPLACEMENT, 3, [0.2, 0.9, 0.0])) == [1, 3, 0]
    assert sorted(drawn(draw(DrawRule.WITHOUT_REPLACEMENT, 9, [0.5] * 5))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rule", [DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT])
def test_a_full_tree_stops_sampling_before_it_draws(rule: DrawRule) -> None:
    # The budget is asked before the uniform is: a third one would be a StopIteration.
    assert len(drawn(draw(rule, 5, [0.2, 0.6], max_nodes=3))) == 2


def test_a_coupled_draw_of_the_right_law_is_the_targets_choice() -> None:
    law = target_law(LOGITS[0], SamplingParams(temperature=1.0))
    for seed in range(50):
        assert drawn(draw(DrawRule.COUPLED, 2, seed=seed))[0] == coupled_choice(law, seed, 17)
