"""Ranks that are processes: the text of one, and what happens when one of them is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from specinfer import LLM, SamplingParams
from specinfer.check.identity import check_identity
from specinfer.config import EngineConfig
from specinfer.engine.ranks import Ranks
from specinfer.errors import ClosedError, ConfigError, ModelError, PeerLostError
from specinfer.parallel.launch import Followers
from specinfer.parallel.processes import FollowerProcesses
from specinfer.progress import NoProgress
from specinfer.serve.backend.replica_backend import ReplicaBackend
from specinfer.serve.backend.work import Work, fingerprint
from tests.engines import ENGINE
from tests.ranks import GREEDY, INT8, PROMPTS, SAMPLED, await_no_followers, followers, soon, token_ids_of

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.thorough]
_POPEN = subprocess.Popen  # before `forked` replaces it


# About 4 s: a smoke; a process imports PyTorch.
def test_two_processes_say_what_one_says_and_leave_nothing(
    folder: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", _POPEN)  # a follower that imports PyTorch itself
    options = {**INT8, "drafts": (str(folder / "draft"),), "lookup": True}
    llm = LLM(folder / "target", tensor_parallel=2, **options)
    [follower], [here] = followers(), llm.models.hosts
    assert len(here.parts) == 2  # parts of rank 1: one of the target, one of its draft
    assert token_ids_of(llm) == plain
    assert follower.is_running()
    draft = llm.models.drafts["draft"]
    assert draft.number == 1
    assert draft.config.num_heads < 6
    assert llm.statistics().guessed_tokens["draft"] > 50
    seconds = llm.statistics().rank_seconds
    assert {name.split()[0] for name in seconds} == {"0", "1"}
    assert all(0 <= spent < 60 for spent in seconds.values()), seconds
    assert min(seconds["0 computing"], seconds["1 computing"]) > 0, seconds
    with LLM(folder / "target", **INT8) as one:
        [verdict] = check_identity("ranks", SAMPLED, PROMPTS, one, llm, num_single=0, progress=NoProgress())
    assert verdict.passed
    llm.close()
    await_no_followers()
    with pytest.raises(ClosedError):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({"pipeline_parallel": 2, "quantization": "none"}, 2),
        ({"pipeline_parallel": 2, "quantization": "int4"}, 2),
        ({"pipeline_parallel": 2, "tensor_parallel": 2, "quantization": "int8"}, 4),
    ],
)
def test_stages_say_what_one_process_says(
    folder: Path, cache: None, options: dict[str, Any], processes: int, caplog: pytest.LogCaptureFixture
) -> None:
    common = {**ENGINE, "quantization": options["quantization"]}
    with LLM(folder / "target", **common) as one:
        want = token_ids_of(one)
    guessing = {"drafts": (str(folder / "draft"),), "lookup": True, "tree_size": "cost"}
    with caplog.at_level("INFO"), LLM(folder / "target", **{**common, **options, **guessing}) as llm:
        assert len(followers()) == processes - 1
        assert token_ids_of(llm) == want
    assert f"target: {processes} ranks, 2 stages of 1 + 1 layers" in caplog.text
    await_no_followers()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("draft", {"tensor_parallel": 2, "pipeline_parallel": 2, "draft_quantization": "int8"}),
        ("draft", {"tensor_parallel": 3, "draft_quantization": "int8"}),  # uneven shards
        ("draft", {"tensor_parallel": 2, "draft_quantization": "int4"}),
        ("self", {"tensor_parallel": 2}),
    ],
)
def test_ranks_share_drafts(
    folder: Path, plain: list[list[int]], cache: None, draft: str, options: dict[str, Any]
) -> None:
    name = draft if draft == "self" else str(folder / draft)
    with LLM(folder / "target", drafts=(name,), **{**INT8, **options}) as llm:
        shared = llm.models.drafts["draft"]
        assert shared.number == 1
        assert shared.config.num_heads < 6
        assert token_ids_of(llm) == plain
        figures = llm.statistics()
        assert figures.guessed_tokens["draft"] > 50
        without = llm.variant(drafts=())
        assert token_ids_of(without) == plain
        assert figures.steps < 0.8 * without.statistics().steps, "they are the guesses of the whole draft"


def test_followers_end_with_rank_0_even_when_they_are_stopped(folder: Path, cache: None) -> None:
    program = (
        "import sys, time, psutil; from specinfer import LLM\n"
        f"llm = LLM(sys.argv[1], tensor_parallel=3, quantization='int8', kv_cache_memory={1 << 24})\n"
        "print(*(one.pid for one in psutil.Process().children()), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(folder / "target")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        begun = [psutil.Process(int(word)) for word in rank_0.stdout.readline().split()]
        begun[0].suspend()
        rank_0.kill()
    assert len(begun) == 2
    assert soon(lambda: not any(one.is_running() for one in begun))


_STAGES = {"tensor_parallel": 2, "pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("layout", "rank", "stopped"),
    # The end of a process is noticed in one way, wherever its rank is; other ranks wait for a stopped one.
    [
        ({"tensor_parallel": 3}, 2, False),
        ({"tensor_parallel": 2}, 1, True),
        (_STAGES, 2, False),
        (_STAGES, 3, True),
        *((_STAGES, rank, True) for rank in (1, 2)),
    ],
)
def test_a_lost_rank_ends_the_call_and_its_name_is_told(
    folder: Path, cache: None, layout: dict[str, int], rank: int, stopped: bool
) -> None:
    llm = LLM(folder / "target", **layout, **INT8)
    group = llm.models.target.group
    group.limit = 1.0  # seconds of an exchange
    if group.exchange is not None:
        group.exchange.wait_at_most(1.0)
    lost = sorted(followers(), key=lambda one: (one.create_time(), one.pid))[rank - 1]
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    lost.send_signal(signal.SIGSTOP if stopped else signal.SIGKILL)
    began = time.monotonic()
    how = "does not answer" if stopped else "has ended with status -9"
    with pytest.raises(PeerLostError, match=rf"rank {rank} \(process {lost.pid}\) {how}") as caught:
        list(stream)
    assert time.monotonic() - began < 8.0  # and not 10 s, as a rank may have at the start
    assert caught.value.rank == rank
    with pytest.raises(ClosedError):
        llm.generate(PROMPTS, GREEDY)
    await_no_followers()


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "size"), [("none", 2), ("int4", 3)])
def test_floats_add_up_to_the_texts_of_one_process(folder: Path, cache: None, kind: str, size: int) -> None:
    options = {**ENGINE, "quantization": kind}
    with LLM(folder / "target", **options) as plain:
        found = {fingerprint(plain)}
    with LLM(folder / "target", sum_parts=8, **options) as one:
        want, own = token_ids_of(one), fingerprint(one)
        assert own not in found
        with LLM(folder / "target", tensor_parallel=size, **options) as several:
            assert token_ids_of(several) == want
            assert fingerprint(several) == own
    await_no_followers()


def test_other_parts_of_sums_are_refused(folder: Path, cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Ranks.start

    def other(self: Ranks, *given: Any, **how: Any) -> None:
        self.layout = replace(self.layout, parts=4)
        start(self, *given, **how)

    monkeypatch.setattr(Ranks, "start", other)
    with pytest.raises(ModelError, match=r"^rank 1 differs from rank 0 in sum_parts; all ranks must run"):
        LLM(folder / "target", tensor_parallel=2, **ENGINE)
    await_no_followers()


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("specinfer.parallel.processes.spawn", spawn)
    begun = FollowerProcesses(2, 2)
    with pytest.raises(BlockingIOError):
        Followers(begun)
    begun.wait()
    begun.close_files()


def test_what_does_not_go_with_ranks_is_refused(folder: Path) -> None:
    int4, none = {"quantization": "int4"}, {"quantization": "none"}
    cases: list[tuple[dict[str, object], str]] = [
        (
            {"kernels": "torch"},
            "tensor_parallel is 2 with PyTorch's kernels (kernels is 'torch'), which do not divide sums; ",
        ),
        (
            {"kernels": "torch", "tensor_parallel": 1, "sum_parts": 8},
            "sum_parts is 8 with PyTorch's kernels (kernels is 'torch'), which do not divide sums; ",
        ),
        (
            {**int4, "sum_parts": 1},
            "sum_parts is 1 with tensor_parallel 2 and quantization 'int4'; allowed there: 2",
        ),
        (
            {**none, "sum_parts": 2, "tensor_parallel": 3},
            "sum_parts is 2 with tensor_parallel 3 and quantization 'none'; allowed there: 3 or more",
        ),
        ({"sum_parts": 257}, "sum_parts is 257; allowed: 1 to 256"),
        ({"sum_parts": 0}, "sum_parts is 0; allowed: an integer >= 1"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0; allowed: an integer >= 1"),
        ({"tensor_parallel": 7}, "tensor_parallel is 7: with 6 heads in 3 groups"),
        ({**none, "tensor_parallel": 10}, "tensor_parallel is 10: with 6 heads in 3 groups"),
        ({"tensor_parallel": 1, "pipeline_parallel": 3}, "pipeline_parallel is 3; the model has 2 layers"),
    ]
    for options, line in cases:
        with pytest.raises(ConfigError) as caught:
            pytest.fail(f"{LLM(folder / 'target', **{**INT8, 'tensor_parallel': 2, **options})}: {options}")
        assert str(caught.value).startswith(line), options
        assert not followers()


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "pipeline_parallel": 2},
    ],
)
def test_a_servers_texts_go_on_with_new_ranks(folder: Path, layout: dict[str, int], cache: None) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=160)
    config = EngineConfig.from_options(str(folder / "target"), {**INT8, **layout})
    work = Work("w", tuple(PROMPTS[0]), params)

    async def answer() -> tuple[list[int], list[int]]:
        backend = ReplicaBackend(config)
        await backend.start()
        said, engines = list[int](), processes(backend)
        async for delta in backend.generate([work]):
            if said := [*said, *delta.token_ids]:
                with suppress(ProcessLookupError):
                    os.kill(engines[1], signal.SIGKILL)
        engines += processes(backend)
        await backend.close()
        return said, engines

    def processes(backend: ReplicaBackend) -> list[int]:
        engine = backend._replicas[0].pid
        assert engine is not None
        return [engine, *(one.pid for one in followers(engine))]

    said, engines = asyncio.run(answer())
    with LLM(folder / "target", **INT8) as llm:
        [output] = llm.generate([PROMPTS[0]], params)
    assert said == list(output.token_ids)
    assert len(set(engines)) == 2 * config.ranks
    assert soon(lambda: not any(map(psutil.pid_exists, engines)))
