"""All outcomes of a procedure with random choices, each with its probability, by replaying it.

`outcomes(play)` runs `play` once per sequence of choices. A `Branching` replaces the verifier's coin and the
speculators' draws, so the enumerated procedure is production code.

    law = outcomes(lambda chance: chance.choose([0.5, 0.5]) + chance.choose([0.5, 0.5]))
    law == {0: 0.25, 1: 0.5, 2: 0.25}
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod

import numpy as np
import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draws import draw_children
from specinfer.tree import DrawRule, TreeBuilder, merge
from specinfer.tree.token_tree import TokenTree
from specinfer.verify.multistep import verify_multistep
from specinfer.verify.target_law import target_law
from tests.flights import flight_of

from .oracles import processed_law


class Branching:
    """Makes the choices of `script`, and then always the first possible one."""

    def __init__(self, script=()):
        self.script = list(script)
        self.trail = []  # (choice, number of possible choices), in order
        self.probability = 1

    def choose(self, probabilities):
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        turn = len(self.trail)
        answer = self.script[turn] if turn < len(self.script) else 0
        self.trail.append((answer, len(possible)))
        self.probability *= probabilities[possible[answer]]
        return possible[answer]

    # The verifier's coin:
    def accept(self, depth, turn, p, q):
        yes = min(1, p / q)
        return self.choose([yes, 1 - yes]) == 0

    def pick(self, depth, turn, weights):
        total = sum(weights)
        return self.choose([weight / total for weight in weights])


def falls(play):
    """Yield the outcome of `play(chance)` for each sequence of choices, with its probability."""
    script = []
    while True:
        chance = Branching(script)
        outcome = play(chance)
        yield outcome, chance.probability
        trail = chance.trail
        while trail and trail[-1][0] + 1 == trail[-1][1]:
            trail.pop()
        if not trail:
            return
        script = [answer for answer, _ in trail[:-1]] + [trail[-1][0] + 1]


def outcomes(play):
    """The law of `play(chance)`, a dict outcome -> probability."""
    law = defaultdict(int)
    for outcome, probability in falls(play):
        law[outcome] += probability
    return dict(law)


def combinations(*plays):
    """Yield the joint outcomes of independent plays: a list, and its probability."""
    for each in product(*(list(falls(play)) for play in plays)):
        yield [outcome for outcome, _ in each], prod(probability for _, probability in each)


class World:
    """Random models over a tiny vocabulary: logits of every text, for the target and any speculator."""

    def __init__(self, vocab, params=None, seed=0, sharpness=1.5):
        self.vocab = vocab
        self.params = params or SamplingParams()
        self.seed = seed
        self.sharpness = sharpness
        self.rows = {}  # computed once per text

    def logits(self, model, text):
        if (model, text) not in self.rows:
            key = [self.seed, *model.encode(), 999, *text]
            row = np.random.default_rng(key).normal(scale=self.sharpness, size=self.vocab)
            self.rows[model, text] = row.astype(np.float32)
        return self.rows[model, text].copy()

    def law(self, model, text):
        """The production law of `model` after `text`, dense."""
        return target_law(self.logits(model, text), self.params).dense()


class Supports(World):
    """A world whose target returns laws over their supports, like the engine's."""

    def law(self, model, text):
        return target_law(self.logits(model, text), self.params).distribution()


@dataclass(frozen=True)
class Guesser:
    """A speculator of the test: `widths[d]` draws below every node of depth d."""

    name: str
    rule: DrawRule
    widths: tuple[int, ...]

    def grow(self, world, text, chance):
        builder = TreeBuilder(root=-1)
        frontier = [(0, text)]
        for width in self.widths:
            below = {}
            for node, path in frontier:
                law = world.law(self.name, path)
                for token in self.draw(law, width, chance):
                    declared = None if self.rule is DrawRule.POINT_MASS else law
                    below[builder.add(node, token, self.name, self.rule, declared)] = (*path, token)
            frontier = list(below.items())
        return builder.build()

    def draw(self, law, width, chance):
        if self.rule is DrawRule.POINT_MASS:
            return np.argsort(-law, kind="stable")[:width].tolist()
        drawn = []
        for _ in range(width):
            left = law.copy()
            if self.rule is DrawRule.WITHOUT_REPLACEMENT:
                left[drawn] = 0
                if not left.any():
                    break
            drawn.append(chance.pick(0, 0, left))
        return drawn


