"""Rows to tensors: slots, masks and padding, as literals a person can check."""

from __future__ import annotations

import numpy as np
import torch

from specinfer.attention.backend import Segment
from specinfer.runtime.batch import PAD, ModelBatch, Rows, build_batch, chain_rows, slots_of
from specinfer.tree.mask import ancestor_matrix


def build(*rows: Rows, window: int | None = None, block_size: int = 4, by_paths: bool = False) -> ModelBatch:
    dtype, device = torch.float32, torch.device("cpu")
    return build_batch(
        rows, block_size=block_size, window=window, dtype=dtype, device=device, by_paths=by_paths
    )


def visible(mask: torch.Tensor, length: int) -> list[str]:
    """One string per row: x where the row sees a position, . where not; padding must be hidden."""
    assert mask.shape[1] % PAD == 0
    assert bool((mask[:, length:] == float("-inf")).all())
    return ["".join("x" if seen else "." for seen in row[:length] == 0) for row in mask]


def segment(batch: ModelBatch, index: int = 0) -> Segment:
    return batch.attention.segments[index]


def test_a_chunk_of_a_prompt_sees_what_is_before_it() -> None:
    batch = build(chain_rows([7, 8, 9], 2, [5, 6], logits=True))
    assert batch.token_ids_T.tolist() == [7, 8, 9]
    assert batch.positions_T.tolist() == [2, 3, 4]
    assert visible(segment(batch).mask_TS, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert segment(batch).slots_S == slice(20, 20 + PAD)  # blocks 5 and 6 lie in a row: no gather
    assert batch.attention.write_slots_T == slice(22, 25)
    assert batch.logit_rows is not None
    assert (batch.logit_rows.tolist(), batch.num_logits) == ([2, 2], 1)  # a product of one row is run as two


def paths(batch: ModelBatch) -> list[tuple[list[int], list[int], list[str]]]:
    """For each segment its rows, the slots of its keys, and who sees which of these."""
    found = []
    for part in batch.attention.segments:
        assert isinstance(part.rows, torch.Tensor)
        assert isinstance(part.slots_S, torch.Tensor)
        length = int((part.mask_TS == 0).any(dim=0).sum())
        found.append((part.rows.tolist(), part.slots_S[:length].tolist(), visible(part.mask_TS, length)))
    return found


def test_a_tree_is_read_path_by_path_each_a_chain() -> None:
    #  root 4 at position 3     1: 5   2: 7 (siblings)   3: 6 below 1
    batch = build(Rows([4, 5, 7, 6], [3, 4, 4, 5], 3, [0, 1], None, None, 0, [-1, 0, 0, 1]), by_paths=True)
    assert paths(batch) == [
        ([0, 2], [0, 1, 2, 3, 5], ["xxxx.", "xxxxx"]),  # the root at slot 3, node 2 at slot 5
        ([1, 3], [0, 1, 2, 3, 4, 6], ["xxxxx.", "xxxxxx"]),  # the root's row is run once
    ]
    assert batch.attention.write_slots_T == slice(3, 7)
    assert batch.logit_rows is None
    assert batch.num_logits == 4


def test_a_tree_that_is_a_chain_is_one() -> None:
    batch = build(Rows([4, 5, 7], [3, 4, 5], 3, [0, 1], None, None, 0, [-1, 0, 1]), by_paths=True)
    assert segment(batch).rows == slice(0, 3)
    assert visible(segment(batch).mask_TS, 6) == ["xxxx..", "xxxxx.", "xxxxxx"]


def test_a_prompt_followed_by_a_tree() -> None:
    # Blocks 5 and 2: positions 0..3 are slots 20..23, position 4 is slot 8.
    batch = build(Rows([1, 2, 4, 5, 7], [0, 1, 2, 3, 3], 0, [5, 2], None, None, 2, [-1, 0, 0]), by_paths=True)
    assert paths(batch) == [
        ([0, 1, 2, 3], [20, 21, 22, 23], ["x...", "xx..", "xxx.", "xxxx"]),
        ([4], [20, 21, 22, 8], ["xxxx"]),
    ]
    assert batch.logit_rows is not None
    assert batch.logit_rows.tolist() == [2, 3, 4]


def test_elsewhere_a_tree_is_one_segment_with_a_mask() -> None:
    batch = build(Rows([1, 2, 4, 5, 7], [0, 1, 2, 3, 3], 0, [0, 1], None, None, 2, [-1, 0, 0]))
    assert len(batch.attention.segments) == 1
    assert visible(segment(batch).mask_TS, 5) == ["x....", "xx...", "xxx..", "xxxx.", "xxx.x"]
    windowed = build(Rows([4, 5, 7], [3, 4, 4], 3, [0, 1], None, None, 0, [-1, 0, 0]), window=3)
    assert visible(segment(windowed).window_mask_TS, 6) == [".xxx..", "..xxx.", "..xx.x"]


def test_the_frontier_of_a_half_grown_tree_sees_nodes_that_are_in_the_cache() -> None:
    #  root 0 at position 2; children 1, 2 in the cache; 3 below 1 and 4 below 2 are run now
    sees = ancestor_matrix([-1, 0, 0, 1, 2])[3:, 1:]
    batch = build(Rows([30, 40], [4, 4], 5, [0, 1], sees, [3, 3, 4, 4], 0))
    assert visible(segment(batch).mask_TS, 7) == ["xxxx.x.", "xxx.x.x"]
    assert batch.attention.write_slots_T == slice(5, 7)


def test_a_window_counts_positions_in_the_text_not_in_the_cache() -> None:
    # Node 2 is a sibling of node 1: both stand at position 4 and see positions 2, 3, 4 with a window of 3.
    rows = Rows([4, 5, 7], [3, 4, 4], 3, [0, 1], ancestor_matrix([-1, 0, 0]), [3, 4, 4], 0)
    batch = build(rows, window=3)
    assert visible(segment(batch).mask_TS, 6) == ["xxxx..", "xxxxx.", "xxxx.x"]
    assert visible(segment(batch).window_mask_TS, 6) == [".xxx..", "..xxx.", "..xx.x"]


def test_a_window_over_the_paths_of_a_tree() -> None:
    batch = build(Rows([4, 5, 7], [3, 4, 4], 3, [0, 1], None, None, 0, [-1, 0, 0]), window=3, by_paths=True)
    windows = [visible(part.window_mask_TS, 5) for part in batch.attention.segments]
    assert windows == [[".xxx.", "..xxx"], ["..xxx"]]
    assert [len(mask) for mask in windows] == [2, 1]
    assert [visible(part.mask_TS, 5) for part in batch.attention.segments] == [["xxxx.", "xxxxx"], ["xxxxx"]]


def test_one_row_is_run_twice_and_writes_one_slot() -> None:
    batch = build(chain_rows([9], 5, [3, 8], logits=True))
    assert batch.token_ids_T.tolist() == [9, 9]
    assert batch.positions_T.tolist() == [5, 5]
    assert visible(segment(batch).mask_TS, 6) == ["xxxxxx", "xxxxxx"]
    assert isinstance(batch.attention.write_slots_T, torch.Tensor)
    assert batch.attention.write_slots_T.tolist() == [33, 33]
    assert batch.num_logits == 1


def test_scattered_blocks_are_gathered() -> None:
    slots = segment(build(chain_rows([1, 2], 4, [9, 2], logits=False))).slots_S
    assert isinstance(slots, torch.Tensor)
    assert slots[:6].tolist() == [36, 37, 38, 39, 8, 9]
    assert len(slots) == PAD
    assert slots_of([9, 2], [0, 3, 5], 4) == [36, 39, 9]


def test_requests_follow_one_another() -> None:
    batch = build(chain_rows([1, 2], 0, [0], logits=False), chain_rows([3], 6, [4, 5], logits=True))
    assert [s.rows for s in batch.attention.segments] == [slice(0, 2), slice(2, 3)]
    assert isinstance(batch.attention.write_slots_T, torch.Tensor)
    assert batch.attention.write_slots_T.tolist() == [0, 1, 22]
    assert batch.num_logits == 1


def test_ancestors_as_a_matrix() -> None:
    #      0
    #     / \
    #    1   2
    #    |  / \
    #    3 4   5
    expected = ["x.....", "xx....", "x.x...", "xx.x..", "x.x.x.", "x.x..x"]
    matrix = ancestor_matrix([-1, 0, 0, 1, 2, 2])
    assert ["".join(np.where(row, "x", ".")) for row in matrix] == expected
