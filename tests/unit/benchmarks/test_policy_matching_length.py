"""What is known at a place, what predictors make of it, and that policies decide by what they are given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specinfer import LLM, SamplingParams
from specinfer.config import SpeculationConfig
from specinfer.replay.guess_trie import GuessRecorder
from specinfer.replay.recorder import record
from specinfer.replay.replay import Part, counting_policy, play
from specinfer.replay.simulated_engine import PlayedStep
from specinfer.replay.trace import EngineFacts, RecordedDraft, RecordedText, Trace
from specinfer.replay.trace_store import read_trace, write_trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.policy.calibration import Calibration
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.tree import Draw, TokenTree
from specinfer.tree.draw import DrawRule
from specinfer.tree.expansion import Expansion
from tests.unit.benchmarks.conftest import Run
from tests.unit.benchmarks.test_scripts import table

Script = Callable[[str], ModuleType]
X = math.nan
TARGET, DRAFT = CostCurve((1, 64), (1.0, 1.5)), CostCurve((1, 64), (0.2, 0.4))


@pytest.fixture(scope="module")
def module(script: Script) -> ModuleType:
    return script("policy_matching_length")


@pytest.fixture(scope="module")
def parts(module: ModuleType) -> tuple[ModuleType, ModuleType, ModuleType]:
    """The places, the predictors and the policies."""
    from matching_length import places, policies, predictors

    return places, predictors, policies


def draws(*sure: float) -> list[Draw]:
    return [Draw(0, i + 1, "draft", DrawRule.POINT_MASS, None, one) for i, one in enumerate(sure)]


def trace_of(notes: GuessRecorder, output: tuple[int, ...], widths: tuple[int, ...]) -> Trace:
    text = RecordedText((1,), output, SamplingParams(temperature=0, max_tokens=8), 0)
    return Trace(
        model="m",
        engine=EngineFacts(
            vocab=16, max_context=64, max_step_tokens=64, block_size=16, prefix_reuse=True, ending=(0,)
        ),
        speculation=SpeculationConfig(drafts=("d",), expansion=Expansion(widths)),
        texts=(text,),
        drafts={"draft": RecordedDraft("d", 64, DRAFT, notes.trie())},
        curve=TARGET,
        stages={},
        likeliest=np.log(np.tile(np.array([0.5, 0.25], dtype=np.float32), (len(output), 1))),
    )


def test_hits_of_a_draft_are_known_as_far_as_they_follow_the_text(parts: Any) -> None:
    places = parts[0]
    deep, roots = GuessRecorder(), GuessRecorder()
    # The text goes on 2 3 4 5, and a level is one guess, then two.
    deep.note((), 1, [2], draws(0.9))
    deep.note((2,), 2, [7, 3], draws(0.6, 0.3))
    deep.close_root()
    deep.note((), 1, [9], draws(0.9))
    deep.note((9,), 2, [4, 3], draws(0.6, 0.3))
    deep.close_root()
    deep.note((), 1, [4], draws(0.9))
    deep.note((4,), 2, [5, 1], draws(0.6, 0.3))
    deep.close_root()
    deep.close_root()  # at the last place nobody guessed
    whole = trace_of(deep, (2, 3, 4, 5), (1, 2))
    hits = places.draft_hits(whole, whole.drafts["draft"])
    expected = [[1, 1], [0, X], [1, 1], [X, X]]
    np.testing.assert_array_equal(hits[:, :2], np.array(expected, dtype=np.float32))
    assert np.isnan(hits[:, 2:]).all()
    # Who knows the roots alone knows the same: what follows a right guess is what is guessed one place on.
    for tokens in ([2, 8], [7, 3], [4, 8], [5, 1]):
        roots.note((), 2, tokens, draws(0.6, 0.3))
        roots.close_root()
    alone = trace_of(roots, (2, 3, 4, 5), (1, 2))
    hits = places.draft_hits(alone, alone.drafts["draft"])
    expected = [[1, 1], [0, X], [1, 1], [1, X]]
    np.testing.assert_array_equal(hits[:, :2], np.array(expected, dtype=np.float32))


def test_what_is_followed_of_several_speculators(parts: Any) -> None:
    places = parts[0]

    def draw(parent: int, node: int, name: str, sure: float = 0.5) -> Draw:
        return Draw(parent, node, name, DrawRule.POINT_MASS, None, sure)

    # 0 -> 5 (a, b), 6 (a); 5 -> 7 (a); 7 -> 8 (b, who was not there before)
    tree = TokenTree(
        (1, 5, 6, 7, 8),
        (-1, 0, 0, 1, 3),
        (draw(0, 1, "a", 0.75), draw(0, 2, "a", 0.1), draw(0, 1, "b"), draw(1, 3, "a"), draw(3, 4, "b")),
    )
    calibration = Calibration()
    found = places.followed(tree, [5, 9, 8], calibration)
    told = [(level, name, hit) for level, (name, hit, _, _) in found]
    assert told == [(0, "a", True), (0, "b", True), (1, "a", False)]
    assert [sure for _, (_, _, _, sure) in found] == [0.75, 0.5, 0.5]
    # It says first, and learns then: b was believed to be as sure as it said, and is surer now.
    assert found[1][1][2] == 0.5
    [(_, again), *_] = [one for one in places.followed(tree, [5], calibration) if one[1][0] == "b"]
    assert again[2] == pytest.approx(0.6, abs=1e-3)


def test_features_of_a_place_know_nothing_of_what_comes(parts: Any) -> None:
    places = parts[0]
    rng = np.random.default_rng(0)
    place, texts = np.arange(40) % 20, np.arange(40) // 20
    notes = GuessRecorder()
    trace = replace(
        trace_of(notes, (2,) * 20, (1,)),
        texts=(
            RecordedText((1,), (2,) * 20, SamplingParams(), 0),
            RecordedText((1, 1), (2,) * 20, SamplingParams(), 0),
        ),
        likeliest=-np.sort(rng.exponential(size=(40, 2)), axis=1).astype(np.float32),
    )

    def features(trace: Trace, hits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        sure = {"ngram": np.ones(40, dtype=np.float32)}
        counted = {"draft": np.full((40, 8), 0.7, dtype=np.float32)}
        found: np.ndarray[Any, Any] = places.cheap_features(
            trace, {"draft": hits}, sure, counted, place, texts
        )
        return found

    hits = rng.integers(0, 2, (40, 8)).astype(np.float32)
    usual = features(trace, hits)
    for at in (5, 25):
        later, likeliest = hits.copy(), trace.likeliest.copy()
        later[at:] = 1 - later[at:]
        likeliest[at:] *= 3
        changed = features(replace(trace, likeliest=likeliest), later)
        np.testing.assert_array_equal(changed[: at + 1], usual[: at + 1])
        assert (changed[at + 1] != usual[at + 1]).any()
    # A text knows nothing of the one before it.
    np.testing.assert_array_equal(usual[20, :-1], usual[0, :-1])


def made_up(places: Any, hits: np.ndarray[Any, Any], cheap: np.ndarray[Any, Any]) -> Any:
    texts = np.arange(len(hits)) // 20
    full = np.full((len(hits), places.LEVELS), np.nan, dtype=np.float32)
    full[:, : hits.shape[1]] = hits
    counted = {"draft": np.full_like(full, 0.5)}
    states = np.zeros((len(hits), 1, 1), dtype=np.float32)
    return places.Known(
        int(texts.max()) + 1, texts, cheap.astype(np.float32), states, {"draft": full}, counted, {}
    )


@pytest.mark.parametrize("units", [(), (16,), (8, 8)])
def test_what_can_be_predicted_is_and_what_cannot_is_not(
    parts: Any, units: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    places, predictors, _ = parts
    monkeypatch.setattr(predictors, "DECAYS", (0.1,))
    monkeypatch.setattr(predictors, "RATE", 0.02)
    monkeypatch.setattr(predictors, "EPOCHS", 30)
    rng = np.random.default_rng(1)
    cheap = rng.normal(size=(2000, 3))
    sign = (cheap[:, 0] > 0).astype(np.float32)
    chance = rng.integers(0, 2, 2000).astype(np.float32)
    # The first level is a function of a feature; the second, known only behind a hit, is a coin's.
    hits = np.stack([sign, np.where(sign == 1, chance, np.nan)], axis=1)
    train, test = (made_up(places, hits[half], cheap[half]) for half in (slice(1000), slice(1000, None)))
    predictor, _ = predictors.fit(train, train.inputs("cheap"), units)
    hazards = predictor(test.inputs("cheap"))["draft"]
    found = predictors.auc(hazards[:, 0], test.hits["draft"][:, 0])
    assert found > 0.99
    seen = ~np.isnan(test.hits["draft"][:, 1])
    assert abs(predictors.auc(hazards[seen, 1], test.hits["draft"][seen, 1]) - 0.5) < 0.08
    assert abs(float(hazards[seen, 1].mean()) - 0.5) < 0.08
    of = predictors.judged(predictor(test.inputs("cheap")), test, ("draft",))["of"]["draft"]
    assert of["auc_first"] == found
    assert of["hits"] == 1000 + seen.sum()
    mean, low, high = of["below_counts"]
    assert 0.2 < low < mean < high < math.log(2)
    assert mean == pytest.approx(math.log(2) - of["log_loss"])


def test_figures_of_hazards(parts: Any) -> None:
    predictors = parts[1]
    truth = np.array([1, 1, 0, 0])
    assert predictors.auc(np.array([0.9, 0.8, 0.3, 0.1]), truth) == 1
    assert predictors.auc(np.array([0.1, 0.3, 0.8, 0.9]), truth) == 0
    assert predictors.auc(np.array([0.5, 0.5, 0.5, 0.5]), truth) == 0.5
    assert predictors.auc(np.array([0.9, 0.2, 0.3, 0.1]), truth) == 0.75
    assert predictors.auc(np.array([0.9]), np.array([1])) == 0.5
    # Two bins: 0.9 where half is right, 0.2 where none is.
    assert predictors.calibration_error(
        np.array([0.9, 0.9, 0.2, 0.2]), np.array([1, 0, 0, 0])
    ) == pytest.approx(0.3)
    rng = np.random.default_rng(0)
    assert predictors.interval(np.array([1.0, 3.0]), np.array([0, 1]), rng) == (2.0, 1.0, 3.0)
    assert predictors.interval(np.array([2.0, 2.0]), np.array([0, 1]), rng) == (2.0, 2.0, 2.0)


def test_a_predictor_is_the_network_that_was_trained(parts: Any) -> None:
    predictors = parts[1]
    two = (np.array([[1.0], [1.0]], dtype=np.float32), np.zeros(1, dtype=np.float32))
    hidden = (np.array([[1.0, -1.0]], dtype=np.float32), np.zeros(2, dtype=np.float32))
    out = (np.repeat(two[0], 8, axis=1), np.full(8, -1.0, dtype=np.float32))
    predictor = predictors.Predictor(np.array([1.0]), np.array([0.5]), (hidden, out), ("draft",))
    hazards = predictor(np.array([[5.0], [-3.0], [1.0]], dtype=np.float32))["draft"]
    one = 1 / (1 + math.exp(-1))  # |(5 - 1) / 2| - 1
    assert hazards.shape == (3, 8)
    np.testing.assert_allclose(hazards[:, 0], [one, one, 1 - one], rtol=1e-6)
    assert predictor.size == 2 + 2 + 16 + 8
    alike = predictors.untrained(1, (2,), ("draft",))
    assert alike.size == predictor.size
    assert (alike(np.array([[5.0]], dtype=np.float32))["draft"] == 0.5).all()


@pytest.fixture(scope="module")
def recorded(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a tiny pair: two kinds, one of them in two files."""
    folder = tmp_path_factory.mktemp("traces")
    llm = LLM(
        pair[0], drafts=(pair[1],), ngram=True, expansion="1,2,1", kv_cache_memory=1 << 24, dtype="float32",
        tree_size="fixed",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "specinfer.replay.recorder.cost_curve",
            lambda runner, *, every_row, **_: DRAFT if every_row else TARGET,
        )
        for number, name in enumerate(("chat-00", "chat-01", "code", "more")):
            prompts = [[7, 8, 9 + number, 7, 8, 20 + i] for i in range(3)]
            params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=i) for i in range(3)]
            requests = [one.request for [one] in llm.intake.prompts(prompts, params)]
            write_trace(
                folder / f"{name}.npz", record(llm, requests, shapes=[Shape.of(llm.config.speculation)])
            )
    llm.close()
    return folder


