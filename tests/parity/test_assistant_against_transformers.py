"""Gemma 4's assistants: their guesses are those of transformers, and no text changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer import LLM, SamplingParams
from specinfer.engine.steps import TreeEvent
from specinfer.errors import ConfigError, ModelError
from specinfer.heads.assistant import AssistantModel
from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.open_model import open_model
from specinfer.sampling_params import SpeculationParams
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import ENGINE, engine_of
from tests.heads import change_head
from tests.tiny_models import write_byte_tokenizer
from tests.unit.engine.heads.head_engines import trees_after

from .families import save_random

PROMPTS = [
    [5, 17, 40, 3, 88, 61, 12, 12, 70, 5, 6, 7, 8, 9, 10, 11, 12],
    [9, 4],
    [40, 41, 42, 40, 41, 42, 40],
]
SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "head_dim": 16, "global_head_dim": 24, "sliding_window": 5},
    **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "pad_token_id": 0},
    **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3},
    "max_position_embeddings": 128,
}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
ORDER = "masked_embedding.token_ordering"
TARGETS: dict[str, dict[str, Any]] = {
    "gemma4": {"num_key_value_heads": 2},
    "gemma4-large": {
        **{"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        "attention_bias": True,
    },
    "gemma4-experts": {"num_key_value_heads": 2},
}


@pytest.fixture(autouse=True)
def _all_layers_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses the configs of its own assistants, all of whose layers share keys."""
    import transformers

    modes = transformers.Gemma4TextConfig.kv_sharing_modes

    def with_all(config: Any) -> Any:
        layers = config.num_hidden_layers
        return ["reuse"] * layers if config.num_kv_shared_layers == layers else modes.fget(config)

    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(with_all))


def save_assistant(folder: Path, target: str, **more: Any) -> Any:
    """Save a random assistant for a target of that case, and return it."""
    import transformers

    text = transformers.Gemma4TextConfig(**SIZES, **TARGETS[target])
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32, **more)
    config._attn_implementation = text._attn_implementation = "eager"
    torch.manual_seed(12)
    model = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.7)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer)))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits_after(target: Any, assistant: Any, text: list[int], above: list[int]) -> Tensor:
    """The assistant's logits after a text and the tokens `above`, as transformers drives it."""
    import transformers

    cache = transformers.DynamicCache()
    known = target(torch.tensor([text[:-1]]), past_key_values=cache, output_hidden_states=True)
    config = target.config
    shared = {
        config.layer_types[i]: (cache.layers[i].keys, cache.layers[i].values)
        for i in range(config.num_hidden_layers - config.num_kv_shared_layers)
    }
    state, embed = known.hidden_states[-1][:, -1:], target.get_input_embeddings()
    for token in [text[-1], *above]:
        given = torch.cat([embed(torch.tensor([[token]])), state], dim=-1)
        place = torch.tensor([[len(text) - 1]])
        made = assistant(inputs_embeds=given, position_ids=place, shared_kv_states=shared)
        state = made.last_hidden_state
    return made.logits[0, 0]


def gaps(target: Any, assistant: Any, text: list[int], tree: TokenTree) -> Iterator[float]:
    """Differences between the probabilities of a tree's guesses in the engine and in transformers."""
    for parent, draws in draws_by_parent(tree.draws).items():
        probs = logits_after(target, assistant, text, list(tree.path_tokens(parent))).softmax(-1)
        for draw in draws:
            yield abs(float(probs[tree.token_ids[draw.node]]) - draw.confidence)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "more"),
    [("gemma4", {}), ("gemma4", CLUSTERS), ("gemma4-large", CLUSTERS), ("gemma4-experts", {})],
)
def test_guesses(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    target = save_random(name, tmp_path / "target", tied=True)
    write_byte_tokenizer(tmp_path / "target", 96)
    assistant = save_assistant(tmp_path / "draft", name, **more)
    events: list[TreeEvent] = []
    shape = SpeculationParams(expansion=(2, 2, 1))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, speculation=shape)
    found, depths = list[float](), set[int]()
    options = {**ENGINE, "drafts": (str(tmp_path / "draft"),), "max_step_tokens": 16, "block_size": 4}
    with LLM(tmp_path / "target", **options) as llm:
        engine_of(llm).listeners.on_tree = events.append
        # The second time the target's keys and values lie in blocks that it finds, then all run together.
        for prompts in (*([prompt] for prompt in PROMPTS * 2), PROMPTS):
            events.clear()
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                for text, tree in trees_after(prompt, output, events):
                    found += gaps(target, assistant, text, tree)
                    depths.update(tree.depths())
        assert llm.statistics().prefix_hits > 0
        draft = llm.models.drafts["draft"]
        assert isinstance(draft, AssistantModel)
        first, rows_RA = draft.first_logits(32), torch.randn(3, draft.head.hidden_size)
        assert (first is None) == ("num_centroids" in more), "clusters are a choice of their own"
        assert first is None or torch.equal(first(rows_RA), draft.logits(rows_RA)[:, :32])
    assert len(found) > 120
    assert depths == {0, 1, 2, 3}
    assert max(found) < 1e-4


