"""All speculators of a step as one guesser of an enumeration: drafts with random logits, sized trees.

`Sized` runs the production code from drafts to merged trees; its subclasses change the policy.
"""

from types import SimpleNamespace

import numpy as np

from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts import draws
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.allowance import WINDOW
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.drafting import PricedDraft
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.policy import LevelPass, StepReport
from specinfer.speculate.speculator import Speculator
from specinfer.tree import TreeBuilder
from specinfer.tree.token_tree import Expansion, single_node
from tests import plans
from tests.flights import flight_of
from tests.kernels import kernels
from tests.unit.speculate.policy.priced import Unguarded

VOCAB = 3
PROMPT = (0,)
TARGET = CostCurve((1, 3, 5), (1.0, 1.1, 1.3))
PARAMS = SamplingParams(temperature=0.7, speculation={"verifier": "mss"})
PLAIN = 5  # initial steps without speculation


class MadeUpRunner:
    """A draft's runner that returns a world's logits for the text along each row's path.

    Its cache has one block. A slot holds the text up to its token instead of K and V: rows write it and read
    it along their paths, and moves copy it.
    """

    block_size = 64
    states = None
    cache = None

    max_context = 64
    shortlist = None

    class model:
        kernels = kernels("torch")
        config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, world, name):
        self.world, self.name, self.texts = world, name, {}
        self.stale = 0  # rows that have read a slot of another text

    def launch(self, rows, *, few=False):
        logits = []
        for part in rows:
            end = part.start + len(part.token_ids)
            for i, token in enumerate(part.token_ids):
                seen = self.path(part, part.start + i, end)
                text = (*(self.texts[place][-1] for place in seen), token)
                self.stale += any(self.texts[place] != text[: n + 1] for n, place in enumerate(seen))
                self.texts[part.start + i] = text
                if i >= part.logits_from:
                    logits.append(self.world.logits(self.name, text[len(PROMPT) :]))
        return flight_of(np.stack(logits)[:, : self.shortlist if few else VOCAB])

    def path(self, part, position, end):
        """Return the positions that the row at `position` attends to, without its own."""
        if part.parents is None:
            return [*range(position)]
        root = end - len(part.parents)
        path, node = [], part.parents[position - root]
        while node > 0:
            path.insert(0, root + node)
            node = part.parents[node]
        return [*range(root + 1), *path] if position > root else [*range(root)]

    def move(self, moves):
        for move in moves:
            moved = [self.texts[source] for source in move.sources]
            self.texts.update(zip(move.targets, moved, strict=True))


class Points(Speculator):
    """A speculator that guesses token 2, and then token 1."""

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


class Watched(CostPolicy):
    """Records whether drafts run, and the numbers of (deepened, open) nodes per level."""

    def __init__(self, noted, parts, *costs):
        super().__init__(*costs)
        self.noted, self.parts = noted, parts

    def worth_starting(self, speculator, entries, unread, guessed):
        starts = super().worth_starting(speculator, entries, unread, guessed)
        self.noted[speculator].update(starts)
        return starts

    def worth_deepening(self, speculator, entries, trees, ends):
        chosen = super().worth_deepening(speculator, entries, trees, ends)
        self.parts.update((len(some), len(all_)) for some, all_ in zip(chosen, ends, strict=True))
        return chosen


