"""Ends of texts in engines: ending tokens and min_tokens, with and without trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.errors import RequestError
from specinfer.request import FinishReason
from specinfer.speculate.policy.policy import StepReport
from specinfer.speculate.speculator import Outcome
from tests.engines import Tiny, assert_idle, engine_of, write_tiny
from tests.tiny_models import write_tiny_llama
from tests.unit.tokenizer.made_up import write_folder

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3, 3, 3, 3]]
SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "chain": {"drafts": ["target"], "expansion": (1, 1, 1, 1)},
    "tree": {"drafts": ["similar"], "lookup": True, "expansion": (3, 2, 1)},
}


def test_a_request_that_can_never_fit_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    slot = 2 * 2 * 2 * 8 * 4  # bytes of a position: K and V, 2 layers, 2 heads of 8, float32
    tiny = write_tiny(tmp_path_factory.mktemp("long"), vocab_size=64, max_context=256)
    llm = tiny.llm(kv_cache_memory=slot * 144, block_size=4)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=139))
    assert len(output.token_ids) == 139  # 5 + 139 is all there is
    with pytest.raises(RequestError, match="need 145 KV cache positions; the cache has 144"):
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=140))
    assert_idle(llm)


def note_outcomes(llm: LLM) -> list[Outcome]:
    """Notes the outcomes that speculators observe."""
    noted: list[Outcome] = []
    speculators = engine_of(llm)._speculators
    observe = speculators.observe

    def heard(report: StepReport) -> None:
        noted.extend(report.outcomes)
        observe(report)

    speculators.observe = heard  # type: ignore[method-assign]
    return noted


@pytest.mark.parametrize("ending", ["finished", "aborted"])
def test_speculators_keep_nothing_of_a_request_that_left(tiny: Tiny, ending: str) -> None:
    llm = tiny.llm(drafts=["similar"], lookup=True)
    outcomes = note_outcomes(llm)
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))
    first = next(stream)
    if ending == "finished":
        assert [*stream][-1].finished
    else:
        stream.close()
    llm.check_integrity()  # waits for the end of the request
    assert [one.finished for one in outcomes if one.request_id == first.request_id].count(True) == 1
    by_name = {s.name: s for s in engine_of(llm)._speculators._speculators}  # type: ignore[attr-defined]
    assert (by_name["0-similar"]._texts._texts, by_name["lookup"]._running) == ({}, {})


@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 5, "max_batch_size": 4, "block_size": 4}])
@pytest.mark.parametrize("speculation", SPECULATION)
def test_a_request_may_want_no_token(tiny: Tiny, speculation: str, limits: dict[str, int]) -> None:
    llm = tiny.llm(**SPECULATION[speculation], **limits)
    outcomes = note_outcomes(llm)
    some, none = SamplingParams(temperature=0, max_tokens=9), SamplingParams(max_tokens=0, n=2)
    expected = tiny.llm().generate(PROMPTS, some)
    batch = [*zip(PROMPTS, [some] * 3, strict=True), *zip(PROMPTS, [none] * 3, strict=True)]
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    assert [output.token_ids for output in outputs[:3]] == [output.token_ids for output in expected]
    empty = [one for output in outputs[3:] for one in output.outputs]
    assert {(one.text, one.token_ids, one.finish_reason) for one in empty} == {("", (), FinishReason.LENGTH)}
    assert len(empty) == 6
    assert all(one.finished and one.timing.finished for one in empty)
    ended = sorted(one.request_id for one in outcomes if one.finished)
    assert ended == sorted(one.request_id for output in outputs for one in output.outputs)
    llm.check_integrity()
    assert_idle(llm)


def test_a_prompt_that_was_computed_for_no_token_is_found_again(tiny: Tiny) -> None:
    llm, params = tiny.llm(block_size=4), SamplingParams(temperature=0, max_tokens=3)
    llm.generate([PROMPTS[1]], SamplingParams(max_tokens=0))
    (output,), (alone,) = (one.generate([PROMPTS[1]], params) for one in (llm, tiny.llm()))
    assert (output.cached_tokens, output.token_ids) == (11, alone.token_ids)


def test_a_prompt_that_fills_the_context_may_be_scored(tiny: Tiny) -> None:
    llm = tiny.llm(max_context=16)
    prompt = [1 + i % 9 for i in range(16)]
    [scored] = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (scored.token_ids, scored.finish_reason) == ((), FinishReason.LENGTH)
    assert [one is None for one in scored.prompt_logprobs] == [True, *[False] * 15]
    with pytest.raises(RequestError, match="16 tokens; allowed: at most 15, since the context is 16"):
        llm.generate([prompt], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="17 tokens; allowed: at most 16, since the context is 16;"):
        llm.generate([[*prompt, 1]], SamplingParams(max_tokens=0))


def test_a_stop_with_the_name_of_a_special_token_ends_texts_alike_with_trees(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "named", vocab_size=258, max_context=128, eos_token_id=257)
    write_folder(folder)  # 256 bytes, <s>, </s>
    law: dict[str, Any] = {"temperature": 1, "max_tokens": 60, "allowed_token_ids": (*range(97, 107), 256)}
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 1 << 22, "kernels": "torch"}
    ended = []
    for drafts in ((), (folder,)):
        with LLM(folder, drafts=drafts, lookup=False, tree_size="fixed", **options) as llm:
            for seed in range(3):
                [whole] = llm.generate("ab", SamplingParams(**law, seed=seed, visible_token_ids=(256,)))
                before = whole.text.partition("<s>")[0]
                for stop in ("<s>", before[-1:] + "<s>"):
                    params = SamplingParams(**law, seed=seed, stop=("zz", stop))
                    [output] = llm.generate("ab", params)
                    assert output.text + stop == before + "<s>"
                    assert (output.stopped_by, output.token_ids[-1]) == (stop, 256)
                    ended.append((output.text, output.finish_reason, output.token_ids))
    assert ended[: len(ended) // 2] == ended[len(ended) // 2 :]
