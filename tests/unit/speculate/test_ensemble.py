"""Several speculators share one request's budget of nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specinfer.errors import ConfigError, SpeculatorError
from specinfer.plan import PlanEntry
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.speculator import Outcome
from specinfer.speculate.tree_size import FixedSize
from specinfer.tree import TokenTree, TreeBuilder
from tests import plans


class Fan:
    """Guesses `tokens` below the root, as many as it is offered nodes for, and notes the offer."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.name = name
        self._tokens = tokens
        self.offered: list[int] = []

    def propose(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        return [self._tree(entry) for entry in entries]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def _tree(self, entry: PlanEntry) -> TokenTree:
        self.offered.append(entry.max_nodes)
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        for token in self._tokens:
            builder.add(0, token, self.name)
        return builder.build()


def entry(max_nodes: int, max_depth: int = 5) -> PlanEntry:
    return plans.entry([3, 7], max_nodes=max_nodes, max_depth=max_depth)


@pytest.mark.parametrize(
    ("max_nodes", "offered", "token_ids"),
    [
        (9, ([9], [6], [5]), (7, 10, 11, 12, 13, 14)),  # b's 11 and 12 are a's too, and cost nothing
        (5, ([5], [2], [2]), (7, 10, 11, 12, 14)),  # b has room for one more and guesses 11, which is there
        (4, ([4], [], []), (7, 10, 11, 12)),  # a fills the tree, nobody else is asked
        (3, ([3], [], []), (7, 10, 11)),
    ],
)
def test_each_is_offered_what_its_predecessors_left(
    max_nodes: int, offered: tuple[list[int], ...], token_ids: tuple[int, ...]
) -> None:
    a, b, c = Fan("a", [10, 11, 12]), Fan("b", [11, 12, 13]), Fan("c", [14])
    (tree,) = Ensemble([a, b, c], vocab=99, size=FixedSize()).propose(plans.plan(entry(max_nodes)))
    assert (a.offered, b.offered, c.offered) == offered
    assert tree.token_ids == token_ids
    assert tree.num_nodes <= max_nodes


def test_nobody_is_asked_where_nothing_is_worth_guessing() -> None:
    fan = Fan("a", [10])
    step = plans.plan(entry(1), entry(8, max_depth=0), entry(8))
    trees = Ensemble([fan], vocab=99, size=FixedSize()).propose(step)
    assert [tree.token_ids for tree in trees] == [(7,), (7,), (7, 10)]
    assert fan.offered == [8]


def test_two_speculators_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        Ensemble([Fan("a", [1]), Fan("a", [2])], vocab=99, size=FixedSize())


class Wrong(Fan):
    """Gives back `trees`, whatever it is asked."""

    def __init__(self, *trees: TokenTree) -> None:
        super().__init__("wrong", [])
        self._trees = list(trees)

    def propose(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        return self._trees


@pytest.mark.parametrize(
    ("trees", "complaint"),
    [
        ([], "gave 0 trees for 1 entries; propose returns one for each"),
        ([TokenTree((6,), (-1,))], "proposed a tree rooted at token 6; the last token is 7"),
        ([TokenTree((7, 1, 2, 3), (-1, 0, 0, 0))], "proposed a tree of 4 nodes; entry.max_nodes is 3"),
        ([TokenTree((7, 1, 2), (-1, 0, 1))], "proposed a tree of depth 2; entry.max_depth is 1"),
        ([TokenTree((7, 99), (-1, 0))], "proposed a tree with tokens outside the vocabulary of 99"),
        ([TokenTree((7, -1), (-1, 0))], "proposed a tree with tokens outside the vocabulary of 99"),
    ],
)
def test_a_speculator_that_breaks_its_contract_is_named(trees: list[TokenTree], complaint: str) -> None:
    with pytest.raises(SpeculatorError, match=complaint):
        Ensemble([Wrong(*trees)], vocab=99, size=FixedSize()).propose(plans.plan(entry(3, max_depth=1)))
