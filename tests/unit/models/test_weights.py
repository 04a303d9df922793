from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelFileError, ModelNotFoundError
from specinfer.models.linear import packs
from specinfer.models.weights import estimate_bytes, load_config, load_model
from tests.tiny_models import write_similar_llama, write_tiny_llama

CPU = torch.device("cpu")


def load(folder, dtype=torch.float32, progress=None):
    return load_model(folder, dtype=dtype, device=CPU, progress=progress)


def rewrite(folder, change):
    """Apply `change` to the folder's tensors, in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits_of(model, token_ids=(3, 1, 4)):
    def attend(layer, q_TNH, k_TKH, v_TKH, *, scale, windowed):
        groups = q_TNH.shape[1] // k_TKH.shape[1]
        k, v = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k_TKH, v_TKH))
        scores = q_TNH.transpose(0, 1) @ k.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)

    ids = torch.tensor(token_ids)
    with torch.inference_mode():
        return model.forward(ids, torch.arange(len(token_ids)), attend)


def test_a_folder_loads_and_says_what_it_is(tmp_path):
    model = load(write_tiny_llama(tmp_path, vocab_size=40))
    assert (model.dtype, model.device, model.config.vocab_size) == (torch.float32, CPU, 40)
    logits = logits_of(model)
    assert logits.shape == (3, 40)
    assert logits.isfinite().all()
    assert load_config(tmp_path) == model.config


def test_logit_rows_are_those_rows_of_all_logits(tmp_path):
    model = load(write_tiny_llama(tmp_path))

    def attend(layer, q_TNH, k_TKH, v_TKH, *, scale, windowed):
        return q_TNH

    ids = torch.tensor([1, 2, 3, 4])
    every = model.forward(ids, ids, attend)
    some = model.forward(ids, ids, attend, torch.tensor([2, 0]))
    torch.testing.assert_close(some, every[[2, 0]])
    assert model.forward(ids, ids, attend, torch.tensor([], dtype=torch.int64)).shape == (0, 64)


def test_tiny_models_are_the_same_every_time_and_differ_by_seed(tmp_path):
    one, same = (logits_of(load(write_tiny_llama(tmp_path / name))) for name in ("a", "b"))
    other = logits_of(load(write_tiny_llama(tmp_path / "c", seed=1)))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    near = logits_of(load(write_similar_llama(tmp_path / "a", tmp_path / "d", noise=0.01)))
    assert 0 < (near - one).abs().max() < (other - one).abs().max()


@pytest.mark.parametrize("tied", [True, False])
def test_estimated_bytes_are_the_bytes_of_all_weights(tied, tmp_path):
    folder = write_tiny_llama(tmp_path, tie_embeddings=tied)
    elements = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert estimate_bytes(folder, torch.float32) == elements * 4
    packed_head = 64 * 32 if tied and packs(torch.bfloat16, CPU) else 0
    assert estimate_bytes(folder, torch.bfloat16) == (elements + packed_head) * 2


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    load(write_tiny_llama(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (estimate_bytes(tmp_path, torch.float32),) * 2


def test_tied_models_may_carry_a_head_that_is_not_used(tmp_path):
    folder = write_tiny_llama(tmp_path)
    before = logits_of(load(folder))
    rewrite(folder, lambda t: t.update({"lm_head.weight": torch.zeros(64, 32)}))
    assert torch.equal(logits_of(load(folder)), before)


def test_other_prefixes_and_old_tables(tmp_path):
    folder = write_tiny_llama(tmp_path)
    before = logits_of(load(folder))

    def rename(tensors):
        for name in list(tensors):
            tensors["language_model." + name] = tensors.pop(name)
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["vision_tower.patch.weight"] = torch.zeros(4)

    rewrite(folder, rename)
    assert torch.equal(logits_of(load(folder)), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_files_of_other_dtypes_are_cast(dtype, tmp_path):
    folder = write_tiny_llama(tmp_path)
    before = logits_of(load(folder))
    rewrite(folder, lambda t: t.update({name: w.to(dtype) for name, w in t.items()}))
    torch.testing.assert_close(logits_of(load(folder)), before, atol=0.5, rtol=0.1)


def test_nothing_there(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"does not exist; give a model folder or a \.gguf file"):
        load(tmp_path / "nothing")


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelFileError, match=r"config.json does not exist; a model folder holds"):
        load(tmp_path)


def test_a_folder_with_pickled_weights_only(tmp_path):
    folder = write_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"only pytorch_model.bin: convert them to safetensors"):
        load(folder)


def test_config_that_is_not_json(tmp_path):
    folder = write_tiny_llama(tmp_path)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelFileError, match=r"config.json is not valid JSON"):
        load(folder)


def test_truncated_safetensors(tmp_path):
    folder = write_tiny_llama(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(ModelFileError, match="is truncated: tensor"):
        load(folder)
    for length in (0, 5, 40):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match="is no safetensors file, or is truncated"):
            load(folder)
    file.write_bytes(whole[:8] + b"#" * (len(whole) - 8))
    with pytest.raises(ModelFileError, match="has a damaged header"):
        load(folder)


def test_missing_unexpected_and_misshapen_tensors(tmp_path):
    folder = write_tiny_llama(tmp_path / "missing")
    rewrite(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelFileError, match=r"lacks tensor 'model.layers.1.mlp.up_proj.weight'"):
        load(folder)
    folder = write_tiny_llama(tmp_path / "extra")
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(2)}))
    with pytest.raises(ModelFileError, match=r"has unexpected tensor 'model\.layers\.0.*lora_A'"):
        load(folder)
    folder = write_tiny_llama(tmp_path / "shape")
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(31)}))
    with pytest.raises(ModelFileError, match=r"shape \[31\], the config asks for \[32\]"):
        load(folder)


def test_an_index_that_names_a_missing_file(tmp_path):
    folder = write_tiny_llama(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"lacks model-00001-of-00002.safetensors"):
        load(folder)


def test_a_tensor_in_two_files(tmp_path):
    folder = write_tiny_llama(tmp_path)
    (folder / "second.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"is in model.safetensors and in second.safetensors"):
        load(folder)


def test_quantized_safetensors_are_refused(tmp_path):
    folder = write_tiny_llama(tmp_path)
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    with pytest.raises(ModelFileError, match="is of type I8; supported: F64, F32, F16, BF16"):
        load(folder)
