"""Rows of requests -> the tensors of one forward pass: here lists become tensors.

Cache positions of one request, as the rows of a pass find and write them:

    0 ................ start ............ root | root + 1 ........... start + n - 1
    in the cache       the rows: text to the root, then the tree's nodes, or the last of these alone

A chunk of a prompt, a whole tree, a prompt followed by a tree, and the frontier of a draft's half-grown tree
are all of this form. Node i of a tree lies at cache position root + i and stands in its text at root + depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.backend import Paths
from specinfer.plan import PlanEntry, StepPlan
from specinfer.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's rows of one forward pass, at cache positions start, start + 1, ...

    `parents` is the whole tree (parents[0] == -1) whose last node is the last row: rows before its root are
    text, and nodes before the first row are in the cache. None: every row is text.
    """

    token_ids: Sequence[int]  # [n]
    start: int
    block_table: Sequence[int]
    logits_from: int  # rows from this one on yield logits; n for none
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """What one forward pass over all requests' rows is given."""

    token_ids_T: Tensor
    positions_T: Tensor  # where each token stands in its own text
    paths: Paths
    logit_rows: Tensor | None  # None: every row


def chain_rows(token_ids: Sequence[int], start: int, block_table: Sequence[int], *, logits: bool) -> Rows:
    """The rows of plain text at positions start, start + 1, ...; logits of the last row only, or of none."""
    n = len(token_ids)
    return Rows(token_ids, start, block_table, n - 1 if logits else n)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step's plan, and whose logits are where among all that are wanted."""

    rows: list[Rows]  # one for each entry of the plan
    roots: list[int]  # of each tree the place of its root's logits; its other nodes follow
    scored: list[tuple[PlanEntry, range]]  # prompts that want log-probabilities, with the places of theirs


def step_rows(plan: StepPlan, trees: Sequence[TokenTree]) -> StepRows:
    """Every entry's uncached text, and behind it the other nodes of its tree; logits from the root on."""
    step = StepRows([], [], [])
    upcoming = iter(trees)
    first = 0
    for entry in plan.entries:
        tree = next(upcoming) if entry.has_tree else None
        rows = _entry_rows(entry, tree)
        in_tree = tree.num_nodes if tree is not None else 0
        end = first + len(rows.token_ids) - rows.logits_from
        if _scores_prompt(entry):
            step.scored.append((entry, range(first, min(end - in_tree, first + _unscored(entry)))))
        if in_tree:
            step.roots.append(end - in_tree)
        step.rows.append(rows)
        first = end
    return step


def _entry_rows(entry: PlanEntry, tree: TokenTree | None) -> Rows:
    chain, root = entry.end - entry.start, entry.end - 1
    scores = _scores_prompt(entry)
    if tree is None or tree.num_nodes == 1:
        text = entry.token_ids[entry.start : entry.end]
        wanted = 0 if scores else chain - (tree is not None)
        return Rows(text, entry.start, entry.block_table, logits_from=wanted)
    return Rows(
        token_ids=[*entry.token_ids[entry.start : root], *tree.token_ids],
        start=entry.start,
        block_table=entry.block_table,
        logits_from=0 if scores else chain - 1,
        parents=tree.parents,
    )


def _scores_prompt(entry: PlanEntry) -> bool:
    """Whether the caller wants to know how likely tokens of the prompt were that follow this entry's rows."""
    return entry.request.params.prompt_logprobs is not None and _unscored(entry) > 0


def _unscored(entry: PlanEntry) -> int:
    """The tokens of the prompt behind this entry's first."""
    return len(entry.request.prompt_token_ids) - 1 - entry.start


def build_batch(rows: Sequence[Rows], *, block_size: int, device: torch.device) -> ModelBatch:
    """The batch of `rows`, in order; paths stay in host memory, for the attention backend to place."""
    token_ids = [token for part in rows for token in part.token_ids]
    wanted: list[int] = []
    first = 0
    for part in rows:
        behind = first + len(part.token_ids)
        wanted.extend(range(first + part.logits_from, behind))
        first = behind
    paths = _joined([_paths_of(part, block_size) for part in rows])
    positions = paths.shared_T + np.diff(paths.tail_ends) - 1
    every_row = len(wanted) == len(token_ids)
    return ModelBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions_T=torch.from_numpy(positions).to(device, torch.int64),
        paths=paths,
        logit_rows=None if every_row else torch.tensor(wanted, dtype=torch.int64, device=device),
    )


def slots_of(block_table: Sequence[int], positions: Sequence[int], block_size: int) -> list[int]:
    """The cache slots of cache positions."""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def _paths_of(rows: Rows, block_size: int) -> Paths:
    """The paths of one request's rows."""
    n = len(rows.token_ids)
    length = rows.start + n
    blocks = np.asarray(rows.block_table[: -(-length // block_size)])
    slots = (blocks[:, None] * block_size + np.arange(block_size)).ravel()[:length].astype(np.int32)
    shared = np.arange(rows.start + 1, length + 1, dtype=np.int32)
    tail_lengths = np.zeros(n, dtype=np.int32)
    tails = np.zeros(0, dtype=np.int32)
    if rows.parents is not None:
        nodes = min(n, len(rows.parents))
        below_root = _below_root(rows.parents)[-nodes:]
        depths = np.count_nonzero(below_root, axis=1).astype(np.int32)
        # A node with no others before it than its ancestors stands where a token of text would.
        branched = depths != np.arange(len(rows.parents) - nodes, len(rows.parents))
        root = length - len(rows.parents)
        shared[-nodes:][branched] = root + 1
        tail_lengths[-nodes:][branched] = depths[branched]
        tails = root + below_root[branched][below_root[branched] > 0]
    return Paths(
        slots=slots,
        requests=np.array([[0, n, 0, length]], dtype=np.int32),
        shared_T=shared,
        tail_ends=_ends(tail_lengths),
        tails=tails,
        write_slots_T=slots[rows.start :],
    )


def _below_root(parents: Sequence[int]) -> NDArray[np.int32]:
    """[nodes, levels]: each node's ancestors below the root and the node itself, behind zeros."""
    up = np.asarray(parents, dtype=np.int32)
    node = np.arange(len(parents), dtype=np.int32)
    levels: list[NDArray[np.int32]] = []
    while node.any():
        levels.append(node)
        node = np.where(node > 0, up[node], 0).astype(np.int32)
    return np.stack(levels[::-1], axis=1) if levels else np.zeros((len(parents), 0), dtype=np.int32)


def _joined(parts: Sequence[Paths]) -> Paths:
    """The paths of several requests, one after another."""
    if len(parts) == 1:
        return parts[0]
    requests = np.concatenate([part.requests for part in parts])
    requests[1:, (0, 2)] = requests[:-1, (1, 3)].cumsum(axis=0)
    return Paths(
        slots=np.concatenate([part.slots for part in parts]),
        requests=requests,
        shared_T=np.concatenate([part.shared_T for part in parts]),
        tail_ends=_ends(np.concatenate([np.diff(part.tail_ends) for part in parts])),
        tails=np.concatenate([part.tails for part in parts]),
        write_slots_T=np.concatenate([part.write_slots_T for part in parts]),
    )


def _ends(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
