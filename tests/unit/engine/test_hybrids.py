"""Engines over hybrids say what whole passes say, whatever is guessed or reused."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.heads.checkpoint import load_head, open_head
from specinfer.kernels.choice import draft_kernels
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.weights import load_model
from specinfer.sampling_params import SamplingParams
from specinfer.tokenizer import Tokenizer
from tests.engines import CPU, Tiny, slow_generate
from tests.heads import block_config, eagle_config, tiny_head, write_tiny_head
from tests.kernels import kernels
from tests.parity.families import save_random
from tests.ranks import llm_of
from tests.tiny_models import write_byte_tokenizer, write_similar_llama

TEXT = [(i * i + 3 * i) % 61 for i in range(40)]
PROMPTS = [TEXT[:20], TEXT[:1], [5, *TEXT], [*TEXT[:20], 7, 8, 9], TEXT[3:9]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, seed=1, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=24, seed=1, ignore_eos=True),
]
SPECULATION: list[dict[str, Any]] = [
    {},
    {"drafts": ["target"], "expansion": (1, 1, 1)},
    {"drafts": ["similar"], "expansion": (3, 2, 1)},
    {"drafts": ["similar", "stranger"], "lookup": True},
]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["lfm2-biases", "qwen3.5", "granite-hybrid", "falcon-h1", "nemotron-h"])
def test_texts_are_those_of_whole_passes(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path / "target", tied=False, vocab_size=64)
    write_byte_tokenizer(tmp_path / "target", 64)

    def load(folder: str, noise: float) -> LanguageModel:
        if noise:
            write_similar_llama(tmp_path / "target", tmp_path / folder, noise=noise)
        used = draft_kernels(kernels("native")) if noise else kernels("native")
        return load_model(tmp_path / folder, dtype=torch.float32, device=CPU, kernels=used)

    models = load("target", 0), load("similar", 0.1), load("stranger", 5)
    hybrids = Tiny(*models, tokenizer=Tokenizer.load(tmp_path / "target"))
    expected = [[slow_generate(hybrids.target, text, params) for text in PROMPTS] for params in PARAMS]
    for speculation in SPECULATION:
        llm = hybrids.llm(**{"block_size": 4, "max_step_tokens": 16, "max_batch_size": 3, **speculation})
        for params, texts in [*zip(PARAMS, expected, strict=True)] * 2:  # the second time behind checkpoints
            outputs = llm.generate(PROMPTS, params)
            assert [list(output.token_ids) for output in outputs] == texts, speculation
            llm.check_integrity()
        assert [output.cached_tokens > 0 for output in outputs] == [True, False, True, True, True]
        assert llm.statistics().failures == {}
    for number, config in enumerate((eagle_config(own_embedding=True), block_config(own_embedding=True))):
        folder = write_tiny_head(tiny_head(config), tmp_path / f"head{number}")
        opened = open_head(folder, open_model(tmp_path / "target"))
        head = load_head(opened, hybrids.target, kernels=draft_kernels(kernels("native")))
        llm = llm_of(hybrids.target, tmp_path / "target", {"head": head})
        outputs = [output for params in PARAMS for output in llm.generate(PROMPTS, params)]
        assert [list(output.token_ids) for output in outputs] == [*chain.from_iterable(expected)]
        assert llm.statistics().failures == {}
