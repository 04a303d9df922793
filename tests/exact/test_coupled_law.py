"""The coupled rule gives the target's own choices whatever the tree, and these follow the target's law.

The noise cannot be enumerated by branching. So the proof has three parts. The text does not depend on the
tree (exhaustively on tiny vocabularies; with drafts in test_parameters.py). The winner of the exponential
race has the law p (on a grid of all uniforms); the noise is what the race supposes
(tests/unit/verify/test_target_law.py, and chi-square here).
"""

from functools import partial
from itertools import pairwise, product
from math import exp, inf

import numpy as np
import pytest
import torch

from specinfer.engine import target_laws
from specinfer.engine.target_laws import TargetLaws, verify_trees
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.heads.runner import HeadPass
from specinfer.models.open_model import open_model
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import named_tokens
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import Expansion
from specinfer.verify import noise
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.scan import NUMPY
from specinfer.verify.target_law import target_law
from tests import plans
from tests.flights import flight_of
from tests.goodness import chi_square
from tests.heads import SIZE, VOCAB, block_config, tiny_head, write_tiny_head
from tests.loading import load
from tests.oracles import best_first, verification
from tests.tiny_models import write_tiny_llama

from .enumeration import World, all_trees, distance, own_law


class NotedFlight(Flight):
    """Notes the rows whose choice is read."""

    def __init__(self, choices):
        logits = torch.eye(2)[list(choices)]
        super().__init__(logits, lambda rows: rows, 2, NUMPY)
        self.read = []

    def choices(self, rows, asks, changes=None):
        self.read += rows
        return super().choices(rows, asks, changes)


@pytest.mark.thorough
# About 8 s: the central law, with drawn trees.
def test_any_tree_and_any_choices_give_the_targets_own_text():
    entry, checked = plans.entry([0], params=SamplingParams(temperature=0)), 0
    for tree in all_trees(vocab=2, max_nodes=5):
        for choices in product(range(2), repeat=tree.num_nodes):
            flight = NotedFlight(choices)
            [acceptance] = verify_trees([TargetLaws(entry, tree, flight, 0)], "coupled", flight)
            visited = [0, *acceptance.path]
            tokens = [*(tree.token_ids[n] for n in acceptance.path), acceptance.next_token]
            assert flight.read == visited, "choices after visited nodes only, once each"
            assert tokens == [choices[node] for node in visited], "every token is the target's own choice"
            assert tokens[-1] not in tree.children()[visited[-1]], "it goes as deep as the tree agrees"
            assert acceptance == verification.coupled(tree, choices)
            checked += 1
    assert checked > 3000


def test_the_race_has_the_law_p_on_a_grid_of_all_uniforms():
    p = np.array([0.6, 0.3, 0.1])
    n = 100
    highs = ((np.arange(n) + 0.5) / n * 2**32).astype(np.uint32)
    E = noise.exponentials_from(highs, 0, np.arange(n))
    a, b, c = E[:, None, None] / p[0], E[None, :, None] / p[1], E[None, None, :] / p[2]
    wins = [((a < b) & (a < c)).mean(), ((b <= a) & (b < c)).mean(), ((c <= a) & (c <= b)).mean()]
    assert wins == pytest.approx(p, abs=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("over", ["positions", "seeds"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=4, temperature=0.8)])
def test_choices_follow_the_law_over_positions_and_over_seeds(params, over):
    law = target_law(World(vocab=8).logits("target", ()), params)
    keys = ((3, i) if over == "positions" else (i, 3) for i in range(6000))
    counts = np.bincount([coupled_choice(law, *key) for key in keys], minlength=8)
    p = law.dense()
    assert counts[p == 0].sum() == 0
    assert chi_square(counts[p > 0], 6000 * p[p > 0]) > 1e-3


def test_neighbouring_positions_choose_independently():
    law = target_law(np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32)), SamplingParams())
    choices = np.array([coupled_choice(law, 17, i) for i in range(9001)])
    pairs = np.bincount(choices[:-1] * 3 + choices[1:], minlength=9)
    p = law.dense()
    assert chi_square(pairs, 9000 * np.outer(p, p).ravel()) > 1e-3


# Best-first draws of one-pass heads.


