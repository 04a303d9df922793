"""Drafts with fewer or other tokens leave the law of the text unchanged, by exact enumeration.

The production code reads the text and draws guesses; the enumeration replaces random numbers.
The target's tokens are A, B, C, D. The foreign draft also has AB, ABC and E, counts backwards and lacks D.
"""

import numpy as np
import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts import draws
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary, foreign_tokens
from specinfer.speculate.drafts.draws import Site
from specinfer.tokenizer import Tokenizer
from specinfer.tree.draw import Draw, DrawRule
from specinfer.tree.token_tree import TokenTree
from tests.foreign import byte_level

from .enumeration import Supports, World, drawn_tree, far

EXACT = 1e-9
VOCAB = 4
TARGET_TOKENIZER = Tokenizer(byte_level(b"ABCD", []), eos_token_ids=[])
DRAFT_TOKENIZER = Tokenizer(byte_level(b"ECBA", ["ABC"]), eos_token_ids=[])
IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS
PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "truncated": SamplingParams(temperature=1.2, top_k=3, top_p=0.9),
}


class Drawing:
    """A draft that draws guesses as engines do."""

    def __init__(self, name, rule, widths, monkeypatch):
        self.name, self.rule, self.widths, self.monkeypatch = name, rule, widths, monkeypatch

    def grow(self, world, text, chance):
        # The draws ask the enumeration instead of a uniform number.
        self.monkeypatch.setattr(draws, "inverse_cdf", lambda left, u: chance.pick(0, 0, left))

        def site(builder, node, width, depth, path):
            own = (world.params, 0, len(text) + depth, lambda: 0.0, self.rule)
            return Site(builder, self.name, node, width, *own)

        logits_of = self.reading(world, text)
        return drawn_tree(self.widths, site, logits_of, self.vocabulary)


class PrunedDraft(Drawing):
    """A draft model with logits for the ids of `kept`."""

    def __init__(self, name, rule, widths, kept, *given):
        super().__init__(name, rule, widths, *given)
        self.vocabulary = DraftVocabulary(np.array(kept), VOCAB)

    def reading(self, world, text):
        return lambda path: world.logits(self.name, (*text, *path))[self.vocabulary.ids]


class ForeignDraft(Drawing):
    """A draft model with other tokens, and its own world."""

    def __init__(self, *given):
        super().__init__(*given)
        sizes = VOCAB, DRAFT_TOKENIZER.vocab_size
        self.tokens = foreign_tokens(TARGET_TOKENIZER, DRAFT_TOKENIZER, sizes, name=self.name)
        self.vocabulary = self.tokens.vocabulary
        self.own = World(vocab=DRAFT_TOKENIZER.vocab_size, seed=3)

    def spelled(self, text):
        spelled = self.tokens.respelling()
        spelled.extend(text)
        return tuple(spelled.ids)

    def reading(self, world, text):
        read, tokens = self.spelled(text), self.tokens
        return lambda path: self.own.logits(self.name, (*read, *tokens.to_draft(path)))[tokens.logit_ids]


def far_of(guessers, length, params, **how):
    return far(Supports(vocab=VOCAB, params=params, seed=5), guessers, length, **how)


@pytest.mark.thorough
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("rule", [IID, WITHOUT, POINT])
def test_the_law_of_the_text_is_the_targets(rule, params, monkeypatch):
    for kept in ((0, 2), (3,), (1, 2, 3)):
        pruned = PrunedDraft("a", rule, (2, 1), kept, monkeypatch)
        assert far_of([pruned, PrunedDraft("b", IID, (1,), (0, 1), monkeypatch)], 2, params) < EXACT, kept
    foreign = ForeignDraft("a", rule, (2, 1), monkeypatch)
    assert far_of([ForeignDraft("b", IID, (1,), monkeypatch), foreign], 2, params) < EXACT


def test_declaring_the_law_of_all_tokens_would_change_it(monkeypatch):
    params = PARAMS["temperature"]
    of_all = Supports(vocab=VOCAB, params=params, seed=5).law("a", ())

    def whole_head(tree):
        draws = tuple(Draw(d.parent, d.node, d.speculator, d.rule, of_all) for d in tree.draws)
        return TokenTree(tree.token_ids, tree.parents, draws)

    pruned = PrunedDraft("a", IID, (1,), (0, 2), monkeypatch)
    assert far_of([pruned], 1, params) < EXACT
    assert far_of([pruned], 1, params, alter=whole_head) > 1e-3