def seconds(trace: Trace, policy: Any) -> tuple[float, list[PlayedStep]]:
    steps: list[PlayedStep] = []
    came = play([Part([(trace, i) for i in range(3)])], policy, on_step=steps.append)
    return came.seconds, steps


def test_by_its_own_counts_it_is_the_policy(parts: Any, recorded: Path) -> None:
    policies = parts[2]
    trace = read_trace(recorded / "code.npz")
    same = policies.ByHazards(trace, (), ahead=False, lookups=False)
    usual, other = (
        seconds(trace, one) for one in (counting_policy(trace, trace.speculation), policies.guarded(same))
    )
    assert other[0] == usual[0]
    assert same.steps == len(usual[1])
    for one, two in zip(usual[1], other[1], strict=True):
        assert one.seconds == two.seconds
        assert [(e.path, e.tree.token_ids) for e in one.entries] == [
            (e.path, e.tree.token_ids) for e in two.entries
        ]


def test_who_knows_the_text_draws_nothing_that_is_wrong(parts: Any, recorded: Path) -> None:
    places, _, policies = parts
    trace = read_trace(recorded / "code.npz")
    hits = {"draft": places.draft_hits(trace, trace.drafts[next(iter(trace.drafts))])}
    [name] = trace.drafts
    starts = trace.starts
    of_texts = [{name: policies.truth(hits["draft"])[a:b]} for a, b in itertools.pairwise(starts)]
    knowing = policies.ByHazards(trace, of_texts, ahead=True, lookups=False)
    quicker, steps = seconds(trace, policies.guarded(knowing))
    assert knowing.steps == len(steps)
    drawn = 0
    for step in steps:
        for entry in step.entries:
            levels = {d.node for d in entry.tree.draws if d.speculator == name}
            depths = entry.tree.depths()
            deepest = max((depths[node] for node in levels), default=0)
            assert deepest <= len(entry.path) or deepest == 0
            drawn += deepest
    assert drawn > 0
    slower = seconds(trace, policies.guarded(policies.ByHazards(trace, (), ahead=True, lookups=False)))[0]
    assert quicker < slower
    # And who is told that nothing is ever right does not draw.
    never = [{name: np.full_like(one[name], 0.001) for name in one} for one in of_texts]
    _, steps = seconds(trace, policies.guarded(policies.ByHazards(trace, never, ahead=True, lookups=False)))
    late = [entry for step in steps for entry in step.entries if len(entry.committed) > 0]
    assert not any(draw.speculator == name for entry in late for draw in entry.tree.draws)


