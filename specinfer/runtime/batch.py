"""Rows of requests -> the tensors of one forward pass: here lists become tensors.

Cache positions of one request, as the rows of a pass see them:

    0 ............ start + n - tail | ......... start + n
    every row sees these             tail: row t sees position s where sees[t, s]

The n rows write the cache positions start .. start + n - 1. A chunk of a prompt, a whole tree, a prompt
followed by a tree, and the frontier of a draft's half-grown tree are all of this form.

A row's result must not depend on the rows beside it, or greedy text would change where two logits are
close. Three things would make it: a product of one row takes another kernel than a product of several, so
one row is run as two; sums over S positions are made in an order that depends on S, so S is padded with
hidden positions to whole blocks of PAD: every block is then summed in the same way; and a node behind
siblings has its ancestors at other places than a chain would. So where rows are to be independent, a whole
tree is read path by path, one segment each, as if each were a chain: the keys of a path lie in a row, and
nothing is between them. Elsewhere a tree is one segment, whose mask says who sees whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.backend import AttentionBatch, Segment
from specinfer.tree.mask import chain_then_tree

PAD = 512  # the block of keys in torch's CPU attention; the KV cache has as many spare slots at its end


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's rows of one forward pass."""

    token_ids: Sequence[int]  # [n]
    positions: Sequence[int]  # [n], where each token stands in its own text
    start: int  # the first cache position the rows write
    block_table: Sequence[int]
    sees: NDArray[np.bool_] | None  # [n, tail]; None: a chain, each row sees all before it
    tail_positions: Sequence[int] | None  # [tail]; None: the rows' own positions
    logits_from: int  # rows from this one on yield logits; n for none
    parents: Sequence[int] | None = None  # of the last rows, if they are a whole tree; `sees` is then None


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """The tensors of one forward pass over all requests' rows."""

    token_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionBatch
    logit_rows: Tensor | None  # None: every row
    num_logits: int  # how many of these are wanted; the others are padding


def chain_rows(token_ids: Sequence[int], start: int, block_table: Sequence[int], *, logits: bool) -> Rows:
    """The rows of plain text at positions start, start + 1, ...; logits of the last row only, or of none."""
    n = len(token_ids)
    positions = range(start, start + n)
    return Rows(token_ids, positions, start, block_table, None, None, n - 1 if logits else n)


def build_batch(
    rows: Sequence[Rows],
    *,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    by_paths: bool = False,
) -> ModelBatch:
    """The tensors for `rows`, in order.

    `window` is the model's sliding window, if any layer has one; `by_paths` reads trees path by path.
    """
    if len(rows) == 1 and len(rows[0].token_ids) == 1:
        return _single_row(rows[0], block_size=block_size, window=window, dtype=dtype, device=device)
    token_ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    writes: list[Tensor | slice] = []
    wanted: list[int] = []
    for part in rows:
        first, n = len(token_ids), len(part.token_ids)
        token_ids.extend(part.token_ids)
        positions.extend(part.positions)
        wanted.extend(range(first + part.logits_from, first + n))
        slots = _slots(part.block_table, part.start + n, block_size, device)
        writes.append(_written(slots, part.start, n))
        if by_paths and part.parents is not None and not _is_chain(part.parents):
            segments.extend(_path_segments(part, first, slots, window, dtype, device))
        else:
            mask, window_mask = _masks(part, window, dtype, device)
            segments.append(Segment(slice(first, first + n), slots, mask, window_mask))
    write_slots = writes[0] if len(writes) == 1 else torch.cat([_as_tensor(w, device) for w in writes])
    num_logits = len(wanted)
    all_rows = num_logits == len(token_ids)
    if num_logits == 1:
        wanted *= 2
    return ModelBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions_T=torch.tensor(positions, dtype=torch.int64, device=device),
        attention=AttentionBatch(tuple(segments), write_slots),
        logit_rows=None if all_rows else torch.tensor(wanted, dtype=torch.int64, device=device),
        num_logits=num_logits,
    )


