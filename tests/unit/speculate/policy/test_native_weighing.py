"""The library weighs a step's guesses as plain Python does, and learns the same, to the last bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest

from specinfer.kernels.library import Library
from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.estimator import Estimator, Lasting
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.policy.native_knowledge import NativeKnowledge
from specinfer.speculate.policy.native_weighing import NativeWeighing
from specinfer.speculate.policy.plain_weighing import PlainWeighing
from specinfer.speculate.policy.speculation_policy import has_own_size
from specinfer.speculate.policy.weighing import Expected, Grown, StepCosts, Weighing
from specinfer.speculate.speculator import Outcome
from specinfer.speculation_params import SpeculationParams
from specinfer.tree import Draw, DrawRule, TokenTree, TreeBuilder
from specinfer.tree.expansion import Expansion
from specinfer.tree.merging import MergedTree
from specinfer.tree.token_tree import single_node
from tests.kernels import library_or_skip
from tests.unit.speculate.policy.priced import chain, entry

FREE = ("ngram", "suffix", "own")
DRAFTS = ("draft", "other")
ODD = (0.0, 1.0, -1.0, 2.0, math.nan, math.inf, -math.inf, 10**400, True)  # confidences
HEATS = (0.0, 0.7, 1.5, 3.0)
TOKENS = 5  # so few that speculators often agree
RULES = (DrawRule.POINT_MASS, DrawRule.COUPLED, DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT)


@pytest.fixture(scope="module")
def library() -> Library:
    return library_or_skip()


class Pair:
    """The two, asked the same; what they say must be the same."""

    def __init__(self, library: Library, *, logistics: bool, drafts: Sequence[str]) -> None:
        self.library, self.logistics = library, logistics
        self.estimator: Lasting = Estimator(logistics=logistics)
        self.knowledge = NativeKnowledge(logistics=logistics)
        self.of_plain, self.of_native = priced(drafts), priced(drafts)
        self.plain: Weighing = PlainWeighing(self.estimator, self.of_plain)  # type: ignore[arg-type]
        self.native = NativeWeighing(library, self.knowledge, self.of_native)

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            found, expected = getattr(self.native, name)(*args), getattr(self.plain, name)(*args)
            assert plainly(found) == plainly(expected), name
            return expected

        return ask

    def compare(self) -> None:
        """They have learnt the same; and one that recalls it goes on from there."""
        assert told(self.knowledge) == told(self.estimator)
        for name, draft in self.of_plain.items():
            assert self.of_native[name].to_json() == draft.to_json()
            for level, request in product(range(4), ("r0", "r1", "r2", "r3", "nobody")):
                assert self.of_native[name].rate(level, request, 0.7) == draft.rate(level, request, 0.7)
        again = NativeKnowledge(logistics=self.logistics)
        native = NativeWeighing(self.library, again, self.of_native)
        again.recall(self.estimator.to_json())
        assert told(again) == told(self.estimator)
        self.knowledge, self.native = again, native


def priced(names: Sequence[str]) -> dict[str, DraftCosts]:
    """Drafts whose passes have a price, and of which other numbers of levels are counted."""
    curve = CostCurve((1, 2), (0.1, 0.2))
    shapes = cycle([Expansion((1,)), Expansion((1, 1, 1, 1))])
    return {
        name: DraftCosts(CostModel(name, curve), shape) for name, shape in zip(names, shapes, strict=False)
    }


def plainly(value: Any) -> Any:
    """A value in which equal trees are equal, though no two draws are, and NaN is NaN."""
    if isinstance(value, TokenTree):
        return value.token_ids, value.parents, [repr(draw) for draw in value.draws]
    if isinstance(value, list | tuple):
        return [plainly(one) for one in value]
    return repr(value)


def told(known: Lasting) -> dict[str, Any]:
    """What was learnt, in an order of its own."""
    found = known.to_json()
    return {**found, "counts": sorted(found["counts"])}


def evidence(name: str, luck: random.Random) -> tuple[Any, ...]:
    likeliest = luck.random()
    if name in DRAFTS:
        return (likeliest, luck.choice([likeliest * luck.random(), 0.0, 1.0, math.nan]))
    return {
        "ngram": (float(luck.randrange(16)),),
        "suffix": (3.0, luck.choice([0.0, 1.0, 7.0, 16.0, 20.0, math.nan]), 2 * luck.random() - 0.5),
        "own": luck.choice([(), (1.0, 2.0, 3.0, 4.0)]),
    }[name]


def add_some(
    builder: TreeBuilder, luck: random.Random, name: str, below: Sequence[int], rule: DrawRule
) -> None:
    """Draws of a speculator below some of these nodes, of which several may hold one node."""
    for parent in below:
        for _ in range(luck.randrange(4)):
            sure = luck.choice(ODD) if luck.random() < 0.2 else luck.random()
            token = luck.randrange(TOKENS)
            if builder.child(parent, token) is None or rule is DrawRule.IID:
                builder.add(parent, token, name, rule, None, sure, evidence(name, luck))


def guessed_by(luck: random.Random, name: str, rule: DrawRule = DrawRule.POINT_MASS) -> TokenTree:
    builder = TreeBuilder(root=7)
    for _ in range(luck.randrange(4)):
        nodes = len(builder.token_ids)
        add_some(builder, luck, name, [luck.randrange(nodes)], rule)
    return builder.build()


def merged(trees: Sequence[TokenTree]) -> TokenTree:
    one = MergedTree(trees[0])
    for tree in trees[1:]:
        one.graft(tree)
    return one.build()


def some_entries(luck: random.Random) -> list[PlanEntry]:
    return [
        replace(
            entry(
                f"r{n}",
                temperature=luck.choice(HEATS),
                overrides=SpeculationParams(max_nodes=6) if luck.random() < 0.2 else None,
            ),
            max_nodes=luck.choice([1, 3, 8, 32, 1 << 40]),
        )
        for n in range(luck.randrange(1, 5))
    ]


def step(pair: Pair, luck: random.Random) -> None:
    """One step: lookups, a draft by levels, a choice, and what came of it."""
    entries = some_entries(luck)
    seconds, all_seconds = luck.random(), [0.0]
    for _ in range(200):
        seconds += luck.choice([0.0, 0.001, 0.1])
        all_seconds.append(seconds)
    costs = StepCosts(
        all_seconds, luck.randrange(1, 9), luck.randrange(9, 150), luck.random(), float(len(entries))
    )
    pair.begin(entries)
    whole = [merged([guessed_by(luck, name) for name in FREE]) for _ in entries]
    for draft in DRAFTS:
        assert isinstance(pair.expect(whole, costs, luck.choice([0.35, 1.0])), Expected)
        grown = grow(pair, luck, draft, costs, entries)
        whole = [merged([tree, own]) for tree, own in zip(whole, grown, strict=True)]
        pair.hopes(whole)
    pair.choose(whole, costs)
    outcomes = list[tuple[int, Outcome]]()
    for number in range(len(entries)):
        text = [luck.randrange(TOKENS) for _ in range(luck.randrange(6))]
        outcomes.append((number, Outcome(f"r{number}", tuple(text), finished=False)))
    luck.shuffle(outcomes)
    pair.learn(outcomes)


def grow(
    pair: Pair, luck: random.Random, draft: str, costs: StepCosts, entries: Sequence[PlanEntry]
) -> list[TokenTree]:
    """A draft grows trees for some of these by some levels; requests with a size of their own get all."""
    rule = luck.choice(RULES)
    builders = [TreeBuilder(root=7) for _ in entries]
    ends = {number: [0] for number in range(len(entries)) if luck.random() < 0.8}
    while ends:
        told = list[Grown]()
        for number, below in ends.items():
            before = len(builders[number].token_ids)
            add_some(builders[number], luck, draft, below, rule)
            ends[number] = [*range(before, len(builders[number].token_ids))]
            weighed = [] if has_own_size(entries[number]) else ends[number]
            rates = [LevelRate(luck.random(), luck.random()) for _ in weighed]
            told.append(Grown(number, builders[number].build(), weighed, rates))
        luck.shuffle(told)
        passes = [0.0, *[0.1 + 0.01 * n for n in range(sum(map(len, ends.values())))]]
        goes_on = iter(pair.deepen(told, costs, passes, luck.choice([1.0, 1.5, 2.0])))
        for one in told:
            if one.ends:
                ends[one.number] = [end for end in one.ends if next(goes_on)]
        ends = {number: below for number, below in ends.items() if below and luck.random() < 0.8}
    return [builder.build() for builder in builders]


@pytest.mark.parametrize("logistics", [True, False])
@pytest.mark.parametrize("drafts", [DRAFTS, ("draft",), ()])
def test_it_says_and_learns_what_the_plain_one_does(
    library: Library, logistics: bool, drafts: Sequence[str]
) -> None:
    luck, pair = random.Random(0), Pair(library, logistics=logistics, drafts=drafts)
    for number in range(150):
        step(pair, luck)
        if number % 50 == 49:
            pair.compare()
    assert pair.knowledge.outcomes == pair.estimator.outcomes > 1000


def test_what_cannot_be_recalled_changes_nothing(library: Library) -> None:
    pair = Pair(library, logistics=True, drafts=DRAFTS)
    step(pair, random.Random(1))
    before = told(pair.knowledge)
    with pytest.raises(ValueError, match="1e\\+300"):
        pair.knowledge.recall({**before, "counts": [["draft", 1, True, 1e300, 5.0]]})
    assert told(pair.knowledge) == before


def fan(count: int, sure: float, speculator: str = "ngram") -> TokenTree:
    builder = TreeBuilder(root=7)
    for token in range(count):
        builder.add(0, token, speculator, confidence=sure)
    return builder.build()


def test_of_equal_ones_both_take_the_same(library: Library) -> None:
    """Fans of nodes that are all as likely, where a row more costs something from some row on."""
    luck, sizes = random.Random(5), (None, SpeculationParams(max_nodes=6))
    for _ in range(500):
        pair = Pair(library, logistics=False, drafts=("draft",))
        entries = [
            replace(entry(f"r{n}", overrides=luck.choice(sizes)), max_nodes=luck.choice([2, 3, 8]))
            for n in range(luck.randrange(1, 4))
        ]
        dear, free = luck.choice([0.01, 0.05, 0.1, 0.2]), luck.randrange(1, 8)
        seconds = [1 + max(0, rows - free) * dear for rows in range(80)]
        costs = StepCosts(seconds, 1, 60, 0.0, float(len(entries)))
        pair.begin(entries)
        pair.expect([single_node(7)] * len(entries), costs, 1.0)
        grown = [
            Grown(n, fan(3, luck.choice([0.5, 0.7]), "draft"), [1, 2, 3], 3 * [LevelRate(0.5, 0.25)])
            for n in range(len(entries))
        ]
        pair.deepen(grown, costs, seconds, 1.0)
        of_lookups = [chain(0.9, 0.9, 0.9), *[fan(n, sure) for n in range(6) for sure in (0.5, 0.7)]]
        pair.choose([luck.choice(of_lookups) for _ in entries], costs)


COSTS = StepCosts([1.0, 2.0], 1, 1, 0.0, 1.0)
LEVEL = [LevelRate(0.5, 0.0)]


@pytest.mark.parametrize("node", [-1, 3, 1 << 20])
@pytest.mark.parametrize("about", ["node", "parent", "above"])
def test_nodes_that_are_not_there_reach_no_memory(library: Library, node: int, about: str) -> None:
    native = NativeWeighing(library, NativeKnowledge(), priced(DRAFTS))
    native.begin([entry()])
    above, of = (node, 1) if about == "parent" else (0, node)
    lost = (Draw(above, of, "own", DrawRule.POINT_MASS),)
    tree = TokenTree((7, 8, 9), (-1, node, 1)) if about == "above" else TokenTree((7, 8, 9), (-1, 0, 1), lost)

    def expect(trees: list[TokenTree]) -> None:
        native.expect(trees, COSTS, 1.0)

    def deepen(trees: list[TokenTree]) -> None:
        expect([single_node(7)])
        native.deepen([Grown(0, trees[0], [1], LEVEL)], COSTS, [0.0, 1.0], 1.0)

    for ask in (expect, native.hopes, lambda trees: native.choose(trees, COSTS), deepen):
        with pytest.raises(IndexError, match="not there"):
            ask([tree])
        with pytest.raises(IndexError, match="not there"):  # nothing is left that could be asked about
            native.deepen([Grown(0, single_node(7), [0], LEVEL)], COSTS, [0.0, 1.0], 1.0)
        with pytest.raises(IndexError, match="not there"):
            native.learn([(0, Outcome("r", (8,), finished=False))])


def test_what_is_asked_at_a_wrong_time_or_of_a_wrong_size_reaches_no_memory(library: Library) -> None:
    native, tree = NativeWeighing(library, NativeKnowledge(), priced(DRAFTS)), chain(0.5, 0.5)
    native.begin([entry()])
    for grown, passes, wrong in (
        (Grown(0, tree, [3], LEVEL), [0.0, 1.0], IndexError),
        (Grown(1, tree, [1], LEVEL), [0.0, 1.0], IndexError),
        (Grown(0, tree, [1], LEVEL), [0.0], IndexError),
        (Grown(0, tree, [1], 2 * LEVEL), [0.0, 1.0], ValueError),
        (Grown(0, replace(tree, parents=(-1, 0)), [1], LEVEL), [0.0, 1.0], ValueError),
    ):
        native.expect([tree], COSTS, 1.0)
        with pytest.raises(wrong):
            native.deepen([grown], COSTS, passes, 1.0)
    with pytest.raises(IndexError, match="seconds of 1 rows"):
        native.choose([tree], COSTS._replace(last=2))
    native.expect([tree], COSTS, 1.0)
    native.choose([tree], COSTS)
    native.begin([entry()])  # another step
    with pytest.raises(IndexError):
        native.deepen([Grown(0, tree, [1], LEVEL)], COSTS, [0.0, 1.0], 1.0)
    with pytest.raises(IndexError):
        native.learn([(0, Outcome("r", (10,), finished=False))])


def test_what_was_told_before_a_recall_reaches_no_memory(library: Library) -> None:
    knowledge = NativeKnowledge()
    native = NativeWeighing(library, knowledge, priced(DRAFTS))
    native.begin([entry()])
    native.choose([chain(0.5, speculator="own")], COSTS)
    knowledge.recall(Estimator().to_json())
    with pytest.raises(IndexError, match="not there"):
        native.learn([(0, Outcome("r", (10,), finished=False))])


def test_evidence_that_is_no_number_says_nothing(library: Library) -> None:
    pair = Pair(library, logistics=True, drafts=())
    draw = Draw(0, 1, "own", DrawRule.POINT_MASS, None, 0.7, (None, "a", 0.5, []))  # type: ignore[arg-type]
    pair.begin([entry()])
    pair.hopes([TokenTree((7, 8), (-1, 0), (draw,))])


def test_trees_of_any_size_have_room(library: Library) -> None:
    pair = Pair(library, logistics=True, drafts=())
    pair.begin([replace(entry(), max_nodes=600)])
    pair.hopes([chain(*500 * [0.3])])
    costs = StepCosts([1.0] * 700, 1, 600, 0.0, 1.0)
    assert pair.choose([chain(*500 * [0.99])], costs)[0].num_nodes == 501
    pair.learn([])
    assert pair.knowledge.outcomes == 0
