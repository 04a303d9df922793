"""A draft with another vocabulary leaves the law of the text unchanged, by exact enumeration.

The production code reads the text and draws guesses; the enumeration replaces random numbers.
The target's tokens are A, B, C, D. The draft also has AB, ABC and E, counts backwards and lacks D.
"""

import numpy as np
import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts import draws
from specinfer.speculate.drafts.draft_tokens import foreign_tokens
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.tokenizer import Tokenizer
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import TreeBuilder
from tests.flights import flight_of
from tests.foreign import byte_level

from .enumeration import Supports, World, distance, own_law, text_law
from .oracles import processed_law

EXACT = 1e-9
VOCAB = 4
TARGET_TOKENIZER = Tokenizer(byte_level(b"ABCD", []), eos_token_ids=[])
DRAFT_TOKENIZER = Tokenizer(byte_level(b"ECBA", ["ABC"]), eos_token_ids=[])
IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS
PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "truncated": SamplingParams(temperature=1.2, top_k=3, top_p=0.9),
}


class ForeignGuesser:
    """Draws children as a ForeignDraft does; `declared` makes something else of the tree it declares."""

    def __init__(self, name, rule, widths, monkeypatch, declared=lambda tree, law: tree):
        self.name, self.widths, self.monkeypatch, self.declared = name, widths, monkeypatch, declared
        self.tokens = foreign_tokens(
            TARGET_TOKENIZER, DRAFT_TOKENIZER, (VOCAB, DRAFT_TOKENIZER.vocab_size), name=name
        )
        self.rule = rule
        self.own = World(vocab=DRAFT_TOKENIZER.vocab_size, seed=3)

    def grow(self, world, text, chance):
        self.monkeypatch.setattr(draws, "inverse_cdf", lambda left, u: chance.pick(0, 0, left))
        spelled = self.tokens.respelling()
        spelled.extend(text)
        builder = TreeBuilder(root=-1)
        frontier = [0]
        for depth, width in enumerate(self.widths):
            first = len(builder.parents)
            paths = [tuple(self.tokens.to_draft(builder.path_tokens(node))) for node in frontier]
            rows = [self.own.logits(self.name, (*spelled.ids, *path)) for path in paths]
            sites = [
                Site(builder, node, width, world.params, 0, len(text) + depth, lambda: 0.0, self.rule)
                for node in frontier
            ]
            named = np.array([row[self.tokens.logit_ids] for row in rows], dtype=np.float32)
            draw_children(flight_of(named.reshape(len(sites), -1)), sites, self.name, self.tokens.vocabulary)
            frontier = list(range(first, len(builder.parents)))
        return self.declared(builder.build(), self.own.law(self.name, tuple(spelled.ids)))


def expected(world, length):
    return own_law(lambda text: processed_law(world.logits("target", text), world.params), VOCAB, length)


@pytest.mark.thorough
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("rule", [IID, WITHOUT, POINT])
def test_the_law_of_the_text_is_the_targets(rule, params, monkeypatch):
    world = Supports(vocab=VOCAB, params=params, seed=5)
    guessers = [
        ForeignGuesser("b", IID, (1,), monkeypatch),
        ForeignGuesser("a", rule, (2, 1), monkeypatch),
    ]
    law = text_law(world, guessers, 2)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, expected(world, 2)) < EXACT


def test_declaring_the_law_of_all_the_drafts_tokens_would_change_it(monkeypatch):
    # The mutant: drawn from the restricted law, declared as the draft's law, whatever the target lacks.
    world = Supports(vocab=VOCAB, params=PARAMS["temperature"], seed=5)
    honest = ForeignGuesser("a", IID, (1,), monkeypatch)

    def lie(tree, law):
        whole = np.zeros(VOCAB)
        for name, token in zip(honest.tokens.vocabulary.ids, honest.tokens.logit_ids, strict=True):
            whole[name] = law[token]
        whole[3] = 1 - whole.sum()  # on the token that the draft cannot name
        builder = TreeBuilder(root=-1)
        for draw in tree.draws:
            builder.add(draw.parent, tree.token_ids[draw.node], "a", IID, whole)
        return builder.build()

    liar = ForeignGuesser("a", IID, (1,), monkeypatch, declared=lie)
    assert distance(text_law(world, [honest], 1), expected(world, 1)) < EXACT
    assert distance(text_law(world, [liar], 1), expected(world, 1)) > 1e-3
