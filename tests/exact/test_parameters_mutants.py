"""Mistakes with sampling parameters, made on purpose: the law and the coupled text show each."""

from dataclasses import replace
from functools import partial

import pytest

import specinfer.tree.merging
from specinfer.processors.changes import BadWords, Penalties
from specinfer.processors.pipeline import Processors
from specinfer.tree.merging import prune
from specinfer.verify.target_law import target_law

from . import played_steps
from .enumeration import Guesser, World, distance
from .parameter_cases import CASES, VOCAB, WordList
from .played_steps import GUESSERS, IID, POINT, Seen, coupled_text, enumerated, expected
from .slow_sampling import seeded_text

EXACT, SEEN = 1e-9, 1e-3  # more than rounding changes a law; less than a mistake does


def with_root_path(method):
    """A processor that ignores the paths of inner nodes."""
    return lambda self, *args, path=None: method(self, *(args[:-1] if path is None else args), ())


MUTANTS = {
    "penalties of the root at every node": (Penalties, "changes", ["presence_penalty", "repetition_penalty"]),
    "bad words of the root at every node": (BadWords, "completions", ["bad_words"]),
    "bans of the root at every node": (Processors, "_parts", ["min_tokens", "frequency_penalty"]),
    "a form of the root at every node": (WordList, "allowed", ["structured output"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mutant", "name"), [(mutant, name) for mutant, (*_, names) in MUTANTS.items() for name in names]
)
def test_forgetting_the_path_is_seen(mutant, name, monkeypatch):
    owner, method, _ = MUTANTS[mutant]
    original = getattr(owner, method)
    case, world = CASES[name], World(VOCAB, seed=3)
    monkeypatch.setattr(owner, method, with_root_path(original))
    # At most 3 tokens, so a root's law reaches into one tree only; the wrong law may leave no token there.
    law = enumerated(case, GUESSERS["point masses"], 3, world, monkeypatch)
    assert distance(law, expected(case, world, 3)) > SEEN
    target = partial(world.logits, "target")
    assert any(
        coupled_text(case, seed, world, 6)[0] != seeded_text(target, case.rules, seed, 6)
        for seed in range(100)
    )


def test_forgetting_a_ban_at_inner_nodes_is_seen(monkeypatch):
    change = Processors.change
    monkeypatch.setattr(
        Processors, "change", lambda self, row, path: None if path else change(self, row, path)
    )
    case, world = CASES["allowed_token_ids"], World(VOCAB, seed=3)
    law = enumerated(case, GUESSERS["i.i.d. draws"], 3, world, monkeypatch)
    assert any(1 in text for text in law), "a token that is not allowed became text"
    assert distance(law, expected(case, world, 3)) > SEEN


def test_pruning_sampled_draws_by_what_their_path_permits_is_seen(monkeypatch):
    # A speculator that does not know of the ban samples from its own law; dropping the banned samples
    # makes its draws come from another law than the one they declare.
    class Unaware(Seen):
        def law(self, model, path):
            return target_law(self.world.logits(model, (*self.output, *path)), self.params).dense()

    def careless(tree, *, permits, ending):
        plain = tuple(draw._replace(rule=POINT) for draw in tree.draws)
        kept = prune(replace(tree, draws=plain), permits=permits, ending=ending)
        laws = {draw.speculator: draw.law for draw in tree.draws}
        return replace(kept, draws=tuple(d._replace(rule=IID, law=laws[d.speculator]) for d in kept.draws))

    case, world = CASES["allowed_token_ids"], World(VOCAB, seed=3)
    monkeypatch.setattr(played_steps, "Seen", Unaware)
    guessers = [Guesser("a", IID, (2,))]
    assert distance(enumerated(case, guessers, 2, world, monkeypatch), expected(case, world, 2)) < EXACT
    monkeypatch.setattr(specinfer.tree.merging, "prune", careless)
    assert distance(enumerated(case, guessers, 2, world, monkeypatch), expected(case, world, 2)) > SEEN
