"""What a draft finds out later may decide who guesses: the law of the text stays, by exact enumeration.

Steps are no longer independent given the text, as a policy remembers what it was told of places at which
the draft was not asked. So whole texts are played, step by step, with the production code that drafts, reads
what was missed, tells of it, merges and verifies: every fall of every draw, those of missed places included.
"""

from functools import cache

import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts import draws
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.speculation_policy import StepReport
from specinfer.tree.draw import DrawRule
from specinfer.tree.expansion import Expansion
from specinfer.verify import verify_multistep
from tests import plans

from .enumeration import Supports, distance, outcomes, own_law
from .oracles import processed_law
from .sized_trees import PROMPT, MadeUpRunner

EXACT, SEEN = 1e-9, 1e-3
VOCAB, LENGTH = 2, 4
PARAMS = SamplingParams(temperature=0.7, speculation={"verifier": "mss"})
FIRST = 2  # tokens of the answer before the draft is asked, which it reads then


class Learning(FixedPolicy):
    """Asks for a level when there are two tokens, and for more where it was told that a guess was right."""

    def __init__(self):
        super().__init__()
        self.told, self.asks, self.length = [], False, 0

    def begin_step(self, plan):
        self.length = plan.entries[0].end - len(PROMPT)
        self.asks = self.length == FIRST or self.told[-1:] == [(0, 0)]
        return plan

    def worth_starting(self, speculator, entries, unread, guessed):
        return [self.asks]

    def worth_deepening(self, speculator, entries, trees, ends):
        return ends if self.length > FIRST else [() for _ in entries]

    def observe(self, report):
        self.told += [(one.level, one.choice) for one in report.hindsight.get("a", ())]


class Peeking(Learning):
    """A mutant: drops what was drawn, where it is not what it was told of."""

    def choose_nodes(self, trees):
        return [single(tree) if 0 in tree.token_ids[1:] else tree for tree in trees]


def single(tree):
    """The tree's root."""
    return type(tree)(tree.token_ids[:1], tree.parents[:1])


def played(world, policy, widths, chance, monkeypatch):
    """The first tokens of a text, and what was told of the draft on the way."""
    monkeypatch.setattr(draws, "inverse_cdf", lambda left, u: chance.pick(0, 0, left))
    shape = Shape(Expansion(widths), DrawRule.IID)
    draft = DraftModel("a", MadeUpRunner(world, "a"), shape, max_rows=64)
    ensemble = Ensemble([draft], vocab=VOCAB, policy=policy)
    text = ()
    while len(text) < LENGTH:
        room = {"max_nodes": 8, "max_depth": 2, "block_table": (0,)}
        [tree] = ensemble.propose(plans.plan(plans.entry(PROMPT, text, params=PARAMS, **room)))
        law_at = cache(lambda node, text=text, tree=tree: world.law("target", text + tree.path_tokens(node)))
        acceptance = verify_multistep(tree, law_at, chance)
        added = (*(tree.token_ids[node] for node in acceptance.path), acceptance.next_token)
        ensemble.observe(StepReport([plans.outcome(*added)], {"target_forward": 1.0}))
        text += added
    return text[:LENGTH], tuple(policy.told)


def law_of(kind, widths, monkeypatch):
    """How far the law of the text is from the target's, and all that was told."""
    world = Supports(vocab=VOCAB, params=PARAMS, seed=5)
    found = outcomes(lambda chance: played(world, kind(), widths, chance, monkeypatch))
    law = {}
    for (text, _), share in found.items():
        law[text] = law.get(text, 0) + share
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    wanted = own_law(lambda text: processed_law(world.logits("target", text), PARAMS), VOCAB, LENGTH)
    return distance(law, wanted), {told for _, told in found}


@pytest.mark.parametrize("widths", [(1, 1), (1,)])
def test_who_guesses_may_depend_on_what_a_draft_found_out_later(widths, monkeypatch, caplog):
    far, told = law_of(Learning, widths, monkeypatch)
    assert far < EXACT
    assert {((0, 0),), ((0, None),)} <= {some[:1] for some in told}, "it would have been right, or not"
    assert not caplog.records


def test_dropping_samples_for_their_value_is_seen(monkeypatch):
    assert law_of(Peeking, (1, 1), monkeypatch)[0] > SEEN
