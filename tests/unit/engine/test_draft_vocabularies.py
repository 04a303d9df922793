"""Drafts with another vocabulary, or with more or fewer ids: the text is the target's all the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer import LLM, SamplingParams
from specinfer.engine import drafts
from specinfer.tree.token_tree import TokenTree
from tests.engines import ENGINE, assert_idle
from tests.foreign import write_foreign_llama
from tests.tiny_models import write_similar_llama, write_tiny_llama

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
def test_the_text_is_the_targets(guessing: LLM, sampling: dict[str, Any], options: dict[str, Any]) -> None:
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


TOKENS = 64
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
def sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets and drafts with the same tokens, and logits for more ids than there are tokens or fewer.

    Ids behind the last token are padding: small models of Qwen2.5 have 151,936 ids and large ones 152,064.
    """
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
def test_guesses_are_the_targets_ids(sizes: Path, target: int, draft: int, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=32, **sampling)
    trees: list[TokenTree] = []
    with engine(sizes, target, draft) as llm, llm.variant(drafts=()) as plain:
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


def test_a_shortlist_of_logits_changes_guesses_alone(sizes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of the first tokens begins with guesses among them; one with many others has any."""
    monkeypatch.setattr(drafts, "_SHORTLIST", 32)
    for target, draft in ((72, 64), (64, 64)):
        trees: list[TokenTree] = []
        with engine(sizes, target, draft) as llm, llm.variant(drafts=()) as plain:
            llm.on_tree = lambda event, trees=trees: trees.append(event.tree)
            for prompt in PROMPTS[:3:2]:
                for sampling in ({"temperature": 0}, {**SAMPLED, "top_p": 0.9}):
                    params = SamplingParams(max_tokens=32, **sampling)
                    [output], [alone] = llm.generate([prompt], params), plain.generate([prompt], params)
                    assert output.token_ids == alone.token_ids, (target, prompt, sampling)
        guesses = [[token for token in tree.token_ids[1:] if token >= 32] for tree in trees]
        assert not guesses[0], (target, draft)
        assert any(guesses), (target, draft)


def test_ids_that_the_draft_lacks_are_read_all_the_same(sizes: Path) -> None:
    prompt = [9, 70, 8, 79, 64, 7]
    params = SamplingParams(max_tokens=24, temperature=1.5, seed=3)
    with engine(sizes, 80, 64) as llm, llm.variant(drafts=()) as plain:
        [output], [alone] = llm.generate([prompt], params), plain.generate([prompt], params)
        assert output.token_ids == alone.token_ids
        assert max(output.token_ids) >= TOKENS, "the target says some of them, too"
        assert output.figures.proposed_by["draft"] > 0
        assert_idle(llm)


def test_a_draft_that_lacks_tokens_has_another_vocabulary(sizes: Path, tmp_path: Path) -> None:
    """As where tokens were added to the target, and the draft has its tokenizer but was not resized."""
    small = padded(sizes / "draft64", tmp_path / "small", 60)
    with LLM(str(sizes / "target72"), **{**ENGINE, "drafts": (str(small),)}) as llm:
        assert len(llm.models.foreign["draft"].logit_ids) == 60
        [output] = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=16, temperature=0))
        [alone] = llm.variant(drafts=()).generate(PROMPTS[:1], SamplingParams(max_tokens=16, temperature=0))
        assert output.token_ids == alone.token_ids
