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
from itertools import chain

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
    block_table: Sequence[int] | NDArray[np.int32]  # int32 arrays and buffers are taken as they lie
    logits_from: int  # rows from this one on yield logits; n for none
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """What one forward pass over all requests' rows is given."""

    token_ids_T: Tensor
    positions_T: Tensor  # where each token stands in its own text
    paths: Paths
    logit_rows: Tensor | None  # None: every row


def chain_rows(
    token_ids: Sequence[int], start: int, block_table: Sequence[int] | NDArray[np.int32], *, logits: bool
) -> Rows:
    """The rows of plain text at positions start, start + 1, ...; logits of the last row only, or of none."""
    n = len(token_ids)
    return Rows(token_ids, start, block_table, n - 1 if logits else n)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step's plan, and whose logits are where among all that are wanted."""

    rows: list[Rows]  # one for each entry of the plan
    roots: list[int]  # of each tree the place of its root's logits; its other nodes follow
    scored: list[tuple[PlanEntry, range]]  # prompts that want log-probabilities, with the places of theirs

    def likelihoods(self, trees: Sequence[TokenTree]) -> list[float]:
        """How likely the logits of each row that wants them are asked for.

        Those of a text are; those of a tree's node as likely as its speculators think that it becomes text.
        """
        found: list[float] = []
        for tree, root in zip(trees, self.roots, strict=True):
            found.extend([1.0] * (root - len(found)))
            found.extend(tree.likelihoods())
        found.extend([1.0] * (self.wanted - len(found)))
        return found

    @property
    def wanted(self) -> int:
        """The rows that want logits."""
        return sum(len(part.token_ids) - part.logits_from for part in self.rows)


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
    """The batch of `rows`, in order; paths stay in host memory, for the attention backend to place.

    A step makes it while a model waits, in caches that the last pass has swept: so of few operations, on all
    requests at once, and none on a text's whole length.
    """
    counts = [len(part.token_ids) for part in rows]
    branched = [_branched(part) for part in rows]
    num_tails = sum(len(path) for nodes in branched for path in nodes)
    num_blocks = sum(len(part.block_table) for part in rows)
    paths = Paths.zeros(len(rows), sum(counts), num_tails, num_blocks, block_size)
    requests: list[tuple[int, int, int, int]] = []
    wanted: list[range] = []
    tables_B = paths.tables_B
    first = table = 0
    for part, n in zip(rows, counts, strict=True):
        end, behind = first + n, table + len(part.block_table)
        requests.append((first, end, table, part.start + n))
        wanted.append(range(first + part.logits_from, end))
        tables_B[table:behind] = part.block_table
        first, table = end, behind
    paths.requests_R4[:] = requests
    if len(rows) == 1:
        positions_T = np.arange(rows[0].start, rows[0].start + first)
    else:
        positions_T = np.arange(first)
        positions_T += np.repeat([positions - end for _, end, _, positions in requests], counts)
    shared_T = paths.shared_T
    shared_T[:] = positions_T
    shared_T += 1
    if num_tails > 0:
        _write_tails(paths, branched, rows, positions_T)
    tokens = chain.from_iterable(part.token_ids for part in rows)
    return ModelBatch(
        token_ids_T=_placed(np.fromiter(tokens, np.int64, first), device),
        positions_T=_placed(positions_T, device),
        paths=paths,
        logit_rows=_logit_rows(wanted, first, device),
    )


def slots_of(
    block_table: Sequence[int] | NDArray[np.int32], positions: Sequence[int], block_size: int
) -> list[int]:
    """The cache slots of cache positions."""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def _branched(rows: Rows) -> list[list[int]]:
    """Of the rows that are no text, which are the last ones: the positions of their paths below the root.

    A node with no others before it than its ancestors stands where a token of text would, and is one.
    """
    parents = rows.parents
    if parents is None:
        return []
    branch = next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
    root = rows.start + len(rows.token_ids) - len(parents)
    below: list[list[int]] = []
    for node in range(branch, len(parents)):
        parent = parents[node]
        above = below[parent - branch] if parent >= branch else range(root + 1, root + parent + 1)
        below.append([*above, root + node])
    return below[-len(rows.token_ids) :]  # nodes before the first row are in the cache


def _write_tails(
    paths: Paths,
    branched: Sequence[Sequence[Sequence[int]]],
    rows: Sequence[Rows],
    positions_T: NDArray[np.int64],
) -> None:
    """Write the paths of each request's last rows that are no text, and where these stand in their texts."""
    shared_T, tail_ends = paths.shared_T, paths.tail_ends
    end = 0
    for part, nodes in zip(rows, branched, strict=True):
        end += len(part.token_ids)
        if not nodes:
            continue
        assert part.parents is not None
        root = part.start + len(part.token_ids) - len(part.parents)
        depths = [len(path) for path in nodes]
        begin = end - len(nodes)
        shared_T[begin:end] = root + 1
        positions_T[begin:end] = depths
        positions_T[begin:end] += root
        tail_ends[begin + 1 : end + 1] = depths
    paths.tails[:] = [position for nodes in branched for path in nodes for position in path]
    np.cumsum(tail_ends, out=tail_ends)


def _logit_rows(wanted: Sequence[range], rows: int, device: torch.device) -> Tensor | None:
    """The rows of these ranges; None where they are all."""
    if sum(map(len, wanted)) == rows:
        return None
    if len(wanted) == 1:
        return _placed(np.arange(wanted[0].start, wanted[0].stop), device)
    return _placed(np.concatenate([np.arange(part.start, part.stop) for part in wanted]), device)


def _placed(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """The same numbers on a device: on the CPU where they lie."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.to(device)