def test_rates_of_siblings_sum_to_the_hazard(parts: Any) -> None:
    policies = parts[2]
    rule = DrawRule.POINT_MASS
    several = [Draw(0, 1, "s", rule), Draw(0, 2, "s", rule), Draw(1, 3, "s", rule), Draw(3, 4, "s", rule)]
    rates = [1.0, 0.6, 0.2, 0.5, 0.25]
    hazards = {"s": np.array([0.4, 1.0, X, 0, 0, 0, 0, 0], dtype=np.float32)}
    policies.of_given(rates, several, hazards)
    assert rates == pytest.approx([1.0, 0.3, 0.1, 1.0, 0.25])


def test_workloads_are_kinds_and_all_in_turns(module: ModuleType, recorded: Path) -> None:
    traces = {name: read_trace(recorded / f"{name}.npz") for name in ("chat-00", "chat-01", "code")}
    found = module.workloads(traces)
    assert list(found) == ["chat", "code", "all in turns"]
    assert found["chat"] == [(f"chat-0{n}", i) for n in (0, 1) for i in range(3)]
    assert found["all in turns"][:4] == [("chat-00", 0), ("code", 0), ("chat-00", 1), ("code", 1)]
    other = replace(traces["code"], engine=replace(traces["code"].engine, max_context=100))
    assert list(module.workloads({**traces, "code": other})) == ["chat", "code"]


