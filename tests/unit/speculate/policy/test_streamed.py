"""With streamed weights the policy is soon as fast as the best fixed depth."""

from __future__ import annotations

import pytest

from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculation_config import MAX_DEPTH_STREAMED, SpeculationConfig
from tests.simulated_engine import OVERHEAD, Guesser, Machine, Simulation

STREAMED = CostCurve((1, 2), (0.005, 0.010)).at_least(1.2)
LEVEL = 0.05  # seconds of one of the draft's
SELF_DRAFT = CostCurve((1, 16, 64), (LEVEL, LEVEL, 2 * LEVEL))
ANSWERS = 20


def engine(hits: float, sure: float, seed: int) -> Simulation:
    """An engine that knows nothing yet, with a draft that is so often right at every level, and so sure."""
    machine = Machine(STREAMED.expected, SELF_DRAFT.expected)
    config = SpeculationConfig(drafts=("self",), max_nodes=360)
    policy = CostPolicy.by_curves(
        STREAMED, {"draft": SELF_DRAFT}, config, measured=True, known=True, deepest=MAX_DEPTH_STREAMED
    )
    draft = Guesser(machine, lambda _: hits, depth=MAX_DEPTH_STREAMED, confidence=sure, chance=seed)
    return Simulation(machine, policy, [draft], nodes=config.node_limit)


def tokens(hits: float, levels: int) -> float:
    """Return the tokens of a step with a chain of this many levels."""
    return sum(hits**level for level in range(levels + 1))


def seconds(levels: int) -> float:
    """That it takes."""
    return STREAMED.expected(1 + levels) + OVERHEAD + LEVEL * levels


def speed(hits: float, levels: list[int]) -> float:
    """Return the expected tokens per second of steps with chains of this many levels."""
    return sum(tokens(hits, one) for one in levels) / sum(map(seconds, levels))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("hits", "sure", "at_first", "soon"),
    [
        *((hits, hits, 0.9, 0.97) for hits in (0.95, 0.9, 0.8, 0.5)),
        (0.9, 0.7, 0.9, 0.92),
        (0.95, 0.6, 0.65, 0.72),
        (0.5, 0.95, 0.88, 0.92),
        (0.2, 0.9, 0.94, 0.96),
    ],
)
def test_it_is_as_fast_as_any_fixed_depth(hits: float, sure: float, at_first: float, soon: float) -> None:
    best = max(speed(hits, [levels]) for levels in range(MAX_DEPTH_STREAMED + 1))
    cold, known = list[int](), list[int]()  # levels of all steps, and of those behind 16 tokens
    for seed in range(ANSWERS):
        one = engine(hits, sure, seed)
        [draft] = one.guessers
        while one.tokens < 64:
            said, passes = one.tokens, draft.passes
            one.run(1)
            cold.append(draft.passes - passes)
            if said >= 16:
                known.append(cold[-1])
    assert speed(hits, cold) > at_first * best
    assert speed(hits, known) > soon * best
