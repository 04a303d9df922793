"""A GGUF file of each family is the model of the folder it was made of: the same config, the same tensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from specinfer.errors import ModelFileError
from specinfer.hub.gguf_header import read_header
from specinfer.models.fingerprint import fingerprint, is_of
from specinfer.models.gguf import GGUFFile
from specinfer.models.open_model import open_model
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.runtime.batch import Rows
from specinfer.speculation_config import Quantization
from tests.loading import load
from tests.states import StateRunner

from .families import CASES, save_random
from .gguf_files import write_gguf
from .test_against_transformers import PROMPT, TOLERANCE, logits_of

# Without what GGUF has no keys for: ReLU, windows of some layers, scales of scores, layers with and without
# rope in another order than every fourth, ALiBi in Falcon, and StarCoder with many key heads. Tensors of
# Falcon-H1 have their factors there, and Bamba's rotated heads another order.
NOT_WRITTEN = {
    *("llama-relu", "llama-llama3-rope", "llama-linear-rope", "mistral", "qwen2-window", "gemma3-softcap"),
    *("opt", "opt-no-bias", "gemma3", "gemma2", "smollm3", "smollm3-window", "mpt-heads"),
    *("mixtral", "gemma3n-unscaled", "llama4", "llama4-interleaved"),
    *("bamba", "falcon-h1", "falcon-h1-normed", "falcon-h1-behind", "nemotron-h-alone"),
    "qwen3.5-same-heads",  # kinds of layers in no order
    *("helium", "cwm", "falcon-rw", "starcoder-heads", "starcoder2", "gpt-neox-serial", "stablelm-parallel"),
}
MORE = {
    "granite-hybrid-limits": {"time_step_limit": (0.0, float("inf"))},
    "gemma3": {"query_pre_attn_scalar": 16, "rope_parameters": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5},
    "mpt-heads": {"attn_config": {"clip_qkv": 0.5}},
    "starcoder2": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "llama4": {"attention_chunk_size": None, "rope_parameters": None, "interleave_moe_layer_step": 2},
    "qwen3.5": {"linear_num_value_heads": 2},
    "qwen3.5-moe": {"linear_num_value_heads": 2},
    "qwen3-next-dense": {"norm_topk_prob": True},
    "lfm2-moe-softer": {"use_expert_bias": True},
    "gpt-neox-serial": {},
    "stablelm-parallel": {},
}
NAMES = [name for name in CASES if name not in NOT_WRITTEN or name in MORE]
OTHERWISE = {"norm_weight_offset", "eos_ids", "part"}  # these fields differ between a file and a folder


def same(one: object, other: object) -> bool:
    """Return whether two values are equal, numbers up to float32 precision."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-6)
    return one == other


def both(
    theirs: torch.nn.Module, path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32
) -> tuple[GGUFFile, SafetensorsFolder]:
    """The file of a model that was saved to a folder, and the folder; their configs and shapes are equal."""
    write_gguf(theirs, path / "model.gguf", kind=kind)
    folder = SafetensorsFolder(path, [path / "model.safetensors"])
    file = GGUFFile(read_header(path / "model.gguf"))
    got, want = asdict(file.config), asdict(folder.config)
    if theirs.config.model_type == "mistral":  # a file says llama of it
        want["family"] = "llama"
    assert {k: (got[k], want[k]) for k in want if k not in OTHERWISE and not same(got[k], want[k])} == {}
    assert file.shapes == folder.shapes
    return file, folder


@pytest.mark.few(22)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", NAMES)
def test_config_and_tensors(name: str, tied: bool, tmp_path: Path) -> None:
    file, folder = both(save_random(name, tmp_path, tied=tied, **MORE.get(name, {})), tmp_path)
    for tensor, shape in folder.shapes.items():
        offset = folder.config.norm_weight_offset if "norm" in tensor and "mixer" not in tensor else 0.0
        here, there = (model.read_rows(tensor, 0, shape[0]) for model in (folder, file))
        assert torch.equal(here + offset, there), tensor
    assert is_of(fingerprint(file), folder)


def test_text_parts_of_models_with_towers(tmp_path: Path) -> None:
    """Their files have the text's tensors alone."""
    for name, kind in (
        *(("qwen2", "qwen2_vl"), ("qwen3", "qwen3_vl"), ("qwen3-moe", "qwen3_vl_moe")),
        ("mistral-full", "mistral3"),
    ):
        theirs = save_random(name, tmp_path / name, tied=False)
        theirs.config.model_type = kind
        file, folder = both(theirs, tmp_path / name)
        query = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(file.read_rows(query, 0, 32), folder.read_rows(query, 0, 32))


def test_a_quantized_file_has_the_fingerprint_of_its_folder(tmp_path: Path) -> None:
    theirs = save_random("llama", tmp_path, tied=False, intermediate_size=64)
    file, folder = both(theirs, tmp_path, GGMLQuantizationType.Q8_0)
    assert is_of(fingerprint(file), folder)
    assert is_of(fingerprint(folder), file)


UNBIASED = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), False)


@pytest.mark.parametrize(
    ("name", "more", "quantization"),
    [
        *((name, UNBIASED, "none") for name in ("falcon-h1", "falcon-h1-behind")),
        *((name, {}, kind) for name in ("qwen3.5", "qwen3.5-moe") for kind in ("none", "gguf")),
    ],
)
def test_a_file_whose_matrices_are_others_has_the_logits(
    name: str, more: dict[str, object], quantization: Quantization, tmp_path: Path
) -> None:
    """Tensors of Falcon-H1 have their factors; value heads of Qwen 3.5 are in llama.cpp's order."""
    theirs = save_random(name, tmp_path, tied=False, **more)
    write_gguf(theirs, tmp_path / "model.gguf")
    ours = load(tmp_path / "model.gguf", quantization=quantization)
    assert ours.config.recurrence.tiled == name.startswith("qwen")
    got = StateRunner(ours, num_blocks=4, block_size=4).forward([Rows(PROMPT, 0, [0, 1, 2, 3], 0)])
    torch.testing.assert_close(got, logits_of(theirs, PROMPT), atol=TOLERANCE, rtol=0)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    theirs = save_random("nemotron-h", tmp_path, tied=False)
    further = {
        "blk.5.attn_norm.weight": np.ones(32, np.float32),
        "blk.5.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
    }
    write_gguf(theirs, tmp_path / "m.gguf", add=further, sizes={"block_count": 6, "nextn_predict_layers": 1})
    file = GGUFFile(read_header(tmp_path / "m.gguf"))
    assert file.config.num_layers == 5
    assert file.shapes == SafetensorsFolder(tmp_path, [tmp_path / "model.safetensors"]).shapes


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        *(("qwen3.5", f"0.linear_attn.{name}") for name in ("A_log", "conv1d.weight")),
        ("lfm2", "0.conv.conv.weight"),
        *(("nemotron-h", f"0.mixer.{name}") for name in ("A_log", "D", "conv1d.weight")),
    ],
)
def test_a_file_without_a_tensor_of_a_recurrence_is_refused(family: str, tensor: str, tmp_path: Path) -> None:
    theirs = save_random(family, tmp_path, tied=False)
    state = {name: one for name, one in theirs.state_dict().items() if not name.endswith(tensor)}
    assert len(state) == len(theirs.state_dict()) - 1
    theirs.state_dict = lambda: state
    write_gguf(theirs, tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=r"model\.layers\.0\.mixer"):
        open_model(tmp_path / "model.gguf")
