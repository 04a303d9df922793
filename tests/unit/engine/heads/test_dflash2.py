"""A DFlash 2 head in an engine guesses what a plain one would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specinfer import SamplingParams
from specinfer.errors import ModelError
from specinfer.heads.checkpoint import HeadFolder, head_shapes
from specinfer.heads.layouts import head_config
from specinfer.models.open_model import open_model
from specinfer.speculation_config import Quantization
from specinfer.tree.token_tree import draws_by_parent
from tests.engines import Tiny
from tests.heads import SIZE, VOCAB, change_head
from tests.oracles.dflash2 import PlainHead
from tests.unit.engine.heads.head_engines import PROMPTS, SAMPLED, answered, engine, load, shaped

OWN = {
    **{"block_size": 5, "mask_token_id": 1, "target_layer_ids": [0, 2]},
    **{"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5},
}
CONFIG: dict[str, Any] = {
    **{"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False},
    **{"vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5},
    **{"rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": False},
    "dflash_config": OWN,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2}


def write(folder: Path, **more: Any) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """A random head."""
    described, chance = {**CONFIG, **more}, torch.Generator().manual_seed(4)
    shapes = head_shapes(head_config(described, 3, {}))
    tensors = {
        name: ("norm" in name) + 0.3 * torch.randn(shape, generator=chance) for name, shape in shapes.items()
    }
    for name in ("lm_head.weight", "embed_tokens.weight"):
        assert name not in tensors, "the target's are used"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors, described


@pytest.mark.parametrize("more", [{}, WINDOWS])
def test_guesses_are_those_of_a_plain_head(tiny: Tiny, folder: Path, tmp_path: Path, more: Any) -> None:
    written, tensors, described = write(tmp_path / "head", **more)
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
def test_texts_do_not_change(tiny: Tiny, folder: Path, tmp_path: Path, kind: Quantization) -> None:
    head, loaded = load(tiny, folder, write(tmp_path / "head")[0], quantization=kind, keep=False)
    assert 0 < head.weight_bytes(torch.float32, kind) <= head.weight_bytes(torch.float32)
    texts = []
    for draft in (None, loaded):
        with engine(tiny, draft) as llm:
            outputs = [
                output
                for params in ({"temperature": 0}, SAMPLED)
                for output in llm.generate(PROMPTS, SamplingParams(max_tokens=12, **params))
            ]
        texts.append([list(output.token_ids) for output in outputs])
    assert texts[0] == texts[1]
    assert sum(output.figures.proposed_by["draft"] for output in outputs) > 50


def test_refusals(folder: Path, tmp_path: Path) -> None:
    target = open_model(folder / "target")
    written = write(tmp_path / "head")[0]
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
        bad = write(tmp_path / f"head{number}")[0]
        change_head(bad, config=lambda c, own=own: c["dflash_config"].update(own))
        with pytest.raises(ModelError, match=message):
            HeadFolder(bad, target.config)
