"""The promise on a real model: the same seed gives the same text, and it is what transformers says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from specinfer import LLM, EngineConfig, SamplingParams

from .models import qwen_draft, smollm2

pytestmark = pytest.mark.slow

QUESTIONS = [
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "What is gravity? Answer in two sentences.",
    "Write a Python function that adds two numbers, then call it twice.",
]
SAMPLING = {
    "greedy": SamplingParams(temperature=0, max_tokens=32),
    "T=1": SamplingParams(temperature=1, seed=5, max_tokens=32),
    "T=.7, top_p, top_k, min_p": SamplingParams(
        temperature=0.7, top_p=0.9, top_k=50, min_p=0.02, seed=8, max_tokens=32
    ),
    "min, stop": SamplingParams(temperature=0.9, seed=3, max_tokens=48, min_tokens=12, stop=(".", "\n")),
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(smollm2(), lookup=False, max_context=1024)


def texts(llm: LLM, params: SamplingParams, *, together: bool) -> list[str]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, params) if together else [llm.chat(chat, params)[0] for chat in chats]
    llm.check_integrity()
    return [output.text for output in outputs]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_same_seed_gives_the_same_text_with_and_without_speculation(plain: LLM, sampling: str) -> None:
    options: dict[str, Any] = {"lookup": True, "max_context": 1024}
    speculative = LLM.from_models(EngineConfig.from_options(smollm2(), options), plain.models)
    params = SAMPLING[sampling]
    expected = texts(plain, params, together=False)
    assert all(len(text) > 10 or params.stop for text in expected)
    assert texts(speculative, params, together=False) == expected
    assert texts(speculative, params, together=True) == expected
    assert texts(plain, params, together=True) == expected


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
def test_the_head_that_comes_with_the_package_guesses_and_changes_nothing(plain: LLM, sampling: str) -> None:
    params = SAMPLING[sampling]
    expected = texts(plain, params, together=False)
    with LLM(
        smollm2(), drafts=["smollm2-135m-head"], lookup=False, tree_size="fixed", max_context=1024
    ) as llm:
        assert texts(llm, params, together=False) == expected
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        figures = [output.figures for output in llm.chat(chats, params)]
    tokens_per_step = sum(one.tokens_per_step for one in figures) / len(figures)
    assert tokens_per_step > (1.6 if sampling == "greedy" else 1.2)


def test_a_model_of_another_family_guesses_for_qwen() -> None:
    options: dict[str, Any] = {
        **{"lookup": False, "quantization": "int8", "max_context": 512, "kv_cache_memory": 1 << 29},
    }
    drafts: dict[str, Any] = {"drafts": (smollm2(),), "tree_size": "fixed"}
    llm = LLM(qwen_draft(), **options, **drafts)
    assert len(llm.models.foreign["draft"].logit_ids) == 39237
    plain = llm.variant(drafts=())
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:2]]
    for params in (SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=3, max_tokens=24)):
        expected = plain.chat(chats, params)
        outputs = llm.chat(chats, params)
        llm.check_integrity()
        assert [output.text for output in outputs] == [output.text for output in expected]
        steps = sum(output.figures.steps for output in outputs)
        assert sum(len(output.token_ids) for output in outputs) / steps > 1.3


def test_a_needle_is_found_in_an_int8_cache_with_and_without_speculation() -> None:
    filler = "The river runs past the mill and the old bridge. " * 60
    for place, number in ((0, "48213"), (30, "71904"), (60, "35586")):
        at = place * len(filler) // 60
        text = f"{filler[:at]}The secret number is {number}. {filler[at:]}"
        chat = [{"role": "user", "content": f"{text}\nWhat is the secret number? Repeat it."}]
        options: dict[str, Any] = {"max_context": 2048, "kv_cache_dtype": "int8"}
        found = []
        for lookup in (True, False):
            with LLM(smollm2(), lookup=lookup, **options) as llm:
                found += [output.text for output in llm.chat(chat, SAMPLING["greedy"])]
        assert found[0] == found[1]
        assert number in found[0], (place, found)


def test_smollm2_says_what_transformers_says(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    # Which it asks for at every module, though it is one table, and takes a tenth of a second.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    path = Path(smollm2())
    llm = LLM(str(path), dtype="float32", lookup=True, max_context=512)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
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