def step_law(world, guessers, text, verify=verify_multistep, alter=lambda tree: tree):
    """The law of the tokens one step adds after `text`: draw the trees, merge, verify."""
    law = defaultdict(int)
    for trees, probability in combinations(*(partial(guesser.grow, world, text) for guesser in guessers)):
        tree = alter(merge(trees))
        law_at = cache(lambda node, tree=tree: world.law("target", text + tree.path_tokens(node)))

        def play(chance, tree=tree, law_at=law_at):
            acceptance = verify(tree, law_at, chance)
            return (*(tree.token_ids[node] for node in acceptance.path), acceptance.next_token)

        for tokens, share in outcomes(play).items():
            law[tokens] += probability * share
    return dict(law)


def text_law(world, guessers, length, **how):
    """The law of the first `length` tokens, over as many steps as they take.

    Steps are independent given the text so far, so each text's step is enumerated once.
    """
    reached = {(): 1}
    finished = defaultdict(int)
    while reached:
        further = defaultdict(int)
        for text, probability in reached.items():
            for tokens, share in step_law(world, guessers, text, **how).items():
                longer = text + tokens
                into = finished if len(longer) >= length else further
                into[longer[:length]] += probability * share
        reached = further
    return dict(finished)


def drawn_tree(widths, site, logits_of, vocabulary=None, max_nodes=32):
    """Return a tree whose children production code draws, level by level.

    `site(builder, node, width, depth, path)` says how to draw; `logits_of(path)` is the draft's row.
    """
    builder = TreeBuilder(root=-1, max_nodes=max_nodes)
    frontier = [0]
    for depth, width in enumerate(widths):
        first = len(builder.parents)
        paths = [builder.path_tokens(node) for node in frontier]
        sites = [site(builder, node, width, depth, path) for node, path in zip(frontier, paths, strict=True)]
        rows = np.array([logits_of(path) for path in paths], dtype=np.float32)
        draw_children(flight_of(rows.reshape(len(sites), -1)), sites, vocabulary)
        frontier = list(range(first, len(builder.parents)))
        if not frontier:
            break
    return builder.build()


def all_trees(vocab, max_nodes):
    """Every token tree of at most `max_nodes` nodes: a parent and a token per node, siblings distinct."""
    grown = [TokenTree((0,), (-1,))]
    for _ in range(max_nodes - 1):
        yield from grown
        grown = [
            TokenTree((*tree.token_ids, token), (*tree.parents, parent))
            for tree in grown
            for parent, token in product(range(tree.num_nodes), range(vocab))
            if token not in tree.children()[parent]
        ]
    yield from grown


def own_law(law_of, vocab, length):
    """The target's own law of the next `length` tokens: the product of its conditional laws."""
    texts = {(): 1}
    for _ in range(length):
        texts = {
            (*text, token): probability * law_of(text)[token]
            for (text, probability), token in product(texts.items(), range(vocab))
        }
    return texts


def distance(law, other):
    """The largest difference between two laws at one outcome."""
    return max(abs(law.get(outcome, 0) - other.get(outcome, 0)) for outcome in {*law, *other})


def far(world, guessers, length, **how):
    """How far the law of the next tokens with speculation is from the target's own, by the slow oracle."""
    law = text_law(world, guessers, length, **how)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    wanted = own_law(lambda t: processed_law(world.logits("target", t), world.params), world.vocab, length)
    return distance(law, wanted)
