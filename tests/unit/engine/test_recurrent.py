"""Engines whose models have recurrent states: texts are those of the states, whatever is reused or fails."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specinfer.engine import build
from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.memory import activation_bytes, cache_bytes
from specinfer.errors import CapacityError, ConfigError
from specinfer.kernels.recurrence_config import LayerKind, Recurrence
from specinfer.llm import LLM
from specinfer.request import Request
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight
from specinfer.sampling_params import SamplingParams
from specinfer.speculation_config import SpeculationConfig
from tests.engines import Tiny, assert_idle, engine_of, runner_of
from tests.recurrent import CONFIG, PLAIN, CountingModel, answer, counting
from tests.switched import RECURRENT, SWITCHED, switched_tiny

SYSTEM = [(7 * i) % 61 for i in range(50)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DELTA = Recurrence(
    kind=LayerKind.GATED_DELTA, taps=4, channels=24, heads=1, groups=1, key_size=4, value_size=16
)
SPECULATION: list[dict[str, Any]] = [{}, {"drafts": ["target"]}, {"drafts": ["similar"], "lookup": True}]


@pytest.fixture
def models(tiny: Tiny) -> Tiny:
    return counting(tiny.tokenizer)


def llm(models: Tiny, **options: Any) -> LLM:
    return models.llm(**{"block_size": 4, "kv_cache_memory": 1 << 20, **options})


def checked(llm: LLM, *prompts: list[int], tokens: int = 12) -> list[int]:
    """Answer the prompts together, check the texts, and return how many tokens each found."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([*prompts], params)
    llm.check_integrity()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == answer(prompt, tokens)
    return [output.cached_tokens for output in outputs]


def test_a_perfect_draft_is_accepted_whole(models: Tiny) -> None:
    one = llm(models, drafts=["target"], expansion=(1, 1, 1, 1))
    checked(one, SYSTEM, tokens=40)
    assert one.statistics().steps <= 1 + 8  # of five tokens each


@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
def test_a_next_turn_computes_only_what_is_new(models: Tiny, speculation: dict[str, Any]) -> None:
    one, text = llm(models, **speculation), [*SYSTEM]
    assert checked(one, text) == [0]
    for _ in range(3):
        text += [*answer(text, 12), 3, 4, 5]
        (found,) = checked(one, text)
        # The state's block ends before the last step of the answer, which may be a whole tree.
        assert len(text) - 3 - (5 if not speculation else 17) <= found < len(text)
    # A draft has begun there, too, and has not read the texts again.
    assert models.similar.rows < 2 * len(text) + 300  # type: ignore[attr-defined]


def test_a_shared_beginning_is_found_from_its_second_use_on(models: Tiny) -> None:
    one = llm(models, drafts=["similar"])
    assert [checked(one, [*SYSTEM, *[i] * 12]) for i in range(3)] == [[0], [0], [48]]
    together = llm(models, max_batch_size=4)
    assert checked(together, *([*SYSTEM, i, i, i] for i in range(4))) == [0, 48, 48, 48]


def test_a_long_prompt_has_checkpoints_every_1024_tokens(models: Tiny) -> None:
    one, long = llm(models, kv_cache_memory=1 << 23), [(i * i) % 59 for i in range(2600)]
    assert checked(one, long) == [0]
    for shared, found in ((2599, 2596), (2500, 2048), (2047, 1024), (900, 0)):
        assert checked(one, [*long[:shared], 60]) == [found]


def test_a_memory_limit_below_one_state_is_said(models: Tiny) -> None:
    with pytest.raises(CapacityError, match=r"^the recurrent states of one request and of 2 checkpoints"):
        llm(models, kv_cache_memory=200)


def test_a_plan_of_memory_counts_the_states_of_a_request() -> None:
    kv = 2 * 8 * 4  # a position's
    for asked, nodes in ((None, 64), ("auto", 64), (10, 10)):
        states, speculation = (1 + nodes) * 4 + 2 * 4, SpeculationConfig(max_nodes=asked)  # and 2 checkpoints
        assert cache_bytes([(CONFIG, torch.float32)], 100, speculation) == 100 * kv + states
        assert cache_bytes([(PLAIN, torch.float32)], 100, speculation) == 100 * 2 * kv
    recurrent = replace(CONFIG, layer_kinds=(LayerKind.ATTENTION, LayerKind.GATED_DELTA), recurrence=DELTA)
    bytes_of = [activation_bytes(one, torch.bfloat16, 10) for one in (PLAIN, recurrent)]
    assert bytes_of[1] - bytes_of[0] == 10 * (2 * (16 + 4 + 4 + 16) + 4 * (24 + 16))


