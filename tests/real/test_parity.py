"""Real files say what transformers says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import pytest
import torch

from specinfer import LLM, SamplingParams

from .models import smollm2

pytestmark = pytest.mark.slow

PROMPTS = ["What is gravity?", "Write a haiku about rivers.", "Sort these words: pear, fig, apple."]


def test_smollm2_says_what_transformers_says(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    # Which it asks for at every module, though it is one table, and takes a tenth of a second.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    path = Path(smollm2())
    llm = LLM(str(path), dtype="float32", lookup=True, max_context=512)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        # If transformers' argmax is equal at every position, its greedy decoding gives the same text. A
        # choice between logits closer than 0.01 may fall either way.
        for row, token in zip(logits, tokens, strict=True):
            if int(row.argmax()) != token:
                assert float(row.max() - row[token]) < 1e-2
                break
