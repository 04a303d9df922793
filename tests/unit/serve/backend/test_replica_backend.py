"""The server's side of engine processes: waiting times, cut answers, counters, and homes of sessions."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.engine.steps import Statistics
from specinfer.request import Delta, FinishReason, Logprob, SpeculationFigures
from specinfer.serve.backend import replica
from specinfer.serve.backend.replica_backend import ReplicaBackend, Ring, key_of
from specinfer.serve.backend.work import UnavailableError
from specinfer.serve.observe.metrics import Metrics
from tests.unit.serve.backend.handles import WORK, Answering, Handle, Late, engines


async def test_reported_prompt_logprobs_are_not_computed_again(handles: list[Handle]) -> None:
    got: list[Delta] = []

    async def ask(backend: ReplicaBackend) -> None:
        params = SamplingParams(seed=1, prompt_logprobs=2)
        got.extend([delta async for delta in backend.generate([replace(WORK, params=params)])])

    async with engines() as backend:
        asked = asyncio.ensure_future(ask(backend))
        await asyncio.sleep(0)
        assert [work.params.prompt_logprobs for work in handles[-1].given] == [2]
        handles[-1].says("deltas", [Delta("w", "x", (7,), prompt_logprobs=(None,))], None)
        handles[-1].says("deltas", [Delta("w", "y", (8, 9))], None)
        handles[-1].dies()
        await asyncio.sleep(10)
        [work] = handles[-1].given
        assert (work.params.prompt_logprobs, work.prior_output) == (None, (7, 8, 9))
        handles[-1].says("deltas", [Delta("w", "z", (3,), finish_reason=FinishReason.LENGTH)], None)
        await asked
    assert [(delta.text, delta.prompt_logprobs) for delta in got] == [("xy", (None,)), ("z", None)]


RANK_SECONDS = 'rank_seconds_total{{doing="{}",,rank="{}",replica="0"}}'
# Metric, field of Statistics, values of the engine that dies and of the next one, and the reported value.
COUNTED: list[tuple[str, str, Any, Any, float]] = [
    ("num_preemptions{}", "preemptions", 1, 0, 1),
    ("num_requests_running{}", "running", 2, 1, 1),
    ("engine_steps{}", "steps", 10, 3, 13),
    ("speculators_paused{}", "speculators_paused", 1, 0, 0),
    ("speculation_off_steps{}", "speculation_off_steps", 5, 2, 7),
    ("speculation_on{}", "speculation_on", False, True, 1),
    ("streamed_bytes_total{}", "streamed_bytes", 4000, 1000, 5000),
    ("stream_wait_seconds_total{}", "stream_wait_seconds", 1.5, 0.25, 1.75),
    ('engine_stage_seconds{,stage="schedule"}', "stage_seconds.schedule", 1.0, 0.5, 1.5),
    ('engine_stage_seconds{,stage="commit"}', "stage_seconds.commit", 2.0, 0.25, 2.25),
    ('speculator_failures{,speculator="draft"}', "failures.draft", 3, None, 3),
    ('speculator_failures{,speculator="policy"}', "failures.policy", None, 1, 1),
    ('schema_keywords_unenforced{keyword="oneOf",}', "unenforced.oneOf", 2, 1, 3),
    ('schema_keywords_unenforced{keyword="not",}', "unenforced.not", None, 1, 1),
    ('guessed_tokens{,speculator="lookup"}', "guessed_tokens.lookup", 8, 0, 8),
    ('guessed_tokens{,speculator="draft"}', "guessed_tokens.draft", 4, None, 4),
    ('guessed_tokens{,speculator="0-draft"}', "guessed_tokens.0-draft", None, 3, 3),
    ('pass_cost_factor{model="target",}', "cost_factors.target", 1.5, 1.25, 1.25),
    ('pass_cost_factor{model="0-draft",}', "cost_factors.0-draft", None, 2.0, 2.0),
    (RANK_SECONDS.format("computing", 0), "rank_seconds.0 computing", 3.0, 1.0, 4.0),
    (RANK_SECONDS.format("waiting", 1), "rank_seconds.1 waiting", 0.5, 0.25, 0.75),
]


def statistics(engine: int, **more: int) -> Statistics:
    found: dict[str, Any] = {}
    for _, name, *values, _ in COUNTED:
        field, _, key = name.partition(".")
        if not key:
            found[field] = values[engine]
        elif values[engine] is not None:
            found.setdefault(field, {})[key] = values[engine]
    return Statistics(**found, **more)


def figures(text: str) -> dict[str, float]:
    """Every metric by its name and its labels but the model's."""
    text = text.replace("specinfer:", "").replace('model_name="m"', "")
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(number) for name, _, number in lines}


