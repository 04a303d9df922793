"""Trees that begin with what was drawn ahead, against earlier trees cut at the new root and drawn anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from specinfer.plan import PlanEntry
from specinfer.runtime.batch import Rows
from specinfer.runtime.executor import Move
from specinfer.speculate.drafts import draft
from specinfer.speculate.drafts.draft import DraftModel
from specinfer.speculate.drafts.draws import Site
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.expansion import Expansion
from tests import plans

TEXT = [3, 1, 4]


class NoRunner:
    """What a draft asks of a runner beside passes."""

    block_size, max_context = 64, 64

    def move(self, moves: Sequence[Move]) -> None:
        """Its cache is never read."""


def guessed(position: int, token: int) -> list[tuple[int, float]]:
    """The tokens at a position below a token, each with its confidence: one to three of five."""
    random = Random(position * 5 + token)
    tokens = random.sample(range(5), random.randint(1, 3))
    return [(token, random.uniform(0.1, 0.9) / len(tokens)) for token in tokens]


def draw(rows: Sequence[Rows], sites: Sequence[Site]) -> None:
    for site in sites:
        for token, confidence in guessed(site.position, site.builder.token_ids[site.node]):
            site.builder.add(site.node, token, "draft", confidence=confidence)


def new_draft() -> DraftModel:
    shape = Shape(Expansion((2,)), DrawRule.POINT_MASS, learned=True)
    runner: Any = NoRunner()
    return DraftModel("draft", runner, shape, max_rows=64, draw=draw)


def entry(text: Sequence[int], **fields: Any) -> PlanEntry:
    return plans.entry([*text], block_table=(0,), **{"max_depth": 40 - len(text), **fields})


@dataclass
class Step:
    """A draft that has grown a tree and looked ahead, and the tokens that became text."""

    draft: DraftModel
    growth: Growth
    edge: int | None  # the last node with children before it looked ahead, if the tree was full then
    levels: int  # drawn ahead
    committed: tuple[int, ...]


def step(random: Random, most: int) -> Step:
    """A step of a tree that grows below nodes taken at random, and a text that mostly stays within it."""
    draft = new_draft()
    draft.begin(plans.plan(entry(TEXT, max_nodes=most)))
    ends = draft.deepen({0: (0,)})
    for _ in range(random.randint(0, 5)):
        if ends:
            ends = draft.deepen({0: random.sample([*ends[0]], random.randint(1, len(ends[0])))})
    growth = draft._growths[0]
    builder = growth.builder
    edge = builder.draws[-1].parent if builder.full else None
    levels = sum([draft.look_ahead(TokenTree.likelihoods) for _ in range(random.randint(0, 6))])
    node, committed = 0, list[int]()
    while not committed or random.random() < 0.6:
        children = [n for n, parent in enumerate(builder.parents) if parent == node]
        if not children or random.random() < 0.05:
            committed.append(random.randrange(5))
            break
        # Rather along nodes that were run: there is more to see.
        node = random.choice([n for n in children if n in growth.order] or children)
        committed.append(builder.token_ids[node])
    return Step(draft, growth, edge, levels, tuple(committed))


@dataclass
class Anew:
    """A tree drawn anew below nodes of an earlier one, and where those lie in the cache."""

    tokens: list[int]
    parents: list[int]
    order: dict[int, int]
    above: list[int]


def anew(done: Step, most: int) -> Anew | None:
    """The next tree, of `most` nodes, from the earlier one's nodes that were run and have all children."""
    builder, order = done.growth.builder, done.growth.order
    children: dict[int, list[int]] = {node: [] for node in range(len(builder.parents))}
    for node, parent in enumerate(builder.parents[1:], 1):
        children[parent].append(node)

    def depth(node: int) -> int:
        return 0 if node == 0 else 1 + depth(builder.parents[node])

    def all_there(node: int) -> bool:
        wanted = [token for token, _ in guessed(len(TEXT) + depth(node), builder.token_ids[node])]
        return wanted == [builder.token_ids[child] for child in children[node]]

    def run_below(node: int) -> list[int]:
        return [node, *(n for child in children[node] if child in whole for n in run_below(child))]

    whole = {node for node in order if node != done.edge and all_there(node)}
    root = 0
    for number, token in enumerate(done.committed):
        found = [n for n in children[root] if builder.token_ids[n] == token and n in order]
        if not found or (number == len(done.committed) - 1 and found[0] not in whole):
            return None
        [root] = found
    if not done.levels:
        return None
    run = sorted(run_below(root), key=order.__getitem__)
    made, new = Anew([done.committed[-1]], [-1], {}, [-1]), {root: 0}
    for place, node in enumerate(run):
        if place:
            made.above.append(run.index(builder.parents[node]))
        if node not in new:  # for want of room
            continue
        made.order[new[node]] = place
        for child in children[node]:
            if len(made.tokens) < most:
                new[child] = len(made.tokens)
                made.tokens.append(builder.token_ids[child])
                made.parents.append(new[node])
    return made


