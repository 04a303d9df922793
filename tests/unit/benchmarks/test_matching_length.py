"""Features at a position, their predictors, and the page from traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specinfer import LLM
from specinfer.replay.trace import RecordedText, Trace, read_trace, write_trace
from tests.unit.benchmarks.conftest import Run
from tests.unit.benchmarks.test_scripts import table

X = math.nan


@pytest.fixture(scope="module")
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("matching_length")


def lengthened(trace: Trace, outputs: list[tuple[int, ...]]) -> Trace:
    """The trace, with texts that have these outputs; of the target's two likeliest tokens little is known."""
    texts = tuple(RecordedText((1, i), output, trace.texts[0].params, 0) for i, output in enumerate(outputs))
    places = sum(map(len, outputs))
    likeliest = np.log(np.tile(np.array([[0.5, 0.25]], dtype=np.float32), (places, 1)))
    return replace(trace, texts=texts, likeliest=likeliest)


def test_hits_are_known_up_to_a_miss_and_to_the_end_of_the_text(
    module: ModuleType, traces: list[Path]
) -> None:
    trace = lengthened(read_trace(traces[0]), [(2, 3, 4, 5)])
    lengths = np.array([[0], [2], [0], [1]])  # at the last place one token is left, and it was right
    found = module.known(trace, lengths, np.zeros((4, 1, 1), dtype=np.float32))
    assert found.texts.tolist() == [0, 0, 0], "a text's first place is left out"
    expected = [[1, 1, 0, X, X], [0, X, X, X, X], [1, X, X, X, X]]
    np.testing.assert_array_equal(found.hits[:, 0], np.array(expected, dtype=np.float32))
    # Counts say first, and learn then: from 0.7 by a miss at the place that was left out, then by a hit.
    first = 0.7 - 0.7 / module.COUNTED
    np.testing.assert_allclose(found.counted[:2, 0, 0], [first, first + (1 - first) / module.COUNTED])
    other = module.known(trace, lengths, np.zeros((4, 1, 1), dtype=np.float32), without={(1, 0)})
    assert len(other.texts) == 0


def test_features_of_a_place_know_nothing_of_what_comes(module: ModuleType, traces: list[Path]) -> None:
    trace = lengthened(read_trace(traces[0]), [(2,) * 20] * 2)
    rng = np.random.default_rng(0)
    place = np.arange(40) % 20
    hits = rng.integers(0, 2, (40, 1, module.LEVELS)).astype(np.float32)
    usual = module.cheap_features(trace, hits, module.counts(hits), place)
    for at in (5, 25):
        later, likeliest = hits.copy(), trace.likeliest.copy()
        later[at:] = 1 - later[at:]
        likeliest[at:] *= 3
        changed = module.cheap_features(
            replace(trace, likeliest=likeliest), later, module.counts(later), place
        )
        np.testing.assert_array_equal(changed[: at + 1], usual[: at + 1])
        assert (changed[at + 1] != usual[at + 1]).any()
    # Texts share only the learned counts.
    np.testing.assert_array_equal(usual[20, :-1], usual[0, :-1])


@pytest.mark.parametrize("units", [(), (16,), (8, 8)])
def test_what_can_be_predicted_is_and_what_cannot_is_not(
    module: ModuleType, units: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DECAYS", (0.1,))
    monkeypatch.setattr(module, "RATE", 0.02)
    rng = np.random.default_rng(1)
    cheap = rng.normal(size=(2000, 3)).astype(np.float32)
    sign = (cheap[:, 0] > 0).astype(np.float32)
    chance = rng.integers(0, 2, 2000).astype(np.float32)
    # The first level is a function of a feature; the second, known only behind a hit, is a coin's.
    hits = np.full((2000, 1, module.LEVELS), np.nan, dtype=np.float32)
    hits[:, 0, 0], hits[:, 0, 1] = sign, np.where(sign == 1, chance, np.nan)
    states = np.zeros((2000, 1, 1), dtype=np.float32)
    every = module.Known(np.arange(2000) // 20, cheap, states, hits, np.full_like(hits, 0.5))

    def part(of: slice) -> Any:
        return module.Known(*(getattr(every, name)[of] for name in module.Known.__slots__))

    train, test = part(slice(1000)), part(slice(1000, None))
    hazards = module.fit(train, train.inputs("cheap"), units)(test.inputs("cheap"))
    assert module.auc(hazards[:, 0, 0], test.hits[:, 0, 0]) > 0.99
    seen = ~np.isnan(test.hits[:, 0, 1])
    assert abs(module.auc(hazards[seen, 0, 1], test.hits[seen, 0, 1]) - 0.5) < 0.08
    of = module.judged(hazards, test, ["draft"])["draft"]
    mean, low, high = of["below_counts"]
    assert 0.2 < low < mean < high < math.log(2)
    assert mean == pytest.approx(math.log(2) - of["log_loss"])


def test_figures_of_hazards(module: ModuleType) -> None:
    truth = np.array([1, 1, 0, 0])
    assert module.auc(np.array([0.9, 0.8, 0.3, 0.1]), truth) == 1
    assert module.auc(np.array([0.1, 0.3, 0.8, 0.9]), truth) == 0
    assert module.auc(np.array([0.5, 0.5, 0.5, 0.5]), truth) == 0.5
    assert module.auc(np.array([0.9, 0.2, 0.3, 0.1]), truth) == 0.75
    assert module.interval(np.array([1.0, 3.0]), np.array([0, 1])) == (2.0, 1.0, 3.0)


def test_hidden_states_are_those_of_the_row_that_chose_the_root(
    module: ModuleType, traces: list[Path], pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = read_trace(traces[0])
    with LLM(pair[0], dtype="float32", kv_cache_memory=1 << 24) as llm:
        whole = module.hidden_states(llm.models.target, trace, 16)
        monkeypatch.setattr(module, "CHUNK", 4)
        np.testing.assert_allclose(module.hidden_states(llm.models.target, trace, 16), whole, atol=1e-3)
    assert whole.shape[:2] == (trace.places, 3)
    np.testing.assert_allclose(np.square(whole[1]).mean(-1), 1, rtol=1e-3)
    assert not whole[trace.starts[1]].any()


def test_from_traces_to_a_page(
    module: ModuleType,
    run: Run,
    traces: list[Path],
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SIZES", {"linear": (), "4": (4,)})
    monkeypatch.setattr(module, "EPOCHS", 2)
    other = read_trace(traces[1])  # other prompts, because equal ones would be excluded from learning
    changed = tuple(replace(text, prompt=(*text.prompt, 7)) for text in other.texts)
    write_trace(traces[1], replace(other, texts=changed))
    options = ["--model", pair[0], "--train", str(traces[1]), "--held-out", str(traces[0])]
    page = run(module, *options)
    rows = table(page)
    assert len([row for row in rows if row[0].startswith(("cheap", "final"))]) == 8
    assert [line.split(",")[0] for line in page if line.startswith("## ")] == ["## draft"]

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("an existing result is computed again")

    monkeypatch.setattr(module, "places_of", refuse)
    assert run(module, *options) == page
