"""A head in an engine guesses what its plain module would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specinfer import SamplingParams
from specinfer.engine.steps import TreeEvent
from specinfer.heads.checkpoint import AnyHeadModel, HeadFolder, load_head
from specinfer.kernels.choice import TORCH, choose_kernels, draft_kernels
from specinfer.models.open_model import open_model
from specinfer.tree.distribution import Distribution
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import CPU, Tiny, engine_of
from tests.heads import block_config, change_head, eagle_config, tiny_body, tiny_head, write_tiny_head
from tests.unit.engine.heads.head_engines import (
    HEADS,
    PROMPTS,
    AnyHead,
    engine,
    hidden_states,
    is_as_likely,
    likelihood_gap,
    module_logits,
    shaped,
    trees_after,
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HEADS)
def test_every_guess_is_as_likely_as_the_module_says(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, AnyHead], name: str
) -> None:
    seen, depths = 0, set[int]()
    events: list[TreeEvent] = []
    with engine(tiny, heads[name], block_size=4, max_step_tokens=20) as llm:
        engine_of(llm).listeners.on_tree = events.append
        for prompt in [*PROMPTS, *PROMPTS]:  # the second time its keys and values lie in blocks it finds
            events.clear()
            (output,) = llm.generate([prompt], shaped(8))
            hidden_TND = hidden_states(tiny, [*prompt, *output.token_ids])
            for text, tree in trees_after(prompt, output, events):
                depths.update(tree.depths())
                assert is_as_likely(modules[name], text, hidden_TND, tree)
                seen += 1
                if seen == 3:
                    wrong = likelihood_gap(modules[name], text, hidden_TND, tree, shift=1)
                    assert wrong > 1e-3, "a head whose taps are one layer off would not be found"
        assert llm.statistics().prefix_hits > 0
        events.clear()
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, shaped(6)), strict=True):  # in one pass
            hidden_TND = hidden_states(tiny, [*prompt, *output.token_ids])
            trees = [*trees_after(prompt, output, events)]
            assert all(is_as_likely(modules[name], text, hidden_TND, tree) for text, tree in trees)
            assert sum(tree.num_nodes > 1 for _, tree in trees) > 1
    assert seen > 18
    assert depths == {0, 1, 2, 3}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("draw", ["iid", "without_replacement", "top_k"])
def test_samples_are_drawn_from_the_law_that_is_told(
    tiny: Tiny, heads: dict[str, AnyHeadModel], modules: dict[str, AnyHead], name: str, draw: str
) -> None:
    events: list[TreeEvent] = []
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=11)
    with engine(tiny, heads[name], verifier="mss", draw=draw, expansion=(2, 2, 1)) as llm:
        engine_of(llm).listeners.on_tree = events.append
        (output,) = llm.generate([PROMPTS[0]], params)
    assert output.figures.proposed_by["draft"] > 0
    if draw == "top_k":
        return
    head, hidden_TND = modules[name], hidden_states(tiny, [*PROMPTS[0], *output.token_ids])
    seen = 0
    for text, tree in trees_after(PROMPTS[0], output, events):
        for parent, draws in draws_by_parent(tree.draws).items():
            law = module_logits(head, text, hidden_TND, list(tree.path_tokens(parent)))
            expected = (law / 0.9).softmax(-1).double().numpy()
            for one in draws:
                assert isinstance(one.law, Distribution)
                law_of_all = np.zeros(64)
                law_of_all[one.law.ids if one.law.ids is not None else slice(None)] = one.law.probabilities
                np.testing.assert_allclose(law_of_all[head.ids.numpy()], expected, atol=1e-4)
                seen += 1
    assert seen > 6


def test_guesses_are_the_likeliest_with_what_the_token_before_adds(tiny: Tiny, folder: Path) -> None:
    head = tiny_head(block_config(reads_last=True), seed=9)
    with torch.no_grad():
        head.markov_head.markov_w2.weight.mul_(15)  # the previous token decides more than hidden states
    target = open_model(folder / "target")
    written = HeadFolder(write_tiny_head(head, folder / "pairs"), target.config, target)
    kernels = draft_kernels(choose_kernels("auto", CPU)[0])
    loaded = load_head(written, tiny.target, kernels=kernels)
    module = written.module(target)
    events: list[TreeEvent] = []
    with engine(tiny, loaded) as llm:
        engine_of(llm).listeners.on_tree = events.append
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=12, temperature=0))
    hidden_TND = hidden_states(tiny, [*PROMPTS[0], *output.token_ids])
    roots, deeper = 0, []
    for text, tree in trees_after(PROMPTS[0], output, events):
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
    target = open_model(folder / "target")
    head = HeadFolder(tmp_path, target.config, target)
    module = head.module(target)
    loaded = load_head(head, tiny.target, kernels=draft_kernels(choose_kernels("auto", CPU)[0]))
    events: list[TreeEvent] = []
    seen = 0
    with engine(tiny, loaded, block_size=4) as llm:
        engine_of(llm).listeners.on_tree = events.append
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, shaped(6)), strict=True):
            hidden_TND = hidden_states(tiny, [*prompt, *output.token_ids])
            for text, tree in trees_after(prompt, output, events):
                assert is_as_likely(module, text, hidden_TND, tree)
                seen += tree.num_nodes
    assert seen > 100


@pytest.mark.parametrize("causal", [True, False])
def test_layers_of_a_block_head_may_have_windows(
    tiny: Tiny, folder: Path, tmp_path: Path, causal: bool
) -> None:
    config = block_config(own_head=False, causal=causal, markov_rank=0)
    kinds = ["sliding_attention"] * 2
    windows = {"use_sliding_window": True, "sliding_window": 7, "layer_types": kinds, "is_causal": causal}
    target, native = open_model(folder / "target"), draft_kernels(choose_kernels("auto", CPU)[0])
    found = list[list[float]]()
    for more, kernels in ((windows, TORCH), (windows, native), ({"is_causal": causal}, native)):
        write_tiny_head(tiny_head(config, seed=8), tmp_path)
        change_head(tmp_path, config=lambda c, more=more: c["transformer_layer_config"].update(more))
        head = load_head(HeadFolder(tmp_path, target.config, target), tiny.target, kernels=kernels)
        events: list[TreeEvent] = []
        with engine(tiny, head, block_size=4) as llm:
            engine_of(llm).listeners.on_tree = events.append
            llm.generate(PROMPTS, shaped(6))
        found.append([draw.confidence for event in events for draw in event.tree.draws])
    assert len(found[0]) > 60
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert not np.allclose(found[0][:30], found[2][:30], atol=1e-2)