async def test_counters_are_summed_over_all_engines(handles: list[Handle]) -> None:
    """A counter never falls, whenever an engine dies and whenever it is read."""
    first = statistics(0, prefix_queries=100, prefix_hits=50)
    metrics = Metrics("m")
    async with engines() as backend:

        async def reported() -> dict[str, float]:
            return figures(metrics.text(await backend.health()).decode())

        handles[0].state = replace(first, steps=4)
        expected = {name: float(one) for name, _, one, _, _ in COUNTED if one is not None}
        assert (expected | {"engine_steps{}": 4}).items() <= (await reported()).items()
        handles[0].says("deltas", [Delta("w", "x", (7,))], first)  # no request between this and its death
        asked = asyncio.ensure_future(reported())  # in just that moment
        handles[0].state = first
        await asyncio.sleep(0)
        handles[0].dies()
        assert (await asked)["engine_steps{}"] == 10
        await asyncio.sleep(1)
        assert (await reported())["engine_steps{}"] == 10  # the second one's steps, which has not started
        handles[1].state = statistics(1, prefix_queries=60)
        expected = {name: both for name, *_, both in COUNTED}
        expected |= {"engine_restarts{}": 1, "prefix_cache_hit_rate{}": 50 / 160}
        assert expected.items() <= (await reported()).items()


async def test_without_engines_requests_wait(handles: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "EngineChild", Late)
    running = Statistics(running=2, steps=7, kv_cache_usage=0.5, cost_factors={"target": 1.5})
    async with engines() as backend:
        works = [replace(WORK, id=f"w{i}") for i in range(3)]
        received = [asyncio.ensure_future(anext(backend.generate([one]))) for one in works]
        await asyncio.sleep(0)
        handles[0].state = running
        health = await backend.health()
        assert (health.trouble, health.state) == ("", running)
        handles[0].dies()
        health = await backend.health()
        assert "is restarted" in health.trouble
        assert health.state == Statistics(waiting=3, steps=7)
        for task in received:
            task.cancel()


REFUSED = "the request has waited for 5 seconds (--max-wait) and has not started; try again later"


async def test_max_wait_ends_only_requests_without_a_started_step(handles: list[Handle]) -> None:
    async def ask(backend: ReplicaBackend, *names: str) -> list[tuple[str, float]]:
        """Return the results and their times."""
        received: list[tuple[str, float]] = []
        loop, deltas = asyncio.get_running_loop(), backend.generate([replace(WORK, id=n) for n in names])
        try:
            received.extend([(delta.id, loop.time()) async for delta in deltas])
        except UnavailableError as error:
            received.append((str(error), loop.time()))
        return received

    async with engines(max_wait=5.0) as backend:
        asked = [asyncio.ensure_future(ask(backend, *names)) for names in ("a", "b", "cd")]
        await asyncio.sleep(1)
        for name in "abcd":
            handles[0].says("deltas", [Delta(name)], None)
        await asyncio.sleep(3)
        for name in "ac":  # one of c and d has started, and started works are not dropped
            handles[0].says("deltas", [Delta(name, started=True)], None)
        await asyncio.sleep(6)
        ended = FinishReason.LENGTH
        for name in "acd":
            handles[0].says("deltas", [Delta(name, "x", (7,), finish_reason=ended)], None)
        assert [await one for one in asked] == [
            [("a", 1), ("a", 4), ("a", 10)],
            [(REFUSED, 5)],
            [("c", 1), ("d", 1), ("c", 4), ("c", 10), ("d", 10)],
        ]


