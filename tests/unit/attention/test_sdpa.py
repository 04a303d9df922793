"""SdpaBackend against an explicit softmax in float64."""

from __future__ import annotations

import pytest
import torch

from specinfer.attention.backend import AttentionBatch, Segment
from specinfer.attention.sdpa import SdpaBackend

SLOTS, HEAD = 192, 16
HIDDEN = float("-inf")


def oracle(q_TNH, k_SKH, v_SKH, mask_TS, scale):
    """Row by row and head by head, in float64."""
    rows, heads, _ = q_TNH.shape
    groups = heads // k_SKH.shape[1]
    out = torch.zeros(q_TNH.shape, dtype=torch.float64)
    for t in range(rows):
        for n in range(heads):
            scores = k_SKH[:, n // groups].double() @ q_TNH[t, n].double() * scale
            scores = scores + mask_TS[t].double()
            weights = (scores - scores.max()).exp()
            out[t, n] = weights @ v_SKH[:, n // groups].double() / weights.sum()
    return out


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def caches(kv_heads, dtype=torch.float32):
    return (random(SLOTS, kv_heads, HEAD, dtype=dtype, seed=s) for s in (1, 2))


def causal_mask(rows, length, dtype=torch.float32, window=None):
    """The mask of the last `rows` of `length` positions in a row."""
    at = torch.arange(length - rows, length)[:, None]
    seen = torch.arange(length)[None]
    hidden = (seen > at) | (seen <= at - (window or length))
    return torch.zeros(rows, length, dtype=dtype).masked_fill(hidden, HIDDEN)


def scattered(length):
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(7))[:length]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("slots", [slice(8, 108), scattered(100)], ids=["slice", "scattered"])
def test_one_request(heads, kv_heads, rows, slots):
    k, v = caches(kv_heads)
    q, mask = random(rows, heads, HEAD), causal_mask(rows, 100)
    batch = AttentionBatch((Segment(slice(0, rows), slots, mask, mask),), slots)
    got = SdpaBackend().attend(q, k, v, batch, scale=0.3, windowed=False)
    want = oracle(q, k[slots], v[slots], mask, 0.3)
    assert got.shape == (rows, heads, HEAD)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


def test_windowed_layers_use_the_window_mask():
    k, v = caches(2)
    q, wide, narrow = random(6, 4, HEAD), causal_mask(6, 40), causal_mask(6, 40, window=3)
    batch = AttentionBatch((Segment(slice(0, 6), slice(0, 40), wide, narrow),), slice(34, 40))
    for windowed, mask in ((False, wide), (True, narrow)):
        got = SdpaBackend().attend(q, k, v, batch, scale=0.25, windowed=windowed)
        torch.testing.assert_close(got.double(), oracle(q, k[:40], v[:40], mask, 0.25), atol=1e-5, rtol=0)


def test_a_tree_sees_its_own_paths_only():
    #  cache 0 1 2, then the tree     3
    #                                / \
    #                               4   5
    #                               |
    #                               6
    sees = torch.tensor(
        [
            [1, 1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0, 1, 0],
            [1, 1, 1, 1, 1, 0, 1],
        ]
    )
    mask = torch.zeros(4, 7).masked_fill(sees == 0, HIDDEN)
    k, v = caches(2)
    q = random(4, 4, HEAD)
    batch = AttentionBatch((Segment(slice(0, 4), slice(0, 7), mask, mask),), slice(3, 7))
    got = SdpaBackend().attend(q, k, v, batch, scale=0.25, windowed=False)
    path = [0, 1, 2, 3, 4, 6]  # of the last node, as if the tree were a line of text
    want = oracle(q[3:], k[path], v[path], torch.zeros(1, 6), 0.25)
    torch.testing.assert_close(got[3:].double(), want, atol=1e-5, rtol=0)


def test_several_requests_do_not_see_each_other():
    k, v = caches(2)
    q = random(9, 4, HEAD)
    parts = [(slice(0, 1), slice(0, 20)), (slice(1, 6), scattered(64)), (slice(6, 9), slice(100, 130))]
    segments, wants = [], []
    for rows, slots in parts:
        count = rows.stop - rows.start
        length = len(k[slots])
        mask = causal_mask(count, length)
        segments.append(Segment(rows, slots, mask, mask))
        wants.append(oracle(q[rows], k[slots], v[slots], mask, 0.25))
    batch = AttentionBatch(tuple(segments), torch.arange(9))
    got = SdpaBackend().attend(q, k, v, batch, scale=0.25, windowed=False)
    torch.testing.assert_close(got.double(), torch.cat(wants), atol=1e-5, rtol=0)


def test_inputs_are_left_alone():
    k, v = caches(2)
    q, mask = random(3, 4, HEAD), causal_mask(3, 20)
    before = [x.clone() for x in (q, k, v, mask)]
    batch = AttentionBatch((Segment(slice(0, 3), slice(0, 20), mask, mask),), slice(17, 20))
    SdpaBackend().attend(q, k, v, batch, scale=0.25, windowed=False)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, mask), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (8, 4), (9, 3), (12, 2), (4, 1)])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype, heads, kv_heads):
    """Bit for bit, however the rows are cut up, given the same padded positions (runtime/batch)."""
    k, v = caches(kv_heads, dtype)
    rows, length = 40, 128
    q, mask = random(rows, heads, HEAD, dtype=dtype), causal_mask(rows, length, dtype)

    def attend(first, last):
        part = Segment(slice(0, last - first), slice(0, length), mask[first:last], mask[first:last])
        batch = AttentionBatch((part,), slice(0, last - first))
        return SdpaBackend().attend(q[first:last], k, v, batch, scale=0.25, windowed=False)

    whole = attend(0, rows)
    for step in (1, 2, 3, 11, 16, 33):
        parts = [attend(first, min(first + step, rows)) for first in range(0, rows, step)]
        assert torch.equal(torch.cat(parts), whole), f"{step} rows at a time"
