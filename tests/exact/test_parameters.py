"""Every sampling parameter, alone and combined, on merged trees: the law is the slow oracle's.

The production code between logits and text is played: `Processors` at every node, `prune` and `merge` on
what several speculators guess from random laws of their own, `TargetLaws` and `verify_trees`. For multi-step
sampling all falls of draws and coin are enumerated and the law of the text is compared; the coupled rule is
compared choice by choice with the oracle's argmax over the same noise, over many seeds.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import specinfer.tree.prune
from specinfer.engine import target_laws
from specinfer.errors import RequestError
from specinfer.processors.bad_words import BadWords
from specinfer.processors.penalties import Penalties
from specinfer.processors.pipeline import Processors
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.draws import Site, draw_children
from specinfer.tree import TreeBuilder, merge
from specinfer.tree.prune import prune
from specinfer.tree.token_tree import DrawRule
from specinfer.verify.pairs import Verifier
from specinfer.verify.target_law import target_law
from tests import plans
from tests.flights import flight_of

from .enumeration import Guesser, World, distance, outcomes
from .slow_sampling import Rules, next_law, seeded_text, text_law

EXACT = 1e-9
SEEN = 1e-3
IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS
VOCAB = 4
END = 3
PROMPT = (0, 1, 1)


class WordList:
    """A form over token ids: the output is one of these words, then the end. Stands in for GrammarState."""

    def __init__(self, words):
        self.words = words
        self.output = ()

    def allowed(self, path=()):
        possible = words_after(self.words, (*self.output, *path))
        return np.array([token in possible for token in range(VOCAB)])

    def permits(self, path, token):
        return bool(self.allowed(path)[token])

    def commit(self, tokens):
        self.output += tuple(tokens)


def words_after(words, output):
    return {
        (*word, END)[len(output)] for word in words if (*word, END)[: len(output)] == output != (*word, END)
    }


@dataclass(frozen=True)
class Case:
    """Parameters, and what they mean over token ids."""

    params: SamplingParams
    ending: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    words: tuple[tuple[int, ...], ...] | None = None

    @property
    def rules(self):
        form = None if self.words is None else partial(words_after, self.words)
        return Rules(self.params, PROMPT, self.ending, self.bad_words, form)

    def processors(self, output):
        made = Processors(
            self.params,
            PROMPT,
            vocab=VOCAB,
            ending=self.ending,
            bad_words=self.bad_words,
            grammar=None if self.words is None else WordList(self.words),
        )
        for token in output:
            made.commit([token])
        return made


def case(ending=(), bad_words=(), words=None, **params):
    return Case(SamplingParams(**params), ending, bad_words, words)


WORDS = ((0, 1), (0, 1, 2), (2,), (1, 1, 0), (1, 2, 2))
CASES = {
    "nothing": case(),
    "ending": case(ending=(END,)),
    "presence_penalty": case(presence_penalty=1.5),
    "frequency_penalty": case(frequency_penalty=1.1),
    "negative penalties": case(presence_penalty=-0.7, frequency_penalty=-1.3),
    "repetition_penalty": case(repetition_penalty=1.7),
    "repetition_penalty < 1": case(repetition_penalty=0.6),
    "logit_bias": case(logit_bias={0: 1.3, 2: -100.0}),
    "bad_words": case(bad_words=((1,), (0, 0), (2, 0, 2))),
    "allowed_token_ids": case(allowed_token_ids=(0, 2, END), ending=(END,)),
    "min_tokens": case(min_tokens=2, ending=(END,)),
    "min_tokens, two endings": case(min_tokens=1, ending=(1, END)),
    "structured output": case(words=WORDS, ending=(END,)),
    "structured output, min_tokens": case(words=WORDS, ending=(END,), min_tokens=2),
    "a dead end in mid-text": case(words=WORDS, ending=(END,), min_tokens=3),
    "greedy": case(temperature=0, frequency_penalty=1.1, bad_words=((0, 0), (2, 1)), ending=(END,)),
    "all of them": case(
        temperature=0.8,
        top_k=3,
        top_p=0.95,
        min_p=0.02,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={1: 0.7},
        bad_words=((0, 0), (2, 1)),
        allowed_token_ids=(0, 1, 2, END),
        min_tokens=2,
        ending=(END,),
    ),
}
GUESSERS = {
    "i.i.d. draws": [Guesser("a", IID, (1, 1)), Guesser("b", IID, (1,))],
    "without replacement": [Guesser("a", WITHOUT, (2,)), Guesser("b", WITHOUT, (1, 1))],
    "point masses": [Guesser("a", POINT, (2, 2)), Guesser("b", POINT, (3, 1))],
    "all three": [Guesser("a", IID, (1, 1)), Guesser("c", POINT, (2, 1)), Guesser("b", WITHOUT, (2,))],
}


class Seen:
    """A speculator's laws as the request's parameters make them: what Guesser.grow asks of a world."""

    def __init__(self, world, processors, params, output):
        self.world, self.processors, self.params, self.output = world, processors, params, output

    def law(self, model, path):
        row = self.processors.apply(self.world.logits(model, (*self.output, *path)), path)
        return np.zeros(VOCAB) if row.max() == -np.inf else target_law(row, self.params).dense()


@dataclass(frozen=True)
class Careful(Guesser):
    """A Guesser that draws nothing where nothing is left to draw, as speculate/draws.py does."""

    def draw(self, law, width, chance):
        return super().draw(law, width, chance) if law.any() else []


def entry_after(case, output, processors, seed=0):
    return plans.entry(PROMPT, output, params=case.params, seed=seed, processors=processors)


def possible(tree, processors):
    """As the ensemble prunes."""
    permits = processors.permits if processors.bans else None
    return specinfer.tree.prune.prune(tree, permits=permits, ending=processors.ending)


def verified(case, output, processors, tree, world, verifier, seed=0):
    """The tokens one step adds; a dead end at the root adds None."""
    rows = np.stack([world.logits("target", output + tree.path_tokens(n)) for n in range(tree.num_nodes)])
    flight = flight_of(rows)
    laws = target_laws.TargetLaws(entry_after(case, output, processors, seed), tree, flight, 0)
    [acceptance] = target_laws.verify_trees([laws], verifier, flight)
    if isinstance(acceptance, RequestError):
        return (None,)
    return (*(tree.token_ids[node] for node in acceptance.path), acceptance.next_token)


def added(case, output, tokens, length):
    """The text after a step, cut where it ends, and whether it is finished (engine/transcript.py)."""
    for token in tokens:
        output = (*output, token)
        over = len(output) >= case.params.min_tokens and token in case.ending
        if over or token is None or len(output) == length:
            return output, True
    return output, False


def enumerated(case, guessers, length, world, monkeypatch, alter=None):
    """The law of the first `length` tokens with speculation, all draws and coins played."""
    reached, finished = {(): 1.0}, defaultdict(float)
    guessers = [Careful(g.name, g.rule, g.widths) for g in guessers]
    while reached:
        further = defaultdict(float)
        for output, probability in reached.items():
            processors = case.processors(output)
            seen = Seen(world, processors, case.params, output)

            def play(chance, output=output, processors=processors, seen=seen):
                monkeypatch.setattr(target_laws, "seeded_coin", lambda seed, position: chance)
                tree = merge([possible(g.grow(seen, (), chance), processors) for g in guessers])
                tree.check_integrity()
                return verified(case, output, processors, tree, world, Verifier.MULTISTEP)

            for tokens, share in outcomes(play).items():
                text, done = added(case, output, tokens, length)
                (finished if done else further)[text] += probability * share
        reached = further
    return dict(finished)


def expected(case, world, length):
    return text_law(lambda output: world.logits("target", output), case.rules, length)


class Remembered(World):
    """A world that makes each row once."""

    def __init__(self, seed):
        super().__init__(vocab=VOCAB, seed=seed)
        self.rows = {}

    def logits(self, model, text):
        if (model, text) not in self.rows:
            self.rows[model, text] = super().logits(model, text)
        return self.rows[model, text].copy()


@pytest.mark.slow  # half a minute of enumeration
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("guessers", GUESSERS)
def test_multistep_sampling_has_the_oracles_law(name, guessers, monkeypatch):
    world = Remembered(seed=3)
    length = 3 if guessers in ("i.i.d. draws", "point masses") else 2
    law = enumerated(CASES[name], GUESSERS[guessers], length, world, monkeypatch)
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, expected(CASES[name], world, length)) < EXACT


@st.composite
def cases(draw):
    """Any parameters together, contradictions included."""

    def maybe(values, usual):
        return draw(st.one_of(st.just(usual), values))

    penalty = st.floats(-2, 2, width=16)
    token = st.integers(0, VOCAB - 1)
    words = maybe(st.sampled_from([WORDS, ((0,),), ((1, 0), (1, 2, 0))]), None)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 0.3, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.93, 0.6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.2])),
        presence_penalty=maybe(penalty, 0.0),
        frequency_penalty=maybe(penalty, 0.0),
        repetition_penalty=maybe(st.floats(0.3, 3), 1.0),
        logit_bias=maybe(st.dictionaries(token, st.sampled_from([-100.0, -1.7, 0.9, 2.3])), None),
        allowed_token_ids=maybe(st.sets(token, min_size=1).map(sorted), None),
        min_tokens=draw(st.sampled_from([0, 0, 1, 2, 3])),
    )
    bad_words = draw(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3))
    ending = (END,) if words is not None else draw(st.sampled_from([(), (END,), (0, END)]))
    return Case(params, ending, tuple(bad_words), words)


@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 99))
def test_any_combination_has_the_oracles_law(case, seed):
    world = Remembered(seed)
    guessers = [Guesser("a", IID, (1, 1)), Guesser("b", WITHOUT, (1,)), Guesser("c", POINT, (1, 1))]
    with pytest.MonkeyPatch.context() as monkeypatch:
        law = enumerated(case, guessers, 2, world, monkeypatch)
    assert distance(law, expected(case, world, 2)) < EXACT


@settings(max_examples=150)
@given(case=cases(), seed=st.integers(0, 99), path=st.lists(st.integers(0, VOCAB - 1), max_size=4))
def test_the_law_at_any_node_is_the_oracles(case, seed, path):
    # Wherever the text is cut into what is committed and what is a path in the tree.
    world, path = Remembered(seed), tuple(path)
    rules = case.rules
    logits = world.logits("target", path)
    for cut in range(len(path) + 1):
        if any(
            case.words is not None and t not in words_after(case.words, path[:i]) for i, t in enumerate(path)
        ):
            continue
        row = case.processors(path[:cut]).apply(logits, path[cut:])
        assert (logits == world.logits("target", path)).all(), "the model's own row stays as it is"
        permits = [case.processors(path[:cut]).permits(path[cut:], token) for token in range(VOCAB)]
        assert permits == (row > -np.inf).tolist()
        if any(permits):
            law = target_law(row, case.params).dense()
            assert law == pytest.approx(next_law(logits, rules, path), abs=EXACT)


# The first one knows the target's laws, so inner nodes are visited often.
DRAFTS = [("target", DrawRule.COUPLED, (1, 1)), ("b", POINT, (1, 2)), ("c", IID, (1, 1))]


def coupled_text(case, seed, world, length):
    """The text of a seed with coupled drafts, a top-k draft and an n-gram's guesses in one tree per step."""
    output, done, steps = (), False, 0
    while not done:
        processors = case.processors(output)
        trees = []
        for name, rule, widths in DRAFTS:
            builder = TreeBuilder(root=-1, max_nodes=9)
            rng = np.random.default_rng([seed, len(output)])
            frontier = [0]
            for depth, width in enumerate(widths):
                first = len(builder.parents)
                paths = [builder.path_tokens(node) for node in frontier]
                sites = [
                    Site(
                        builder,
                        node,
                        width,
                        case.params,
                        seed,
                        len(PROMPT) + len(output) + depth,
                        rng.random,
                        rule,
                        partial(processors.apply, path=path),
                    )
                    for node, path in zip(frontier, paths, strict=True)
                ]
                rows = [world.logits(name, output + path) for path in paths]
                draw_children(flight_of(np.array(rows, dtype=np.float32).reshape(-1, VOCAB)), sites, name)
                frontier = list(range(first, len(builder.parents)))
            trees.append(possible(builder.build(), processors))
        tokens = verified(case, output, processors, merge(trees), world, Verifier.COUPLED, seed)
        output, done = added(case, output, tokens, length)
        steps += 1
    return output, steps


