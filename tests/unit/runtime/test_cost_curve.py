"""Cost of a pass: the convex hull of measurements and its file, and the model that follows times."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specinfer.attention.sdpa import SdpaAttention
from specinfer.kernels.choice import TORCH
from specinfer.kernels.ops import Ops
from specinfer.models.config import Experts
from specinfer.runtime import cost_curve as cost_curve_module
from specinfer.runtime.batch import Rows
from specinfer.runtime.cost_curve import CostCurve, cost_curve, measure
from specinfer.runtime.cost_model import CostModel
from specinfer.runtime.runner import ModelRunner, probe_rows
from tests.engines import Tiny, tiny_of
from tests.kernels import kernels as kernels_of

tiny = tiny_of(TORCH, vocab_size=16, max_context=2048)


def test_a_pass_that_is_timed_has_the_tokens_of_a_text() -> None:
    """Equal tokens would all have the same experts."""
    assert len({*probe_rows(128, 16, 50000).token_ids}) == 128
    assert max(probe_rows(1000, 16, 64).token_ids) < 64


def runner(tiny: Tiny) -> ModelRunner:
    return ModelRunner(tiny.target, num_blocks=128, block_size=16)


def test_a_mixture_rises_with_the_experts_that_rows_touch() -> None:
    experts = Experts(64, 8, 1024, normalized=True)

    def true(rows: int) -> float:
        return 1.0 + experts.active(rows) / 8 + 0.02 * rows

    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    curve = CostCurve.through({rows: true(rows) for rows in sizes}, experts)
    assert curve.rows == sizes
    assert curve.at_rows == pytest.approx([true(rows) for rows in sizes])
    # One size was disturbed: its neighbours say what experts cost.
    disturbed = {rows: true(rows) for rows in sizes} | {8: 9.0}
    assert CostCurve.through(disturbed, experts).expected(8) == pytest.approx(true(8), rel=0.02)
    # A slow model is measured at two sizes.
    few = CostCurve.through({1: true(1), 16: true(16)}, experts)
    assert few.seconds([2, 4, 8]).tolist() == pytest.approx([true(rows) for rows in (2, 4, 8)], rel=0.02)
    assert few.expected(4) > 1.2 * CostCurve.through({1: true(1), 16: true(16)}).expected(4)
    assert few.expected(32) > few.expected(16)


def test_between_sizes_it_is_straight_and_beyond_them_it_goes_on() -> None:
    curve = CostCurve((1, 8, 16), (2.0, 2.0, 10.0))
    assert curve.seconds([0, 1, 4, 8, 12, 16, 17, 116]).tolist() == [0, 2, 2, 2, 6, 10, 11, 110]
    assert curve.seconds(np.array([[8], [12]])).tolist() == [[2], [6]]
    both = curve + CostCurve((1, 12), (1.0, 12.0))
    assert both.seconds([0, 1, 8, 10, 12, 16, 17, 116]).tolist() == [0, 3, 10, 14, 18, 26, 28, 226]


class Paced:
    """A clock and a model whose passes take what a table says: only the clock moves."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now = 0.0
        self.passes: list[int] = []
        self.likeliest_first: bool | None = None
        self._seconds = seconds

    def perf_counter(self) -> float:
        return self.now

    def over(self, inner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
        launch = inner.launch

        def paced(rows: Sequence[Rows], **asked: Any) -> object:
            (part,) = rows
            self.likeliest_first = asked["likelihoods"] is not None
            assert part.logits_from == 0, "a step wants the logits of every node"
            self.passes.append(len(part.token_ids))
            self.now += self._seconds(len(part.token_ids))
            return launch(rows, **asked)

        monkeypatch.setattr(inner, "launch", paced)
        monkeypatch.setattr(cost_curve_module, "time", self)
        return inner


def test_a_slow_model_is_measured_for_a_while(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows that a pass has room for at no cost, and the size that shows what others cost.
    for free, largest in ((16, 32), (60, 128), (400, 1024), (9999, 2048)):
        pace = Paced(lambda rows, free=free: 1.5 * max(1.0, rows / free))  # type: ignore[misc]
        curve = measure(pace.over(runner(tiny), monkeypatch), max_rows=2048)
        assert (pace.passes[1:3], pace.passes[-1]) == ([1, 16], largest), free
        assert curve.expected(2 * largest) == pytest.approx(1.5 * max(1.0, 2 * largest / free), rel=0.2), free


def test_a_measurement_that_is_ended_early_is_rough_until_there_is_time(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    pace = Paced(lambda rows: 0.1 * rows)
    slow = pace.over(runner(tiny), monkeypatch)
    for limit, sizes in ((0.0, [1, 16]), (2.0, [1, 16, 4])):
        pace.passes.clear()
        curve = measure(slow, max_rows=64, stop=lambda seconds, limit=limit: seconds > limit)
        assert (curve.rough, pace.passes[1:]) == (True, sizes)
    assert not measure(slow, max_rows=64).rough
    for stops, rough, passes in ((True, True, 3), (True, True, 0), (False, False, 4), (True, False, 0)):
        pace.passes.clear()
        kept = cost_curve(*(slow,), max_rows=64, variant="", keep=True, stop=lambda _, stops=stops: stops)
        assert (kept.rough, len(pace.passes) >= passes, not pace.passes) == (rough, True, not passes)


def test_a_pass_behind_anothers_is_timed_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    pace, before = Paced(lambda rows: 0.001 * rows), Paced(lambda rows: 0.0)
    first = before.over(runner(tiny), monkeypatch)
    order: list[str] = []
    for name, probed in (("first", first), ("second", second := pace.over(runner(tiny), monkeypatch))):
        probe = probed.probe

        def noted(rows: int, *, every_row: bool, name: str = name, probe: Any = probe) -> None:
            order.append(name)
            pace.now += 0.1 if name == "first" else 0.0  # of the same machine
            probe(rows, every_row=every_row)

        monkeypatch.setattr(probed, "probe", noted)
    curve = measure(second, max_rows=4, behind=first)
    assert curve.seconds([1, 4]).tolist() == pytest.approx([0.001, 0.004])
    assert order[1:] == ["first", "second"] * (len(order) // 2)
    assert len(order) < 3 * 2 * 7 + 2, "the time is up sooner"


def edited(**values: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **values})


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "another kind": lambda text: "[1, 2]",
    "another key": edited(key={"model": "another"}),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes whatever is measured seem slow enough to be worth a file; notes the measurements."""
    measured: list[int] = []

    def pretend(runner: ModelRunner, *, max_rows: int, **_: object) -> CostCurve:
        measured.append(max_rows)
        return CostCurve((1, 16), (0.1, 0.2 + len(measured)))

    monkeypatch.setattr("specinfer.runtime.cost_curve.measure", pretend)
    monkeypatch.setattr("specinfer.runtime.cost_curve._MIN_CACHED", -1.0)
    return measured


def test_a_curve_is_measured_once_for_a_model(tiny: Tiny, slow: list[int], own_cache: Path) -> None:
    first = cost_curve(runner(tiny), max_rows=512, variant="bfloat16")
    assert cost_curve(runner(tiny), max_rows=512, variant="bfloat16") == first
    assert len(slow) == 1
    assert cost_curve(runner(tiny), max_rows=512, variant="int8") != first
    assert cost_curve(runner(tiny), max_rows=64, variant="bfloat16") != first
    assert slow == [512, 512, 64]
    curves = own_cache / "curves"
    assert len(list(curves.iterdir())) == 3, "nothing but whole curves is left behind"
    shutil.rmtree(curves)
    curves.write_text("a file, no folder")
    assert cost_curve(runner(tiny), max_rows=512, variant="").rows == (1, 16)


def test_other_kernels_have_another_curve(tiny: Tiny, slow: list[int], own_cache: Path) -> None:
    chosen, model = tiny.target.kernels, copy(tiny.target)
    for kernels in (
        chosen,
        replace(chosen, library=kernels_of("native").library),
        replace(chosen, attention=type("AnotherAttention", (SdpaAttention,), {})()),
        replace(chosen, ops=type("AnotherOps", (Ops,), {})()),
        chosen,
    ):
        model.kernels = kernels
        cost_curve(ModelRunner(model, num_blocks=16, block_size=16), max_rows=64, variant="")
    assert len(slow) == 4


def test_a_damaged_or_foreign_file_is_measured_anew(tiny: Tiny, slow: list[int], own_cache: Path) -> None:
    curve = cost_curve(runner(tiny), max_rows=512, variant="")
    (file,) = (own_cache / "curves").iterdir()
    for name, damage in DAMAGES.items():
        slow.clear()
        file.write_text(damage(file.read_text()))
        for _ in range(2):
            curve = cost_curve(runner(tiny), max_rows=512, variant="")
        assert (len(slow), curve.at_rows) == (1, (0.1, 1.2)), name


CURVE = CostCurve((1, 4, 16, 64), (5.0, 5.5, 9.0, 25.0))
Truth = Callable[[int, int, float], float]  # seconds of a pass: by its number, its rows and its context


def at(rows: int) -> float:
    return float(CURVE.seconds([rows])[0])


def taught(
    truth: Truth,
    passes: int = 600,
    *,
    rows: tuple[int, ...] = (1, 8, 12, 16),
    context: Callable[[int], float] = lambda number: 300,
    noise: float = 0.05,
    interrupted: float = 0.03,
) -> CostModel:
    """A model after passes, some of them interrupted for a hundred times as long."""
    model, chance = CostModel(CURVE), random.Random(1)
    for number in range(passes):
        size, there = chance.choice(rows), context(number)
        model.begin(there)
        seconds = truth(number, size, there) * chance.lognormvariate(0, noise)
        model.learn(size, seconds * (100 if chance.random() < interrupted else 1))
    return model


TRUTHS: dict[str, tuple[Truth, float]] = {  # and the allowed error of a pass
    "as measured": (lambda number, rows, context: at(rows), 0.03),
    "twice as slow": (lambda number, rows, context: 2 * at(rows), 0.05),
    "half as slow": (lambda number, rows, context: at(rows) / 2, 0.05),
    "slower by and by": (lambda number, rows, context: at(rows) * (1 + number / 600), 0.05),
    "slow in between": (lambda number, rows, context: at(rows) * (2 if 200 < number < 400 else 1), 0.08),
    "slow at last": (lambda number, rows, context: at(rows) * (2.5 if number > 540 else 1), 0.15),
    "python around it": (lambda number, rows, context: at(rows) + 2, 0.06),
    "python for each row": (lambda number, rows, context: at(rows) + 0.2 * rows, 0.06),
    "four times too quick a curve": (lambda number, rows, context: 4 * at(rows), 0.08),
    "four times too slow a curve": (lambda number, rows, context: at(rows) / 4, 0.21),  # 0.3 is the least
    "rows are dear": (lambda number, rows, context: 5 * (1 + rows / 8), 0.1),
    "rows are free": (lambda number, rows, context: 5, 0.25),
}


@pytest.mark.parametrize("truth", TRUTHS)
def test_seconds_become_those_that_passes_take(truth: str) -> None:
    takes, bound = TRUTHS[truth]
    model = taught(takes)
    thought = model.seconds([1, 8, 16])
    wanted = [takes(600, rows, 300) for rows in (1, 8, 16)]
    np.testing.assert_allclose(thought, wanted, rtol=bound)


def test_a_machine_that_becomes_slow_is_noticed_within_a_dozen_passes() -> None:
    model = taught(lambda number, rows, context: at(rows), rows=(8,), interrupted=0)
    for _ in range(12):
        model.learn(8, 2 * at(8))
    assert model.seconds([8])[0] == pytest.approx(2 * at(8), rel=0.1)
    assert model.factor == pytest.approx(2, rel=0.15)


def test_what_is_no_time_of_a_pass_teaches_nothing() -> None:
    model = CostModel(CURVE)
    for seconds in 100 * (math.nan, math.inf, -math.inf, 0.0, -1.0):
        model.learn(8, seconds)
        model.learn(0, 1.0)
    np.testing.assert_array_equal(model.seconds(range(70)), CURVE.seconds(range(70)))


@pytest.mark.parametrize("seconds", [1e-300, 1e300])
def test_absurd_times_leave_costs_within_bounds(seconds: float) -> None:
    model = CostModel(CURVE)
    for number in range(1000):
        model.begin(float(number))
        model.learn(1 + number % 16, seconds)
        thought = model.seconds([0, 1, 16, 64])
        assert thought[0] == 0
        assert all(
            0.29 * at(rows) <= there < 200 * at(rows)
            for rows, there in zip((1, 16, 64), thought[1:], strict=True)
        )


def test_more_rows_never_take_less_and_none_take_nothing() -> None:
    for truth, _ in TRUTHS.values():
        thought = taught(truth, 100).seconds(np.arange(300))
        assert thought[0] == 0
        assert (np.diff(thought) >= 0).all()
