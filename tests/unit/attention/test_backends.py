"""Both backends against attention in float64: chains, trees, batches, windows, head norms, rope."""

from __future__ import annotations

import pytest
import torch

from specinfer.attention.backend import AttentionBackend
from specinfer.runtime.batch import Rows
from tests.kernels import NAMES, kernels
from tests.unit.attention.paths import Layer, paths_of, scattered

#      0          with 70 tokens of text before it, 0 among the last of them or all of them at once
#     / \
#    1   2
#    |  / \
#    3 4   5
TREE = [-1, 0, 0, 1, 2, 2]
BATCHES = {
    "one row": [Rows([1], 200, scattered(0, 20), 0)],
    "the first row of a text": [Rows([1], 0, [3], 0)],
    "a whole prompt": [Rows([1] * 150, 0, scattered(0, 12), 0)],
    "a chunk of a prompt": [Rows([1] * 40, 100, [5, 6, 7, 8, 9, 10, 11, 12, 13], 0)],
    "a tree": [Rows([1] * 6, 70, scattered(0, 6), 0, TREE)],
    "a tree at the beginning": [Rows([1] * 6, 0, [2], 0, TREE)],
    "a prompt and its tree": [Rows([1] * 30, 46, scattered(0, 6), 0, TREE)],
    "a tree's last level": [Rows([1] * 3, 73, scattered(0, 6), 0, TREE)],
    "one node": [Rows([1], 75, scattered(0, 6), 0, TREE)],
    "a path over two blocks": [Rows([1] * 80, 50, scattered(0, 9), 0, [-1, 0, 0, *range(2, 79)])],
    "requests of all kinds": [
        Rows([1] * 6, 70, scattered(0, 6), 0, TREE),
        Rows([1], 300, scattered(6, 20), 0),
        Rows([1] * 33, 0, scattered(26, 3), 0),
        Rows([1] * 2, 63, scattered(29, 5), 0, [-1, 0]),
    ],
}
HEADS = [(4, 4, 16), (6, 2, 16), (5, 1, 8), (12, 2, 128), (9, 3, 64), (14, 2, 20)]


@pytest.fixture(params=NAMES, scope="module")
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return kernels(request.param).attention


def check(backend: AttentionBackend, layer: Layer, rows: list[Rows], tolerance: float) -> None:
    paths = paths_of(*rows)
    names = ("attended", "keys", "values")
    for name, got, want in zip(names, layer.run(backend, paths), layer.oracle(paths), strict=True):
        assert got.dtype is layer.dtype
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("window", [None, 3, 64, 100])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_batches(backend: AttentionBackend, rows: list[Rows], window: int | None) -> None:
    check(backend, Layer(6, 2, 16, window=window), rows, 1e-5)


@pytest.mark.parametrize(
    "extras", [{}, {"norms": True}, {"rope": True}, {"norms": True, "rope": True}], ids=str
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_heads(backend, heads, kv_heads, head_dim, extras, dtype, tolerance):
    layer = Layer(heads, kv_heads, head_dim, dtype, **extras)
    check(backend, layer, BATCHES["requests of all kinds"], tolerance)
