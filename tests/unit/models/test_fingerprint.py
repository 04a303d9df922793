"""A fingerprint is equal in every format of a model, and differs between fine-tunes and base."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.hub.pool import FINGERPRINT
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


def test_matrices_in_another_dtype_are_not_compared(base: OpenModel, tmp_path: Path) -> None:
    wide = model(tmp_path / "wide", lambda name, tensor: tensor.float() if "proj" in name else tensor)
    assert fingerprint(wide) != fingerprint(base)
    assert is_of(fingerprint(wide), base)
    assert is_of(fingerprint(base), wide)
    norms = fingerprint(base).rsplit(":", 2)[0]  # as quantized files have it
    assert is_of(norms, base)
    assert not is_of(norms, model(tmp_path / "tuned", moved("layernorm")))


def test_dtypes_that_differ_within_a_model_leave_its_rows_out(base: OpenModel, tmp_path: Path) -> None:
    mixed = model(tmp_path / "mixed", lambda name, tensor: tensor.float() if "v_proj" in name else tensor)
    assert fingerprint(mixed) == fingerprint(base).rsplit(":", 2)[0]


def test_the_first_version_is_still_read(base: OpenModel, tmp_path: Path) -> None:
    """64 digits that depend only on the sizes and the final norm."""
    norm = load_file(base.path / "model.safetensors")["model.norm.weight"].float()
    kept = hashlib.sha256(b"('llama', 64, 32, 2, 4, 2)" + norm.numpy().tobytes()).hexdigest()
    assert is_of(kept, base)
    assert is_of(kept, model(tmp_path / "tuned", moved("mlp")))
    assert not is_of(kept, model(tmp_path / "other", moved("model.norm")))


def test_files_that_hold_one_take_all_versions(base: OpenModel) -> None:
    for kept in ("0" * 64, fingerprint(base), fingerprint(base).rsplit(":", 2)[0]):
        assert FINGERPRINT.fullmatch(kept)
    for wrong in (
        "0" * 63,
        "2:0",
        "3:" + "0" * 32,
        "2:" + "0" * 32 + ":bfloat16",
        "2:" + "0" * 32 + ":a b:" + "0" * 32,
    ):
        assert not FINGERPRINT.fullmatch(wrong)
