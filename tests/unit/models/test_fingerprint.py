"""A fingerprint is equal in every format of a model, and differs between fine-tunes and base."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.models.fingerprint import fingerprint, is_of
from specinfer.models.open_model import OpenModel, open_model
from tests.tiny_models import write_tiny_llama

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