@pytest.mark.few(2)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_texts(name: str, kind: str, tmp_path: Path) -> None:
    save_random(name, tmp_path / "target", tied=True)
    write_byte_tokenizer(tmp_path / "target", 96)
    save_assistant(tmp_path / "draft", name, **CLUSTERS)
    options = {**ENGINE, "quantization": kind, "dtype": "bfloat16" if kind == "none" else "float32"}
    params, texts = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True), []
    drafts = {"drafts": (str(tmp_path / "draft"),), "draft_quantization": kind}
    for more in ({}, drafts, {**drafts, "expansion": (2, 2, 1)}):
        with LLM(tmp_path / "target", **{**options, **more}) as llm:
            outputs = llm.generate(PROMPTS, params)
        texts.append([list(out.token_ids) for out in outputs])
        if more:
            assert sum(out.figures.proposed_by["draft"] for out in outputs) > 50
    assert texts[0] == texts[1] == texts[2]


def test_refusals(tmp_path: Path) -> None:
    save_random("gemma4", tmp_path / "target", tied=True)
    save_random("llama", tmp_path / "llama", tied=True)
    target, llama = (open_model(tmp_path / name).config for name in ("target", "llama"))

    def text(**own: object) -> dict[str, Any]:
        return {"config": lambda c: c["text_config"].update(own)}

    def top(**own: object) -> dict[str, Any]:
        return {"config": lambda c: c.update(own)}

    cases: list[tuple[dict[str, Any], str]] = [
        (text(hidden_size_per_layer_input=8), "hidden_size_per_layer_input"),
        (text(enable_moe_block=True), "enable_moe_block"),
        (text(num_kv_shared_layers=2), "num_kv_shared_layers"),
        (text(head_dim=8), "2 key-value heads of 8 in its layer 0"),
        (top(backbone_hidden_size=48), "hidden states of 48"),
        (top(num_centroids=13), "num_centroids is 13 and centroid_inter"),
        (top(num_centroids=2), "num_centroids is 2 and centroid_intermediate_top_k 3"),
        (top(num_centroids=24), r"requires numbers of \[24, 16\]"),
        ({"tensors": lambda t: t[ORDER].__setitem__(0, t[ORDER][1])}, "must name every token once"),
        ({"tensors": lambda t: t.pop(ORDER)}, f"lacks tensor '{ORDER}'"),
        ({"tensors": lambda t: t.pop("model.embed_tokens.weight")}, "lacks tensor 'embed_tokens.weight'"),
        ({}, "its target has no such layer; it belongs to another target"),
    ]
    folder = tmp_path / "draft"
    for change, message in cases:
        save_assistant(folder, "gemma4", **CLUSTERS)
        change_head(folder, **change)
        with pytest.raises(ModelError, match=message) as caught:
            HeadFolder(folder, target if change else llama)
        assert "\n" not in str(caught.value)
    whole = HeadFolder(folder, target)
    assert whole.weight_bytes(torch.float32) == sum(4 * math.prod(shape) for shape in whole.shapes.values())
    with pytest.raises(ModelError, match="of a kind that is not trained here"):
        whole.module(open_model(tmp_path / "target"))
    large = tmp_path / "large"
    save_random("gemma4-large", large, tied=True)
    write_byte_tokenizer(large, 96)
    save_assistant(tmp_path / "large-draft", "gemma4-large")
    with pytest.raises(ConfigError, match="an assistant, and with pipeline_parallel 2 its target's keys lie"):
        LLM(large, drafts=(str(tmp_path / "large-draft"),), pipeline_parallel=2)
