"""Texts of models whose rotary embeddings are scaled or rotate a part: the same with every tree and batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams, SpeculationParams
from tests.tiny_models import write_similar_llama, write_tiny_llama

pytestmark = pytest.mark.thorough

ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "a part": {"partial_rotary_factor": 0.5},
    "a part, dynamic": {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "dynamic", "factor": 4}},
}
# Texts begin within the original context of 32 tokens and end behind it, or begin behind it.
PROMPTS = [[5, 17, 40, 3, 58, 61, 12, 12], [9, 2, 9, 2, 9] * 8, [5, 17, 40, 3, 58, 61, 12, 12, 30, 1] * 3]
OPTIONS: dict[str, Any] = {"lookup": False, "dtype": "float32", "kv_cache_memory": 1 << 23}


def write(folder: Path, rope: dict[str, Any]) -> None:
    write_tiny_llama(folder / "target", tokenizer=True, max_context=32)
    config = json.loads((folder / "target" / "config.json").read_text()) | rope
    (folder / "target" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    write_similar_llama(folder / "target", folder / "draft", noise=0.02)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("rope", ["yarn", "dynamic", "a part, dynamic"])
def test_texts_do_not_depend_on_trees_batches_and_what_was_cached(
    rope: str, kernels: str, tmp_path: Path
) -> None:
    write(tmp_path, ROPES[rope])
    params = [
        SamplingParams(max_tokens=28, temperature=0),
        SamplingParams(max_tokens=28, temperature=0.9, seed=7),
    ]
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    # Measuring PyTorch's passes takes most of a minute.
    options = {**OPTIONS, "kernels": kernels, "tree_size": "fixed" if kernels == "torch" else "cost"}
    with LLM(target, prefix_reuse=False, **options) as llm:
        alone = [llm.generate([prompt], one)[0].token_ids for one in params for prompt in PROMPTS]
    assert {len(text) for text in alone} == {28}
    shaped = [replace(one, speculation=SpeculationParams(expansion=(2, 2, 1))) for one in params]
    with LLM(target, drafts=[draft], **{**options, "lookup": True}) as llm:
        for _ in range(2):  # the second run uses the first one's cache
            outputs = [output for one in shaped for output in llm.generate(PROMPTS, one)]
            assert [output.token_ids for output in outputs] == alone
            assert sum(output.figures.accepted_tokens for output in outputs) > 28


def test_a_part_within_a_context_of_its_own(tmp_path: Path) -> None:
    """Without scaling a text ends where the context does."""
    write(tmp_path, ROPES["a part"])
    with LLM(str(tmp_path / "target"), **OPTIONS) as llm:
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=40, temperature=0))
    assert len(output.token_ids) == 24
    assert output.finish_reason == "length"
