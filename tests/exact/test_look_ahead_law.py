"""Drafts that look ahead while the target's pass runs leave the law of the text as it is, by enumeration.

The production code drafts, looks ahead, commits and begins the next tree with what it has. A step's tree
depends on those before it, so whole texts are enumerated, over three steps at least. Under `mss` the law sees
a draft that knows the target's coins, and samples that are kept for their value. It cannot see guesses for
another text, and under the coupled rule nothing at all. So each tree is drawn anew as well, by a draft that
never looked ahead.
"""

from collections import defaultdict
from copy import copy, deepcopy
from functools import partial

import numpy as np
import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts import draft, draws, growth
from specinfer.speculate.drafts.draft import DraftModel
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport
from specinfer.tree.draw import DrawRule, any_sampled
from specinfer.tree.expansion import Expansion
from specinfer.tree.merging import likeliest
from specinfer.verify.coupled import coupled_choice, verify_coupled
from specinfer.verify.multistep import verify_multistep
from specinfer.verify.target_law import target_law
from tests import plans
from tests.flights import Late, flight_of

from .enumeration import Supports, distance, falls, outcomes, own_law
from .oracles import processed_law
from .sized_trees import PROMPT, MadeUpRunner

EXACT, SEEN = 1e-9, 1e-3
THOROUGH = [pytest.param(levels, marks=pytest.mark.thorough) for levels in (0, 1, 4)]
LEVELS = [2, *THOROUGH]  # that are drawn ahead in each step
IID, WITHOUT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT
POINT, COUPLED = DrawRule.POINT_MASS, DrawRule.COUPLED
MSS = SamplingParams(temperature=0.7, speculation={"verifier": "mss"})
SAMPLED = SamplingParams(temperature=0.7, speculation={"verifier": "coupled"})
GREEDY = SamplingParams(temperature=0.0)
SHAPE = Expansion((2, 2))
LIKELY = partial(Shape, learned=True, least=0.1)  # trees of a learned shape, with likely children alone


class Few(SpeculationPolicy):
    """Has drafts run more nodes than are verified, which are the likeliest, so that texts leave the trees."""

    def choose_nodes(self, trees):
        return [tree if any_sampled(tree.draws) else likeliest(tree, tree.likelihoods(), 3) for tree in trees]


class Text:
    """A text as far as it is written, with the draft that guesses for it."""

    def __init__(self, world, shape, *, levels, params, room=32, seed=0):
        self.world, self.params, self.levels, self.room, self.seed = world, params, levels, room, seed
        self.shape = shape
        self.draft = self.new_draft()
        self.ensemble = Ensemble([self.draft], vocab=world.vocab, policy=Few(shape.expansion))
        self.tokens, self.steps, self.tree = (), 0, None
        self.halves = {}  # by place in the text, where somebody has asked for one (`Halves`)

    def __deepcopy__(self, memo):
        memo |= {id(same): same for same in (self.world, self.params, self.shape, self.tree)}
        twin = copy(self)
        twin.halves = dict(self.halves)
        twin.draft, twin.ensemble = deepcopy((self.draft, self.ensemble), memo)
        return twin

    def new_draft(self):
        return DraftModel("a", MadeUpRunner(self.world, "a"), self.shape, max_rows=64)

    def plan(self):
        room = {"max_nodes": self.room, "max_depth": 12 - len(self.tokens), "block_table": (0,)}
        return plans.plan(plans.entry(PROMPT, self.tokens, params=self.params, seed=self.seed, **room))

    def grown(self):
        """The draft's tree, whose nodes were run in this order, with all draws."""
        tree, order = self.draft.tree(0), self.draft._growths[0].order
        return tree.token_ids, tree.parents, order, [tuple(draw) for draw in tree.draws]

    def grown_anew(self):
        """The same by a draft that has never looked ahead, below the same nodes in the same order.

        None where it has no such nodes.
        """
        anew = copy(self)
        anew.draft = self.new_draft()
        anew.draft.begin(self.plan())
        for node in self.draft._growths[0].order:
            if node and node not in anew.draft._growths[0].waiting:
                return None
            anew.draft.deepen({0: [node]})
        return anew.grown()

    def propose(self):
        [self.tree] = self.ensemble.propose(self.plan())

    def look_ahead(self):
        self.ensemble.look_ahead(Late(flight_of(np.zeros((1, 1), np.float32)), self.levels))

    def commit(self, *tokens):
        self.ensemble.observe(StepReport([plans.outcome(*tokens)]))
        self.tokens, self.steps = self.tokens + tokens, self.steps + 1
        assert self.ensemble._speculators, "the draft has not failed"