def test_no_checkpoint_is_made_without_reuse(models: Tiny) -> None:
    one = llm(models, prefix_reuse=False)
    assert [checked(one, SYSTEM), checked(one, SYSTEM)] == [[0], [0]]
    assert engine_of(one)._executor.states.checkpoints == 0


def requests(llm: LLM, *prompts: list[int], tokens: int = 12) -> Iterator[str]:
    params = replace(GREEDY, max_tokens=tokens)
    for number, prompt in enumerate(prompts):
        admitted = engine_of(llm).admission.admit(Request(str(number), tuple(prompt), params, seed=0))
        engine_of(llm).add(admitted)
        yield admitted.request.request_id


def test_an_aborted_text_leaves_its_slot_and_what_it_computed(models: Tiny) -> None:
    one = llm(models, drafts=["similar"], max_batch_size=2)
    first, second = requests(one, SYSTEM, SYSTEM[::-1], tokens=60)
    for _ in range(3):  # the prompts, and trees
        engine_of(one).step()
    assert engine_of(one).abort(first) is not None
    engine_of(one).check_integrity()
    assert engine_of(one).abort(second) is not None
    assert checked(one, SYSTEM, [9, *SYSTEM]) == [48, 0]


def test_a_draft_whose_pass_failed_begins_again(models: Tiny) -> None:
    twin = CountingModel()
    one = llm(Tiny(models.target, twin, twin, models.tokenizer), drafts=["similar"], max_step_tokens=16)
    [*requests(one, SYSTEM, tokens=120)]
    for step in range(8):
        twin.fails = step == 6
        engine_of(one).step()
    while engine_of(one).has_work:
        engine_of(one).step()
    assert one.statistics().failures == {"0-similar": 1}
    assert one.statistics().steps < 70  # it pauses for 32, and is right again behind them
    assert twin.rows < 3 * len(SYSTEM) + 300


def test_a_draft_makes_the_checkpoint_that_it_missed_when_it_reads_the_text_again(models: Tiny) -> None:
    one, draft, read = llm(models, drafts=["similar"]), models.similar, list[int]()
    draft.fails = 1  # in the pass that was to make it
    assert checked(one, [*SYSTEM, 1]) == [0]
    checked(one, [9], tokens=80)  # meanwhile its pause ends
    for last in (2, 3):
        before = draft.rows
        assert checked(one, [*SYSTEM, last], tokens=2) == [48]
        read.append(draft.rows - before)
    assert read[0] - read[1] > 40


def test_a_restarted_engine_begins_with_no_states_and_goes_on(models: Tiny) -> None:
    whole = answer(SYSTEM, 12)
    for said in (1, 5, 11):  # by an engine that was killed
        one = llm(models, drafts=["similar"])
        request = Request("r", tuple(SYSTEM), GREEDY, seed=0)
        admitted = engine_of(one).admission.admit(request, prior_output=whole[:said])
        engine_of(one).add(admitted)
        while engine_of(one).has_work:
            engine_of(one).step()
        assert list(admitted.transcript.output().token_ids) == whole


def test_drafts_of_a_plain_target_have_states_of_their_own(tiny: Tiny, models: Tiny) -> None:
    mixed = Tiny(tiny.target, models.similar, models.similar, tiny.tokenizer)
    plain, one = tiny.llm(block_size=4), mixed.llm(["similar"], block_size=4)
    for prompt in (SYSTEM, SYSTEM, [*SYSTEM, 5, 6, 7, 8, 9]):
        expected, found = (llm.generate(prompt, GREEDY)[0] for llm in (plain, one))
        assert found.token_ids == expected.token_ids
        assert found.cached_tokens == expected.cached_tokens // 4 * 4  # states are kept at blocks' ends
        one.check_integrity()
    assert one.statistics().failures == {}


def test_auto_trees_are_as_large_as_the_memory_of_a_slot(models: Tiny) -> None:
    assert engine_of(llm(models, max_nodes="auto", tree_size="fixed"))._executor.states.nodes == 64
    with pytest.raises(ConfigError):
        llm(models, max_nodes=0)


# Faults and random lives: a fault costs its own request alone.


PROMPTS = [[(7 * i) % 61 for i in range(40)], [9, 8, 7, 6, 5, 4], [50, 51, 52, 53] * 3, [7, 7, 7]]
SICK = 2
PARAMS = SamplingParams(temperature=1, seed=2, max_tokens=24, ignore_eos=True)
HOW = {"block_size": 4, "max_step_tokens": 16, "max_batch_size": 4}


@pytest.fixture(scope="module", params=RECURRENT)
def hybrid(request: pytest.FixtureRequest, tiny: Tiny) -> Tiny:
    return switched_tiny(replace(SWITCHED[request.param], max_context=96), tiny.tokenizer)


@pytest.fixture(scope="module")
def want(hybrid: Tiny) -> list[tuple[int, ...]]:
    return [output.token_ids for output in hybrid.llm(**HOW).generate(PROMPTS, PARAMS)]


