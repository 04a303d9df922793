"""Requests that begin alike share the K and V of their beginning, and say what they would say alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.engine import kv_blocks
from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.changing_text import ChangingText
from specinfer.llm import LLM
from specinfer.request import PrefixMiss, Request, RequestOutput
from specinfer.sampling_params import SamplingParams
from tests.engines import Tiny, engine_of, runner_of, slow_generate
from tests.spies import spied

SYSTEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]  # 18 tokens: 4 blocks of 4, and 2
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SLOT = 2 * 2 * 2 * 8 * 4  # bytes of a position of one model: K and V, 2 layers, 2 heads of 8, float32


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.cached_tokens for output in outputs]


def prefix_hits(llm: LLM) -> tuple[int, int]:
    statistics = llm.statistics()
    return statistics.prefix_hits, statistics.prefix_queries


def texts(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def test_a_prompt_starts_behind_what_an_earlier_one_left(tiny: Tiny) -> None:
    for prompts, found in (
        # prompts, one after the other; what each finds of it, in blocks of 4 and as rows of one
        ([SYSTEM, SYSTEM], [0, 17]),
        ([SYSTEM, [*SYSTEM, 7, 7, 7]], [0, 18]),
        ([SYSTEM, SYSTEM[:9]], [0, 8]),
        ([SYSTEM, SYSTEM[:8]], [0, 7]),  # the last token is always computed
        ([SYSTEM, [9, *SYSTEM]], [0, 0]),
        ([SYSTEM, [*SYSTEM[:7], 0, *SYSTEM[8:]]], [0, 7]),
        ([[5, 6, 7], [5, 6, 7]], [0, 2]),
    ):
        llm = tiny.llm(drafts=["similar"], block_size=4)
        outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert cached(outputs) == found, prompts
        assert prefix_hits(llm) == (sum(found), sum(map(len, prompts))), prompts
        assert texts(outputs) == [tuple(slow_generate(tiny.target, p, GREEDY)) for p in prompts], prompts


def test_a_conversation_finds_its_own_answers(tiny: Tiny) -> None:
    llm = tiny.llm(block_size=4)
    (answer,) = llm.generate(SYSTEM, GREEDY)
    (reply,) = llm.generate([*SYSTEM, *answer.token_ids, 11, 12], GREEDY)
    assert reply.cached_tokens == 29  # 18 + 12 tokens; the last output token was never computed


def test_an_output_says_why_the_rest_of_its_prompt_was_computed(tiny: Tiny) -> None:
    parted = PrefixMiss(7, "differs", tuple(SYSTEM[7:8]), (0, 4))  # the kept text, as far as its block goes
    for prompts, expected in (
        ([SYSTEM], PrefixMiss(0, "cold")),
        ([SYSTEM, SYSTEM], None),
        ([SYSTEM, [9, *SYSTEM]], PrefixMiss(0, "cold")),
        ([SYSTEM, [*SYSTEM[:7], 0, 4]], parted.read(tiny.tokenizer.text_of)),
        ([SYSTEM[:6], [*SYSTEM[:6], 60, 61]], PrefixMiss(6, "ended")),
    ):
        llm = tiny.llm(block_size=4)
        miss = [llm.generate(prompt, SamplingParams(max_tokens=0))[0] for prompt in prompts][-1].miss
        assert miss == expected, prompts


def test_an_evicted_prompt_is_said_to_be_evicted(tiny: Tiny) -> None:
    llm = tiny.llm(block_size=4, max_context=24, kv_cache_memory=24 * SLOT)
    short = SamplingParams(temperature=0, max_tokens=2)
    misses = [llm.generate(prompt, short)[0].miss for prompt in (SYSTEM, [9] * 20, SYSTEM)]
    assert [miss and miss.reason for miss in misses] == ["cold", "cold", "evicted"]


def test_a_text_that_always_changes_is_told_once(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny.llm(block_size=4)
    for number in range(6):
        llm.generate([3, 1, number, *[4, 5, 6, 7] * 20], SamplingParams(max_tokens=0))
    [line] = [one.message for one in caplog.records if "prompts change at token 2" in one.message]
    assert "the 81 tokens from there on are computed each time; move what changes" in line


def test_completions_of_one_prompt_compute_it_once(tiny: Tiny) -> None:
    llm = tiny.llm(lookup=True, block_size=4)
    params = SamplingParams(temperature=1, seed=5, n=4, max_tokens=12)
    (output,) = llm.generate(SYSTEM, params)
    assert cached(list(output.outputs)) == [0, 16, 16, 16]
    (alone,) = tiny.llm(prefix_reuse=False).generate(SYSTEM, params)
    assert texts(list(output.outputs)) == texts(list(alone.outputs))
    assert len(set(texts(list(output.outputs)))) == 4


def test_salts_keep_requests_apart(tiny: Tiny) -> None:
    llm = tiny.llm(block_size=4)
    salts = [None, "a", "b", "a", None, "\ud800", "\udfff", "\ud800"]
    outputs = [
        llm.generate(SYSTEM, SamplingParams(temperature=0, max_tokens=4, cache_salt=salt))[0]
        for salt in salts
    ]
    assert cached(outputs) == [0, 0, 0, 17, 17, 0, 0, 17]


def test_blocks_are_hashed_before_a_prompt_is_added(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = spied(monkeypatch, kv_blocks, "blake2b", lambda data, **_: len(data))
    llm = tiny.llm(block_size=4)
    [group] = llm.intake.prompts([SYSTEM], SamplingParams(temperature=0, max_tokens=1, n=3))
    assert len(hashed) == 3 * (1 + len(SYSTEM) // 4)  # a block's hash, and the first ones' root
    for one in group:
        engine_of(llm).add(one)
    hashed.clear()
    while engine_of(llm).has_work:
        engine_of(llm).step()
    assert sum(hashed) < 3 * 64  # the last block of each text, when it ends


def test_scored_prompts_are_computed(tiny: Tiny) -> None:
    llm = tiny.llm(block_size=4)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    outputs = [llm.generate(SYSTEM, p)[0] for p in (params, params, GREEDY)]
    assert cached(outputs) == [0, 0, 17]
    assert prefix_hits(llm) == (17, 18)  # only the last one looked


def test_a_draft_guesses_as_well_behind_a_prefix_it_has_and_behind_one_it_never_read(tiny: Tiny) -> None:
    without = tiny.llm(drafts=["similar"], block_size=4, prefix_reuse=False).generate(SYSTEM, GREEDY)[0]
    llm = tiny.llm(drafts=["similar"], block_size=4)
    no_drafts = SamplingParams(temperature=0, max_tokens=12, speculation=False)  # type: ignore[arg-type]
    llm.generate(SYSTEM, no_drafts)  # the target's blocks are there, the draft's are not
    for _ in range(2):  # and then they are
        (output,) = llm.generate(SYSTEM, GREEDY)
        assert output.cached_tokens == 17
        assert output.figures == without.figures


def test_a_draft_reads_a_prefix_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny.llm(drafts=["target"], block_size=4)
    draft = next(s for s in engine_of(llm)._speculators._speculators if s.name == "0-target")  # type: ignore[attr-defined]
    rows = spied(monkeypatch, draft._runner, "launch", lambda rows, **_: sum(len(p.token_ids) for p in rows))
    first_passes = []
    for _ in range(2):
        rows.clear()
        llm.generate(SYSTEM, GREEDY)
        first_passes.append(rows[0])
    assert first_passes == [18, 2]  # in step with the target; 16 of them are there the second time


def test_the_cache_is_written_as_far_as_prompt_memory_reaches(tiny: Tiny) -> None:
    llm = tiny.llm(block_size=4, prompt_memory=20 * 4 * SLOT)
    cache = runner_of(llm).cache
    assert len(cache.keys[0]) >= 4000
    short = SamplingParams(temperature=0, max_tokens=2)
    for number in range(30):
        llm.generate([number, *SYSTEM], short)
    written = cache.keys[0].flatten(1).abs().sum(1) != 0
    blocks_of_one = 6  # of 4: 19 tokens, 2 more
    assert int(written.sum()) <= 4 * (20 + blocks_of_one)
    assert [cached(llm.generate([number, *SYSTEM], short)) for number in (29, 27, 0)] == [[18], [18], [0]]


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    prefix = draw(st.sampled_from([SYSTEM, SYSTEM, SYSTEM[:11], []]))
    rest = draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    params = SamplingParams(
        temperature=1,
        seed=draw(st.integers(0, 99)),
        max_tokens=draw(st.integers(1, 20)),
        cache_salt=draw(st.sampled_from([None, None, None, "a"])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, None, 0])),
    )
    return [*prefix, *rest], params


@pytest.mark.slow
@settings(max_examples=60)
@given(
    requests=st.lists(traffic(), min_size=3, max_size=9),
    # After each number of steps: another request comes, or one that is there is aborted.
    happenings=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=12),
    options=st.fixed_dictionaries(
        {
            "drafts": st.sampled_from([(), ("similar",), ("similar", "stranger")]),
            "lookup": st.booleans(),
            "block_size": st.sampled_from([1, 4]),
            "max_nodes": st.just(8),
            "max_context": st.just(48),
            "max_step_tokens": st.sampled_from([6, 40]),
            "max_batch_size": st.sampled_from([2, 4]),
        }
    ),
)
def test_whatever_is_shared_preempted_or_aborted_texts_and_blocks_stay_right(
    tiny: Tiny,
    requests: list[tuple[list[int], SamplingParams]],
    happenings: list[tuple[int, int]],
    options: dict[str, Any],
) -> None:
    positions = 56  # the longest request needs 47: two of them fit only as far as they share
    llm = tiny.llm(kv_cache_memory=positions * SLOT * (1 + len(options["drafts"])), **options)
    engine = engine_of(llm)
    arriving = [
        Request(f"{number}", tuple(prompt), params, seed=params.seed or 0)
        for number, (prompt, params) in enumerate(requests)
    ]
    present: dict[str, AdmittedRequest] = {}

    def arrive(request: Request) -> None:
        present[request.request_id] = engine.admission.admit(request)
        engine.add(present[request.request_id])

    for request in arriving[:2]:
        arrive(request)
    del arriving[:2]

    def steps(number: int) -> None:
        for _ in range(number):
            for delta in engine.step():
                if delta.finished:
                    admitted = present.pop(delta.id)
                    request = admitted.request
                    alone = slow_generate(tiny.target, request.prompt_token_ids, request.params)
                    assert list(admitted.transcript.output().token_ids) == alone
            engine.check_integrity()

    for wait, what in happenings:
        steps(wait)
        if what == 0 and present:
            engine.abort(present.popitem()[0])
            engine.check_integrity()
        elif arriving:
            arrive(arriving.pop(0))
    while engine.has_work:
        steps(1)
    assert not present


FIXED = [*range(100, 300)]


def test_a_short_text_that_changes_three_times_in_a_row_is_noticed_once() -> None:
    for name, prompts, expected in (
        ("a date", [[7, number, *FIXED] for number in range(6)], [3]),
        ("a date of other lengths", [[7, *[9] * number, *FIXED] for number in range(6)], [3]),
        ("the same", [[7, *FIXED]] * 6, []),
        ("another text", [[number] * 200 for number in range(6)], []),
        ("too short a rest", [[7, number, *FIXED[:60]] for number in range(6)], []),
        ("interrupted", [[1, *FIXED], [2, *FIXED], [3, *FIXED], [5] * 99, [4, *FIXED], [6, *FIXED]], []),
    ):
        watch = ChangingText()
        assert [i for i, prompt in enumerate(prompts) if watch.see(b"", prompt)] == expected, name


def test_a_bounded_number_of_beginnings_is_watched() -> None:
    watch = ChangingText()
    for number in range(10_000):
        watch.see(b"%d" % number, FIXED)
    assert len(watch._seen) == 64
