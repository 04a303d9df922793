"""A head in an engine guesses what its plain module would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specinfer import SamplingParams
from specinfer.engine import drafts
from specinfer.heads.checkpoint import AnyHeadModel
from specinfer.kernels.choice import TORCH
from specinfer.models.open_model import open_model
from specinfer.tree.distribution import Distribution
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import Tiny
from tests.heads import VOCAB, block_config, change_head, eagle_config, tiny_body, tiny_head, write_tiny_head
from tests.unit.engine.heads.head_engines import (
    HEADS,
    PROMPTS,
    SAMPLED,
    AnyHead,
    answered,
    engine,
    is_as_likely,
    likelihood_gap,
    load,
    logits_made,
    module_logits,
    shaped,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HEADS)
def test_every_guess_is_as_likely_as_the_module_says(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, AnyHead], name: str
) -> None:
    module, seen, depths = modules[name], 0, set[int]()
    with engine(tiny, heads[name], block_size=4, max_step_tokens=20) as llm:
        for prompt in [*PROMPTS, *PROMPTS]:  # the second time its keys and values lie in blocks it finds
            for one in answered(llm, tiny, [prompt], shaped(8)):
                depths.update(one[2].depths())
                assert is_as_likely(module, *one)
                seen += 1
                if seen == 3:
                    wrong = likelihood_gap(module, *one, shift=1)
                    assert wrong > 1e-3, "a head whose taps are one layer off would not be found"
        assert llm.statistics().prefix_hits > 0
        together = [*answered(llm, tiny, PROMPTS, shaped(6))]  # in one pass
        assert all(is_as_likely(module, *one) for one in together)
        assert sum(tree.num_nodes > 1 for *_, tree in together) > len(PROMPTS)
    assert seen > 18
    assert depths == {0, 1, 2, 3}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("draw", ["iid", "without_replacement", "top_k"])
def test_samples_are_drawn_from_the_law_that_is_told(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, AnyHead], name: str, draw: str
) -> None:
    head, seen = modules[name], 0
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=11)
    with engine(tiny, heads[name], verifier="mss", draw=draw, expansion=(2, 2, 1)) as llm:
        for text, hidden_TND, tree in answered(llm, tiny, PROMPTS[:1], params):
            for parent, draws in draws_by_parent(tree.draws).items():
                law = module_logits(head, text, hidden_TND, list(tree.path_tokens(parent)))
                expected = (law / 0.9).softmax(-1).double().numpy()
                for one in draws:
                    seen += 1
                    if draw == "top_k":
                        continue
                    assert isinstance(one.law, Distribution)
                    law_of_all = np.zeros(64)
                    law_of_all[one.law.ids if one.law.ids is not None else slice(None)] = (
                        one.law.probabilities
                    )
                    np.testing.assert_allclose(law_of_all[head.ids.numpy()], expected, atol=1e-4)
    assert seen > 6


@pytest.mark.few(1)
@pytest.mark.parametrize("own_head", [False, True])
def test_texts_of_common_tokens_are_guessed_from_the_shortlist(
    tiny: Tiny, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_head: bool
) -> None:
    monkeypatch.setattr(drafts, "_SHORTLIST", 32)
    config = eagle_config(draft_vocab_size=VOCAB, own_head=own_head)
    head, loaded = load(tiny, folder, write_tiny_head(tiny_head(config, seed=3), tmp_path))
    module, counts = head.module(open_model(folder / "target")), set[int]()
    with engine(tiny, loaded, verifier="mss", draw="iid", expansion=(2, 2, 1)) as llm:
        params = SamplingParams(max_tokens=16, temperature=0.9, seed=11)
        for text, hidden_TND, tree in [one for p in PROMPTS for one in answered(llm, tiny, [p], params)]:
            made = logits_made(text, 32)
            for parent, draws in draws_by_parent(tree.draws).items():
                logits = module_logits(module, text, hidden_TND, list(tree.path_tokens(parent)))[made]
                for one in draws:
                    assert isinstance(one.law, Distribution)
                    counts.add(len(logits))
                    told, others = np.split(one.law.dense(), [len(logits)])
                    np.testing.assert_allclose(told, (logits / 0.9).softmax(-1).double().numpy(), atol=1e-4)
                    assert not others.any()
    assert counts == {32, VOCAB}
    for sampling in ({"temperature": 0}, SAMPLED):
        params = SamplingParams(max_tokens=24, **sampling)
        with engine(tiny, loaded) as llm, engine(tiny, None) as plain:
            outputs, alone = llm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
        assert [one.token_ids for one in outputs] == [one.token_ids for one in alone], sampling
        assert sum(one.figures.proposed_by["draft"] for one in outputs) > 0


def test_guesses_are_the_likeliest_with_what_the_token_before_adds(tiny: Tiny, folder: Path) -> None:
    head = tiny_head(block_config(reads_last=True), seed=9)
    with torch.no_grad():
        head.markov_head.markov_w2.weight.mul_(15)  # the previous token decides more than hidden states
    written, loaded = load(tiny, folder, write_tiny_head(head, folder / "pairs"))
    module = written.module(open_model(folder / "target"))
    roots, deeper = 0, []
    with engine(tiny, loaded) as llm:
        trees = [*answered(llm, tiny, PROMPTS[:1], SamplingParams(max_tokens=12, temperature=0))]
    for text, hidden_TND, tree in trees:
        for node in range(tree.num_nodes):
            below = [tree.token_ids[i] for i in range(tree.num_nodes) if tree.parents[i] == node]
            if not below:
                continue
            said = module_logits(module, text, hidden_TND, list(tree.path_tokens(node)))
            likeliest = module.ids[said.argsort(descending=True)[: len(below)]].tolist()
            if node == 0:  # the previous token is known: all children are the likeliest, in order
                assert below == likeliest
                roots += 1
            else:  # candidates are chosen after the mean of possible previous tokens
                deeper.append(below[0] == likeliest[0])
    assert roots > 3
    assert sum(deeper) > 0.7 * len(deeper) > 0


def test_layers_of_an_eagle_head_may_have_windows(tiny: Tiny, folder: Path, tmp_path: Path) -> None:
    config = eagle_config(body=tiny_body(qk_norm=True, num_layers=2), own_head=False)
    kinds = ["sliding_attention", "full_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 7, "layer_types": kinds}
    write_tiny_head(tiny_head(config, seed=8), tmp_path)
    change_head(tmp_path, config=lambda c: c["transformer_layer_config"].update(windows))
    head, loaded = load(tiny, folder, tmp_path)
    module = head.module(open_model(folder / "target"))
    with engine(tiny, loaded, block_size=4) as llm:
        trees = [*answered(llm, tiny, PROMPTS, shaped(6))]
    assert all(is_as_likely(module, *one) for one in trees)
    assert sum(tree.num_nodes for *_, tree in trees) > 100


@pytest.mark.parametrize("causal", [True, False])
def test_layers_of_a_block_head_may_have_windows(
    tiny: Tiny, folder: Path, tmp_path: Path, causal: bool
) -> None:
    config = block_config(own_head=False, causal=causal, markov_rank=0)
    kinds = ["sliding_attention"] * 2
    windows = {"use_sliding_window": True, "sliding_window": 7, "layer_types": kinds, "is_causal": causal}
    found = list[list[float]]()
    for more, kernels in ((windows, TORCH), (windows, None), ({"is_causal": causal}, None)):
        write_tiny_head(tiny_head(config, seed=8), tmp_path)
        change_head(tmp_path, config=lambda c, more=more: c["transformer_layer_config"].update(more))
        with engine(tiny, load(tiny, folder, tmp_path, kernels)[1], block_size=4) as llm:
            trees = answered(llm, tiny, PROMPTS, shaped(6))
            found.append([draw.confidence for *_, tree in trees for draw in tree.draws])
    assert len(found[0]) > 60
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert not np.allclose(found[0][:30], found[2][:30], atol=1e-2)