@pytest.mark.parametrize("name", CASES)
def test_the_coupled_rule_makes_the_oracles_choices(name):
    world, case = Remembered(seed=5), CASES[name]
    tokens = steps = 0
    for seed in range(60):
        text, took = coupled_text(case, seed, world, 6)
        assert text == seeded_text(lambda output: world.logits("target", output), case.rules, seed, 6)
        tokens, steps = tokens + len(text), steps + took
    assert tokens > 1.5 * steps, "guesses were accepted, so inner nodes were visited"


@settings(max_examples=100)
@given(case=cases(), seed=st.integers(0, 2**40))
def test_the_coupled_rule_makes_the_oracles_choices_under_any_combination(case, seed):
    world = Remembered(seed % 50)
    text, _ = coupled_text(case, seed, world, 6)
    assert text == seeded_text(lambda output: world.logits("target", output), case.rules, seed, 6)


def test_coupled_texts_follow_the_oracles_law_over_seeds():
    world, case = Remembered(seed=8), replace(CASES["all of them"], bad_words=((0, 0),))
    law = expected(case, world, 3)
    counts = dict.fromkeys(law, 0)
    for seed in range(1500):
        counts[coupled_text(case, seed, world, 3)[0]] += 1
    likely = [text for text, p in law.items() if p * 1500 > 5]
    seen = [*(counts[t] for t in likely), 1500 - sum(counts[t] for t in likely)]
    wanted = [*(law[t] * 1500 for t in likely), 1500 * (1 - sum(law[t] for t in likely))]
    assert chisquare(seen, wanted).pvalue > 1e-3