class Played:
    """All texts of a world: how far their law is from the target's, and what was found on the way."""

    def __init__(self, monkeypatch, rule, *, levels, vocab=3, world=5, steps=3, length=4, shape=SHAPE, **how):
        """Texts have so many steps at least, and the law is that of their first `length` tokens."""
        self.world, self.levels = Supports(vocab=vocab, params=MSS, seed=world), levels
        self.planted = 0  # trees that began with nodes of the step before
        self.otherwise = 0  # trees that are not as they are drawn anew
        self.stale = 0  # rows that have read what was made of another text
        self.ahead = 0  # the most levels that were drawn ahead for a text
        self.chance = None
        monkeypatch.setattr(draws, "inverse_cdf", lambda left, u: self.chance.pick(0, 0, left))
        reached = [(Text(self.world, LIKELY(shape, rule), levels=levels, **{"params": MSS, **how}), 1.0)]
        law = defaultdict(float)
        while reached:
            text, probability = reached.pop()
            for proposed, drawn in falls(partial(self.drawn, text)):
                for tokens, share in outcomes(partial(self.verified, proposed)).items():
                    added, reaching = text.tokens + tokens, probability * drawn * share
                    if text.steps + 1 >= steps and len(added) >= length:
                        law[added[:length]] += reaching
                    else:
                        longer = deepcopy(proposed)
                        longer.commit(*tokens)
                        reached.append((longer, reaching))
        assert sum(law.values()) == pytest.approx(1, abs=EXACT)
        self.far = distance(law, own_law(self.target, vocab, length))

    def target(self, text):
        return processed_law(self.world.logits("target", text), MSS)

    def drawn(self, text, chance):
        """The text with a step's tree, and with what was drawn for the next one."""
        self.chance, text = chance, deepcopy(text)
        before = text.draft.looked_ahead
        text.propose()
        self.planted += text.draft.looked_ahead > before
        if self.levels and not any_sampled(text.tree.draws):
            self.otherwise += text.grown() != text.grown_anew()
        self.look_ahead(text)
        self.stale += text.draft._runner.stale
        self.ahead = max(self.ahead, text.draft.looked_ahead[0])
        return text

    def look_ahead(self, text):
        text.look_ahead()

    def coin(self, text, chance):
        return chance

    def verified(self, text, chance):
        """The tokens of a step. Under the coupled rule the target chooses by chance here."""
        tree = text.tree
        if text.params.speculation.verifier == "mss":
            law = partial(self.world.law, "target")
            coin = self.coin(text, chance)
            return verify_multistep(tree, lambda n: law(text.tokens + tree.path_tokens(n)), coin).tokens(tree)

        def choose(node):
            return chance.choose(self.target(text.tokens + tree.path_tokens(node)))

        return verify_coupled(tree, choose).tokens(tree)


# How a draft draws, and for whom; and trees that are full before they end.
LEARNED = {
    "mss": {"rule": POINT, "params": MSS},
    "mss, a tree of 5": {"rule": POINT, "params": MSS, "room": 5},
    "mss, a tree of 3": {"rule": POINT, "params": MSS, "room": 3},
    "coupled": {"rule": COUPLED, "params": SAMPLED},
    "coupled, a tree of 5": {"rule": COUPLED, "params": SAMPLED, "room": 5, "seed": 1},
    "greedy": {"rule": COUPLED, "params": GREEDY},
}


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("how", LEARNED.values(), ids=LEARNED)
def test_the_law_of_the_text_is_the_targets(how, levels, monkeypatch):
    played = Played(monkeypatch, levels=levels, **how)
    assert played.far < EXACT
    assert (played.ahead > 0) == (levels > 0)
    assert (played.planted > 0) == (levels > (how.get("room") == 3)), "a full tree has less to go on with"
    assert played.otherwise == 0, "trees are as if they were drawn anew"
    assert played.stale == 0, "and rows see the K and V of their own text"


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["coupled", "greedy"])
def test_a_seeds_text_is_the_targets_own(params, levels):
    world = Supports(vocab=3, params=params, seed=2)

    def choice(seed, text):
        law = target_law(world.logits("target", text), params)
        return coupled_choice(law, seed, len(PROMPT) + len(text))

    def follow(text):
        return verify_coupled(text.tree, lambda n: choice(text.seed, text.tokens + text.tree.path_tokens(n)))

    kept = 0
    for seed in range(20 if params is SAMPLED else 1):
        plain = ()
        while len(plain) < 10:
            plain += (choice(seed, plain),)
        text = Text(world, LIKELY(SHAPE, COUPLED), levels=levels, params=params, seed=seed)
        while len(text.tokens) < 8:
            text.propose()
            text.look_ahead()
            text.commit(*follow(text).tokens(text.tree))
        assert text.tokens == plain[: len(text.tokens)]
        kept += text.draft.looked_ahead[1]
    assert (kept > 0) == (levels > 0)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("rule", [IID, WITHOUT])
