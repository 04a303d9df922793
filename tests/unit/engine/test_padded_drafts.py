"""Drafts with the target's tokens and logits for more ids than it has, or fewer: they need no exchange.

Ids behind the last token are padding, as in Qwen2.5, whose small models have 151,936 and large ones 152,064.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer import LLM, SamplingParams
from specinfer.engine import drafts
from specinfer.tree.token_tree import TokenTree
from tests.engines import ENGINE, assert_idle
from tests.tiny_models import write_similar_llama, write_tiny_llama

TOKENS = 64
PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3] * 37, [50, 2, 61, 7]]
SAMPLED = {"temperature": 0.9, "seed": 5}
SIZES = pytest.mark.parametrize(("target", "draft"), [(64, 72), (72, 64), (72, 80), (80, 72)])


def padded(source: Path, folder: Path, size: int) -> Path:
    """Copy a model with `size` embeddings; padding ids are likely, too."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    more = table[: max(0, size - TOKENS)].flip(1)
    tensors["model.embed_tokens.weight"] = torch.cat((table[:size], more))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padded")
    target = write_tiny_llama(folder / "target64", vocab_size=TOKENS, max_context=96, tokenizer=True)
    draft = write_similar_llama(target, folder / "draft64", noise=0.1)
    for size in (72, 80):
        padded(target, folder / f"target{size}", size)
        padded(draft, folder / f"draft{size}", size)
    return folder


def engine(folder: Path, target: int, draft: int, **options: Any) -> LLM:
    options = {**ENGINE, "drafts": (str(folder / f"draft{draft}"),), **options}
    return LLM(str(folder / f"target{target}"), **options)


@SIZES
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {**SAMPLED, "top_p": 0.9},
        {**SAMPLED, "repetition_penalty": 1.3, "logit_bias": {50: 4.0}},
        {**SAMPLED, "speculation": {"verifier": "mss"}},
    ],
    ids=["greedy", "sampled", "processed", "multi-step"],
)
def test_the_text_is_the_targets_and_guesses_are_its_ids(
    folder: Path, target: int, draft: int, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=32, **sampling)
    trees: list[TokenTree] = []
    with engine(folder, target, draft) as llm, llm.variant(drafts=()) as plain:
        assert llm.models.foreign == {}
        llm.on_tree = lambda event: trees.append(event.tree)
        outputs = llm.generate(PROMPTS, params)
        if "speculation" not in sampling:
            alone = plain.generate(PROMPTS, params)
            assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
        assert sum(one.figures.accepted_by.get("draft", 0) for one in outputs) > 0
        assert_idle(llm)
    guessed = {token for tree in trees for token in tree.token_ids[1:]}
    assert guessed
    assert max(guessed) < min(target, draft)


def test_a_shortlist_of_logits_changes_guesses_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of the first tokens begins with guesses among them; one with many others has any."""
    monkeypatch.setattr(drafts, "_SHORTLIST", 32)
    for target, draft in ((72, 64), (64, 64)):
        trees: list[TokenTree] = []
        with engine(folder, target, draft) as llm, llm.variant(drafts=()) as plain:
            llm.on_tree = lambda event, trees=trees: trees.append(event.tree)
            for prompt in PROMPTS[::2]:
                for sampling in ({"temperature": 0}, {**SAMPLED, "top_p": 0.9}):
                    params = SamplingParams(max_tokens=32, **sampling)
                    [output], [alone] = llm.generate([prompt], params), plain.generate([prompt], params)
                    assert output.token_ids == alone.token_ids, (target, prompt, sampling)
        guesses = [[token for token in tree.token_ids[1:] if token >= 32] for tree in trees]
        assert not guesses[0], (target, draft)
        assert any(guesses), (target, draft)


def test_ids_that_the_draft_lacks_are_read_all_the_same(folder: Path) -> None:
    prompt = [9, 70, 8, 79, 64, 7]
    params = SamplingParams(max_tokens=24, temperature=1.5, seed=3)
    with engine(folder, 80, 64) as llm, llm.variant(drafts=()) as plain:
        [output], [alone] = llm.generate([prompt], params), plain.generate([prompt], params)
        assert output.token_ids == alone.token_ids
        assert max(output.token_ids) >= TOKENS, "the target says some of them, too"
        assert output.figures.proposed_by["draft"] > 0
        assert_idle(llm)


def test_a_draft_that_lacks_tokens_has_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    """As where tokens were added to the target, and the draft has its tokenizer but was not resized."""
    small = padded(folder / "draft64", tmp_path / "small", 60)
    with LLM(str(folder / "target72"), **{**ENGINE, "drafts": (str(small),)}) as llm:
        assert len(llm.models.foreign["draft"].logit_ids) == 60
        [output] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=16, temperature=0))
        [alone] = llm.variant(drafts=()).generate(PROMPTS[:1], SamplingParams(max_tokens=16, temperature=0))
        assert output.token_ids == alone.token_ids
