"""Drafts with another vocabulary in engines: the text is the target's, whatever they guess."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from specinfer import LLM, SamplingParams
from tests.engines import ENGINE, assert_idle
from tests.foreign import write_foreign_llama
from tests.tiny_models import write_tiny_llama

PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3] * 37, [50, 2, 61, 7], [49, 50, 49, 50, 30]]
SAMPLED = {"temperature": 0.8, "seed": 5}
WORDS = ["12", "3333", "\x02\x01", "\x00\x00\x00"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    target = write_tiny_llama(
        folder / "target", vocab_size=64, max_context=96, tokenizer=True, eos_token_id=63
    )
    write_foreign_llama(target, folder / "draft", words=WORDS, lacks=[30, 60])
    return folder


@pytest.fixture(scope="module")
def guessing(folder: Path) -> LLM:
    return LLM(str(folder / "target"), **cast(Any, {**ENGINE, "drafts": (str(folder / "draft"),)}))


@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED, {**SAMPLED, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4, "max_step_tokens": 20},
        {"prefix_reuse": False, "kv_cache_memory": 90_000, "block_size": 4},
        {"tree_size": "cost", "clock": "curve"},
    ],
    ids=["chunks", "little memory", "by cost"],
)
def test_the_text_is_that_of_the_target_alone(
    guessing: LLM, sampling: dict[str, Any], options: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=24, **sampling)
    # With a size of its own a request is guessed for, whatever that costs here.
    guessed = replace(params, speculation={"expansion": (1, 2, 1)})
    with guessing.variant(**options) as llm, guessing.variant(drafts=()) as plain:
        alone = [output.token_ids for output in plain.generate(PROMPTS, params)]
        for _ in range(2):  # the second run uses the first one's cache
            outputs = llm.generate(PROMPTS, guessed)
            assert [output.token_ids for output in outputs] == alone
            proposed = sum(output.figures.proposed_by.get("draft", 0) for output in outputs)
            accepted = sum(output.figures.accepted_by.get("draft", 0) for output in outputs)
            assert proposed > 0
            assert accepted > 0
        assert_idle(llm)


def test_multistep_sampling_takes_what_they_draw(guessing: LLM) -> None:
    params = SamplingParams(**SAMPLED, max_tokens=16)
    with guessing.variant(verifier="mss") as llm:
        outputs = llm.generate(PROMPTS, params)
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == [
            output.token_ids for output in outputs
        ]
        assert sum(output.figures.accepted_by.get("draft", 0) for output in outputs) > 0
    asked = SamplingParams(**SAMPLED, max_tokens=16, speculation={"verifier": "mss"})
    assert all(output.error is None for output in guessing.generate(PROMPTS, asked))
