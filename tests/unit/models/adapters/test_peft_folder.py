"""PEFT folders that are damaged, of another model, or not what they say: refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.models.adapters.peft_folder import PeftFolder
from specinfer.models.config import ModelConfig
from specinfer.models.open_model import open_model
from tests.adapters import ALL, write_adapter
from tests.kernels import kernels
from tests.tiny_models import write_tiny_llama

INSIDE = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


def config_of(model: Path) -> ModelConfig:
    return open_model(model).config


def change(folder: Path, how: Callable[[Tensors], None]) -> None:
    """Change the tensors of an adapter."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def describe(folder: Path, **values: object) -> None:
    """Change its config."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def put(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def drop(name: str) -> Callable[[Tensors], None]:
    def without(tensors: Tensors) -> None:
        del tensors[name]

    return without


OTHER = "base_model.model.model.layers"
ODD_TENSORS = [
    (put(f"{INSIDE}.lora_A.weight", 3, 32), "lora_A.weight' has shape .3, 32., and the config's rank is 4"),
    (put(f"{INSIDE}.lora_B.weight", 32, 5), "lora_B.weight' has shape .32, 5., and the config's rank is 4"),
    (put(f"{INSIDE}.lora_A.weight", 4, 64), "has shape .4, 64., the model needs .4, 32.; .* another model"),
    (put(f"{INSIDE}.lora_B.weight", 64, 4), "has shape .64, 4., the model needs .32, 4.; .* another model"),
    (put(f"{INSIDE}.lora_A.weight", 4), "lora_A.weight' has shape .4., the model needs"),
    (drop(f"{INSIDE}.lora_B.weight"), "q_proj.lora_A.weight' lacks the other half"),
    (put(f"{OTHER}.7.self_attn.q_proj.lora_A.weight", 4, 32), "of 2 layers"),
    (put(f"{OTHER}.0.self_attn.w_pack.lora_A.weight", 4, 32), "allowed: q_proj, k_proj"),
    (put("base_model.model.lm_head.lora_A.weight", 4, 32), "_A.weight' is for a module that cannot have"),
    (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 64), "is not a low-rank adapter's"),
]
ODD_CONFIGS = [
    ({"r": 8}, "and the config's rank is 8"),
    (
        {"rank_pattern": {"up_proj": 2}},
        "up_proj.lora_A.weight' has shape .4, 32., and the config's rank is 2",
    ),
    ({"target_modules": ["q_proj"]}, "is for a module that target_modules does not include"),
    ({"layers_to_transform": [0]}, "layers.1.* is for a module that layers_to_transform does not include"),
    ({"use_dora": True}, "use_dora"),
]


def test_what_does_not_fit_is_named(model: Path, tmp_path: Path) -> None:
    for how, message in (*ODD_TENSORS, *ODD_CONFIGS):
        folder = write_adapter(tmp_path / "sql", model)
        if isinstance(how, dict):
            describe(folder, **how)
        else:
            change(folder, how)
        with pytest.raises(ModelError, match=message) as error:
            PeftFolder("sql", folder, config_of(model))
        assert str(error.value).startswith("adapter 'sql' (")
        assert "\n" not in str(error.value)


def test_a_module_without_tensors_is_named(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql", model, targets=["q_proj", "v_proj"])
    for half in "AB":
        change(folder, drop(f"base_model.model.model.layers.1.self_attn.v_proj.lora_{half}.weight"))
    with pytest.raises(ModelError, match=r"target_modules includes model.layers.1.self_attn.v_proj, but"):
        PeftFolder("sql", folder, config_of(model))


def test_files_that_are_not_there_or_damaged(model: Path, tmp_path: Path) -> None:
    config, folder = config_of(model), write_adapter(tmp_path / "sql", model)
    with pytest.raises(ModelError, match="is not a folder"):
        PeftFolder("sql", tmp_path / "gone", config)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    with pytest.raises(ModelError, match=r"adapter 'sql' .*truncated"):
        PeftFolder("sql", folder, config)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(whole)
    with pytest.raises(ModelError, match=r"has no adapter_model.safetensors; adapter_model.bin is pickled"):
        PeftFolder("sql", folder, config)
    weights.write_bytes(whole)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter 'sql' .*is not valid JSON"):
        PeftFolder("sql", folder, config)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_config.json"):
        PeftFolder("sql", folder, config)


def test_the_bytes_of_an_adapter_are_those_that_it_takes(model: Path, tmp_path: Path) -> None:
    library, config = kernels("native").library, config_of(model)
    for rank, targets in product((1, 16, 17), (ALL, ("k_proj", "down_proj"))):
        opened = PeftFolder("sql", write_adapter(tmp_path / "sql", model, rank=rank, targets=targets), config)
        for weights in (torch.bfloat16, torch.int8):
            loaded = opened.load(weights, torch.device("cpu"), library)
            assert opened.bytes(weights) == loaded.used_bytes, (rank, targets, weights)


def test_numbers_that_are_none_are_found_when_they_are_read(model: Path, tmp_path: Path) -> None:
    folder, config = write_adapter(tmp_path / "sql", model), config_of(model)
    wrong = torch.zeros(32, 4, dtype=torch.float64)
    for value in (float("nan"), float("inf"), 1e300):
        wrong[3, 1] = value
        change(folder, lambda tensors: tensors.update({f"{INSIDE}.lora_B.weight": wrong}))
        opened = PeftFolder("sql", folder, config)
        with pytest.raises(ModelError, match=r"q_proj.lora_B.weight' holds values that are not finite float"):
            opened.load(torch.float32, torch.device("cpu"), None)


def test_files_that_changed_since_are_not_loaded(model: Path, tmp_path: Path) -> None:
    folder, config = write_adapter(tmp_path / "sql", model), config_of(model)
    opened = PeftFolder("sql", folder, config)
    write_adapter(folder, model, seed=1, rank=4, alpha=100)
    describe(folder, more=None)
    with pytest.raises(ModelError, match="its files were changed since it was named"):
        opened.load(torch.float32, torch.device("cpu"), None)


def test_names_as_other_programs_write_them(model: Path, tmp_path: Path) -> None:
    folder, config = write_adapter(tmp_path / "sql", model, targets=["q_proj"]), config_of(model)

    def renamed(tensors: Tensors) -> None:
        for name in list(tensors):
            new = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            tensors[new.replace("model.layers", "model.language_model.layers")] = tensors.pop(name)

    change(folder, renamed)
    adapter = PeftFolder("sql", folder, config).load(torch.float32, torch.device("cpu"), None)
    assert [product is not None for product in adapter.products] == [True, False, False, False] * 2


def test_an_adapter_of_a_part_of_the_layers(model: Path, tmp_path: Path) -> None:
    folder, config = write_adapter(tmp_path / "sql", model, targets=["o_proj"]), config_of(model)
    for half in "AB":
        change(folder, drop(f"base_model.model.model.layers.0.self_attn.o_proj.lora_{half}.weight"))
    describe(folder, layers_to_transform=[1])
    adapter = PeftFolder("sql", folder, config).load(torch.float32, torch.device("cpu"), None)
    assert [product is not None for product in adapter.products] == [*[False] * 5, True, False, False]
