from __future__ import annotations

import json
import threading
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelError, ModelFileError
from specinfer.hub.model_files import files_of
from specinfer.kernels.choice import TORCH
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.models.weight_reader import chosen_rows
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from tests.kernels import kernels
from tests.loading import load as load_with
from tests.shown import Shown
from tests.tiny_models import write_tiny_llama


def load(folder, **options):
    return load_with(folder, "torch", **options)


def load_quantized(folder, cache, quantization="int4", **options):
    return load(folder, quantization=quantization, cache=cache, **options)


def rewrite(folder, change):
    """Apply `change` to the folder's tensors, in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits_of(model, token_ids=(3, 1, 4)):
    runner = ModelRunner(model, num_blocks=1, block_size=len(token_ids))
    return runner.forward([Rows(token_ids, 0, [0], 0)])


@pytest.mark.parametrize("tied", [True, False])
def test_estimated_bytes_are_the_bytes_of_all_weights(tied, tmp_path):
    folder = write_tiny_llama(tmp_path / "m", tie_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    elements = sum(t.numel() for t in tensors.values())
    assert estimate_bytes(folder, torch.float32) == elements * 4
    second_head = 64 * 32 if tied else 0
    assert estimate_bytes(folder, torch.bfloat16, kernels("native")) == (elements + second_head) * 2
    norms = sum(tensor.numel() * 4 for name, tensor in tensors.items() if "norm" in name)
    for quantization in ("int8", "int4"):
        load_quantized(folder, tmp_path / quantization, quantization)
        [kept] = (tmp_path / quantization).glob("*.safetensors")
        matrices = sum(t.nbytes for name, t in load_file(kept).items() if "padding" not in name)
        assert estimate_bytes(folder, torch.float32, TORCH, quantization) == matrices + norms, quantization


def test_progress_ends_at_the_total(tmp_path):
    folder, shown = write_tiny_llama(tmp_path / "tiny"), Shown()
    size = sum(file.stat().st_size for file in files_of(folder))  # as the user sees it
    load(folder, progress=shown)
    for loads in (1, 2):  # quantized, then kept
        load_quantized(folder, tmp_path / "cache", progress=shown, name="mine")
        assert shown.works == [("loading tiny", size), *loads * [("loading mine", size)]]


def test_tied_models_may_carry_their_head_once_more(tmp_path):
    folder = write_tiny_llama(tmp_path)
    before = logits_of(load(folder))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits_of(load(folder)), before)


def test_other_prefixes_and_old_tables(tmp_path):
    folder = write_tiny_llama(tmp_path)
    before = logits_of(load(folder))

    def rename(tensors):
        for name in list(tensors):
            tensors["language_model." + name] = tensors.pop(name)
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["language_model.model.layers.1.self_attn.rotary_emb.cos_cached"] = torch.zeros(4)
        tensors["language_model.model.layers.1.self_attn.masked_bias"] = torch.zeros(())
        tensors["language_model.model.layers.1.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)

    rewrite(folder, rename)
    assert torch.equal(logits_of(load(folder)), before)
    rewrite(folder, lambda tensors: tensors.update({"vision_tower.patch.weight": torch.zeros(4)}))
    with pytest.raises(ModelFileError, match=r"unexpected tensor 'vision_tower\.patch\.weight'"):
        load(folder)


def test_files_of_other_dtypes_are_cast(tmp_path):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        folder = write_tiny_llama(tmp_path)
        before = logits_of(load(folder))
        rewrite(folder, lambda t, dtype=dtype: t.update({name: w.to(dtype) for name, w in t.items()}))
        torch.testing.assert_close(logits_of(load(folder)), before, atol=0.5, rtol=0.1)


def refused(text, folder):
    """Check that the folder is refused in these words."""
    with pytest.raises(ModelError, match=text):
        load(folder)


def test_folders_that_are_no_whole_model(tmp_path):
    refused(r"does not exist; give a model folder or a \.gguf file", tmp_path / "nothing")
    refused(r"has no config\.json; give a model's folder", tmp_path)
    folder = write_tiny_llama(tmp_path / "config")
    (folder / "config.json").write_text('{"model_type": ')
    refused("config.json is not valid JSON", folder)
    folder, both = write_tiny_llama(tmp_path / "index"), ("model.safetensors", "second.safetensors")
    (folder / both[1]).write_bytes((folder / both[0]).read_bytes())
    index = {"weight_map": dict(zip(("model.norm.weight", "lm_head.weight"), both, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("is in model.safetensors and in second.safetensors", folder)


def test_truncated_safetensors(tmp_path):
    folder = write_tiny_llama(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for left, message in (
        (whole[:-10], "is truncated: tensor"),
        *((whole[:length], "is not a safetensors file, or is truncated") for length in (0, 5, 40)),
        (whole[:8] + b"#" * (len(whole) - 8), "has a damaged header"),
    ):
        file.write_bytes(left)
        refused(message, folder)


def test_missing_unexpected_and_misshapen_tensors(tmp_path):
    query = "model.layers.0.self_attn.q_proj"
    folder = write_tiny_llama(tmp_path)
    rewrite(folder, lambda t: t.update({f"{query}.bias": torch.zeros(32)}))
    load(folder)  # as GPTQ's tools write it
    for change, message in (
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks tensor 'model.layers.1.mlp.up_proj"),
        (lambda t: t.update({f"{query}.lora_A": torch.zeros(2)}), rf"has unexpected tensor '{query}.lora_A'"),
        (lambda t: t.update({f"{query}.bias": torch.ones(32)}), rf"has unexpected tensor '{query}.bias'"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"shape \[31\], the config .* \[32\]"),
    ):
        rewrite(write_tiny_llama(folder), change)
        refused(message, folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quantization", "noise"), [("int8", 0.05), ("int4", 0.35)])
def test_quantized_logits_are_near_and_the_same_from_the_cache(tied, quantization, noise, tmp_path):
    folder = write_tiny_llama(tmp_path / "m", tie_embeddings=tied, intermediate_size=72, spread=0.1)
    want = logits_of(load(folder))
    made = logits_of(load_quantized(folder, tmp_path / "cache", quantization))
    assert 0 < (made - want).norm() < noise * want.norm()
    assert torch.equal(logits_of(load_quantized(folder, tmp_path / "cache", quantization)), made)


def test_matrices_whose_rows_fill_no_block(tmp_path):
    """Heads of 6: q, k and v have 24, 12 and 12 rows, stacked into three blocks."""
    folder = write_tiny_llama(tmp_path / "m", hidden_size=24, intermediate_size=20, spread=0.1)
    want = logits_of(load(folder))
    got = logits_of(load_quantized(folder, tmp_path / "cache", "int8"))
    assert (got - want).norm() < 0.05 * want.norm()


def test_a_start_that_keeps_nothing_reads_what_is_kept(tmp_path):
    folder, cache = write_tiny_llama(tmp_path / "m"), tmp_path / "cache"
    want = logits_of(load_quantized(folder, cache, keep=False))
    assert not cache.exists()
    for keep in (True, False):
        assert torch.equal(logits_of(load_quantized(folder, cache, keep=keep)), want)


def test_the_first_logits_are_no_copy_of_the_output_layer():
    table = torch.arange(12.0).view(4, 3)
    first, none, chosen = (chosen_rows(table, ids) for ids in (range(3), [], [0, 1, 3]))
    assert torch.equal(first, table[:3])
    assert first.data_ptr() == table.data_ptr()
    assert none.shape == (0, 3)
    assert torch.equal(chosen, table[[0, 1, 3]])
    assert chosen.data_ptr() != table.data_ptr()


def test_no_thread_outlives_a_load(tmp_path, monkeypatch):
    before = set(threading.enumerate())
    folder = write_tiny_llama(tmp_path / "m", vocab_size=20_000)
    for quantization in ("none", "int8"):
        load_quantized(folder, tmp_path / "cache", quantization)
        assert set(threading.enumerate()) <= before, quantization
    monkeypatch.setattr(SafetensorsFolder, "read_rows", Mock(side_effect=ModelFileError("the disk is gone")))
    with pytest.raises(ModelFileError, match="the disk is gone"):
        load(folder)
    assert set(threading.enumerate()) <= before
