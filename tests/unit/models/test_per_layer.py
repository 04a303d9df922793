"""Gemma 3n and 4: tables that stay in the file, layers that differ, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file

from specinfer.config import EngineConfig
from specinfer.engine.drafts import FoundModel
from specinfer.errors import ConfigError, ModelError, ModelFileError
from specinfer.hub.model_files import local_model
from specinfer.kernels.disk import DiskRate
from specinfer.models.config import LayerHeads
from specinfer.models.families.registry import config_from_hf
from specinfer.models.open_model import open_model
from specinfer.models.per_layer import PER_LAYER_TABLE
from specinfer.models.placement import Placement
from specinfer.models.safetensors import write_safetensors
from specinfer.models.streamed import layer_records
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.models.weights import load_model, load_streamed, prepare
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner
from specinfer.support import check_support
from tests.kernels import NAMES, kernels
from tests.parity.families import config_of, save_random
from tests.parity.gguf_files import write_gguf
from tests.switched import SWITCHED
from tests.unit.runtime.test_row_independence import differing_lengths

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("name", ["gemma4", "gemma3n"])


@BOTH
def test_the_table_of_per_layer_embeddings_stays_in_the_file(name: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path / "m", tied=True)
    model, native = open_model(tmp_path / "m"), kernels("native")
    options: dict[str, Any] = {"dtype": torch.float32, "kernels": native}
    table = model.shapes[PER_LAYER_TABLE]
    with_table = estimate_bytes(model, **options) + 4 * table[0] * table[1]
    assert with_table > sum(p.numel() * 4 for p in theirs.parameters())
    loaded = load_model(model, device=CPU, cache=tmp_path, **options)
    rows = [Rows((3, 1, 4, 1, 5), 0, [0, 1], 0)]
    ModelRunner(loaded, num_blocks=3, block_size=4).forward(rows)
    with (tmp_path / "m" / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelFileError, match="was changed while it was in use"):
        ModelRunner(loaded, num_blocks=3, block_size=4).forward(rows)


@BOTH
@pytest.mark.parametrize("kind", ["none", "int4"])
def test_streamed_layers_give_the_same_bits(name: str, kind: Any, tmp_path: Path) -> None:
    save_random(name, tmp_path / "m", tied=False)
    model = open_model(tmp_path / "m")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "kernels": kernels("native"), "quantization": kind}
    rows = [Rows((3, 1, 4, 1, 5), 0, [0, 1], 0), Rows((2, 7), 0, [2], 1)]
    prepared = prepare(model, cache=tmp_path, **options)
    whole = load_model(model, device=CPU, cache=tmp_path, **options)
    want = ModelRunner(whole, num_blocks=3, block_size=4).forward(rows)
    layers = [prepared.records[one].length for one in layer_records(prepared)]
    disk = DiskRate(readers=2, piece=4096, bytes_per_second=1e9, direct=True)
    for streamed in ((0,), tuple(range(len(layers)))):
        placement = Placement(1 << 30, {}, layers, 2, streamed)
        made = load_streamed(model, prepared, placement, disk, **options)
        assert torch.equal(ModelRunner(made, num_blocks=3, block_size=4).forward(rows), want)
        assert made.stream is not None
        made.stream.close()


@BOTH
def test_gguf_files_give_the_logits_of_their_folder(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "hidden_size_per_layer_input": 32}
    own = {"intermediate_size": 64, "global_head_dim": 64}
    if name == "gemma3n":
        own = {"intermediate_size": [64] * 9, "laurel_rank": 32}
    theirs = save_random(name, tmp_path, tied=True, **sizes, **own)
    rows, options = [Rows((3, 1, 4, 1, 5), 0, [0, 1], 0)], {"device": CPU, "kernels": kernels("native")}

    def logits(path: Path, quantization: Any) -> torch.Tensor:
        model = load_model(path, dtype=torch.float32, quantization=quantization, **options)
        return ModelRunner(model, num_blocks=3, block_size=4).forward(rows)

    write_gguf(theirs, tmp_path / "floats.gguf")
    write_gguf(theirs, tmp_path / "blocks.gguf", kind=GGMLQuantizationType.Q8_0)
    want = logits(tmp_path, "none")
    torch.testing.assert_close(logits(tmp_path / "floats.gguf", "none"), want, atol=1e-4, rtol=0)
    floats, blocks = (logits(tmp_path / "blocks.gguf", kind) for kind in ("none", "gguf"))
    assert 0 < (blocks - floats).std() < 0.3 * floats.std()


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("name", ["gemma3n", "gemma4-experts"])
def test_a_row_that_runs_op_by_op_is_the_same_in_any_company(name: str, which: Any, tmp_path: Path) -> None:
    save_random(name, tmp_path, tied=True, sliding_window=100)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path, dtype=dtype, device=CPU, kernels=kernels(which))
        runner = ModelRunner(model, num_blocks=4, block_size=1024)
        assert differing_lengths(runner, (12, 63)) == []


@pytest.mark.parametrize("name", ["gemma4", "gemma4-large", "gemma4-experts", "gemma3n"])
def test_chunks_of_any_size_have_the_same_bits(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path, tied=True, max_position_embeddings=600)
    text = [(7 * i * i + 3 * i) % 96 for i in range(200)]
    for dtype, quantization in ((torch.bfloat16, "none"), (torch.float32, "int4")):
        options: dict[str, Any] = {"dtype": dtype, "kernels": kernels("native"), "quantization": quantization}
        model, found = load_model(tmp_path, device=CPU, cache=tmp_path / "kept", **options), []
        for step in (1, 7, 64, len(text)):
            runner = ModelRunner(model, num_blocks=13, block_size=16)
            for first in range(0, len(text), step):
                chunk = text[first : first + step]
                ends = first + step >= len(text)
                logits = runner.forward([chain_rows(chunk, first, range(13), logits=ends)])
            found.append(logits[-1])
        assert all(torch.equal(one, found[0]) for one in found), (dtype, quantization)


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