def _single_row(
    row: Rows, *, block_size: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> ModelBatch:
    """One row of one request, run twice; both copies write the same K and V to the same slot."""
    slots = _slots(row.block_table, row.start + 1, block_size, device)
    slot = slots_of(row.block_table, [row.start], block_size) * 2
    masks = _masks(row, window, dtype, device)
    return ModelBatch(
        token_ids_T=torch.tensor([*row.token_ids] * 2, dtype=torch.int64, device=device),
        positions_T=torch.tensor([*row.positions] * 2, dtype=torch.int64, device=device),
        attention=AttentionBatch(
            (Segment(slice(0, 2), slots, *(mask.expand(2, -1) for mask in masks)),),
            torch.tensor(slot, dtype=torch.int64, device=device),
        ),
        logit_rows=None,
        num_logits=1 - row.logits_from,
    )


def slots_of(block_table: Sequence[int], positions: Sequence[int], block_size: int) -> list[int]:
    """The cache slots of cache positions."""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def _padded(length: int) -> int:
    return -(-length // PAD) * PAD


def _slots(table: Sequence[int], length: int, block_size: int, device: torch.device) -> Tensor | slice:
    """The slots of positions 0..length-1 and of the hidden ones behind them, whosever they are."""
    used = (length + block_size - 1) // block_size
    blocks = np.asarray(table[:used], dtype=np.int64)
    first = int(blocks[0])
    if used == 1 or bool((np.diff(blocks) == 1).all()):
        # Blocks in a row are a view of the cache; anything else must be gathered.
        return slice(first * block_size, first * block_size + _padded(length))
    slots = np.full(_padded(length), first * block_size, dtype=np.int64)
    slots[:length] = (blocks[:, None] * block_size + np.arange(block_size)).ravel()[:length]
    return torch.from_numpy(slots).to(device)


def _path_segments(
    part: Rows,
    first: int,
    slots: Tensor | slice,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Segment]:
    """One segment per leaf of the tree: the text and the path to the leaf, as a chain.

    A row belongs to the first path that has it. `first` is the number of the part's first row.
    """
    assert part.parents is not None
    before = len(part.token_ids) - len(part.parents)  # rows of text before the root
    text = np.arange(part.start + before)
    all_slots = _as_tensor(slots, device)
    segments: list[Segment] = []
    for path, old in _paths(part.parents):
        # The row of each key from `part.start` on, and the place of each row's own key among all keys.
        rows = np.array([*range(before), *(before + node for node in path)])
        own = np.arange(part.start, part.start + len(rows))
        fresh = before + old if segments else 0
        keys = np.concatenate([text, part.start + rows[before:]])
        padded = np.full(_padded(len(keys)), keys[0])
        padded[: len(keys)] = keys
        hidden = np.arange(len(padded))[None, :] > own[fresh:, None]
        mask = window_mask = _additive(hidden, dtype, device)
        if window is not None and len(keys) > window:
            too_old = own[fresh:, None] - np.arange(len(padded))[None, :] >= window
            window_mask = _additive(hidden | too_old, dtype, device)
        segments.append(
            Segment(
                torch.from_numpy(first + rows[fresh:]).to(device),
                all_slots[torch.from_numpy(padded).to(device)],
                mask,
                window_mask,
            )
        )
    return segments


def _is_chain(parents: Sequence[int]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))


def _paths(parents: Sequence[int]) -> list[tuple[list[int], int]]:
    """For every leaf the nodes from the root to it, and how many of them an earlier path has, too."""
    leaves = set(range(len(parents))) - set(parents)
    taken: set[int] = set()
    paths: list[tuple[list[int], int]] = []
    for leaf in sorted(leaves):
        path = [leaf]
        while path[-1] > 0:
            path.append(parents[path[-1]])
        path.reverse()
        paths.append((path, sum(node in taken for node in path)))
        taken.update(path)
    return paths


def _written(slots: Tensor | slice, start: int, n: int) -> Tensor | slice:
    if isinstance(slots, slice):
        return slice(slots.start + start, slots.start + start + n)
    return slots[start : start + n]


def _as_tensor(slots: Tensor | slice, device: torch.device) -> Tensor:
    if isinstance(slots, slice):
        return torch.arange(slots.start, slots.stop, dtype=torch.int64, device=device)
    return slots


def _masks(rows: Rows, window: int | None, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The additive masks of full and of windowed layers, [n, padded length] each."""
    n = len(rows.token_ids)
    length = rows.start + n
    sees = rows.sees
    if sees is None and rows.parents is not None:
        sees = chain_then_tree(n - len(rows.parents) + 1, rows.parents)
    elif sees is None:
        sees = np.tri(n, dtype=np.bool_)
    tail = sees.shape[1]
    hidden = np.zeros((n, _padded(length)), dtype=np.bool_)
    hidden[:, length:] = True
    np.logical_not(sees, out=hidden[:, length - tail : length])
    mask = _additive(hidden, dtype, device)
    if window is None or length <= window:
        return mask, mask
    tail_positions = rows.positions if rows.tail_positions is None else rows.tail_positions
    key_positions = np.concatenate([np.arange(length - tail), np.asarray(tail_positions, dtype=np.int64)])
    too_old = np.asarray(rows.positions, dtype=np.int64)[:, None] - key_positions[None, :] >= window
    hidden[:, :length] |= too_old
    return mask, _additive(hidden, dtype, device)


def _additive(hidden: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(device)
