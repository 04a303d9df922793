"""Layers that differ: tables that stay in the file, experts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.config import EngineConfig
from specinfer.engine.drafts import FoundModel
from specinfer.errors import ConfigError, ModelError, ModelFileError
from specinfer.hub.model_files import local_model
from specinfer.models.config import LayerHeads
from specinfer.models.families.registry import config_from_hf
from specinfer.models.open_model import open_model
from specinfer.models.per_layer import PER_LAYER_TABLE
from specinfer.models.safetensors import write_safetensors
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from specinfer.support import check_support
from tests.kernels import NAMES, kernels
from tests.loading import load
from tests.parity.families import config_of, save_random
from tests.parity.gguf_files import write_gguf
from tests.switched import SWITCHED
from tests.tiny_models import write_tiny_mixture
from tests.unit.runtime.test_row_independence import differing_chunks, differing_lengths

ROWS = [Rows((3, 1, 4, 1, 5), 0, [0, 1], 0)]
BOTH = pytest.mark.parametrize("name", ["gemma4", "gemma3n"])


@BOTH
def test_the_table_of_per_layer_embeddings_stays_in_the_file(name: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path / "m", tied=True)
    model = open_model(tmp_path / "m")
    table = model.shapes[PER_LAYER_TABLE]
    with_table = estimate_bytes(model, torch.float32, kernels("native")) + 4 * table[0] * table[1]
    assert with_table > sum(p.numel() * 4 for p in theirs.parameters())
    runner = ModelRunner(load(model), num_blocks=3, block_size=4)
    runner.forward(ROWS)
    with (tmp_path / "m" / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelFileError, match="was changed while it was in use"):
        runner.forward(ROWS)


@BOTH
def test_gguf_files_give_the_logits_of_their_folder(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "hidden_size_per_layer_input": 32}
    own = {"intermediate_size": 64, "global_head_dim": 64}
    if name == "gemma3n":
        own = {"intermediate_size": [64] * 9, "laurel_rank": 32}
    theirs = save_random(name, tmp_path, tied=True, **sizes, **own)

    def logits(path: Path, quantization: Any) -> torch.Tensor:
        return ModelRunner(load(path, quantization=quantization), num_blocks=3, block_size=4).forward(ROWS)

    write_gguf(theirs, tmp_path / "floats.gguf")
    write_gguf(theirs, tmp_path / "blocks.gguf", kind=GGMLQuantizationType.Q8_0)
    want = logits(tmp_path, "none")
    torch.testing.assert_close(logits(tmp_path / "floats.gguf", "none"), want, atol=1e-4, rtol=0)
    floats, blocks = (logits(tmp_path / "blocks.gguf", kind) for kind in ("none", "gguf"))
    assert 0 < (blocks - floats).std() < 0.3 * floats.std()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-large", "gemma4-experts", "gemma3n", "llama4"])
def test_a_row_is_the_same_in_any_company_and_in_chunks_of_any_size(name: str, tmp_path: Path) -> None:
    window = {"attention_chunk_size": 100} if name == "llama4" else {"sliding_window": 100}
    save_random(name, tmp_path, tied=True, max_position_embeddings=600, **window)
    for which, dtype, quantization in (
        *(("torch", torch.float32, "none"), ("torch", torch.bfloat16, "none")),
        *(("native", torch.float32, "none"), ("native", torch.bfloat16, "none")),
        ("native", torch.float32, "int4"),
    ):
        model = load(tmp_path, which, dtype=dtype, quantization=quantization)
        runner = ModelRunner(model, num_blocks=4, block_size=1024)
        assert differing_lengths(runner, (12, 63)) == [], (which, dtype, quantization)
        if which == "native":
            assert differing_chunks(runner, (1, 7, 64), 200) == [], (dtype, quantization)


def test_keys_of_layers_that_share_are_passed_over(tmp_path: Path) -> None:
    save_random("gemma4", tmp_path, tied=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    write_safetensors(path, tensors | {"model.layers.8.self_attn.k_proj.weight": torch.zeros(48, 32)})
    open_model(tmp_path)
    write_safetensors(path, tensors | {"model.layers.5.self_attn.x_proj.weight": torch.zeros(48, 1)})
    with pytest.raises(ModelFileError, match="unexpected tensor"):
        open_model(tmp_path)


def test_configs_that_are_refused() -> None:
    gemma4, gemma3n = (config_of(name).to_dict() for name in ("gemma4", "gemma3n"))
    odd = {"2": {"head_dim": 24, "num_key_value_heads": 1}, "5": {"head_dim": 16, "num_key_value_heads": 1}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({**gemma4, "enable_moe_block": True}, "num_experts is"),
        ({**gemma4, "use_bidirectional_attention": "all"}, "sets use_bidirectional_attention = 'all'"),
        ({**gemma4, "per_layer_config": odd}, "per_layer_config of config.json differs"),
        ({**gemma4, "num_kv_shared_layers": 9}, "the last 9 of 9 layers use the keys"),
        ({**gemma4, "num_kv_shared_layers": 7}, "the last 7 of 9 layers use the keys"),
        ({**gemma3n, "altup_active_idx": 4}, "altup_active_idx is 4 and altup_num_inputs 4"),
        ({**gemma3n, "intermediate_size": [56] * 8}, "expected a list for 9 layers"),
        ({**gemma3n, "activation_sparsity_pattern": [1.0] * 9}, "allowed: 0 to below 1"),
    ]
    for config, message in cases:
        with pytest.raises(ModelError, match=message):
            config_from_hf(config)


def test_published_keys_are_read() -> None:
    """Published files give the heads of layers without a window once, transformers by layer."""
    written = config_of("gemma4-large").to_dict()
    published = {k: v for k, v in written.items() if k not in ("per_layer_config", "layer_types")}
    published |= {"global_head_dim": 24, "num_global_key_value_heads": 1}
    assert config_from_hf(published) == config_from_hf(written)


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("gemma3n", {"tensor_parallel": 2}, "tensor_parallel is 2, and m cuts gates off by the spread"),
        ("gemma3n", {"sum_parts": 2}, "sum_parts is 2, and m cuts gates off by the spread of a row"),
        ("gemma4", {"pipeline_parallel": 2}, "pipeline_parallel is 2, and layers of m use keys"),
        ("gemma3n", {"pipeline_parallel": 2}, "pipeline_parallel is 2, and layers of m use keys"),
    ],
)
def test_options_that_are_refused(name: str, options: dict[str, object], line: str, tmp_path: Path) -> None:
    save_random(name, tmp_path / "m", tied=True)
    found = FoundModel(local_model("m", tmp_path / "m"), open_model(tmp_path / "m"))
    with pytest.raises(ConfigError, match=line):
        check_support(EngineConfig.from_options("m", options).features | found.features)


def test_layers_have_their_heads() -> None:
    config = SWITCHED["gemma4"]
    assert [config.heads_of(i).head_dim for i in range(6)] == [16, 16, 24] * 2
    assert [config.cache_of(i) for i in range(6)] == [0, 1, 2, 1, 1, 2]
    assert [config.inner_of(i) for i in (0, 5)] == [96, 192]
    with pytest.raises(ModelError, match="4 query heads and 3 key-value heads in layers without a window"):
        replace(config, global_heads=LayerHeads(24, 3))


# Mixtures of experts: ties and rows that are not finite; tests/parity has what experts make.


Name = Literal["torch", "native"]


def chosen(name: Name, logits_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Three of eight experts for each row."""
    return kernels(name).ops.choose_experts(logits_TC, 8, 3, normalized=True)


