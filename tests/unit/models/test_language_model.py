"""The last steps of a model: hidden states of chosen rows, and which taps there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.models.language_model import Residual, check_taps
from specinfer.models.ranges import PipelineStage
from specinfer.models.weights import load_model
from tests.kernels import kernels
from tests.parity.families import save_random


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_the_norm_of_chosen_rows_is_theirs_among_all_and_may_be_asked_for_again(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_random(name, tmp_path, tied=True)
    model = load_model(tmp_path, dtype=dtype, device=torch.device("cpu"), kernels=kernels("native"))
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