def test_hidden_states_are_those_of_the_row_that_chose_the_root(
    parts: Any, recorded: Path, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = parts[0]
    trace = read_trace(recorded / "code.npz")
    with LLM(pair[0], dtype="float32", kv_cache_memory=1 << 24) as llm:
        target = llm.models.target
        whole = places.hidden_states(target, trace, 16)
        monkeypatch.setattr(places, "CHUNK", 4)
        np.testing.assert_allclose(places.hidden_states(target, trace, 16), whole, atol=1e-2)
        assert whole.shape == (trace.places, 3, target.config.hidden_size)
        # The last layer's output, through the final norm and the output layer, chooses the root again.
        import torch

        from specinfer.models.language_model import Residual

        text = trace.texts[1]
        rows = torch.from_numpy(whole[trace.starts[1] + 1 : trace.starts[2], -1]).float()
        logits = target.logits(target.final_norm(Residual(rows, None), None))
        assert logits.argmax(-1).tolist() == list(text.output[:-1])
        assert not whole[trace.starts[1]].any()


def test_from_traces_to_a_page(
    module: ModuleType,
    run: Run,
    recorded: Path,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    parts: Any,
) -> None:
    monkeypatch.setattr(module, "SIZES", {"linear": (), "4": (4,)})
    names = tuple(f"{inputs}, {size}" for inputs in module.INPUTS for size in ("linear", "4"))
    monkeypatch.setattr(module, "NAMES", names)
    monkeypatch.setattr(parts[1], "EPOCHS", 2)
    files = [str(recorded / f"{name}.npz") for name in ("more", "chat-00", "chat-01", "code")]
    options = ["--model", pair[0], "--train", *files[:1], "--held-out", *files[1:]]
    page = run(module, *options)
    rows = table(page)
    assert len([row for row in rows if row[0].startswith(("cheap", "final"))]) >= 8
    assert any(line.startswith("all in turns, 9 texts of 108 tokens; the oracle: ") for line in page)
    played = [row for row in rows if row[0] in {"none", "present", "ahead: truth"}]
    assert len(played) == 9
    assert all(row[1] == "1.000 (1.000 to 1.000)" for row in played if row[0] == "present")

    def refuse(*args: Any, **options: Any) -> LLM:
        raise AssertionError("something is done anew although it is there")

    monkeypatch.setattr(parts[0], "LLM", refuse)
    monkeypatch.setattr(module, "fit", refuse)
    assert run(module, *options) == page


def test_prompts_of_held_out_texts_are_not_learnt_from(parts: Any, recorded: Path) -> None:
    places = parts[0]
    trace = read_trace(recorded / "code.npz")
    states = np.zeros((trace.places, 1, 2), dtype=np.float32)
    all_of_it = places.known(trace, states)
    assert all_of_it.count == 3
    assert np.bincount(all_of_it.texts).tolist() == [11, 11, 11]  # first places are left out
    some = places.known(trace, states, without={trace.texts[1].prompt})
    assert np.bincount(some.texts).tolist() == [11, 0, 11]
    both = places.joined([some, all_of_it])
    assert (both.count, np.bincount(both.texts).tolist()) == (6, [11, 0, 11, 11, 11, 11])


def test_a_policy_that_fails_is_no_result(module: ModuleType, parts: Any, recorded: Path) -> None:
    policies = parts[2]
    trace = read_trace(recorded / "code.npz")
    order = [Part([(trace, i) for i in range(3)])]
    broken = policies.ByHazards(trace, [{}], ahead=False, lookups=False)  # hazards of one text of three
    with pytest.raises(AssertionError, match="then it failed"):
        module.seconds_of(order, policies.guarded(broken), inner=broken)
    alone = module.seconds_of(order, FixedPolicy())
    assert len(alone) == 3
    assert sum(alone) == pytest.approx(play(order, FixedPolicy()).seconds)
