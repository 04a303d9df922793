"""No lie of a clock or a curve, and no draft, makes an engine slower than it is without, but by the bound.

The engine is simulated (tests/simulated_engine.py): its true time is known, and the time without guesses. Its
clock may be wrong. It contains a policy that always guesses, the worst there
is, or the one that is used.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from typing import Any, Final

import pytest

from specinfer.models.draft_memory import DraftMemory
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy import allowance
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.allowance import DEFAULT_TOLERANCE, LOSS, TRIALS, WINDOW, Allowance
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.drafting import PricedDraft
from specinfer.speculate.policy.guard import Guard, SelfDraft
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.tree.token_tree import Expansion
from tests.simulated_engine import Guesser, Machine, Simulation
from tests.unit.speculate.policy.priced import Reckless, Unguarded

TARGET = CostCurve((1, 4, 16, 64), (1.0, 1.1, 1.8, 5.0))
DRAFT = CostCurve((1, 64), (0.25, 1.0))
STREAMED = CostCurve((1, 240, 480), (1.2, 1.2, 2.4))  # passes that wait for their weights
SELF_DRAFT = CostCurve((1, 64), (0.25, 0.5))
FLAT, STEEP = CostCurve((1, 64), (1.0, 1.0)), CostCurve((1, 2), (1.0, 4.0))
STEPS: Final = 800
BOUND: Final = 1 + LOSS + TRIALS + 2 * DEFAULT_TOLERANCE / STEPS
NEVER, POOR, GOOD = 0.0, 0.3, 0.85  # how often a guess is right; .43 is what this draft needs
LOSING = NEVER, POOR  # a guard has to act on; with good guesses the bound holds without one
_slow = random.Random(3)
NEIGHBOUR = [_slow.choice((1.0, 1.0, 2.0, 3.0)) for _ in range(1000)]  # how slow the machine is, in turn


def stalls(every: float, seconds: float) -> Callable[[float], float]:
    """A clock that jumps ahead now and then."""
    return lambda now: now + seconds * math.floor(now / every)


CLOCKS: dict[str, Callable[[float], float]] = {
    "stalled": stalls(400, 10_000),
    "four times too quick": lambda now: 4 * now,
}
CURVES = {  # factors of the target's and of the draft's
    "four times": (4.0, 1.0),
    "a quarter": (0.25, 1.0),
    "both a quarter": (0.25, 0.25),
    "the draft's a quarter": (1.0, 0.25),
    "the draft's four times": (1.0, 4.0),
}


def scaled(curve: CostCurve, factor: float) -> CostCurve:
    return CostCurve(curve.rows, tuple(factor * seconds for seconds in curve.at_rows))


def takes(curve: CostCurve) -> Callable[[int], float]:
    return cache(lambda rows: float(curve.seconds([rows])[0]))


def simulation(
    hits: float | Callable[[int], float],
    *,
    curve: CostCurve = TARGET,
    draft_curve: CostCurve = DRAFT,
    slowness: Callable[[float], float] = lambda now: 1.0,
    careful: bool = False,
    guarded: bool = True,
    known: bool = False,
    gone_at: int | None = None,
    **options: Any,
) -> Simulation:
    """An engine whose passes take the seconds of TARGET and DRAFT, but which has other curves.

    With `known` they are those of STREAMED and SELF_DRAFT, and the time of plain steps is known.
    """
    true = (STREAMED, SELF_DRAFT) if known else (TARGET, DRAFT)
    machine = Machine(takes(true[0]), takes(true[1]), slowness)
    guesser = Guesser(machine, hits if callable(hits) else lambda step: hits, gone_at=gone_at)
    target, draft = CostModel(curve, group=1 if known else 5), CostModel(draft_curve)
    policy: SpeculationPolicy = Reckless(target, draft, guarded=guarded, known=known)
    if careful:
        guard = (Guard if guarded else Unguarded)(target, {"draft": draft}, known=known)
        drafts = {"draft": PricedDraft(draft, Expansion((1, 1, 1, 1)))}
        policy = CostPolicy(target, drafts, AcceptanceRates({"draft": 4}), guard)
    return Simulation(machine, policy, [guesser], **options)


@pytest.mark.thorough
@pytest.mark.parametrize("clock", CLOCKS)
def test_clocks_that_lie(clock: str) -> None:
    for hits in LOSING:
        assert simulation(hits, reading=CLOCKS[clock]).run(STEPS) < BOUND, hits


@pytest.mark.thorough
@pytest.mark.parametrize("curve", CURVES)
def test_curves_that_are_off(curve: str) -> None:
    of_target, of_draft = CURVES[curve]
    curves = {"curve": scaled(TARGET, of_target), "draft_curve": scaled(DRAFT, of_draft)}
    for hits, careful in product(LOSING, (False, True)):
        assert simulation(hits, careful=careful, **curves).run(STEPS) < BOUND, (hits, careful)


TRAFFIC: dict[str, dict[str, Any]] = {
    "short requests": {"length": 20},
    "answers of one token": {"length": 1, "prompt": 300},
    "long prompts": {"length": 60, "prompt": 600},
    "prompts beside answers": {"length": 60, "prompt": 300, "batch": lambda step: 4},
    "batches that grow": {"batch": lambda step: 1 + step // 75 % 8},
    "a neighbour": {"slowness": lambda now: NEIGHBOUR[int(now / 150) % 1000]},
    "a restless neighbour": {"slowness": lambda now: NEIGHBOUR[int(now / 15) % 1000]},
    "gone": {"gone_at": 300},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_traffic_of_all_kinds(traffic: str) -> None:
    for hits, careful in product(LOSING, (False, True)):
        assert simulation(hits, careful=careful, **TRAFFIC[traffic]).run(STEPS) < BOUND, (hits, careful)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "traffic",
    ["short requests", "long prompts", "prompts beside answers", "batches that grow", "a neighbour"],
)
def test_what_gains_is_hardly_slower_for_being_guarded(traffic: str) -> None:
    free = simulation(GOOD, guarded=False, careful=True, **TRAFFIC[traffic]).run(STEPS)
    guarded = simulation(GOOD, careful=True, **TRAFFIC[traffic]).run(STEPS)
    assert free < 0.975
    assert guarded < free + 0.04


LIES: dict[str, dict[str, Any]] = {
    "none": {},
    "half": {"curve": scaled(STREAMED, 0.5)},
    "double": {"curve": scaled(STREAMED, 2.0)},
    "double, and the draft half": {"curve": scaled(STREAMED, 2.0), "draft_curve": scaled(SELF_DRAFT, 0.5)},
    "rows are dear": {"curve": STEEP},
    "a disk that stalls": {"slowness": lambda now: 20.0 if int(now) % 300 < 2 else 1.0},
    "a disk that is slow by the minute": {"slowness": lambda now: NEIGHBOUR[int(now / 60) % 1000]},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("hits", [NEVER, POOR, GOOD])
@pytest.mark.parametrize("lie", LIES)
def test_plain_steps_that_are_believed(lie: str, hits: float) -> None:
    curves = {"curve": STREAMED, "draft_curve": SELF_DRAFT} | LIES[lie]
    lost = 1.25 * (1 + 2 * allowance.KNOWN_COST_TOLERANCE)
    for careful in (False, True):
        engine = simulation(hits, known=True, careful=careful, **curves)
        for _ in range(40):  # ten steps each, so that the bound is checked often
            engine.run(10)
            assert engine.machine.now - engine.plain < LOSS * engine.machine.now + lost, careful
        if hits == GOOD and lie not in ("rows are dear", "a disk that is slow by the minute"):
            assert engine.machine.now < 0.85 * engine.plain, "nobody was held back for long"


@dataclass
class SimulatedMemory(DraftMemory):
    """A draft's memory that nothing lies in: to give it away takes most of a pass."""

    machine: Machine
    layers: Mapping[int, memoryview] = field(default_factory=lambda: {0: memoryview(b"")})
    given: bool = False
    takes: float = 0.8
    _kept: bool = False

    @property
    def seconds(self) -> float:
        return self.takes

    def give_to_layers(self) -> bool:
        assert not self.given, "layers get it once"
        self.given = True
        self.machine.run(self.seconds)
        return True


