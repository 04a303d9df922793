"""Mixtures of experts: which experts a row has, what these make of it, and that no row sees another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.ops import SigmoidScores
from specinfer.models.config import Experts
from specinfer.models.decoder_layer import DecoderLayer
from specinfer.models.experts import Mixture
from specinfer.models.open_model import open_model
from specinfer.models.weight_memory import Weights
from specinfer.models.weight_reader import WeightReader
from specinfer.models.weights import load_model
from specinfer.progress import NoProgress
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.kernels import NAMES, kernels
from tests.oracles.experts import chosen_experts, mixture_row
from tests.parity.families import save_random
from tests.tiny_models import write_tiny_mixture

CPU = torch.device("cpu")
Name = Literal["torch", "native"]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_logits_choose_and_their_softmax_weighs(name: Name, normalized: bool) -> None:
    config = Experts(8, 3, 16, normalized)
    logits_TC = torch.randn(20, 9, generator=torch.Generator().manual_seed(1)) * 3
    numbers_TK, weights_TK = chosen(name, logits_TC, normalized=normalized)
    for logits, numbers, weights in zip(logits_TC, numbers_TK, weights_TK, strict=True):
        want = chosen_experts(logits[:8].tolist(), config)
        assert numbers.tolist() == [*want]
        assert weights.tolist() == pytest.approx([*want.values()], rel=1e-5)
    open_T = kernels(name).ops.open_gates(logits_TC, 8)
    torch.testing.assert_close(open_T, logits_TC[:, 8].sigmoid())


@pytest.mark.parametrize("name", NAMES)
def test_sigmoids_with_a_bias_choose_and_weigh_without_it(name: Name) -> None:
    logits_TC = torch.randn(20, 9, generator=torch.Generator().manual_seed(1)) * 3
    bias_E, scores_TE = torch.linspace(-1, 1, 8), logits_TC[:, :8].sigmoid()
    for normalized in (True, False):
        given = SigmoidScores(bias_E, 2.5, 0.1)
        numbers_TK, weights_TK = kernels(name).ops.choose_experts(
            logits_TC, 8, 3, normalized=normalized, scores=given
        )
        want_TK = (scores_TE + bias_E).topk(3).indices.sort().values
        assert torch.equal(numbers_TK, want_TK)
        own_TK = scores_TE.gather(1, want_TK)
        divisor_T1 = own_TK.sum(1, keepdim=True) + 0.1 if normalized else 1.0
        torch.testing.assert_close(weights_TK, own_TK / divisor_T1 * 2.5)


def chosen(name: Name, logits_TC: Tensor, *, normalized: bool = True) -> tuple[Tensor, Tensor]:
    """Three of eight experts for each row."""
    return kernels(name).ops.choose_experts(logits_TC, 8, 3, normalized=normalized)


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


def mixture_of(folder: Path, name: Name) -> tuple[Mixture, Mapping[str, Tensor], Experts]:
    """The mixture of a folder's first layer, its tensors and its sizes."""
    file = open_model(folder)
    with WeightReader(file, torch.float32, NoProgress()) as reader:
        layer = DecoderLayer(0, file.config, Weights(reader, CPU, kernels(name)), "model.layers.0")
    assert file.config.experts is not None
    tensors = {tensor: file.read_rows(tensor, 0, shape[0]) for tensor, shape in file.shapes.items()}
    return layer._mlp, tensors, file.config.experts


@pytest.mark.parametrize("shared", [0, 24])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_is_what_is_stated(name: Name, normalized: bool, shared: int, tmp_path: Path) -> None:
    folder = write_tiny_mixture(tmp_path, normalized=normalized, shared_size=shared)
    mixture, tensors, config = mixture_of(folder, name)
    x_TD = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    want = torch.stack([mixture_row(x_D, tensors, "model.layers.0.mlp", config) for x_D in x_TD])
    torch.testing.assert_close(mixture(x_TD).double(), want, atol=1e-4, rtol=1e-4)


def runner_of(folder: Path, name: Name, dtype: torch.dtype, kind: Quantization) -> ModelRunner:
    model = load_model(
        folder, dtype=dtype, device=CPU, kernels=kernels(name), quantization=kind, cache=folder / "kept"
    )
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
