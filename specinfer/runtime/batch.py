"""Rows of requests -> the tensors of one forward pass: here lists become tensors.

Cache positions of one request, as the rows of a pass find and write them:

    0 ................ start ............ root | root + 1 ........... start + n - 1
    in the cache       the rows: text to the root, then the tree's nodes, or the last of these alone

A chunk of a prompt, a whole tree, a prompt followed by a tree, and the frontier of a draft's half-grown tree
are all of this form. Node i of a tree lies at cache position root + i and stands in its text at root + depth.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
    adapter: str | None = None  # that all of these rows have


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """What one forward pass over all requests' rows is given."""

    token_ids_T: Tensor
    positions_T: Tensor  # where each token stands in its own text
    paths: Paths
    logit_rows: Tensor | None  # None: every row
    adapted: Sequence[tuple[range, str]] = ()  # rows that have adapters, with the adapter's name


def chain_rows(token_ids: Sequence[int], start: int, block_table: Sequence[int], *, logits: bool) -> Rows:
    """The rows of plain text at positions start, start + 1, ...; logits of the last row only, or of none."""
    n = len(token_ids)
    return Rows(token_ids, start, block_table, n - 1 if logits else n)


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Whose rows are where among those of a step's pass that want logits."""

    roots: list[int]  # of each tree the row of its root; the rows of its other nodes follow
    scored: list[tuple[PlanEntry, range]]  # prompts that want log-probabilities, with the rows of theirs
    count: int


def logit_rows(plan: StepPlan, trees: Sequence[TokenTree]) -> LogitRows:
    """How the rows with logits of a step's pass are numbered: entry by entry, from the root of each tree on.

    Of a prompt that is scored all rows have logits, and its tree's are the last of them.
    """
    roots: list[int] = []
    scored: list[tuple[PlanEntry, range]] = []
    upcoming = iter(trees)
    first = 0
    for entry in plan.entries:
        nodes = next(upcoming).num_nodes if entry.has_tree else 0
        text = 0
        if _scores_prompt(entry):
            text = entry.end - entry.start - (nodes > 0)
            scored.append((entry, range(first, first + min(text, _unscored(entry)))))
        if nodes:
            roots.append(first + text)
        first += text + nodes
    return LogitRows(roots, scored, first)


def likelihoods(plan: StepPlan, trees: Sequence[TokenTree]) -> list[float]:
    """How likely the logits of each row of a step's pass that has some are asked for.

    Those of a tree's node as likely as its speculators think that it becomes text. Those of a prompt that is
    scored are asked for behind all others, so they come last.
    """
    rows = logit_rows(plan, trees)
    found = [0.0] * rows.count
    for tree, root in zip(trees, rows.roots, strict=True):
        found[root : root + tree.num_nodes] = tree.likelihoods()
    return found


def step_rows(plan: StepPlan, trees: Sequence[TokenTree]) -> list[Rows]:
    """Every entry's uncached text, and behind it the other nodes of its tree; see `logit_rows`."""
    upcoming = iter(trees)
    return [_entry_rows(entry, next(upcoming) if entry.has_tree else None) for entry in plan.entries]


def _entry_rows(entry: PlanEntry, tree: TokenTree | None) -> Rows:
    chain, root = entry.end - entry.start, entry.end - 1
    scores = _scores_prompt(entry)
    if tree is None or tree.num_nodes == 1:
        text = entry.token_ids[entry.start : entry.end]
        wanted = 0 if scores else chain - (tree is not None)
        return Rows(
            *(text, entry.start, entry.block_table), logits_from=wanted, adapter=entry.request.adapter
        )
    return Rows(
        token_ids=[*entry.token_ids[entry.start : root], *tree.token_ids],
        start=entry.start,
        block_table=entry.block_table,
        logits_from=0 if scores else chain - 1,
        parents=tree.parents,
        adapter=entry.request.adapter,
    )


def _scores_prompt(entry: PlanEntry) -> bool:
    """Whether the caller wants to know how likely tokens of the prompt were that follow this entry's rows."""
    return entry.request.scores_prompt and _unscored(entry) > 0


def _unscored(entry: PlanEntry) -> int:
    """The tokens of the prompt behind this entry's first."""
    return len(entry.request.prompt_token_ids) - 1 - entry.start


def build_batch(rows: Sequence[Rows], *, block_size: int, device: torch.device) -> ModelBatch:
    """The batch of `rows`, in order; paths stay in host memory, for the attention backend to place.

    A step makes it while a model waits, in caches that the last pass has swept: so all numbers are gathered
    in lists, and become two arrays at the end.
    """
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    requests: list[int] = []
    shared: list[int] = []
    tails: list[int] = []
    tail_ends = [0]
    num_blocks = 0
    adapted: list[tuple[range, str]] = []
    for part in rows:
        first, n = len(tokens), len(part.token_ids)
        if part.adapter is not None:
            adapted.append((range(first, first + n), part.adapter))
        branched = _branched(part)
        text = part.start + n - len(branched)  # behind the rows that stand where tokens of a text would
        tokens.extend(part.token_ids)
        positions += range(part.start, text)
        shared += range(part.start + 1, text + 1)
        tail_ends += [len(tails)] * (n - len(branched))
        if branched:
            assert part.parents is not None
            root = part.start + n - len(part.parents)
            shared += [root + 1] * len(branched)
            for path in branched:
                positions.append(root + len(path))
                tails += path
                tail_ends.append(len(tails))
        wanted += range(first + part.logits_from, first + n)
        requests += (first, first + n, num_blocks, part.start + n)
        num_blocks += len(part.block_table)
    count = len(tokens)
    every = len(wanted) == count
    told = array("q", [*tokens, *positions, *(() if every else wanted)])
    numbers = torch.frombuffer(told, dtype=torch.int64) if told else torch.empty(0, dtype=torch.int64)
    if device.type != "cpu":
        numbers = numbers.to(device)
    return ModelBatch(
        token_ids_T=numbers[:count],
        positions_T=numbers[count : 2 * count],
        paths=Paths.of(
            *(requests, shared, tail_ends, tails),
            tables=[part.block_table for part in rows],
            block_size=block_size,
        ),
        logit_rows=None if every else numbers[2 * count :],
        adapted=adapted,
    )


def slots_of(block_table: Sequence[int], positions: Sequence[int], block_size: int) -> list[int]:
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