PINNED = scaled(STREAMED, 0.7)  # passes while layers have the draft's memory


def draft_memory(hits: float | Callable[[int], float], **options: Any) -> Simulation:
    """An engine whose draft has memory that layers of the target could have."""
    fast, slow = takes(PINNED), takes(STREAMED)
    machine = Machine(lambda rows: (fast if memory.given else slow)(rows), takes(SELF_DRAFT))
    memory = SimulatedMemory(machine)
    costs = CostModel(STREAMED, group=1), CostModel(SELF_DRAFT)
    guesser = Guesser(machine, hits if callable(hits) else lambda step: hits)
    self_draft = SelfDraft(guesser, memory, PINNED)
    guard = Guard(costs[0], {"draft": costs[1]}, known=True, self_draft=self_draft)
    drafts = {"draft": PricedDraft(costs[1], Expansion((1, 1, 1, 1)))}
    policy = CostPolicy(costs[0], drafts, AcceptanceRates({"draft": 4}), guard)
    return Simulation(machine, policy, [guesser], without=fast, **options)


def memory_of(engine: Simulation) -> SimulatedMemory:
    return engine.policy.guard._self_draft.memory


LENDING: dict[str, dict[str, Any]] = {
    "one text": {},
    "eight": {"batch": lambda step: 8},
    "short texts": {"length": 20},
    "long prompts": {"length": 60, "prompt": 600},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("hits", [NEVER, POOR])
@pytest.mark.parametrize("traffic", LENDING)
def test_memory_that_guesses_are_not_worth_goes_to_layers(traffic: str, hits: float) -> None:
    """A guess would have to be right four times in five to be worth it."""
    engine = draft_memory(hits, **LENDING[traffic])
    memory = memory_of(engine)
    engine.run(400)
    assert memory.given
    guesses = engine.guessers[0].passes
    assert engine.run(400) < 1 + LOSS + TRIALS
    assert engine.guessers[0].passes == guesses, "the draft does not come back"


@pytest.mark.few(1)
@pytest.mark.parametrize("traffic", LENDING)
def test_memory_that_guesses_are_worth_stays_the_drafts(traffic: str) -> None:
    engine = draft_memory(1.0, **LENDING[traffic])
    assert engine.run(300) < 0.8
    assert not memory_of(engine).given


def test_without_the_guard_the_bound_is_broken() -> None:
    assert simulation(NEVER, guarded=False).run(STEPS) > 2
    assert simulation(POOR, guarded=False).run(STEPS) > 1.3


def test_speculation_comes_back_where_it_gains_again() -> None:
    """A draft that was never right for long, and always is by now, with new requests coming."""
    engine = simulation(lambda step: float(step > 1500), length=40)
    engine.run(1800)
    assert engine.run(300) < 0.6


# The allowance.


Step = tuple[float, float]  # time of guesses and time saved, in plain steps


@dataclass
class Driven:
    """A guard driven by steps of one plain step's time, with costs and savings of guesses."""

    tolerance: float = DEFAULT_TOLERANCE
    guard: Allowance = field(init=False)
    seconds: float = 0.0
    lost: float = 0.0
    guessing_steps: list[int] = field(default_factory=list)  # numbers of the steps that allowed speculation
    steps: int = 0

    def __post_init__(self) -> None:
        self.guard = Allowance(self.tolerance)

    def step(
        self,
        spent: float,
        saved: float,
        *,
        plain: float = 1.0,
        read: float = 0.0,
        requests: int = 1,
        new: bool = False,
    ) -> bool:
        """Run one step whose guesses would take and save these seconds."""
        self.steps += 1
        allowed = self.guard.allows(requests, plain, new=new)
        if allowed:
            self.guessing_steps.append(self.steps)
            self.lost += spent + read - saved
            self.seconds += plain + spent + read
            self.guard.count_guessing(plain + spent + read, plain, spent, saved, read)
        else:
            self.seconds += plain
            self.guard.count_plain(plain)
        return allowed

    def bound(self, plain: float = 1.0) -> float:
        return LOSS * self.seconds + 2 * self.tolerance * plain


CHANCE = random.Random(5)
WORKLOADS: dict[str, Callable[[int], Step]] = {
    "never right": lambda step: (1.0, 0.0),
    "never right, and dear": lambda step: (20.0, 0.0),
    "a little slower": lambda step: (0.05, 0.0),
    "slower by less than is noticed": lambda step: (0.0149, 0.0),
    "as it comes": lambda step: (0.5, CHANCE.choice((0.0, 0.0, 1.0))),
    "wildly": lambda step: (CHANCE.expovariate(1), CHANCE.expovariate(1.1)),
    "right until it is trusted": lambda step: (0.5, 2.0 if step % 400 < 100 else 0.0),
    "right for a window": lambda step: (0.5, 0.6 if step // 64 % 2 else 0.0),
    "right at each trial": lambda step: (1.0, 2.0 if step % 65 == 0 else 0.0),
    "pauses of the machine": lambda step: (1000.0 if step % 5000 == 0 else 0.2, 0.3),
}


@pytest.mark.parametrize("tolerance", [DEFAULT_TOLERANCE, allowance.KNOWN_COST_TOLERANCE])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_workload_loses_more_than_the_bound(workload: str, tolerance: float) -> None:
    driven = Driven(tolerance)
    for step in range(6000):
        spent, saved = WORKLOADS[workload](step)
        driven.step(spent, saved)
        if spent <= tolerance:
            assert driven.lost <= driven.bound()
        else:
            driven.lost = 0.0  # a pause of the machine, which is not the guard's fault


def test_nor_does_reading_that_is_never_paid_back() -> None:
    driven = Driven()
    for step in range(20_000):
        driven.step(0.0, 0.0, read=2.0 if step % 3 == 0 else 0.0, new=step % 3 == 0)
    assert driven.lost <= driven.bound() + WINDOW  # reading counts as a loss until it is earned back
    assert driven.seconds < 1.03 * 20_000


def test_what_loses_is_off_after_a_window_and_pauses_double(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    driven = Driven()
    for _ in range(20_000):
        driven.step(0.3, 0.0)
    guessing_steps = driven.guessing_steps
    assert guessing_steps[:WINDOW] == list(range(1, WINDOW + 1)), "a window is looked at first"
    pauses = [later - step - 1 for step, later in pairwise(guessing_steps) if later - step > 1]
    assert pauses[:4] == [64, 128, 256, 512]
    assert max(pauses) == allowance.LONGEST_PAUSE
    (record,) = caplog.records
    assert "speculation is off for 64 steps" in record.getMessage()
    assert "it made the last 64 steps slower, by the time of 19.2 steps" in record.getMessage()


def test_the_allowance_is_a_number_whatever_happens() -> None:
    guard = Allowance()
    for step in range(500):
        guard.allows(step % 17, 1e-6 if step % 2 else 10.0, new=False)
        guard.count_guessing(1e9, 1e-6, 1e9, 0.0)
        assert math.isfinite(guard.seconds)
