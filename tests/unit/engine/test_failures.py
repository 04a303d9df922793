"""A failure in a step ends only the request at fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer import SamplingParams
from specinfer.engine.trace import TreeEvent
from specinfer.grammar.grammar import GrammarCompiler
from specinfer.llm import LLM
from specinfer.plan import StepPlan
from specinfer.request import RequestOutput
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight
from specinfer.speculators import Outcome, Speculator, TokenTree
from tests.engines import Tiny, runner_of, write_tiny
from tests.flights import flight_over

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4], [50, 51, 52, 53], [7, 7, 7]]
SICK = PROMPTS[2]
PARAMS = SamplingParams(temperature=1, seed=2, max_tokens=12)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_context=96)


def expected(tiny: Tiny) -> list[tuple[int, ...]]:
    return [output.token_ids for output in tiny.llm().generate(PROMPTS, PARAMS)]


Spoiler = Callable[[Sequence[Rows], Flight], Flight]


def spoil(llm: LLM, monkeypatch: pytest.MonkeyPatch, spoilt: Spoiler) -> None:
    """Let the target's passes come back as `spoilt` makes them."""
    target = runner_of(llm)
    launch = target.launch
    monkeypatch.setattr(target, "launch", lambda rows, **options: spoilt(rows, launch(rows, **options)))


def is_sick(part: Rows) -> bool:
    """Whether these are rows of the sick request, some way into its answer."""
    return part.start + len(part.token_ids) > len(SICK) + 3 and part.block_table[0] == SICK_BLOCK[0]


SICK_BLOCK = [-1]  # the first block of the sick request, noted when its prompt is read


def note(rows: Sequence[Rows]) -> None:
    for part in rows:
        if part.start == 0:
            if list(part.token_ids[: len(SICK)]) == SICK:
                SICK_BLOCK[0] = part.block_table[0]
            elif part.block_table[0] == SICK_BLOCK[0]:
                SICK_BLOCK[0] = -1


def check_others(outputs: Sequence[RequestOutput], want: Sequence[tuple[int, ...]], error: str) -> None:
    for prompt, output, tokens in zip(PROMPTS, outputs, want, strict=True):
        if prompt == SICK:
            assert output.finish_reason == "error"
            assert output.error is not None
            assert error in output.error
            assert output.internal_error
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert (output.finish_reason, output.token_ids) == ("length", tokens)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=0, max_tokens=12)])
@pytest.mark.parametrize("drafts", [[], ["similar"]])
def test_logits_that_are_no_numbers_end_their_own_request(
    tiny: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    params: SamplingParams,
    drafts: list[str],
) -> None:
    want = [output.token_ids for output in tiny.llm().generate(PROMPTS, params)]
    llm = tiny.llm(drafts)

    def spoilt(rows: Sequence[Rows], flight: Flight) -> Flight:
        note(rows)
        wanted = [is_sick(part) for part in rows for _ in part.token_ids[part.logits_from :]]
        logits = torch.stack([torch.from_numpy(flight.row(i).copy()) for i in range(len(wanted))])
        logits[torch.tensor(wanted), 5] = value
        return flight_over(logits, flight.scan)

    spoil(llm, monkeypatch, spoilt)
    outputs = llm.generate(PROMPTS, params)
    check_others(outputs, want, f"logit 5 of 64 is {value}; the largest must be finite")
    llm.check_integrity()
    assert len(outputs[2].token_ids) >= 1


def test_a_request_whose_steps_fail_is_found_out_and_ends(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = expected(tiny)
    llm = tiny.llm(["similar"])

    def spoilt(rows: Sequence[Rows], flight: Flight) -> Flight:
        note(rows)
        if any(map(is_sick, rows)):
            raise MemoryError("no room for this one")
        return flight

    spoil(llm, monkeypatch, spoilt)
    check_others(
        llm.generate(PROMPTS, PARAMS),
        want,
        "its steps failed repeatedly: MemoryError('no room for this one')",
    )
    llm.check_integrity()
    assert "a step failed (1); requests continue from their texts" in caplog.text


def test_a_failure_that_does_not_come_back_costs_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    want = expected(tiny)
    llm = tiny.llm(["similar"])
    failing = iter([False, True, True, False, True, *[False] * 99])

    def spoilt(rows: Sequence[Rows], flight: Flight) -> Flight:
        if next(failing):
            raise RuntimeError("once in a while")
        return flight

    spoil(llm, monkeypatch, spoilt)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == want


def test_where_every_step_fails_every_request_ends_and_the_engine_lives(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny.llm()

    def spoilt(rows: Sequence[Rows], flight: Flight) -> Flight:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        spoil(llm, patch, spoilt)
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.finish_reason for output in outputs] == ["error"] * 4
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected(tiny)
    llm.check_integrity()


class Raising(Speculator):
    """A caller's speculator that is broken."""

    name = "broken"

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        raise ZeroDivisionError

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        raise ZeroDivisionError


def test_a_speculator_that_raises_costs_no_text(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM.from_models(tiny.llm(lookup=True).config, tiny.llm().models, [Raising()])
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected(tiny)
    assert len(caplog.records) == 1


def test_what_a_listener_raises_is_its_callers_and_no_text_is_lost(tiny: Tiny) -> None:
    llm = tiny.llm(["similar"])
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    for stream in streams:
        next(stream)

    def trace(event: TreeEvent) -> Any:
        raise OSError("the disk is full")

    llm.on_tree = trace
    with pytest.raises(OSError, match="the disk is full"):
        list(streams[0])
    llm.on_tree = None
    assert [[*stream][-1].token_ids for stream in streams[1:]] == expected(tiny)[1:]
    llm.check_integrity()


def test_a_step_that_fails_compiles_no_grammar_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text continues by the grammar that it was admitted with, whatever is cached."""
    llm = write_tiny(tmp_path, vocab_size=64, max_context=96, eos_token_id=0).llm()
    params = SamplingParams(temperature=1, seed=2, max_tokens=12, regex="[0-9]{20}")
    [want] = llm.generate(PROMPTS[:1], params)
    compiled, passes = list[object](), count()
    compile_form = GrammarCompiler.compile

    def counted(self: GrammarCompiler, form: Any) -> Any:
        compiled.append(form)
        return compile_form(self, form)

    def fourth_fails(rows: Sequence[Rows], flight: Flight) -> Flight:
        if next(passes) == 3:
            raise MemoryError
        return flight

    monkeypatch.setattr(GrammarCompiler, "compile", counted)
    spoil(llm, monkeypatch, fourth_fails)
    [found] = llm.generate(PROMPTS[:1], params)
    assert found.token_ids == want.token_ids
    assert (llm.statistics().failed_steps, len(compiled)) == (1, 1)
