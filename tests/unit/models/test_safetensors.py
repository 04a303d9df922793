"""Damaged and malicious headers of safetensors files; undeclared quantized tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.fingerprint import fingerprint, is_of
from specinfer.models.open_model import OpenModel, open_model
from specinfer.models.safetensors import FLOATS, read_entries
from tests.tiny_models import write_tiny_llama


def write_header(path: Path, header: bytes, data: bytes = bytes(16)) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(**changes: Any) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}).encode()


def test_an_entry_is_read(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    path = write_header(tmp_path / "a", entry(), values.numpy().tobytes())
    assert torch.equal(read_entries([path])["w"].read_rows(0, 2), values)


ODD_ENTRIES = [
    *({"shape": shape} for shape in (["x"], [None], [[4]], [True, 4], [2.0, 2], [-2, -2], [2**70, 0])),
    *({"shape": {"a": 1}}, {"shape": "22"}, {"dtype": 4}),
    *({"data_offsets": ends} for ends in ([0], [0, 8, 16], [-16, 0], [0.0, 16], [False, 16], [0, 2**80])),
    *({"data_offsets": [None, None]}, {"data_offsets": None}),
]
ODD_HEADERS = [
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"w": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 16]}}',
    b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}',
    b'{"w": {"dtype": "F32", "shape": [' + b"1" * 5000 + b'], "data_offsets": [0, 16]}}',
    *(b'{"w": 4}', b'{"w": null}', b"[]", b"4 ", b"\xff\xfe{}"),
]


def test_odd_headers_are_told_in_one_line(tmp_path: Path) -> None:
    for header, message in (
        *((entry(**odd), "the entry of tensor 'w' is damaged; get the file again") for odd in ODD_ENTRIES),
        *((header, r"damaged.*get (it|the file) again") for header in ODD_HEADERS),
        (entry(data_offsets=[16, 0]), r"has -16 bytes for shape \[2, 2\]; get it again"),
        (entry(data_offsets=[0, 12]), "has 12 bytes for shape"),
        (entry(shape=[2**40, 2**20]), "has 16 bytes for shape"),
        (entry(data_offsets=[4, 20]), "is truncated: tensor 'w' ends at byte"),
        (entry(dtype="F" * 9000), "is of type F{20}; supported: F64"),
    ):
        with pytest.raises(ModelFileError, match=message) as caught:
            read_entries([write_header(tmp_path / "a", header)])
        assert "\n" not in str(caught.value), header[:40]
        assert len(str(caught.value)) < 400, header[:40]


def test_no_tensor_of_a_quantized_folder_passes_for_a_plain_one(tmp_path: Path) -> None:
    """The config.json says nothing, as the one of compressed-tensors without its format."""
    extras = [
        "mlp.up_proj.weight_scale",
        "mlp.up_proj.weight_scale_inv",
        "mlp.up_proj.input_scale",
        "self_attn.k_scale",
        "mlp.up_proj.weight_packed",
        "mlp.up_proj.weight_zero_point",
        "mlp.up_proj.qweight",
        "mlp.up_proj.scales",
        "mlp.up_proj.biases",
        "mlp.up_proj.weight.absmax",
        "mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
        "mlp.up_proj.SCB",
        "mlp.up_proj.q_scale_max",
        "mlp.up_proj.suh",
        "mlp.up_proj.W_q",
        "mlp.up_proj.codebooks",
    ]
    folder = write_tiny_llama(tmp_path / "m")
    plain = load_file(folder / "model.safetensors")
    for name in extras:
        for instead in (False, True):
            tensors = plain | {f"model.layers.0.{name}": torch.ones(4)}
            if instead:
                del tensors["model.layers.0.mlp.up_proj.weight"]
            save_file(tensors, folder / "model.safetensors")
            with pytest.raises(ModelFileError, match=f"is quantized, but .*{name}. is not of a"):
                open_model(folder)


def test_no_tensor_of_another_type_is_read(tmp_path: Path) -> None:
    folder, name = write_tiny_llama(tmp_path), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    said = f"tensor '{name}' is of type .*; supported: {', '.join(FLOATS)}"
    for kind in (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool):
        save_file(tensors | {name: tensors[name].to(kind)}, folder / "model.safetensors")
        with pytest.raises(ModelFileError, match=said):
            open_model(folder)


# Fingerprints: equal in every format of a model, other for fine-tunes.


Change = Callable[[str, Tensor], Tensor]


def model(folder: Path, change: Change = lambda name, tensor: tensor) -> OpenModel:
    """A tiny model in bfloat16, whose tensors were changed."""
    write_tiny_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: change(name, tensor.bfloat16()).contiguous() for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors")
    return open_model(folder)


def moved(part: str) -> Change:
    """Tensors with this in their names are a little larger."""
    return lambda name, tensor: tensor * 1.02 if part in name else tensor


@pytest.fixture
def base(tmp_path: Path) -> OpenModel:
    return model(tmp_path / "base")


@pytest.mark.parametrize(
    "part", ["model.norm", "layers.0.input_layernorm", "layers.1.self_attn.v_proj", "layers.0.mlp.down_proj"]
)
def test_a_fine_tune_is_told_from_its_base(part: str, base: OpenModel, tmp_path: Path) -> None:
    assert is_of(fingerprint(base), base)
    tuned = model(tmp_path / "tuned", moved(part))
    assert not is_of(fingerprint(base), tuned)
    assert not is_of(fingerprint(tuned), base)


def test_the_first_version_is_still_read(base: OpenModel, tmp_path: Path) -> None:
    """64 digits that depend only on the sizes and the final norm."""
    norm = load_file(base.path / "model.safetensors")["model.norm.weight"].float()
    kept = hashlib.sha256(b"('llama', 64, 32, 2, 4, 2)" + norm.numpy().tobytes()).hexdigest()
    assert is_of(kept, base)
    assert is_of(kept, model(tmp_path / "tuned", moved("mlp")))
    assert not is_of(kept, model(tmp_path / "other", moved("model.norm")))