async def test_answers_can_be_cut_with_a_reason_and_are_counted(handles: list[Handle]) -> None:
    async with engines() as backend:
        asked = [Answering(backend, name).task for name in "abc"]
        await asyncio.sleep(1)
        handles[0].says("deltas", [Delta("a", "x", (7,), finish_reason=FinishReason.LENGTH)], None)
        assert await asked[0] == [7]
        assert backend.cut("it is over") == 2
        for one in asked[1:]:
            with pytest.raises(UnavailableError, match="it is over"):
                await one
        assert backend.cut("it is over") == 0


def test_several_deltas_are_one_with_everything_in_order() -> None:
    prompt, figures = (None, {9: Logprob(-2.0, 1, "x")}), SpeculationFigures(steps=2)
    of_prompt: Any = {"prompt_logprobs": prompt, "cached_tokens": 4}
    first = Delta("w", "Hel", (1, 2), ({1: Logprob(-1.0, 1, "He")},), ({"step": 1},), ((3, 1),), **of_prompt)
    # From another engine without cached tokens.
    last = Delta("w", "lo", (3,), (), (), ((0, 0),), FinishReason.STOP, figures=figures)
    assert Delta.joined([first]) is first
    whole = replace(first, text="Helllo", token_ids=(1, 2, 5, 3), steps=((3, 1), (0, 0)))
    whole = replace(whole, finish_reason=FinishReason.STOP, figures=figures)
    assert Delta.joined([first, Delta("w", "l", (5,)), last]) == whole


PROMPT = tuple(range(100))


def home(ring: Ring, key: int, *replicas: int) -> int:
    return ring.choose(key, dict.fromkeys(replicas, 0))


def test_a_session_belongs_to_one_replica_whatever_it_asks() -> None:
    salted = [replace(WORK, params=SamplingParams(seed=1, cache_salt=salt)) for salt in (None, "s")]
    keys = {key_of("ann", replace(work, prompt_token_ids=ids)) for work in salted for ids in (PROMPT, (1,))}
    assert len(keys) == 1
    assert key_of("ben", WORK) not in keys
    assert key_of("x" * (1 << 24), WORK) != key_of("x" * (1 << 24) + "y", WORK)
    assert key_of("\udcff \N{SNOWMAN}", WORK) < 1 << 64


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_replica_has_about_its_share(count: int) -> None:
    ring = Ring(count)
    found = Counter(home(ring, key_of(f"session {n}", WORK), *range(count)) for n in range(4000))
    assert set(found) == set(range(count))
    assert max(found.values()) < 1.6 * 4000 / count
    assert min(found.values()) > 0.5 * 4000 / count


def test_only_the_sessions_of_a_missing_replica_move() -> None:
    ring, keys = Ring(4), [key_of(f"session {n}", WORK) for n in range(400)]
    moved = Counter[int]()
    for key in keys:
        replica = ring.choose(key, {0: 0, 1: 0, 3: 0})
        if (first := home(ring, key, *range(4))) != 2:
            assert replica == first
        else:
            moved[replica] += 1
    assert set(moved) == {0, 1, 3}  # and not all to one neighbour


def test_above_one_and_a_half_times_the_mean_the_next_one_takes_over() -> None:
    ring = Ring(3)
    key = key_of("ann", WORK)
    first = home(ring, key, 0, 1, 2)
    second = home(ring, key, *{0, 1, 2} - {first})
    [third] = {0, 1, 2} - {first, second}
    loads = {first: 5, second: 3, third: 3}  # 12 with one more: at most 6
    assert ring.choose(key, loads) == first
    assert ring.choose(key, loads | {first: 6, third: 2}) == second
    loads = {first: 0, second: 0, third: 0}
    for _ in range(300):  # of one session alone
        loads[ring.choose(key, loads)] += 1
    assert max(loads.values()) == 150
    assert ring.choose(key, {second: 1000}) == second
