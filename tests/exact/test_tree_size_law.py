"""Trees sized by what they cost leave the law of the text as it is, by exact enumeration.

The production code drafts, sizes and merges: draft models over made-up logits, CostPolicy, Ensemble. Whether
a level is guessed may depend on every draw before it, never on the draws that are to be made.
"""

import numpy as np
import pytest

from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SamplingParams
from specinfer.speculate import cost_policy, draws
from specinfer.speculate.cost_policy import CostPolicy
from specinfer.speculate.draft_costs import DraftCosts
from specinfer.speculate.draft_model import DraftModel
from specinfer.speculate.ensemble import Ensemble
from specinfer.tree import TreeBuilder
from specinfer.tree.expansion import Expansion
from specinfer.tree.token_tree import DrawRule
from tests import plans
from tests.flights import flight_of
from tests.kernels import kernels

from .enumeration import Supports, distance, own_law, text_law
from .oracles import processed_law

EXACT, SEEN = 1e-9, 1e-3
VOCAB = 3
LENGTH = 2  # of texts: both levels of a tree have a say
PROMPT = (0,)
IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS


class MadeUpRunner:
    """A draft's runner whose logits are a world's, by the text along each row's path."""

    block_size = 64

    class model:
        class config:
            max_context = 64

        kernels = kernels("torch")

    def __init__(self, world, name):
        self.world, self.name, self.tokens = world, name, {}

    def launch(self, rows):
        logits = []
        for part in rows:
            self.tokens.update(enumerate(part.token_ids, part.start))
            end = part.start + len(part.token_ids)
            asked = range(part.start + part.logits_from, end)
            logits.extend(self.world.logits(self.name, self.text(part, position, end)) for position in asked)
        return flight_of(np.stack(logits))

    def text(self, part, position, end):
        path = list(range(position + 1))
        if part.parents is not None:
            root, node = end - len(part.parents), position - (end - len(part.parents))
            path = []
            while node > 0:
                path.insert(0, root + node)
                node = part.parents[node]
            path = [*range(root + 1), *path]
        return tuple(self.tokens[p] for p in path)[len(PROMPT) :]

    def move(self, moves):
        raise AssertionError("no step is committed here")


class Points:
    """A speculator that guesses token 2, and then 1."""

    name = "points"

    def propose(self, plan):
        trees = []
        for entry in plan.tree_entries:
            builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
            node = builder.add(0, 2, self.name, confidence=0.5)
            if entry.max_depth > 1 and not builder.full:
                builder.add(node, 1, self.name, confidence=0.5)
            trees.append(builder.build())
        return trees

    def observe(self, outcomes):
        pass


class Watched(CostPolicy):
    """Notes whether drafts are run."""

    def __init__(self, noted, *costs):
        super().__init__(*costs)
        self.noted = noted

    def worth_starting(self, speculator, entries, unread):
        starts = super().worth_starting(speculator, entries, unread)
        self.noted[speculator].update(starts)
        return starts


class Sized:
    """All speculators of a test as one guesser: merged trees, sized by the seconds of the drafts' passes."""

    def __init__(self, drafts, pass_, monkeypatch, points=False):
        self.drafts, self.pass_, self.points = drafts, pass_, points
        self.monkeypatch = monkeypatch
        self.depths = set()  # of the trees that were verified
        self.starts = {name: set() for name, *_ in drafts}  # whether each draft was run

    def grow(self, world, text, chance):
        # The draws ask the enumeration instead of a uniform number.
        self.monkeypatch.setattr(draws, "inverse_cdf", lambda left, u: chance.pick(0, 0, left))
        depths = {
            name: DraftCosts(CostCurve((1, 1000), (self.pass_, self.pass_)), Expansion(widths))
            for name, _, widths in self.drafts
        }
        policy = Watched(self.starts, TARGET, depths)
        speculators = [
            DraftModel(name, MadeUpRunner(world, name), Expansion(widths), rule, max_rows=64)
            for name, rule, widths in self.drafts
        ]
        ensemble = Ensemble([*speculators, *([Points()] if self.points else [])], vocab=VOCAB, policy=policy)
        asked = plans.entry(PROMPT, text, params=world.params, max_nodes=32, max_depth=2, block_table=(0,))
        [tree] = ensemble.propose(plans.plan(asked))
        self.depths.add(max(tree.depths()))
        return tree


TARGET = CostCurve((1, 3, 5), (1.0, 1.1, 1.3))
PARAMS = SamplingParams(temperature=0.7, speculation={"verifier": "mss"})
DRAFTS = {
    "a chain": [("a", IID, (1, 1))],
    "i.i.d. draws": [("a", IID, (2, 1))],
    "without replacement": [("a", WITHOUT, (2, 1))],
    "two drafts": [("a", IID, (1, 1)), ("b", WITHOUT, (2,))],
}


# Nothing in these is sampled: they are pruned by value.
PRUNED = {"top-k": [("a", POINT, (2, 1))], "nobody": []}


def play(drafts, pass_, monkeypatch, points=False):
    """The guesser after all texts, and how far their law is from the target's."""
    world = Supports(vocab=VOCAB, params=PARAMS, seed=5)
    sized = Sized(drafts, pass_, monkeypatch, points)
    law = text_law(world, [sized], LENGTH)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    wanted = own_law(lambda text: processed_law(world.logits("target", text), PARAMS), VOCAB, LENGTH)
    return sized, distance(law, wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("points", [False, True], ids=["drafts", "drafts and points"])
@pytest.mark.parametrize("drafts", [*DRAFTS.values(), *PRUNED.values()], ids=[*DRAFTS, *PRUNED])
@pytest.mark.parametrize("pass_", [0.01, 0.2])  # nothing is spared, and much
def test_the_law_of_the_text_is_the_targets(drafts, pass_, points, monkeypatch):
    assert play(drafts, pass_, monkeypatch, points)[1] < EXACT


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_whether_a_level_is_drawn_depends_on_the_draws_above_it(drafts, monkeypatch):
    assert play(drafts, 0.2, monkeypatch)[0].depths == {1, 2}


def test_whether_a_draft_is_run_depends_on_the_draws_of_another(monkeypatch):
    sized, _ = play(DRAFTS["two drafts"], 0.2, monkeypatch)
    assert sized.starts == {"a": {True}, "b": {True, False}}


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_dropping_samples_for_their_value_is_seen(drafts, monkeypatch):
    monkeypatch.setattr(cost_policy, "prunable", lambda tree: True)
    assert play(drafts, 0.01, monkeypatch)[1] > SEEN