@pytest.mark.parametrize("name", NAMES)
def test_of_equal_logits_that_of_the_lower_number_wins(name: Name) -> None:
    logits_TE = torch.tensor([[0.0, 2, 1, 1, 1, 0, 0, 1], [5.0] * 8])
    assert chosen(name, logits_TE)[0].tolist() == [[1, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_not_finite_has_weights_of_nan_and_others_their_own(name: Name, odd: float) -> None:
    logits_TE = torch.arange(16.0).view(2, 8)
    logits_TE[0, 5] = odd
    numbers_TK, weights_TK = chosen(name, logits_TE)
    assert numbers_TK.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert weights_TK[0].isnan().all()
    assert torch.equal(weights_TK[1:], chosen(name, logits_TE[1:])[1])


def runner_of(folder: Path, name: Name, dtype: torch.dtype, kind: Quantization) -> ModelRunner:
    model = load(folder, name, dtype=dtype, quantization=kind)
    assert (model._native is not None) == (name == "native"), "one call runs all layers"
    return ModelRunner(model, num_blocks=8, block_size=16)


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_not_finite_ends_alone(name: Name, kind: Quantization, tmp_path: Path) -> None:
    """The embedding of token 9 is no number, so neither are the logits of its routers."""
    folder = write_tiny_mixture(tmp_path / "model", shared_size=24, tie_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    runner = runner_of(folder, name, torch.float32, kind)
    want = runner.forward([Rows([1, 2, 3, 4], 0, [0], 0)])
    assert want.isfinite().all()
    got = runner.forward([Rows([5, 9, 3], 0, [1], 0), Rows([1, 2, 3, 4], 0, [2], 0)])
    assert got[1:3].isnan().all()
    assert torch.equal(got[3:], want)


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_router_that_is_not_finite_is_named(name: Name, kind: Quantization, tmp_path: Path) -> None:
    save_random("gpt-oss", tmp_path / "oss", tied=False)
    for ours, theirs in (
        ("gate.weight",) * 2,
        ("shared_expert_gate.weight",) * 2,
        ("gate.bias", "router.bias"),
    ):
        folder = write_tiny_mixture(tmp_path / ours, shared_size=24)
        path = (tmp_path / "oss" if ours == "gate.bias" else folder) / "model.safetensors"
        tensors = load_file(path)
        tensors[f"model.layers.1.mlp.{theirs}"].view(-1)[3] = torch.nan
        save_file(tensors, path)
        said = rf"tensor 'model\.layers\.1\.mlp\.{ours}' of a router holds values that are not finite"
        with pytest.raises(ModelFileError, match=said):
            runner_of(path.parent, name, torch.float32, kind)
        left = {path.suffix for path in path.parent.rglob("kept/*")}
        assert left <= {".lock"}, "no half of a prepared file"