class Sized:
    """All speculators of a test as one guesser: merged trees, sized by the costs of the drafts' passes."""

    learned = False  # True if trees may have learned shapes

    def __init__(self, drafts, pass_, monkeypatch, points="no", target=None, max_nodes=32):
        self.drafts, self.pass_, self.points = drafts, pass_, points
        self.monkeypatch = monkeypatch
        self.target, self.max_nodes = target or TARGET, max_nodes
        self.depths = set()  # depths of the verified trees
        self.proposed = set()  # number of draws per speculator
        self.starts = {name: set() for name, *_ in drafts}  # per draft: whether it ran
        self.parts = set()  # (deepened, open) nodes per level

    def grow(self, world, text, chance):
        # The enumeration replaces the uniform numbers of draws.
        self.monkeypatch.setattr(draws, "inverse_cdf", lambda left, u: chance.pick(0, 0, left))
        pass_ = CostCurve((1, 1000), (self.pass_, self.pass_))
        drafts = {
            name: PricedDraft(CostModel(pass_, learns=False), Expansion(widths))
            for name, _, widths in self.drafts
        }
        acceptance = AcceptanceRates({name: len(widths) for name, _, widths in self.drafts})
        target = CostModel(self.target, learns=False)
        policy = self.policy(target, drafts, acceptance, text)
        speculators = [
            DraftModel(
                name, MadeUpRunner(world, name), Shape(Expansion(widths), rule, self.learned), max_rows=64
            )
            for name, rule, widths in self.drafts
        ]
        if self.points != "no":
            speculators.insert(0 if self.points == "first" else len(speculators), Points())
        ensemble = Ensemble(speculators, vocab=VOCAB, policy=policy)
        room = {"max_nodes": self.max_nodes, "max_depth": 2, "block_table": (0,)}
        [tree] = ensemble.propose(plans.plan(plans.entry(PROMPT, text, params=world.params, **room)))
        assert tree.num_nodes <= self.max_nodes
        self.depths.add(max(tree.depths()))
        self.proposed.add(tuple(sum(d.speculator == s.name for d in tree.draws) for s in speculators))
        return tree

    def policy(self, target, drafts, acceptance, text, guard=None):
        """Return the policy that sizes the next tree after `text`."""
        guard = guard or Unguarded(target, {})
        return Watched(self.starts, self.parts, target, drafts, acceptance, guard)


class Guarded(Sized):
    """Like Sized, with a guard that has seen guesses fail after texts that start with token 1."""

    held = frozenset()  # per tree: whether the guard turned speculation off

    def policy(self, target, drafts, acceptance, text):
        guard = Guard(target, {name: draft.costs for name, draft in drafts.items()}, measured=False)
        policy = super().policy(target, drafts, acceptance, text, guard)
        was, wrong = plans.entry(PROMPT, max_nodes=4, max_depth=2), tree_of(2)
        for step in range(PLAIN + (WINDOW if text[:1] == (1,) else 0)):
            policy.begin_step(plans.plan(was))
            policy.choose_nodes([single_node(0) if step < PLAIN else wrong])
            lost = [LevelPass("a", 0, 1, 0.0)] if step >= PLAIN else []
            policy.observe(StepReport([plans.outcome(1)], {"target_forward": 1.0}, lost))
        self.held |= {not guard.allowance.guessing}
        return policy


class Wayward(Sized):
    """Chooses the nodes to deepen only by the values of earlier draws and guesses.

    Shapes are learned except for samples. A policy could break the law only if it saw the draws below an open
    leaf before it decides about that leaf; it never does.
    """

    learned = True

    def __init__(self, *args, **sizes):
        super().__init__(*args, **sizes)
        self.shown = set()  # open leaves whose draws the policy saw

    def policy(self, target, drafts, acceptance, text):
        policy = WaywardPolicy(self.starts, set(), target, drafts, acceptance, Unguarded(target, {}))
        policy.wayward, policy.shown = self.parts, self.shown
        return policy


class WaywardPolicy(Watched):
    def worth_starting(self, speculator, entries, unread, guessed):
        super().worth_starting(speculator, entries, unread, guessed)
        return [True] * len(entries)

    def worth_deepening(self, speculator, entries, trees, ends):
        super().worth_deepening(speculator, entries, trees, ends)
        for tree, of_tree in zip(trees, ends, strict=True):
            self.shown |= {draw.parent for draw in tree.draws}.intersection(of_tree)
        chosen = [
            [end for end in of_tree if (sum(tree.token_ids) + tree.token_ids[end]) % 3]
            for tree, of_tree in zip(trees, ends, strict=True)
        ]
        self.wayward.update((len(some), len(all_)) for some, all_ in zip(chosen, ends, strict=True))
        return chosen

    def choose_nodes(self, trees):
        return trees


def tree_of(token):
    builder = TreeBuilder(0)
    builder.add(0, token, "points", confidence=0.5)
    return builder.build()
