"""Floats -> quantized weights: how near they come, and that pieces make the same whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specinfer.kernels.layout import (
    GROUP,
    Int4Weight,
    int8_matrix,
    quantize_int4,
    quantize_int8,
    rotate,
    unpack_levels,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int4_values(weight: Int4Weight) -> Tensor:
    """The weights it stands for, [blocks * 16, padded inner]."""
    columns = [
        (unpack_levels(weight.levels[:, g]) - weight.zeros[:, g].reshape(-1, 1) / 16)
        * weight.scales[:, g].reshape(-1, 1).float()
        for g in range(weight.scales.shape[1])
    ]
    return torch.cat(columns, 1)


def test_int8_is_within_half_a_step_of_the_turned_weights() -> None:
    w = random(20, 100) * torch.logspace(-4, 4, 20)[:, None]
    values, scales = int8_matrix(quantize_int8(w), 20, 128)
    rotated = rotate(torch.nn.functional.pad(w, (0, 28)).view(20, 4, GROUP)).flatten(1) / GROUP
    assert values.abs().amax(1).tolist() == [127] * 20
    error = (values * scales[:, None] - rotated).abs().amax(1)
    assert (error <= 0.501 * scales).all()


@pytest.mark.parametrize("span", [15, 12, 10])
def test_int4_finds_the_grid_that_weights_lie_on(span: int) -> None:
    """Groups that use `span` + 1 of 16 levels with a zero among them, as those of 4-bit files do."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, span + 1, (16, 4, GROUP), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, span
    steps = 2.0 ** -torch.randint(4, 9, (16, 4, 1), generator=generator)
    w = ((levels - 6.25) * steps).view(16, 4 * GROUP)
    torch.testing.assert_close(int4_values(quantize_int4(w)), w, rtol=2**-9, atol=0)
