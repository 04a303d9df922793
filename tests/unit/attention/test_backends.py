"""Both backends against attention in float64: chains, trees, batches, windows, head norms, rope."""

import re
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch

from specinfer.attention.backend import AttentionBackend, Paths
from specinfer.attention.sdpa import SdpaAttention, weighed
from specinfer.kernels.attention import unsupported
from specinfer.runtime.batch import Rows
from tests.kernels import NAMES, kernels
from tests.unit.attention.paths import BLOCK, BLOCKS, Layer, paths_of, random, scattered

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
# Nothing, and caps, ALiBi and sinks, each alone and all together.
OTHERWISE: list[dict[str, Any]] = [
    *({}, {"softcap": 2.0}, {"alibi": True}, {"alibi": True, "rounded": True}, {"sinks": True}),
    {"softcap": 2.0, "alibi": True, "sinks": True},
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS = [(4, 4, 16), (6, 2, 16), (5, 1, 8), (12, 2, 128), (9, 3, 64), (14, 2, 20)]


@pytest.fixture(params=NAMES, scope="module")
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return kernels(request.param).attention


def check(backend: AttentionBackend, layer: Layer, batch: str) -> None:
    paths, near = paths_of(*BATCHES[batch]), TOLERANCE[layer.dtype]
    for got, want in zip(layer.run(backend, paths), layer.oracle(paths), strict=True):
        assert got.dtype is layer.dtype
        torch.testing.assert_close(
            *(got.double(), want), atol=near, rtol=near, msg=lambda said: f"{batch}, {layer}: {said}"
        )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "extras", [{}, {"norms": True}, {"rope": True}, {"norms": True, "rope": True}], ids=str
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_heads(backend: AttentionBackend, extras: dict[str, Any], dtype: torch.dtype) -> None:
    for heads in HEADS:
        check(backend, Layer(*heads, dtype, **extras), "requests of all kinds")


@pytest.mark.few(8)
@pytest.mark.parametrize("window", [None, 3, 64, 100])
@pytest.mark.parametrize("extras", OTHERWISE, ids=str)
def test_batches(backend: AttentionBackend, extras: dict[str, Any], window: int | None) -> None:
    for name in BATCHES:
        check(backend, Layer(6, 2, 16, window=window, **extras), name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_int8(backend: AttentionBackend, dtype: torch.dtype) -> None:
    """Attention over rounded rows; and the bits of those that were written."""
    layers = [Layer(*heads, dtype, int8=True) for heads in HEADS]
    layers += [
        Layer(6, 2, 16, dtype, window=window, int8=True, **extras)
        for window, extras in ((3, {}), (100, OTHERWISE[-1]))
    ]
    near = {torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
    for layer in layers:
        for name, rows in BATCHES.items():
            paths = paths_of(*rows)
            out, *written = layer.run(backend, paths)
            rounded = [x.float() * s.unsqueeze(-1) for x, s in zip(written, layer.scales[0], strict=True)]
            want, *caches = layer.oracle(paths)
            assert torch.allclose(out.double(), want, atol=near, rtol=near), (name, layer)
            for got, exact in zip(rounded, caches, strict=True):
                assert torch.equal(got.double(), exact), (name, layer)


@pytest.mark.parametrize("extras", OTHERWISE, ids=str)
def test_rows_together_under_a_mask_find_what_each_finds_alone(extras: dict[str, Any]) -> None:
    """As other devices than a CPU compute it."""
    heads = Layer(6, 2, 16, **extras).heads
    q_TNH, k_SKH, v_SKH = random(5, 6, 16, seed=1), random(9, 2, 16, seed=2), random(9, 2, 16, seed=3)
    sees_TS = torch.ones(5, 9, dtype=torch.bool).tril(4)
    sees_TS[1, 2], sees_TS[3, 5] = False, False  # of another branch
    window_TS = sees_TS & (sees_TS.cumsum(1) > 1)
    places_TS, lengths_T1 = sees_TS.cumsum(1) - 1, sees_TS.sum(1, keepdim=True)
    together = weighed(heads, q_TNH, k_SKH, v_SKH, places_TS, lengths_T1, window_TS)
    for t in range(5):
        seen = window_TS[t]
        alone = weighed(
            *(heads, q_TNH[t : t + 1], k_SKH[seen], v_SKH[seen]),
            *(places_TS[t : t + 1, seen], lengths_T1[t : t + 1]),
        )
        torch.testing.assert_close(together[t], alone[0], atol=1e-6, rtol=1e-5)


def test_nan_propagates(backend: AttentionBackend) -> None:
    """A key that overflowed must not pass for a sensible one: the engine looks for it in the logits."""
    layer = Layer(4, 2, 32)
    paths = paths_of(Rows([1], 40, scattered(0, 4), 0))
    qkv, _ = layer.inputs(paths)
    k, v = layer.caches()
    k[paths.slots(0)[7], 1] = float("nan")
    out = backend.over([k], [v]).bind(paths)(layer.heads, qkv, None).view(1, 4, 32)
    assert out[:, 2:].isnan().all(), "of the heads that read it"
    assert out[:, :2].isfinite().all()


@pytest.mark.parametrize("block", [1, 3, 7, 16, 100, 1000])
def test_blocks_of_any_size(backend: AttentionBackend, block: int) -> None:
    layer = Layer(6, 2, 16)
    blocks = torch.randperm(BLOCKS * BLOCK // block, generator=torch.Generator().manual_seed(block)).tolist()
    tree = Rows([1] * 6, 70, blocks[: -(-76 // block)], 0, TREE)
    rest = blocks[-(-76 // block) :]
    parts = [tree, Rows([1] * 33, 167, rest, 0)] if len(rest) * block >= 200 else [tree]
    paths = paths_of(*parts, block=block)
    for got, want in zip(layer.run(backend, paths), layer.oracle(paths), strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_slot_that_is_not_there_is_refused_by_pytorch() -> None:
    layer = Layer(2, 1, 16)
    k, v = layer.caches()
    for table in ([BLOCKS, BLOCKS], [0]):
        paths = paths_of(Rows([1] * 2, BLOCK, table, 0))
        with pytest.raises(
            (RuntimeError, IndexError, ValueError),
            match=r"a table of 1 blocks of 16 for 18 positions|out of (range|bounds)",
        ):
            SdpaAttention().over([k], [v]).bind(paths)(layer.heads, torch.zeros(2, 64), None)


GOOD: dict[str, list[Any]] = {
    **{"tables_B": [2, 0, 1], "requests_R4": [[0, 2, 0, 2], [2, 5, 1, 20]], "shared_T": [1, 2, 18, 18, 18]},
    **{"tail_ends": [0, 0, 0, 0, 1, 3], "tails": [18, 18, 19]},
}


FIRST, SECOND = GOOD["requests_R4"]
WRONG: dict[str, list[tuple[str, Any]]] = {
    "a block that the cache does not have": [
        *(("tables_B", wrong) for wrong in ([2, 0, 3], [-1, 0, 1])),
        *(("block_size", wrong) for wrong in (0, 17)),
    ],
    "requests whose rows do not follow one another to the last": [
        *(("requests_R4", [FIRST, *more]) for more in ([], [[1, 5, 1, 20]], [[2, 6, 1, 20]], [[2, 5, 1, 2]])),
        ("requests_R4", [[0, 0, 0, 2], [0, 5, 1, 20]]),
    ],
    "a table that is too short for its request": [
        *(("requests_R4", [wrong, SECOND]) for wrong in ([0, 2, 0, 17], [0, 2, -1, 2])),
        *(("requests_R4", [FIRST, wrong]) for wrong in ([2, 5, 1, 33], [2, 5, 2, 20])),
    ],
    "a path that is not one of the request's positions": [
        *(("shared_T", wrong) for wrong in ([1, 3, 18, 18, 18], [0, 2, 18, 18, 18], [1, 2, 18, 19, 18])),
        *(("tails", wrong) for wrong in ([18, 18, 20], [18, 19, 19])),
        *(("tail_ends", [*wrong, 1, 3]) for wrong in ([0, 0, 0, 2], [-1, 0, 0, 0])),
        ("tail_ends", [0, 0, 0, 0, 1, 4]),
    ],
}


def made_of(block_size: int, parts: dict[str, list[Any]]) -> Paths:
    requests = [0] * 4 * len(parts["requests_R4"])
    paths = Paths.of(requests, [0] * 5, [0] * 6, [0] * 3, tables=[[0] * 3], block_size=block_size)
    for name, values in parts.items():
        getattr(paths, name)[:] = values
    return paths


def test_paths_that_lead_nowhere_are_refused_before_they_are_followed() -> None:
    k, v = torch.zeros(2, 48, 1, 16)
    cache = kernels("native").attention.over([k], [v])

    def bind(block_size: int = 16, **changed: list[Any]) -> None:
        cache.bind(made_of(block_size, {**GOOD, **changed}))

    bind()
    good = made_of(16, GOOD)
    for wrong in (
        replace(good, numbers=array("q", good.numbers)),
        replace(good, num_tails=len(good.numbers)),
    ):
        with pytest.raises(ValueError, match="paths must be an array of int32, with as many numbers"):
            cache.bind(wrong)
    for fault, changes in WRONG.items():
        for name, wrong in changes:
            with pytest.raises(ValueError, match=f"^{fault}: 5 rows.*cache of 48 slots"):
                bind(**{name: wrong})


def test_heads_that_native_attention_cannot_serve_are_known() -> None:
    for head_dim, group, dtype, reason in (
        (64, 8, torch.bfloat16, None),
        (15, 1, torch.float32, None),
        (512, 96, torch.bfloat16, None),
        (15, 1, torch.bfloat16, "heads have 15 elements; in bfloat16 it takes an even number"),
        (576, 1, torch.float32, "heads have 576 elements; it takes at most 512"),
        (64, 128, torch.bfloat16, "128 query heads share a key-value head; it takes at most 96"),
    ):
        assert unsupported(head_dim, group, dtype) == reason, (head_dim, group, dtype)
        layer, paths = Layer(group, 1, head_dim, dtype), paths_of(Rows([1], 3, scattered(0, 1), 0))
        native = kernels("native").attention
        if reason is None:
            assert layer.run(native, paths)[0].isfinite().all(), (head_dim, group, dtype)
        else:
            with pytest.raises(ValueError, match=re.escape(reason)):
                layer.run(native, paths)