def spoil(llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str, start: int) -> None:
    """Write NaN into what a slot keeps of the sick text before its first pass at `start` or later."""
    runner = runner_of(llm)
    states, launch, slots = runner.states, runner.launch, list[int]()
    memory = states.memory.states_LSF if part == "states" else states.memory.rings_LRNF

    def spoilt(rows: Sequence[Rows], **options: Any) -> Flight:
        for one in rows:
            if one.start == 0 and [*one.token_ids[:4]] == PROMPTS[SICK][:4]:
                slots.append(one.states.slot)
            elif [one.states.slot] == slots and one.start >= start:
                memory[:, slots.pop()] = torch.nan
        return launch(rows, **options)

    monkeypatch.setattr(runner, "launch", spoilt)


@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
@pytest.mark.parametrize(("part", "start"), [("states", 16), ("states", 20), ("rings", 16)])
def test_what_is_no_number_in_a_state_ends_its_own_request(
    hybrid: Tiny,
    want: list[tuple[int, ...]],
    speculation: dict[str, Any],
    part: str,
    start: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = hybrid.llm(**HOW, **speculation)
    with monkeypatch.context() as patch:
        spoil(llm, patch, part, start)
        found = llm.generate(PROMPTS, PARAMS)
    for prompt, output, tokens in zip(PROMPTS, found, want, strict=True):
        if output.finish_reason == "error":
            assert prompt == PROMPTS[SICK]
            assert "the largest must be finite" in str(output.error)
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:  # a convolution sees a few tokens back, and only accepted nodes are read again
            assert output.token_ids == tokens
    assert part != "states" or speculation or found[SICK].finish_reason == "error"
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == want
    for said in range(0, 20, 3):  # no checkpoint has them
        params = replace(PARAMS, max_tokens=24 - said)
        [output] = llm.generate([*PROMPTS[SICK], *want[SICK][:said]], params)
        assert output.token_ids == want[SICK][said:]
    assert_idle(llm)


def test_a_context_of_few_tokens(hybrid: Tiny, want: list[tuple[int, ...]]) -> None:
    for tokens in (2, 3, 41):
        prompt = [7] if tokens < 9 else PROMPTS[0]
        one, whole = hybrid.llm(["similar"], **HOW, max_context=tokens), hybrid.llm(**HOW)
        found, other = (llm.generate(prompt, PARAMS)[0] for llm in (one, whole))
        assert found.token_ids == other.token_ids[: tokens - len(prompt)]
        assert found.finish_reason == "length"
        assert_idle(one)


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(20))
def test_every_text_is_that_of_its_states(seed: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, models = random.Random(seed), counting(tiny.tokenizer)
    monkeypatch.setattr(build, "MAX_CHECKPOINTS", chance.choice([2, 3, 8, 256]))
    drafts = chance.choice([[], ["similar"], ["similar", "stranger"]])
    batch, blocks = chance.choice([1, 3, 6]), chance.choice([40, 60, 300])
    llm = models.llm(
        drafts,
        block_size=4,
        kv_cache_memory=(2 * batch * 260 + blocks * 256 + 1024)
        * (1 + len(drafts)),  # bytes of slots, KV, copies
        max_step_tokens=chance.choice([8, 16, 40]),
        max_batch_size=batch,
        lookup=chance.random() < 0.5,
    )
    engine, live, ended = engine_of(llm), list[AdmittedRequest](), 0
    texts = [[chance.randrange(64) for _ in range(60)] for _ in range(3)]
    for number in range(120):
        if chance.random() < 0.35 and len(live) < 10:
            prompt = [*chance.choice(texts)[: chance.randrange(1, 70)], *range(chance.randrange(5))]
            params = replace(GREEDY, max_tokens=chance.randrange(1, 40))
            live.append(engine.admission.admit(Request(str(number), tuple(prompt), params, seed=0)))
            engine.add(live[-1])
        if live and chance.random() < 0.06:
            engine.abort(live.pop(chance.randrange(len(live))).request.request_id)
        if chance.random() < 0.04:
            failing = chance.choice([models.target, models.similar])
            failing.fails = 1
        try:
            engine.step()
        except RuntimeError as error:
            engine.fail(error)
        engine.check_integrity()
        for one in [one for one in live if one.transcript.finished]:
            live.remove(one)
            found, prompt = one.transcript.output(), list(one.request.prompt_token_ids)
            said = answer(prompt, one.request.params.max_tokens)
            assert list(found.token_ids) == said[: len(found.token_ids)]
            assert found.finish_reason == "error" or len(found.token_ids) == len(said)
            texts.append([*prompt, *found.token_ids])
            ended += 1
    assert ended > 4
