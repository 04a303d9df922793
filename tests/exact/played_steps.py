"""Speculation steps without a model: trees of several speculators, merging, and verification.

This runs the production code between logits and text: `Processors` at every node, `prune` and `merge` on
trees from random draft laws, `TargetLaws` and `verify_trees`.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np

import specinfer.tree.merging
from specinfer.engine import target_laws
from specinfer.engine.transcript import Transcript
from specinfer.errors import RequestError
from specinfer.request import Request
from specinfer.speculate.drafts.draws import Site
from specinfer.tree import merge
from specinfer.tree.draw import DrawRule
from specinfer.tree.token_tree import TokenTree
from specinfer.verify.coupled import Acceptance
from specinfer.verify.target_law import target_law
from tests import plans
from tests.flights import flight_of
from tests.unit.grammar.vocabulary import TOKENIZER

from .enumeration import Guesser, combinations, drawn_tree, outcomes
from .parameter_cases import NAMES, PROMPT, VOCAB
from .slow_sampling import text_law

IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS
GUESSERS = {
    "i.i.d. draws": [Guesser("a", IID, (1, 1)), Guesser("b", IID, (1,))],
    "without replacement": [Guesser("a", WITHOUT, (2,)), Guesser("b", WITHOUT, (1, 1))],
    "point masses": [Guesser("a", POINT, (2, 2)), Guesser("b", POINT, (3, 1))],
    "all three": [Guesser("a", IID, (1, 1)), Guesser("c", POINT, (2, 1)), Guesser("b", WITHOUT, (2,))],
}


class Seen:
    """A speculator's laws after the request's parameters, in the interface that Guesser.grow calls."""

    def __init__(self, world, processors, params, output):
        self.world, self.processors, self.params, self.output = world, processors, params, output

    def law(self, model, path):
        row = self.processors.apply(self.world.logits(model, (*self.output, *path)), path)
        return np.zeros(VOCAB) if row.max() == -np.inf else target_law(row, self.params).dense()


@dataclass(frozen=True)
class Careful(Guesser):
    """A Guesser that draws nothing from an all-zero law, like speculate/drafts/draws.py."""

    def draw(self, law, width, chance):
        return super().draw(law, width, chance) if law.any() else []


def ids(tokens):
    """These tokens in a vocabulary that has their names."""
    return tuple(TOKENIZER.encode(NAMES[token])[0] for token in tokens)


def entry_after(case, output, processors, seed=0):
    return plans.entry(PROMPT, output, params=case.params, seed=seed, processors=processors)


def possible(tree, processors):
    """Prune a tree like the ensemble."""
    permits = processors.permits if processors.bans else None
    return specinfer.tree.merging.prune(tree, permits=permits, ending=processors.ending)


def read(output, tree, world):
    """Return the target's logits over a tree, as a flight."""
    rows = [world.logits("target", output + tree.path_tokens(node)) for node in range(tree.num_nodes)]
    return flight_of(np.stack(rows))


def verified(case, output, processors, tree, flight, verifier, seed=0):
    """The tokens one step adds; a dead end at the root adds None."""
    laws = target_laws.TargetLaws(entry_after(case, output, processors, seed), tree, flight, 0)
    [acceptance] = target_laws.verify_trees([laws], verifier, flight)
    if isinstance(acceptance, RequestError):
        return (None,)
    return (*(tree.token_ids[node] for node in acceptance.path), acceptance.next_token)


def added(case, output, tokens, length):
    """Return the text after a step, cut at its end, and whether it is finished (engine/transcript.py)."""
    if case.params.stop:
        request = Request("r", ids(PROMPT), case.params, 0)
        transcript = Transcript(request, TOKENIZER, ending=frozenset(), max_context=99, now=0.0)
        transcript.resume(ids(output))
        *path, last = ids(tokens)
        tree = TokenTree((0, *path), tuple(range(-1, len(path))))
        kept = transcript.commit(tree, Acceptance(tuple(range(1, tree.num_nodes)), last), 0.0)
        output = (*output, *tokens[: len(kept)])[:length]
        return output, transcript.finished or len(output) == length
    for token in tokens:
        output = (*output, token)
        finished = len(output) >= case.params.min_tokens and token in case.ending
        if finished or token is None or len(output) == length:
            return output, True
    return output, False


def enumerated(case, guessers, length, world, monkeypatch):
    """Return the law of the first `length` tokens with speculation, over all draws and coins."""
    reached, finished = {(): 1.0}, defaultdict(float)
    guessers = [Careful(g.name, g.rule, g.widths) for g in guessers]
    while reached:
        further = defaultdict(float)
        for output, probability in reached.items():
            processors = case.processors(output)
            seen = Seen(world, processors, case.params, output)

            for trees, drawn in combinations(*(partial(g.grow, seen, ()) for g in guessers)):
                tree = merge([possible(tree, processors) for tree in trees])
                tree.check_integrity()
                flight = read(output, tree, world)

                def play(chance, output=output, processors=processors, tree=tree, flight=flight):
                    monkeypatch.setattr(target_laws, "seeded_coin", lambda seed, position: chance)
                    return verified(case, output, processors, tree, flight, "mss")

                for tokens, share in outcomes(play).items():
                    text, done = added(case, output, tokens, length)
                    (finished if done else further)[text] += probability * drawn * share
        reached = further
    return dict(finished)


def expected(case, world, length):
    return text_law(lambda output: world.logits("target", output), case.rules, length)


# The first draft has the target's laws, so inner nodes are visited often.
DRAFTS = [("target", DrawRule.COUPLED, (1, 1)), ("b", POINT, (1, 2)), ("c", IID, (1, 1))]


def coupled_text(case, seed, world, length):
    """Return the text of a seed with a coupled, a top-k and an i.i.d. draft in one tree per step."""
    output, done, steps = (), False, 0
    while not done:
        processors = case.processors(output)
        trees = []
        for name, rule, widths in DRAFTS:
            rng = np.random.default_rng([seed, len(output)])

            def site(
                builder, node, width, depth, path, of=(name, rule), rng=rng, forms=processors, output=output
            ):
                name, rule = of
                place = len(PROMPT) + len(output) + depth
                own = (case.params, seed, place, rng.random, rule, partial(forms.apply, path=path))
                return Site(builder, name, node, width, *own)

            def logits(path, name=name, output=output):
                return world.logits(name, output + path)

            trees.append(possible(drawn_tree(widths, site, logits, max_nodes=9), processors))
        tree = merge(trees)
        flight = read(output, tree, world)
        tokens = verified(case, output, processors, tree, flight, "coupled", seed)
        output, done = added(case, output, tokens, length)
        steps += 1
    return output, steps