EXACT = 1e-9
SAID = (4, 10)  # the tokens there are
PROMPT, SEED, LENGTH = (7,), 5, 3
LEVELS = 3
NEVER = 1e40  # exponential of impossible tokens, which come last
SHAPE = Shape(Expansion((1,) * LEVELS), DrawRule.COUPLED, learned=True)  # a fixed one is drawn by levels
HEADS = {"pairs": block_config(), "no pairs": block_config(markov_rank=0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    write_tiny_llama(folder / "target", tokenizer=True, num_layers=3)
    return folder


class Head:
    """A tiny head whose rows behind a text are random, and the trees that it grows."""

    def __init__(self, folder, name, params):
        target = open_model(folder / "target")
        model = load(folder / "target", "torch")
        written = write_tiny_head(tiny_head(HEADS[name], seed=3), folder / name)
        self.model = load_head(HeadFolder(written, target.config, target), model)
        named = named_tokens(self.model.ids, VOCAB)
        self.trees = best_first.plain_one_pass_trees("head", self.model, SHAPE, named)
        self.params = params

    def tree(self, text, most):
        """Return the guesses after a text, with at most `max_nodes` nodes."""
        entry = plans.entry(PROMPT, ids(text), params=self.params, seed=SEED, max_nodes=1 + most)
        growth = Growth.of(entry, "head", LEVELS)
        row = torch.Generator().manual_seed(int("".join(map(str, (1, *text))), 3))
        with torch.no_grad():
            read_TD = torch.randn(LEVELS, SIZE, generator=row)
            made = HeadPass((), read_TD, self.model.logits(read_TD))
            self.trees.grow([self.trees.open(growth, 0, LEVELS)], made)
        return growth.tree()


def ids(text):
    return [SAID[token] for token in text]


class Step:
    """The target's side: its laws of texts, and what a step adds."""

    def __init__(self, params):
        self.world = World(vocab=len(SAID), params=params)

    def logits(self, text):
        row = np.full(VOCAB, -np.inf, dtype=np.float32)
        row[[*SAID]] = self.world.logits("target", text)
        return row

    def __call__(self, text, tree):
        """The said tokens that the engine's walk adds to a text."""
        entry = plans.entry(PROMPT, ids(text), params=self.world.params, seed=SEED)
        said = [tree.path_tokens(node) for node in range(tree.num_nodes)]
        rows = [
            self.logits((*text, *map(SAID.index, path))) if {*path} <= {*SAID} else self.logits(text)
            for path in said
        ]
        laws = target_laws.TargetLaws(entry, tree, flight_of(np.stack(rows)), 0)
        [acceptance] = target_laws.verify_trees([laws], "coupled", flight_of(np.stack(rows)))
        tokens = [*(tree.token_ids[node] for node in acceptance.path), acceptance.next_token]
        return tuple(map(SAID.index, tokens))


def cuts(head, step, most, monkeypatch):
    """Return, by position, the ratios at which the target's choice or the order of children changes."""
    found = [{0.0, inf} for _ in range(LENGTH)]
    grown = []  # levels of each tree

    def caught(builder, made, *rest):
        grown.append(made)
        return grow(builder, made, *rest)

    grow = best_first.grow
    monkeypatch.setattr(best_first, "grow", caught)
    for length in range(LENGTH):
        for text in product(range(len(SAID)), repeat=length):
            p = step.world.law("target", text)
            found[length].add(p[0] / p[1])
            grown.clear()
            head.tree(text, most)
            assert grown, "no tree was grown best first"
            for levels in grown:
                before = [0]  # rows after which a token may follow
                for position, level in enumerate(levels[: LENGTH - length], start=length):
                    said = [[*level.tokens_C].index(token) for token in SAID]
                    rows = level.logits_AC[before][:, said]
                    found[position] |= {exp(first - second) for first, second in rows}
                    before = said
    monkeypatch.setattr(best_first, "grow", grow)
    return [sorted(ratios) for ratios in found]


def enumerated(head, step, most, monkeypatch):
    """The law of the first tokens, and the steps that they take on average."""
    law, steps = {}, 0.0
    with monkeypatch.context() as patches:
        between = [[*pairwise(ratios)] for ratios in cuts(head, step, most, patches)]
        ratios = [0.0] * (LENGTH + LEVELS + 1)
        at = {noise.race_key(SEED, len(PROMPT) + place): place for place in range(len(ratios))}

        def exponentials(highs, key, tokens):
            ratio = ratios[at[key]]
            return np.array([{SAID[0]: ratio, SAID[1]: 1.0}.get(token, NEVER) for token in tokens.tolist()])

        patches.setattr(noise, "exponentials_from", exponentials)
        grown = {}
        for some in product(*between):
            ratios[:LENGTH] = [low + 1 if high == inf else (low + high) / 2 for low, high in some]
            ratios[LENGTH:] = [1.0] * (len(ratios) - LENGTH)
            share, text = 1.0, ()
            for low, high in some:
                share *= (1 if high == inf else high / (1 + high)) - low / (1 + low)
            while len(text) < LENGTH:
                key = (text, *ratios[len(text) :])
                if key not in grown:
                    tree = head.tree(text, most)
                    grown[key] = step(text, tree)
                text += grown[key]
                steps += share
            law[text[:LENGTH]] = law.get(text[:LENGTH], 0.0) + share
    return law, steps


@pytest.mark.few(3)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("temperature", "most"), [(0.7, 1), (1.3, 2), (1.3, 5)])
def test_the_law_of_the_text_is_the_targets(folder, name, temperature, most, monkeypatch):
    params = SamplingParams(temperature=temperature)
    head, step = Head(folder, name, params), Step(params)
    law, steps = enumerated(head, step, most, monkeypatch)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, own_law(partial(step.world.law, "target"), len(SAID), LENGTH)) < EXACT
    assert steps < LENGTH - 0.05, "guesses become text"


class Trusting(Step):
    """The mutant: the head's first guess is accepted without verification."""

    def __call__(self, text, tree):
        return (SAID.index(tree.token_ids[1]),)


def test_a_walk_that_trusts_the_head_has_another_law(folder, monkeypatch):
    params = SamplingParams(temperature=0.7)
    step = Trusting(params)
    law, _ = enumerated(Head(folder, "pairs", params), step, 1, monkeypatch)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, own_law(partial(step.world.law, "target"), len(SAID), LENGTH)) > 0.01
