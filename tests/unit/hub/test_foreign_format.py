"""Folders and files that are not supported language models: one line names each kind."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from specinfer.errors import ModelError, ModelFileError
from specinfer.hub.foreign_format import quantized_config
from specinfer.hub.resolution import resolve
from specinfer.models.families.registry import gguf_family, hf_family
from specinfer.models.open_model import open_model
from specinfer.models.quantized.checkpoint import quantization_of
from tests.tiny_models import write_tiny_llama

NOT_READ = (
    "neither model.safetensors nor model.safetensors.index.json; fetch the model again, or give the original"
)
FOLDERS = {
    ("adapter_config.json", "adapter_model.safetensors"): "is an adapter (LoRA), or a model with one: merge",
    ("config.json", "model.safetensors", "adapter_config.json"): "is an adapter (LoRA), or a model with one",
    ("model_index.json",): "is a diffusers pipeline, which makes pictures",
    ("config.json", "modules.json", "model.safetensors"): "is a sentence-transformers model, which makes",
    ("config.json", "model.safetensors", "hf_quant_config.json"): "is quantized by NVIDIA's ModelOpt",
    ("config.json", "openvino_model.xml", "openvino_model.bin"): NOT_READ,
    ("config.json", "model.onnx"): NOT_READ,
    ("config.json", "rank0.safetensors"): NOT_READ,
    ("config.json", "qmodel.pt"): NOT_READ,
    ("config.json", "consolidated.safetensors"): NOT_READ,
    ("config.json",): NOT_READ.partition(", or give")[0],
    ("config.json", "other.safetensors"): "if other.safetensors is the whole model, rename it to model.safe",
    ("params.json", "consolidated.00.pth"): "is not a model: it has no config.json",
}


def test_a_folder_is_described_in_one_line(tmp_path: Path) -> None:
    for number, (files, message) in enumerate(FOLDERS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in files:
            (folder / name).write_bytes(b"{}")
        with pytest.raises(ModelFileError, match=re.escape(message)) as caught:
            pytest.fail(f"{files} is {resolve(str(folder))}")
        assert "\n" not in str(caught.value), files


def test_the_line_on_pickled_weights_converts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for i, name in enumerate(names):
        torch.save(dict([*tensors.items()][i :: len(names)]), folder / name)
    (folder / "training_args.bin").write_bytes(b"no weights")
    with pytest.raises(ModelFileError, match=rf"; convert {', '.join(names)} to safetensors, as") as caught:
        resolve(str(folder))
    command = re.search(r'python -c "([^"]*)"$', str(caught.value))
    monkeypatch.chdir(folder)
    exec(command[1], {})  # the command in the message
    assert open_model(folder).config.num_layers == 2
    converted = load_file(folder / "model.safetensors")
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())


QUANTIZED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "torchao", "quant_type": {}}, "torchao"),
    ({"quant_method": "intel/auto-round", "bits": 4}, r"intel/auto-round \(4 bits\)"),
    ({"quant_method": "tomorrow's"}, "tomorrow's"),
    ({"group_size": 64, "bits": 4}, r"an unnamed method \(4 bits\)"),
    ({"config_groups": {}}, "an unnamed method"),
]


def test_a_declared_quantization_is_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    keys = ("quantization_config", "compression_config", "quantization")
    for key, (quantization, method) in product(keys, QUANTIZED):
        (folder / "config.json").write_text(json.dumps(config | {key: quantization}))
        message = f"the weights are quantized by {method}, which is not supported here; supp"
        with pytest.raises(ModelError, match=message):
            pytest.fail(f"{key} {quantization} is opened: {open_model(folder)}")


def test_a_quantization_that_no_tensor_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for settings in ({"quant_method": "gptq", "bits": 4, "group_size": 32}, {"quant_method": "fp8"}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        caplog.clear()
        assert open_model(tmp_path).shapes
        assert f"are quantized by {settings['quant_method']}, but no tensor is" in caplog.text


def test_a_refused_model_says_what_it_is_and_which_relative_runs() -> None:
    for kind, what, relative in (
        ("lfm3", "a recurrent hybrid, ", "LFM2 and LFM2.5"),
        ("mamba2", "a recurrent hybrid, ", ""),
        ("pixtral", "a model with a vision tower, ", "Mistral Small 24B"),
        ("llama4_text", "a model with attention in chunks, ", "Llama 3"),
        ("nomic-bert", "an encoder, ", ""),
        ("t5", "an encoder with a decoder, ", ""),
        ("deepseek2", "a model with latent attention, ", "DeepSeek-R1-Distill"),
        ("minicpm", "of no family that specinfer has; ", ""),
    ):
        for read, fields in (
            (hf_family, {"model_type": kind}),
            (gguf_family, {"general.architecture": kind}),
        ):
            with pytest.raises(ModelError) as caught:
                read(fields)
            assert f"{kind!r} is {what}" in str(caught.value)
            runs = f"; of its relatives {relative} run; " if relative else "; "
            assert f"{runs}docs/models.md lists the models that run" in str(caught.value)


def test_one_around_the_language_model_counts_too() -> None:
    inner = {"model_type": "gemma3_text", "quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(ModelError, match="quantized by hqq"):
        quantization_of({"model_type": "gemma3", "text_config": inner})
    assert quantized_config({"quantization_config": None, "quantization": {}}) is None


def test_gguf_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    for architecture, kind, message in (
        ("llama", "adapter lora", r"an adapter \(LoRA\), not a model"),
        ("clip", "mmproj", r"the image encoder of a model \(mmproj\); give the GGUF"),
        ("controlvector", "", "a control vector"),
        ("llama", "imatrix", "an importance matrix"),
    ):
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in zip(("general.type", "adapter.type"), kind.split(), strict=False):
            writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelFileError, match=f"some.gguf is .*{message}"):
            pytest.fail(f"{architecture} {kind} is {resolve(str(path))}")
