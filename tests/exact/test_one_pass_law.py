"""Best-first draws of one-pass heads leave the law of the text unchanged, by exact enumeration of noise.

Two tokens are possible. The winner of their race depends only on the ratio of their exponentials, which is
below t with probability t / (1 + t). So the noise of a position is cut where the target's choice
or the order of the head's children changes: between two cuts all is the same, whatever the ratio.
"""

from functools import partial
from itertools import pairwise, product
from math import exp, inf

import numpy as np
import pytest
import torch

from specinfer.engine import target_laws
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.heads.runner import HeadPass
from specinfer.models.open_model import open_model
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import named_tokens
from specinfer.speculate.drafts.growth import Growth, Shape
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import Expansion
from specinfer.verify import noise
from tests import plans
from tests.flights import flight_of
from tests.heads import SIZE, VOCAB, block_config, tiny_head, write_tiny_head
from tests.loading import load
from tests.oracles import best_first
from tests.tiny_models import write_tiny_llama

from .enumeration import World, distance, own_law

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
