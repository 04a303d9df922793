"""Cost of a request for prompt log-probabilities, in steps and rows of logits of other requests."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch import Tensor

from specinfer import LLM, SamplingParams
from specinfer.request import Delta
from specinfer.runtime.flight import Flight
from specinfer.verify.logprobs import PromptLogprobs
from tests.engines import Tiny, engine_of, runner_of, tiny_of

LONG = [(7 * i) % 60 for i in range(300)]
ROWS = 32  # of a step


tiny = tiny_of(vocab_size=64, max_context=512)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=1, seed=4, max_tokens=3, ignore_eos=True, **more)


def count_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the rows of logits that are made, block by block."""
    model, made = runner_of(llm).model, list[int]()
    logits, init = model.logits, Flight.__init__

    def counted(hidden_RD: Tensor) -> Tensor:
        made.append(hidden_RD.size(0))
        return logits(hidden_RD)

    def without_shortcut(self: Flight, hidden_RD: Tensor, head: Any, *args: Any, **options: Any) -> None:
        init(self, hidden_RD, counted, *args, **{**options, "logits_RV": None})

    monkeypatch.setattr(Flight, "__init__", without_shortcut)
    return made


@pytest.mark.parametrize("options", [{}, {"prefix_reuse": False}, {"max_batch_size": 1}])
def test_completions_share_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    llm = tiny.llm(block_size=4, max_step_tokens=ROWS, **options)
    [alone] = llm.generate(LONG, params(prompt_logprobs=2))
    plain = llm.generate(LONG, params(n=5))[0].outputs
    made = count_logits(llm, monkeypatch)
    [output] = llm.generate(LONG, params(n=5, prompt_logprobs=2))
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in plain]
    assert all(one.prompt_logprobs is output.prompt_logprobs for one in output.outputs)
    assert output.prompt_logprobs == alone.prompt_logprobs
    assert None not in output.prompt_logprobs[1:]
    answers = 5 * 3
    assert sum(made) == len(LONG) - 1 + answers, "each of the prompt's rows once, whatever n"


def until_first_token(llm: LLM, asked: SamplingParams, tokens: int, steps: int) -> tuple[int, int]:
    """Return the steps and rows (with logits) until the first token of another request.

    That request has `length` tokens, and arrives `after` steps later than a long prompt.
    """
    rows: list[int] = []
    engine, target = engine_of(llm), runner_of(llm)
    launch = target.launch

    def counted(parts: Any, **more: Any) -> Flight:
        rows.append(sum(2 * len(part.token_ids) - part.logits_from for part in parts))
        return launch(parts, **more)

    target.launch = counted  # type: ignore[method-assign, assignment]
    deltas: list[Delta] = []
    for one in llm.intake.prompts(LONG, asked)[0]:
        engine.add(one)
    for _ in range(steps):
        engine.step()
    [[stranger]] = llm.intake.prompts([63] * tokens, params())
    engine.add(stranger)
    rows.clear()
    while stranger.request.request_id not in {delta.id for delta in deltas}:
        deltas = engine.step()
    return len(rows), sum(rows)


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("steps", [1, 2])
def test_others_wait_as_beside_an_ordinary_prompt(tiny: Tiny, n: int, tokens: int, steps: int) -> None:
    def waited(**more: Any) -> tuple[int, int]:
        llm = tiny.llm(block_size=4, max_step_tokens=ROWS, max_batch_size=16)
        return until_first_token(llm, params(n=n, **more), tokens, steps)

    (ordinary, rows), (scored, with_logits) = waited(), waited(prompt_logprobs=20)
    assert scored <= ordinary + 1
    assert with_logits <= 1.5 * rows
    assert rows < len(LONG) - ROWS, "completions that wait for the prompt to be read let others pass"


def test_logits_of_a_prompt_are_made_in_blocks(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, held = tiny.llm(max_step_tokens=512), list[int]()
    [want] = tiny.llm(max_step_tokens=ROWS).generate([LONG], params(prompt_logprobs=1))
    scores = Flight.scores

    def noted(self: Flight, *args: Any) -> Any:
        found = scores(self, *args)
        held.append(max((len(block.rows) for block in self._blocks), default=0))
        return found

    monkeypatch.setattr(Flight, "scores", noted)
    made = count_logits(llm, monkeypatch)
    [found] = llm.generate([LONG], params(prompt_logprobs=1))
    assert found.prompt_logprobs == want.prompt_logprobs
    assert made[:3] == [64, 64, 64], "not all rows at once"
    assert max(held) == 64


def test_an_aborted_request_reports_what_is_known(tiny: Tiny) -> None:
    llm = tiny.llm(max_step_tokens=ROWS)
    engine = engine_of(llm)
    [[one]] = llm.intake.prompts([LONG], params(prompt_logprobs=0))
    engine.add(one)
    engine.step()
    last = engine.abort(one.request.request_id)
    known = [report is not None for report in last.prompt_logprobs]
    assert known == [0 < i <= ROWS // 2 for i in range(len(LONG))]


def test_nothing_is_kept_of_reports_that_nobody_has_any_more(tiny: Tiny) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(one) is PromptLogprobs for one in gc.get_objects())

    before, llm = kept(), tiny.llm()
    outputs = llm.generate([LONG, LONG[:40]], params(n=4, prompt_logprobs=20))
    assert kept() == before + 2, "one for each prompt"
    stream = llm.stream(LONG, params(prompt_logprobs=20))
    next(stream)
    stream.close()
    llm.check_integrity()  # between two steps, so the request has ended
    outputs.clear()
    assert kept() == before
