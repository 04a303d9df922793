"""How large best-first trees become: about as large as is verified of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specinfer.heads.block import BlockModel
from specinfer.heads.runner import HeadPass
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.speculate.drafts.one_pass import OnePassTrees
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.token_tree import Expansion, single_node
from tests import plans
from tests.heads import SIZE
from tests.unit.speculate.drafts.test_native_trees import loaded

LEVELS = 4


Loaded = tuple[BlockModel, DraftVocabulary | None]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loaded(tmp_path_factory.mktemp("trees"), "pairs", torch.float32, "none")


@pytest.fixture(scope="module")
def trees(head: Loaded) -> OnePassTrees:
    return OnePassTrees(
        "head", head[0], Shape(Expansion((1,) * LEVELS), DrawRule.COUPLED, learned=True), head[1]
    )


def grown(trees: OnePassTrees, head: BlockModel) -> int:
    """The nodes of a tree that is grown now."""
    entry = plans.entry([3, 7], params=SamplingParams(temperature=0))
    growth = Growth.of(entry, "head", LEVELS)
    read_TD = torch.randn(LEVELS, SIZE, generator=torch.Generator().manual_seed(1))
    trees.grow([trees.open(growth, 0, LEVELS)], HeadPass((), read_TD, head.logits(read_TD)))
    return growth.tree().num_nodes - 1


def chain(nodes: int, name: str = "head") -> TokenTree:
    builder = TreeBuilder(1)
    for node in range(nodes):
        builder.add(node, 5, name)
    return builder.build()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("params", [{"top_p": 0.9, "temperature": 1.0}, {"temperature": 0}])
def test_what_is_drawn_by_levels_has_a_shape(
    head: Loaded, params: dict[str, Any], native: bool, learned: bool
) -> None:
    model, vocabulary = head
    shape = Shape(Expansion((1, 2, 1)), DrawRule.COUPLED, learned=learned)
    entry = plans.entry([3, 7], params=SamplingParams(seed=1, **params))
    growth = Growth.of(entry, "head", LEVELS)
    read_TD = torch.randn(LEVELS, SIZE, generator=torch.Generator().manual_seed(1))
    mine = OnePassTrees("head", model, shape, vocabulary)
    if not native:
        mine._grow_best_first = None
    assert mine.max_nodes(entry.request) == (32 if native and learned else 5)
    mine.grow([mine.open(growth, 0, LEVELS)], HeadPass((), read_TD, model.logits(read_TD)))
    by_levels = "top_p" in params or not native or not learned
    assert (growth.tree().parents == (-1, 0, 1, 1, 2, 3)) == by_levels


def test_trees_are_as_large_as_is_verified_of_them(trees: OnePassTrees, head: Loaded) -> None:
    others = chain(30, "lookup")
    assert grown(trees, head[0]) == 32
    trees.see_choices([chain(32)], [chain(11)])
    assert grown(trees, head[0]) == 32
    trees.see_choices([others], [single_node(1)])  # no guess of this draft
    assert grown(trees, head[0]) == 32
    trees.see_choices([chain(32), others], [chain(10), others])
    assert grown(trees, head[0]) == 16
    for _ in range(3):
        trees.see_choices([chain(16)], [single_node(1)])
    assert grown(trees, head[0]) == 8
    trees.see_choices([chain(8), chain(8)], [chain(3), chain(8)])
    assert grown(trees, head[0]) == 16
    for _ in range(3):
        trees.see_choices([chain(16)], [chain(16)])
    assert grown(trees, head[0]) == 32
