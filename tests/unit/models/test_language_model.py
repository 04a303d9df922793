"""The last steps of a model: hidden states of chosen rows, and logits in blocks of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.models.config import PipelineStage
from specinfer.models.language_model import LanguageModel, Residual, check_taps
from specinfer.models.weights import load_model
from specinfer.speculation_config import Quantization
from tests.kernels import kernels
from tests.parity.families import save_random

FORMATS = [
    ("none", torch.bfloat16),
    ("int8", torch.bfloat16),
    ("int4", torch.bfloat16),
    ("int8", torch.float32),
    ("int4", torch.float32),
    ("none", torch.float32),
]
ROWS = 70  # more than any product takes at once


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def load(folder: Path, quantization: Quantization, dtype: torch.dtype) -> LanguageModel:
    return load_model(
        folder,
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=kernels("native"),
        quantization=quantization,
        cache=folder / "quantized",
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("quantization", "dtype"), FORMATS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3-softcap", "opt-350m"])
def test_logits_of_blocks_of_rows_have_the_bits_of_all_at_once(
    name: str, quantization: Quantization, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_random(name, tmp_path, tied=True)
    model = load(tmp_path, quantization, dtype)
    h_RD = random(ROWS, model.config.hidden_size, dtype=dtype, seed=1)
    whole = model.logits(h_RD)
    assert whole.shape == (ROWS, 96)
    for block in (1, 2, 3, 7, 8, 9, 16, 17, 32, 33, 64, 69):
        parts = torch.cat([model.logits(part) for part in h_RD.split(block)])
        assert torch.equal(parts, whole), f"{block} rows at a time"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "opt-350m"])
def test_the_norm_of_chosen_rows_is_theirs_among_all_and_may_be_asked_for_again(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_random(name, tmp_path, tied=True)
    model = load(tmp_path, "none", dtype)
    x_TD, y_TD = (random(9, model.config.hidden_size, dtype=dtype, seed=seed) for seed in (1, 2))
    residual = Residual(x_TD.clone(), y_TD.clone())
    whole = model.final_norm(residual)
    for rows in ([], [3], [8, 0, 0, 5], list(range(9))):
        assert torch.equal(model.final_norm(residual, torch.tensor(rows, dtype=torch.int64)), whole[rows])
    assert torch.equal(model.final_norm(residual), whole)
    assert torch.equal(residual.x_TD, x_TD)
    assert torch.equal(residual.y_TD, y_TD)


def test_taps_of_layers_that_are_not_there_are_refused() -> None:
    check_taps([0, 4], PipelineStage(0, 4, 4))
    with pytest.raises(ValueError, match=r"got taps \[5, -1\]; allowed: 0 .. 4"):
        check_taps([5, 0, -1], PipelineStage(0, 4, 4))
