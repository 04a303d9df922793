"""A draft with a pruned vocabulary leaves the law of the text unchanged, by exact enumeration.

The production code draws (speculate/drafts/draws.py); the enumeration replaces its choice by cumulated
weights.
"""

import numpy as np
import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts import draws
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import TreeBuilder
from tests.flights import flight_of

from .enumeration import Supports, distance, own_law, text_law
from .oracles import processed_law

EXACT = 1e-9
VOCAB = 4
IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS
PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "truncated": SamplingParams(temperature=1.2, top_k=3, top_p=0.9),
}


class PrunedDraft:
    """A draft model with logits for the ids of `kept`; it reads ids from `reads` on as the one before."""

    def __init__(self, name, rule, widths, kept, monkeypatch, reads=VOCAB):
        self.name, self.rule, self.widths, self.monkeypatch = name, rule, widths, monkeypatch
        self.vocabulary = DraftVocabulary(np.array(kept), VOCAB)
        self.reads = reads

    def grow(self, world, text, chance):
        # The draws ask the enumeration instead of a uniform number.
        self.monkeypatch.setattr(draws, "inverse_cdf", lambda left, u: chance.pick(0, 0, left))
        builder = TreeBuilder(root=-1)
        frontier = [0]
        read = [min(token, self.reads - 1) for token in text]
        for depth, width in enumerate(self.widths):
            first = len(builder.parents)
            rows = [world.logits(self.name, (*read, *builder.path_tokens(node))) for node in frontier]
            sites = [
                Site(builder, node, width, world.params, 0, len(text) + depth, lambda: 0.0, self.rule)
                for node in frontier
            ]
            kept = np.array([row[self.vocabulary.ids] for row in rows], dtype=np.float32)
            draw_children(flight_of(kept.reshape(len(sites), -1)), sites, self.name, self.vocabulary)
            frontier = list(range(first, len(builder.parents)))
        return builder.build()


@pytest.mark.thorough
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("kept", [(0, 2), (3,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("rule", [IID, WITHOUT, POINT])
def test_the_law_of_the_text_is_the_targets(rule, kept, params, monkeypatch):
    world = Supports(vocab=VOCAB, params=params, seed=5)
    guessers = [
        PrunedDraft("a", rule, (2, 1), kept, monkeypatch),
        PrunedDraft("b", IID, (1,), (0, 1), monkeypatch),
    ]
    law = text_law(world, guessers, 2)
    expected = own_law(lambda text: processed_law(world.logits("target", text), params), VOCAB, 2)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, expected) < EXACT


def test_declaring_the_law_of_the_whole_head_would_change_it(monkeypatch):
    # The mutant: drawn from the pruned law, declared as the draft's law over every token.
    world = Supports(vocab=VOCAB, params=PARAMS["temperature"], seed=5)
    draft = PrunedDraft("a", IID, (1,), (0, 2), monkeypatch)

    class Liar:
        def grow(self, world, text, chance):
            tree = draft.grow(world, text, chance)
            whole = world.law("a", text)
            builder = TreeBuilder(root=-1)
            for draw in tree.draws:
                builder.add(draw.parent, tree.token_ids[draw.node], "a", IID, whole)
            return builder.build()

    expected = own_law(lambda text: processed_law(world.logits("target", text), world.params), VOCAB, 1)
    assert distance(text_law(world, [draft], 1), expected) < EXACT
    assert distance(text_law(world, [Liar()], 1), expected) > 1e-3
