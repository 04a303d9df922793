"""A head in an engine guesses what its plain module would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specinfer import SamplingParams
from specinfer.engine import drafts
from specinfer.errors import ModelError
from specinfer.heads.checkpoint import AnyHeadModel, HeadFolder, head_shapes
from specinfer.heads.layouts import head_config
from specinfer.kernels.choice import TORCH
from specinfer.models.open_model import open_model
from specinfer.speculation_config import Quantization
from specinfer.tree.distribution import Distribution
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import Tiny
from tests.heads import VOCAB, block_config, change_head, eagle_config, tiny_body, tiny_head, write_tiny_head
from tests.oracles.dflash2 import PlainHead
from tests.unit.engine.heads import head_engines
from tests.unit.engine.heads.head_engines import (
    PROMPTS,
    SAMPLED,
    answered,
    engine,
    load,
    logits_made,
    module_logits,
    shaped,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", head_engines.HEADS)
def test_every_guess_is_as_likely_as_the_module_says(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, head_engines.AnyHead], name: str
) -> None:
    module, seen, depths = modules[name], 0, set[int]()
    with engine(tiny, heads[name], block_size=4, max_step_tokens=20) as llm:
        for prompt in [*PROMPTS, *PROMPTS]:  # the second time its keys and values lie in blocks it finds
            for one in answered(llm, tiny, [prompt], shaped(8)):
                depths.update(one[2].depths())
                assert head_engines.is_as_likely(module, *one)
                seen += 1
                if seen == 3:
                    wrong = head_engines.likelihood_gap(module, *one, shift=1)
                    assert wrong > 1e-3, "a head whose taps are one layer off would not be found"
        assert llm.statistics().prefix_hits > 0
        together = [*answered(llm, tiny, PROMPTS, shaped(6))]  # in one pass
        assert all(head_engines.is_as_likely(module, *one) for one in together)
        assert sum(tree.num_nodes > 1 for *_, tree in together) > len(PROMPTS)
    assert seen > 18
    assert depths == {0, 1, 2, 3}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", head_engines.HEADS)
@pytest.mark.parametrize("draw", ["iid", "without_replacement", "top_k"])
def test_samples_are_drawn_from_the_law_that_is_told(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, head_engines.AnyHead], name: str, draw: str
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
                    whole = np.zeros(64)
                    whole[one.law.ids if one.law.ids is not None else slice(None)] = one.law.probabilities
                    np.testing.assert_allclose(whole[head.ids.numpy()], expected, atol=1e-4)
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
    assert all(head_engines.is_as_likely(module, *one) for one in trees)
    assert sum(tree.num_nodes for *_, tree in trees) > 100


@pytest.mark.parametrize("causal", [True, False])
def test_layers_of_blocks_may_have_windows(tiny: Tiny, folder: Path, tmp_path: Path, causal: bool) -> None:
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


# DFlash 2.


OWN = {
    **{"block_size": 5, "mask_token_id": 1, "target_layer_ids": [0, 2]},
    **{"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
}
DFLASH2: dict[str, Any] = {
    **{"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False},
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5},
    **{"rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": False},
    "dflash_config": OWN,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2}


def write_dflash2(folder: Path, **more: Any) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """A random head."""
    described, chance = {**DFLASH2, **more}, torch.Generator().manual_seed(4)
    shapes = head_shapes(head_config(described, 3, {}))
    tensors = {n: ("norm" in n) + 0.3 * torch.randn(shape, generator=chance) for n, shape in shapes.items()}
    for name in ("lm_head.weight", "embed_tokens.weight"):
        assert name not in tensors, "the target's are used"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors, described


@pytest.mark.parametrize("more", [{}, WINDOWS])
def test_dflash2_guesses_as_a_plain_head(tiny: Tiny, folder: Path, tmp_path: Path, more: Any) -> None:
    written, tensors, described = write_dflash2(tmp_path / "head", **more)
    target = open_model(folder / "target")
    embedding = target.read_rows("model.embed_tokens.weight", 0, VOCAB).double().numpy()
    rows = embedding
    if "lm_head.weight" in target.shapes:
        rows = target.read_rows("lm_head.weight", 0, VOCAB).double().numpy()
    plain = PlainHead({k: v.double().numpy() for k, v in tensors.items()}, described, (embedding, rows))
    gaps = list[float]()
    with engine(tiny, load(tiny, folder, written)[1], block_size=4) as llm:
        for text, hidden_TND, tree in answered(llm, tiny, PROMPTS, shaped(8)):
            taps = hidden_TND[: len(text) - 1, [1, 3]].double().numpy()
            for parent, draws in draws_by_parent(tree.draws).items():
                logits = plain.logits(text, taps, list(tree.path_tokens(parent)))
                law = np.exp(logits - logits.max())
                law /= law.sum()
                gaps += [abs(law[tree.token_ids[draw.node]] - draw.confidence) for draw in draws]
    assert len(gaps) > 60
    assert max(gaps) < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_texts_with_dflash2(tiny: Tiny, folder: Path, tmp_path: Path, kind: Quantization) -> None:
    head, loaded = load(tiny, folder, write_dflash2(tmp_path / "head")[0], quantization=kind, keep=False)
    assert 0 < head.weight_bytes(torch.float32, kind) <= head.weight_bytes(torch.float32)
    texts = []
    for draft in (None, loaded):
        with engine(tiny, draft) as llm:
            outputs = [
                output
                for params in ({"temperature": 0}, head_engines.SAMPLED)
                for output in llm.generate(PROMPTS, SamplingParams(max_tokens=12, **params))
            ]
        texts.append([list(output.token_ids) for output in outputs])
    assert texts[0] == texts[1]
    assert sum(output.figures.proposed_by["draft"] for output in outputs) > 50


def test_refusals_of_dflash2(folder: Path, tmp_path: Path) -> None:
    target = open_model(folder / "target")
    written = write_dflash2(tmp_path / "head")[0]
    with pytest.raises(ModelError, match="of a kind that is not trained here"):
        HeadFolder(written, target.config).module(target)
    for number, (own, message) in enumerate(
        (
            ({"conv_kernel_size": 9}, "conv_kernel_size is 9 and conv_group_size 4; allowed"),
            ({"conv_group_size": 5}, "conv_kernel_size is 2 and conv_group_size 5; allowed"),
            ({"selector_top_k": 99}, "selector_top_k 99 and markov_rank 0; allowed: all 64"),
            ({"markov_rank": 3}, "markov_rank is 3; supported: 0 in a DFlash head"),
            ({"output_multiplier": 2.0}, "output_multiplier is 2.0; supported: 1"),
            ({"selector_rank": 7}, "the config requires numbers of"),
        )
    ):
        bad = write_dflash2(tmp_path / f"head{number}")[0]
        change_head(bad, config=lambda c, own=own: c["dflash_config"].update(own))
        with pytest.raises(ModelError, match=message):
            HeadFolder(bad, target.config)