@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_samples_are_never_drawn_ahead(rule, shape, levels, monkeypatch):
    played = Played(monkeypatch, rule, vocab=2, shape=Expansion(shape), levels=levels)
    assert played.far < EXACT
    assert played.ahead == 0


def mutant(change, was):
    """A method in whose place stands `change`, which is given it."""
    return lambda *args: change(was, *args)


def of_a_sibling(run_ahead, self, path, committed):
    """A mutant of `Growth.run_ahead`: goes on with another child than the one that became text."""
    builder, above = self.builder, path[-1] if path else 0
    others = [n for n in self.order if builder.parents[n] == above and builder.token_ids[n] != committed[-1]]
    if others and len(path) + 1 == len(committed):
        committed = (*committed[:-1], builder.token_ids[others[0]])
    return run_ahead(self, path, committed)


@pytest.mark.parametrize("how", LEARNED.values(), ids=LEARNED)
def test_keeping_what_lies_below_another_child_is_seen(how, monkeypatch):
    monkeypatch.setattr(Growth, "run_ahead", mutant(of_a_sibling, Growth.run_ahead))
    played = Played(monkeypatch, levels=2, **how)
    assert played.otherwise > 0
    assert played.far < EXACT, "guesses for another text are guesses"


class Halves:
    """A coin whose first number at each place of a text is tossed twice: which half of [0, 1), and where.

    So a draft can know the half before the target asks.
    """

    def __init__(self, known, first, chance):
        self.known, self.first, self.pick, self.chance = known, first, chance.pick, chance

    def half(self, place):
        if place not in self.known:
            self.known[place] = self.chance.choose([0.5, 0.5])
        return self.known[place]

    def accept(self, depth, turn, p, q):
        if turn:
            return self.chance.accept(depth, turn, p, q)
        within = 2 * min(1, p / q) - self.half(self.first + depth)
        return self.chance.accept(depth, turn, max(0, within), 1)


class Foreseen(Played):
    """All texts, where coins are tossed so; draws ahead ask for a coin's half if `peeks`."""

    def __init__(self, monkeypatch, rule, *, peeks, **how):
        self.monkeypatch, self.peeks = monkeypatch, peeks
        super().__init__(monkeypatch, rule, **how)

    def coin(self, text, chance):
        return Halves(dict(text.halves), len(text.tokens), chance)

    def look_ahead(self, text):
        def draw(flight, sites, *more):
            """Draw unlikely tokens where the coin will take them."""
            coin = Halves(text.halves, 0, self.chance)
            signs = [1 if coin.half(site.position - len(PROMPT)) else -1 for site in sites]
            rows = [sign * flight.row(i) for i, sign in enumerate(signs)]
            draws.draw_children(flight_of(np.stack(rows)), sites, *more)

        with self.monkeypatch.context() as patch:
            if self.peeks:
                patch.setattr(draft, "draw_children", draw)
            text.look_ahead()


def test_draws_that_know_the_targets_coins_are_seen(monkeypatch):
    honest = Foreseen(monkeypatch, POINT, peeks=False, levels=1, steps=2)
    assert honest.planted > 0
    assert honest.far < EXACT
    assert Foreseen(monkeypatch, POINT, peeks=True, levels=1, steps=2).far > SEEN


def pleasing(begin_with, self, earlier, run):
    """A mutant of `Growth.begin_with`: of the draws it keeps those of one token."""
    builder = earlier.builder
    builder.draws = [draw for draw in builder.draws if builder.token_ids[draw.node]]
    begin_with(self, earlier, run)


def test_samples_drawn_ahead_and_kept_for_their_value_are_seen(monkeypatch):
    monkeypatch.setattr(Shape, "is_learned", lambda self, request: self.learned)
    monkeypatch.setattr(growth, "_WIDTH", 1)
    how = {"rule": IID, "vocab": 2, "world": 8, "levels": 2, "room": 2, "steps": 2, "length": 3}
    kept = Played(monkeypatch, **how)
    assert kept.planted > 0
    assert kept.far < EXACT, "samples that are kept whatever they are would do no harm"
    monkeypatch.setattr(Growth, "begin_with", mutant(pleasing, Growth.begin_with))
    assert Played(monkeypatch, **how).far > SEEN
