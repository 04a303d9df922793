"""The draws of each rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, coupled_children, draw_children
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.distribution import Distribution
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.target_law import most_likely, target_law
from tests.flights import flight_of

LOGITS = np.log(np.array([[0.05, 0.4, 0.3, 0.2, 0.05]], dtype=np.float32))


def draw(
    rule: DrawRule, width: int, uniforms: list[float] | None = None, *, max_nodes: int = 99, seed: int = 0,
    temperature: float = 1.0,
) -> TreeBuilder:  # fmt: skip
    builder = TreeBuilder(root=0, max_nodes=max_nodes)
    source = iter(uniforms or [])
    params = SamplingParams(temperature=temperature)
    site = Site(builder, "draft", 0, width, params, seed, 17, lambda: next(source), rule)
    draw_children(flight_of(LOGITS), [site])
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
    builder = draw(DrawRule.IID, 3, [0.06, 0.44, 0.99])  # cumulative: .05 .45 .75 .95 1
    assert drawn(builder) == [1, 1, 4]
    assert builder.token_ids == [0, 1, 4]  # two draws share a node
    for d in builder.draws:
        np.testing.assert_allclose(d.law.dense(), [0.05, 0.4, 0.3, 0.2, 0.05], atol=1e-7)


def test_draws_without_replacement_take_from_what_is_left() -> None:
    # Without 1 the cumulative masses are .05 .05 .35 .55 .6; a uniform number of .9 is .54, token 3.
    assert drawn(draw(DrawRule.WITHOUT_REPLACEMENT, 3, [0.2, 0.9, 0.0])) == [1, 3, 0]
    assert sorted(drawn(draw(DrawRule.WITHOUT_REPLACEMENT, 9, [0.5] * 5))) == [0, 1, 2, 3, 4]


def test_a_coupled_draw_of_the_right_law_is_the_targets_choice() -> None:
    law = target_law(LOGITS[0], SamplingParams(temperature=1.0))
    for seed in range(50):
        assert drawn(draw(DrawRule.COUPLED, 2, seed=seed))[0] == coupled_choice(law, seed, 17)


def test_a_narrow_law_is_filled_up_with_the_next_most_likely_tokens() -> None:
    logits = np.random.default_rng(6).normal(size=500).astype(np.float32)
    ranked = most_likely(logits, 5).tolist()
    for seed in range(30):
        children = coupled_children(logits, SamplingParams(top_k=3), seed, 2, 5).tolist()
        assert sorted(children[:3]) == sorted(ranked[:3])
        assert children[3:] == ranked[3:]
        law = target_law(logits, SamplingParams(top_k=3))
        assert children[0] == coupled_choice(law, seed, 2), "the target's choice, were it the target"
    assert len(coupled_children(logits[:3], SamplingParams(), 0, 0, 5)) == 3


def test_a_draw_says_how_likely_the_draft_thinks_it() -> None:
    for rule, temperature, confidences in (
        (DrawRule.POINT_MASS, 0.0, [0.4, 0.3]),
        (DrawRule.POINT_MASS, 0.5, [0.4, 0.3]),  # the top-k of the model, whatever the temperature
        (DrawRule.COUPLED, 1.0, [0.4, 0.3, 0.2, 0.05, 0.05]),
        (DrawRule.COUPLED, 0.5, [0.16, 0.09, 0.04, 0.0025, 0.0025]),  # of 0.295
    ):
        builder = draw(rule, len(confidences), temperature=temperature)
        scale = sum(confidences) if rule is DrawRule.COUPLED else 1
        by_token = {builder.token_ids[d.node]: d.confidence for d in builder.draws}
        expected = dict(zip([1, 2, 3, 0, 4], [c / scale for c in confidences], strict=False))
        assert by_token == pytest.approx(expected, rel=1e-4), (rule, temperature)


def test_draws_do_not_depend_on_what_a_neighbour_wants() -> None:
    rows = np.random.default_rng(1).normal(size=(2, 500)).astype(np.float32) / 4
    params = SamplingParams(temperature=1.0)

    def drawn_beside(others: list[int]) -> list[list[int]]:
        widths = [2, *others]
        builders = [TreeBuilder(root=0) for _ in widths]
        sites = [
            Site(builder, "draft", 0, width, params, seed, 9, lambda: 0.0, DrawRule.COUPLED)
            for builder, width, seed in zip(builders, widths, range(len(widths)), strict=True)
        ]
        draw_children(flight_of(rows[: len(widths)]), sites)
        return [drawn(builder) for builder in builders]

    for seed in range(30):
        params = SamplingParams(temperature=1.0 + seed / 10)
        assert drawn_beside([400])[0] == drawn_beside([])[0]


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", list(DrawRule))
def test_a_pruned_row_draws_as_a_shorter_one(rule: DrawRule, temperature: float, processed: bool) -> None:
    rng = np.random.default_rng(7)
    vocabulary = DraftVocabulary(np.sort(rng.choice(500, 80, replace=False)), 500)

    def add_one_hundredth(row: Any) -> Any:
        assert row.shape == (500,), "processors see the whole vocabulary"
        return row + np.float32(0.01)

    def tree_of(row: Any, seed: int, pruned: DraftVocabulary | None) -> TokenTree:
        uniforms = np.random.default_rng(seed)
        builder = TreeBuilder(root=0)
        params = SamplingParams(temperature=temperature, top_p=0.9)
        own = (params, seed, 3, uniforms.random, rule, add_one_hundredth if processed else None)
        site = Site(builder, "draft", 0, 4, *own)
        draw_children(flight_of(row[None]), [site], pruned)
        return builder.build()

    for seed in range(20):
        row = np.round(rng.normal(size=80) * 3).astype(np.float32)  # with ties
        ours, theirs = tree_of(row, seed, vocabulary), tree_of(vocabulary.widened(row), seed, None)
        assert ours.token_ids == theirs.token_ids
        assert set(ours.token_ids[1:]) <= set(vocabulary.ids.tolist())
        for draw, twin in zip(ours.draws, theirs.draws, strict=True):
            assert (draw.law is None) == (twin.law is None)
            if isinstance(draw.law, Distribution) and isinstance(twin.law, Distribution):
                assert draw.law.dense().tolist() == twin.law.dense().tolist()