# Each mistake, made on purpose, is seen: by the law of multi-step sampling and by the coupled text.


def with_root_path(method):
    """A processor that forgets that inner nodes have a path of their own."""
    return lambda self, *args, path=None: method(self, *(args[:-1] if path is None else args), ())


MUTANTS = {
    "penalties of the root at every node": (Penalties, "apply", ["presence_penalty", "repetition_penalty"]),
    "bad words of the root at every node": (BadWords, "completions", ["bad_words"]),
    "bans of the root at every node": (Processors, "apply", ["min_tokens", "frequency_penalty"]),
    "a form of the root at every node": (WordList, "allowed", ["structured output"]),
}


@pytest.mark.parametrize(
    ("mutant", "name"), [(mutant, name) for mutant, (*_, names) in MUTANTS.items() for name in names]
)
def test_forgetting_the_path_is_seen(mutant, name, monkeypatch):
    owner, method, _ = MUTANTS[mutant]
    original = getattr(owner, method)
    case, world = CASES[name], Remembered(seed=3)
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
    apply = Processors.apply
    monkeypatch.setattr(Processors, "apply", lambda self, row, path: row if path else apply(self, row, path))
    case, world = CASES["allowed_token_ids"], Remembered(seed=3)
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
        plain = tuple(replace(draw, rule=POINT) for draw in tree.draws)
        kept = prune(replace(tree, draws=plain), permits=permits, ending=ending)
        laws = {draw.speculator: draw.law for draw in tree.draws}
        return replace(kept, draws=tuple(replace(d, rule=IID, law=laws[d.speculator]) for d in kept.draws))

    case, world = CASES["allowed_token_ids"], Remembered(seed=3)
    monkeypatch.setitem(globals(), "Seen", Unaware)
    guessers = [Guesser("a", IID, (2,))]
    assert distance(enumerated(case, guessers, 2, world, monkeypatch), expected(case, world, 2)) < EXACT
    monkeypatch.setattr(specinfer.tree.prune, "prune", careless)
    assert distance(enumerated(case, guessers, 2, world, monkeypatch), expected(case, world, 2)) > SEEN
