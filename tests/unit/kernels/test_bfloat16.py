"""Native bfloat16 products: near the real ones, a row for itself, and used where they are the fastest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.kernels.bfloat16 import is_fastest, tile, tiled_product
from specinfer.models.linear import packs
from specinfer.models.weights import load_model
from tests.kernels import kernels
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
SHAPES = [(16, 4), (48, 80), (17, 6), (1, 1), (100, 1536), (33, 8960)]  # channels, inner
ROWS = [0, 1, 2, 7, 12, 13, 24, 25, 70]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    kernels("native")


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("channels", "inner"), SHAPES)
def test_products_are_rounded_once(channels: int, inner: int, with_bias: bool) -> None:
    weight, bias = random(channels, inner, seed=1), random(channels, seed=2) if with_bias else None
    product = tiled_product(weight, bias)
    for rows in ROWS:
        x = random(rows, inner, seed=3)
        got = product(x)
        assert got.dtype is torch.bfloat16
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize(("channels", "inner"), SHAPES)
def test_a_row_does_not_depend_on_the_rows_beside_it(channels: int, inner: int) -> None:
    product, x = tiled_product(random(channels, inner, seed=1), None), random(70, inner, seed=3)
    whole = product(x)
    for step in (1, 2, 5, 11, 12, 13, 24, 33):
        assert torch.equal(torch.cat([product(part) for part in x.split(step)]), whole), f"{step} at a time"


def test_weights_lie_as_the_kernel_reads_them() -> None:
    weight = torch.arange(18 * 6).reshape(18, 6).bfloat16()
    tiles = tile(weight)
    assert tiles.shape == (2, 4, 16, 2)
    assert tiles[0, 1, 5].tolist() == weight[5, 2:4].tolist()
    assert tiles[1, 2, 1].tolist() == weight[17, 4:6].tolist()
    assert not tiles[1, :, 2:].any()
    assert not tiles[:, 3].any()


def test_what_it_cannot_multiply_is_refused() -> None:
    product = tiled_product(random(16, 8, seed=1), None)
    for wrong in (random(2, 12, seed=2), random(2, 8, seed=2).float(), random(8, 2, seed=2).T):
        with pytest.raises(
            RuntimeError, match=r"x must be contiguous rows|a weight of 128 elements for 16 x 12"
        ):
            product(wrong)


def test_models_use_it_where_it_is_the_fastest(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    assert (kernels("native").bfloat16 is not None) == is_fastest()
    assert kernels("torch").bfloat16 is None
    differs = {
        name: load_model(folder, dtype=torch.bfloat16, device=CPU, kernels=kernels(name)).lone_row_differs
        for name in ("native", "torch")
    }
    onednn = packs(torch.bfloat16, CPU)
    assert differs == {"native": onednn and not is_fastest(), "torch": onednn}
