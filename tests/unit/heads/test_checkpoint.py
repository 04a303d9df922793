"""Heads as folders: written, read again, and refused where they are not what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specinfer.errors import ModelError
from specinfer.heads.checkpoint import HeadFolder, is_head, target_embedding, target_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.speculators import write_head
from specinfer.models.open_model import open_model
from tests.heads import NAMED, SIZE, VOCAB, block_config, eagle_config, tiny_body, tiny_head, write_tiny_head

CONFIGS = {
    "EAGLE-3": eagle_config(),
    "EAGLE-3.1": eagle_config(fc_norm=True, norm_output=True, own_head=False),
    "gpt-oss": eagle_config(norm_before_fc=True, norm_before_residual=True, own_embedding=True),
    "two layers, biases": eagle_config(body=tiny_body(num_layers=2, bias=True), draft_vocab_size=VOCAB),
    "DSpark": block_config(),
    "behind the last state": block_config(reads_last=True, own_head=False),
    "bidirectional": block_config(causal=False),
    "DFlash": block_config(causal=False, sample_from_anchor=False, markov_rank=0, own_head=False),
}


def test_the_shapes_of_a_head_do_not_need_pytorchs_compiler() -> None:
    code = (
        "import sys\n"
        "from specinfer.heads.checkpoint import head_shapes\n"
        "from tests.heads import block_config, eagle_config\n"
        "shapes = head_shapes(eagle_config(own_embedding=True)) | head_shapes(block_config())\n"
        "print(any('markov_w1' in name for name in shapes), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_head_that_is_written_is_read_again(
    config: EagleConfig | BlockConfig, target: Path, tmp_path: Path
) -> None:
    opened = open_model(target)
    head = tiny_head(config)
    write_tiny_head(head, tmp_path / "head")
    assert is_head(tmp_path / "head")
    assert not is_head(target)
    folder = HeadFolder(tmp_path / "head", opened.config)
    assert folder.config == config
    assert list(folder.ids) == head.ids.tolist()
    again = folder.module(opened).state_dict()
    borrowed = {
        "embed_tokens.weight": None if config.own_embedding else target_embedding(opened),
        "lm_head.weight": None if config.own_head else target_head(opened, folder.ids),
    }
    for name, tensor in head.state_dict().items():
        expected = borrowed.get(name)
        assert torch.equal(again[name], tensor if expected is None else expected), name


def test_a_config_has_the_librarys_words(tmp_path: Path) -> None:
    write_tiny_head(tiny_head(block_config()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {key: value for key, value in config.items() if not isinstance(value, dict)} == {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.7.0",
        "draft_vocab_size": NAMED,
        "target_hidden_size": SIZE,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "aux_hidden_state_layer_ids": [0, 2],
        "block_size": 5,
        "mask_token_id": 1,
        "sliding_window_non_causal": False,
        "sample_from_anchor": True,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
    layers = config["transformer_layer_config"]
    assert layers["model_type"] == "qwen3"
    # A row of the block sees those before it: vLLM reads the first, the library the others.
    assert layers["is_causal"] is True
    assert layers["layer_types"] == ["sliding_attention"] * 2
    assert layers["sliding_window"] == layers["max_position_embeddings"]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "tiny",
        "architectures": ["LlamaForCausalLM"],
    }


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    head = tiny_head(eagle_config())
    with torch.no_grad():
        head.fc.weight[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"fc\.weight"):
        write_tiny_head(head, tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_matrices_may_be_int8_with_a_factor_for_each_row(target: Path, tmp_path: Path) -> None:
    opened = open_model(target)
    head = tiny_head(block_config(reads_last=True, own_head=False))
    write_head(head, tmp_path / "head", verifier="tiny", architectures=["x"], dtype=torch.int8)
    written = load_file(tmp_path / "head" / "model.safetensors")
    assert written["fc.weight"].dtype == torch.int8
    assert written["norm.weight"].dtype == torch.float32
    again = HeadFolder(tmp_path / "head", opened.config).module(opened).state_dict()
    for name, tensor in head.state_dict().items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        if written[name].dtype == torch.int8:
            step = tensor.abs().amax(dim=1, keepdim=True) / 127
            assert bool(((again[name] - tensor).abs() <= 0.51 * step).all()), name
        else:
            assert torch.equal(again[name], tensor), name
