"""Mixtures of experts: ties and rows that are not finite; tests/parity has what experts make."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.kernels import NAMES, kernels
from tests.loading import load
from tests.parity.families import save_random
from tests.tiny_models import write_tiny_mixture

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
def test_a_row_that_is_not_finite_has_weights_of_nan_and_the_others_have_their_own(
    name: Name, odd: float
) -> None:
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
def test_a_router_that_is_not_finite_is_refused_by_name(
    name: Name, kind: Quantization, tmp_path: Path
) -> None:
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
