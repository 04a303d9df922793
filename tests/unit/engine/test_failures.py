"""A failure in a step ends the requests of the step, or the one at fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch

from specinfer import SamplingParams
from specinfer.engine.steps import TreeEvent
from specinfer.errors import ModelFileError
from specinfer.llm import LLM
from specinfer.request import RequestOutput
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight
from tests.engines import Tiny, assert_idle, engine_of, runner_of
from tests.flights import flight_over

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4], [50, 51, 52, 53], [7, 7, 7]]
SICK = PROMPTS[2]
PARAMS = SamplingParams(temperature=1, seed=2, max_tokens=12)


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
            assert error in output.error
            assert output.internal_error
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert (output.finish_reason, output.token_ids) == ("length", tokens)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=0, max_tokens=12)])
@pytest.mark.parametrize("drafts", [[], ["similar"]])
def test_logits_that_are_no_numbers_end_their_own_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, value: float, params: SamplingParams, drafts: list[str]
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


FAULTS = [
    *((part, MemoryError("no room")) for part in ("propose", "launch", "move", "observe")),
    # The output layer may be read for the first time when a tree is verified.
    *((part, ModelFileError("the disk failed")) for part in ("_launch", "_land")),
]


@pytest.mark.parametrize(("part", "error"), FAULTS, ids=str)
def test_a_step_that_fails_ends_its_requests_and_no_later_one(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    want = expected(tiny)
    llm, calls, heard = tiny.llm(["similar"], max_batch_size=2), count(), list[BaseException]()
    llm.loop.on_failed = lambda error, names: heard.append(error)
    engine = engine_of(llm)
    owner = next(one for one in (engine, engine._speculators, engine._executor) if hasattr(one, part))
    real = getattr(owner, part)

    def fails(*args: Any, **options: Any) -> Any:
        if next(calls) == (1 if part == "move" else 3):
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, part, fails)
    outputs = llm.generate(PROMPTS, PARAMS)
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert 1 <= len(failed) <= 2, "those of the step"
    of_file, said = isinstance(error, ModelFileError), f"a step of the engine failed: {error!r}"
    said = f"the model cannot be read: {error}" if of_file else said
    assert [(output.error, output.internal_error) for output in failed] == [(said, True)] * len(failed)
    assert heard == ([] if of_file else [error]), "a server's process does not end for a file"
    for output, tokens in zip(outputs, want, strict=True):
        assert output.token_ids == tokens[: len(output.token_ids)]
        assert output.finish_reason == "error" or output.token_ids == tokens
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == want
    assert_idle(llm)


def test_a_listener_that_raises_ends_its_request(tiny: Tiny) -> None:
    llm = tiny.llm(["similar"])

    def trace(event: TreeEvent) -> None:
        if event.request_id == "request-1":
            raise OSError("the disk is full")

    llm.on_tree = trace
    found = llm.generate(PROMPTS, PARAMS)
    assert [output.finish_reason for output in found] == ["length", "error", "length", "length"]
    assert found[1].error == "on_tree failed: the disk is full"
    want = expected(tiny)
    assert [found[number].token_ids for number in (0, 2, 3)] == [want[number] for number in (0, 2, 3)]
    assert_idle(llm)