def test_trees_begin_as_if_they_were_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "_LIKELY_AHEAD", 0.0)  # nodes are run however unlikely they are
    cases = [(seed, before, most) for before in (4, 8, 12, 16) for most in (3, 16) for seed in range(150)]
    found = [nodes for case in cases if (nodes := begins_as_drawn_anew(*case))]
    assert len(found) > len(cases) // 8
    assert max(found) > 5


def begins_as_drawn_anew(seed: int, before: int, most: int) -> int:
    """A tree of `most` nodes after one of `before`; the nodes that it began with, which were run."""
    done = step(Random(seed), before)
    expected = anew(done, most)
    done.draft.observe([plans.outcome(*done.committed)])
    text = [*TEXT, *done.committed]
    [unread] = done.draft.begin(plans.plan(entry(text, max_nodes=most)))
    growth = done.draft._growths[0]
    if expected is None:
        assert (growth.started, growth.order) == (False, {0: 0})
        assert unread > 0
        return 0
    builder = growth.builder
    assert (growth.started, growth.planted, unread) == (True, True, 0)
    assert (builder.token_ids, builder.parents) == (expected.tokens, expected.parents)
    assert (growth.order, growth.above) == (expected.order, expected.above)
    fresh = new_draft()
    fresh.begin(plans.plan(entry(text, max_nodes=most)))
    for node in growth.order:
        fresh.deepen({0: (node,)})
    other = fresh._growths[0]
    assert [*map(tuple, builder.draws)] == [*map(tuple, other.builder.draws)]
    assert (growth.depths, growth.likely) == (other.depths, other.likely)
    assert (growth.waiting, growth.ends) == (other.waiting, other.ends)
    return len(expected.above)


def looked_ahead() -> tuple[DraftModel, list[int]]:
    """A draft whose next tree begins with earlier nodes, and the text."""
    for seed in range(100):
        done = step(Random(seed), 16)
        if (made := anew(done, 16)) is not None and len(made.above) > 1:
            done.draft.observe([plans.outcome(*done.committed)])
            return done.draft, [*TEXT, *done.committed]
    raise AssertionError("one of them has")


@pytest.mark.parametrize(
    ("fields", "more", "unread"),
    [
        ({"incarnation": 1}, [], lambda text: len(text)),  # its blocks were given back
        ({}, [2], lambda text: 1),  # a step in which the draft was not asked
        ({"max_nodes": 1}, [], lambda text: 0),  # no guesses are wanted
        ({"max_depth": 0}, [], lambda text: 0),
    ],
)
def test_what_was_drawn_ahead_is_dropped(fields: dict[str, int], more: list[int], unread: Any) -> None:
    draft, text = looked_ahead()
    text += more
    assert draft.begin(plans.plan(entry(text, **fields))) == [unread(text)]
    assert draft.tree(0).num_nodes == 1
    assert draft.looked_ahead[1] == 0
    assert draft._texts.of(entry(text, **fields), 0).ahead is None


def test_else_it_is_kept() -> None:
    draft, text = looked_ahead()
    assert draft.begin(plans.plan(entry(text))) == [0]
    assert draft.tree(0).num_nodes > 1
    assert draft.looked_ahead[1] > 0


@pytest.mark.parametrize(("likely", "rows"), [(0.5, 3), (0.05, 1)])
def test_a_row_is_worth_a_tenth_of_a_pass(likely: float, rows: int) -> None:
    one = new_draft()
    one.begin(plans.plan(entry(TEXT, max_nodes=16)))
    one.deepen({0: (0,)})
    growth = one._growths[0]
    assert len(growth.waiting) >= 3
    growth.waiting = growth.waiting[:3]
    assert one.look_ahead(lambda tree: [likely] * tree.num_nodes)
    assert len(growth.order) - 1 == rows
