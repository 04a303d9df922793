"""Both backends against attention in float64: chains, trees, batches, windows, head norms, rope."""

from __future__ import annotations

import re

import pytest
import torch

from specinfer.attention.backend import AttentionBackend
from specinfer.attention.native import unsupported
from specinfer.runtime.batch import Rows
from tests.kernels import NAMES, kernels
from tests.unit.attention.paths import BLOCKS, Layer, paths_of, scattered

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


def test_what_is_no_number_stays_none(backend: AttentionBackend) -> None:
    """A key that overflowed must not pass for a sensible one: the engine looks for it in the logits."""
    layer = Layer(4, 2, 32)
    paths = paths_of(Rows([1], 40, scattered(0, 4), 0))
    qkv, _ = layer.inputs(paths)
    k, v = layer.caches()
    k[paths.slots[7], 1] = float("nan")
    out = backend.over([k], [v]).bind(paths)(layer.heads, qkv, None).view(1, 4, 32)
    assert out[:, 2:].isnan().all(), "of the heads that read it"
    assert out[:, :2].isfinite().all()


def test_a_slot_that_is_not_there_is_refused(backend: AttentionBackend) -> None:
    layer = Layer(2, 1, 16)
    paths = paths_of(Rows([1, 2], 0, [BLOCKS], 0))  # one block too far
    k, v = layer.caches()
    with pytest.raises(
        (RuntimeError, IndexError, ValueError),
        match=r"slots .* 1025 of a cache of 1024|out of (range|bounds)",
    ):
        backend.over([k], [v]).bind(paths)(layer.heads, torch.zeros(2, 64), None)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "reason"),
    [
        (64, 8, torch.bfloat16, None),
        (15, 1, torch.float32, None),
        (512, 96, torch.bfloat16, None),
        (15, 1, torch.bfloat16, "heads have 15 elements; in bfloat16 it takes an even number"),
        (576, 1, torch.float32, "heads have 576 elements; it takes at most 512"),
        (64, 128, torch.bfloat16, "128 query heads share a key-value head; it takes at most 96"),
    ],
)
def test_heads_that_native_attention_cannot_serve_are_known(
    head_dim: int, group: int, dtype: torch.dtype, reason: str | None
) -> None:
    assert unsupported(head_dim, group, dtype) == reason
    layer, paths = Layer(group, 1, head_dim, dtype), paths_of(Rows([1], 3, scattered(0, 1), 0))
    native = kernels("native").attention
    if reason is None:
        assert layer.run(native, paths)[0].isfinite().all()
    else:
        with pytest.raises(ValueError, match=re.escape(reason)):
            layer.run(native, paths)
