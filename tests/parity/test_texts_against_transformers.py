"""Texts of every family: greedy ones are those of transformers, and speculation changes none of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer import LLM, SamplingParams
from tests.engines import ENGINE
from tests.tiny_models import write_byte_tokenizer, write_similar_llama

from .families import CASES, save_random

PROMPTS = [[5, 17, 40, 3, 88, 61, 12, 12, 70], [9], [40, 41, 42, 40, 41, 42, 40]]
TOKENS = 12
PARAMS = [
    SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=TOKENS, ignore_eos=True),
]
# A few that have each another kind of layer; the others are thorough.
QUICK = ("qwen3", "phi3", "glm4")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CASES]


def said(model: Path, **options: object) -> list[list[int]]:
    with LLM(model, **{**ENGINE, **options}) as llm:
        return [list(out.token_ids) for params in PARAMS for out in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", NAMES)
def test_texts(name: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path / "target", tied=True)
    write_byte_tokenizer(tmp_path / "target", 96)
    draft = write_similar_llama(tmp_path / "target", tmp_path / "draft", noise=0.1)
    plain = said(tmp_path / "target")
    assert said(tmp_path / "target", drafts=(str(draft),), expansion=(2, 2, 1)) == plain
    with torch.no_grad():
        for prompt, text in zip(PROMPTS, plain, strict=False):
            made = list(prompt)
            for _ in range(TOKENS):
                made.append(int(theirs(torch.tensor([made])).logits[0, -1].argmax()))
            assert made[len(prompt) :] == text
