"""Every sampling parameter, alone and combined, on merged trees: the law is the slow oracle's.

For multi-step sampling all outcomes of draws and coin are enumerated, and the law of the text is compared.
The coupled rule is compared choice by choice with the oracle's argmax over the same noise, over many seeds.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.sampling_params import SamplingParams
from specinfer.verify.target_law import target_law

from .enumeration import Guesser, World, distance
from .parameter_cases import CASES, END, VOCAB, WORDS, Case, words_after
from .played_steps import GUESSERS, IID, POINT, WITHOUT, coupled_text, enumerated, expected
from .slow_sampling import next_law, seeded_text

EXACT = 1e-9


@pytest.mark.slow  # half a minute of enumeration
@pytest.mark.parametrize(  # each case with half of the guessers
    ("name", "guessers"),
    [(name, how) for i, name in enumerate(CASES) for j, how in enumerate(GUESSERS) if (i + j) % 2 == 0],
)
def test_multistep_sampling_has_the_oracles_law(name, guessers, monkeypatch):
    world = World(VOCAB, seed=3)
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


@pytest.mark.thorough
@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 99))
def test_any_combination_has_the_oracles_law(case, seed):
    world = World(VOCAB, seed=seed)
    guessers = [Guesser("a", IID, (1, 1)), Guesser("b", WITHOUT, (1,)), Guesser("c", POINT, (1, 1))]
    with pytest.MonkeyPatch.context() as monkeypatch:
        law = enumerated(case, guessers, 2, world, monkeypatch)
    assert distance(law, expected(case, world, 2)) < EXACT


@pytest.mark.thorough
@settings(max_examples=150)
@given(case=cases(), seed=st.integers(0, 99), path=st.lists(st.integers(0, VOCAB - 1), max_size=4))
def test_the_law_at_any_node_is_the_oracles(case, seed, path):
    # For every division of the text into committed tokens and a path in the tree.
    world, path = World(VOCAB, seed=seed), tuple(path)
    rules = case.rules
    logits = world.logits("target", path)
    for cut in range(len(path) + 1):
        if any(case.words and t not in words_after(case.words, path[:i]) for i, t in enumerate(path)):
            continue
        row = case.processors(path[:cut]).apply(logits, path[cut:])
        assert (logits == world.logits("target", path)).all(), "the model's own row stays as it is"
        permits = [case.processors(path[:cut]).permits(path[cut:], token) for token in range(VOCAB)]
        assert permits == (row > -np.inf).tolist()
        if any(permits):
            law = target_law(row, case.params).dense()
            assert law == pytest.approx(next_law(logits, rules, path), abs=EXACT)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_the_coupled_rule_makes_the_oracles_choices(name):
    world, case = World(VOCAB, seed=5), CASES[name]
    tokens = steps = 0
    for seed in range(60):
        text, took = coupled_text(case, seed, world, 6)
        assert text == seeded_text(lambda output: world.logits("target", output), case.rules, seed, 6)
        tokens, steps = tokens + len(text), steps + took
    assert tokens > 1.5 * steps, "guesses were accepted, so inner nodes were visited"
