"""Build the tensors of one forward pass from the rows of requests.

Cache positions of one request in a pass:

    0 ................ start ............ root | root + 1 ........... start + n - 1
    in the cache       the rows: text to the root, then the tree's nodes, or the last of these alone

A chunk of a prompt, a whole tree, a prompt followed by a tree, and the frontier of a draft's partial tree all
have this form. Node i of a tree has cache position root + i and text position root + depth.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.attention.backend import Paths
from specinfer.plan import FIRST_SLOT, PlanEntry, StateUse, StepPlan
from specinfer.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's rows of one forward pass, at cache positions start, start + 1, ...

    `parents` is the whole tree (parents[0] == -1), whose last node is the last row. Rows before its root are
    text, and nodes before the first row are in the cache. None: every row is text.
    """

    token_ids: Sequence[int]  # [n]
    start: int
    block_table: Sequence[int]
    logits_from: int  # the first row with logits; n: no row
    parents: Sequence[int] | None = None
    adapter: str | None = None  # name of the adapter of these rows
    states: StateUse = FIRST_SLOT  # a source that ends at `start` is where this pass begins


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """Input of one forward pass over the rows of all requests."""

    token_ids_T: Tensor
    positions_T: Tensor  # position of each token in its text
    paths: Paths
    logit_rows: Tensor | None  # None: every row
    adapted: Sequence[tuple[range, str]] = ()  # rows with adapters, and the adapter's name


def chain_rows(token_ids: Sequence[int], start: int, block_table: Sequence[int], *, logits: bool) -> Rows:
    """Return rows of text at positions start, start + 1, ...; with `logits` the last row has logits."""
    n = len(token_ids)
    return Rows(token_ids, start, block_table, n - 1 if logits else n)


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Indices of requests' rows among the rows with logits of a step's pass."""

    roots: list[int]  # the row of each tree's root; the rows of its other nodes follow
    scored: list[tuple[PlanEntry, range]]  # prompts with log-probabilities, and their rows
    count: int


def logit_rows(plan: StepPlan, trees: Sequence[TokenTree]) -> LogitRows:
    """Return the numbering of the rows with logits of a step: entry by entry, each tree from its root on.

    All rows of a scored prompt have logits; its tree's rows come last.
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
    """Return the probability that verification reads the logits of each row with logits.

    For a tree's node it is the speculators' acceptance probability. Rows of a scored prompt are read after
    all others, so they come last.
    """
    rows = logit_rows(plan, trees)
    found = [0.0] * rows.count
    for tree, root in zip(trees, rows.roots, strict=True):
        found[root : root + tree.num_nodes] = tree.likelihoods()
    return found


def step_rows(plan: StepPlan, trees: Sequence[TokenTree]) -> list[Rows]:
    """Return every entry's uncached text, followed by the other nodes of its tree; see `logit_rows`."""
    upcoming = iter(trees)
    return [_entry_rows(entry, next(upcoming) if entry.has_tree else None) for entry in plan.entries]


def _entry_rows(entry: PlanEntry, tree: TokenTree | None) -> Rows:
    parents: Sequence[int] | None = None
    if tree is None or tree.num_nodes == 1:
        token_ids = entry.token_ids[entry.start : entry.end]
    else:
        token_ids = [*entry.token_ids[entry.start : entry.end - 1], *tree.token_ids]
        parents = tree.parents
    return Rows(
        *(token_ids, entry.start, entry.block_table),
        logits_from=0 if _scores_prompt(entry) else entry.end - entry.start - (tree is not None),
        parents=parents,
        adapter=entry.request.adapter,
        states=entry.states,
    )


def _scores_prompt(entry: PlanEntry) -> bool:
    """Return whether the entry's rows yield requested log-probabilities of the prompt."""
    return entry.request.scores_prompt and _unscored(entry) > 0


def _unscored(entry: PlanEntry) -> int:
    """Return the number of prompt tokens after this entry's first."""
    return len(entry.request.prompt_token_ids) - 1 - entry.start


def build_batch(rows: Sequence[Rows], *, block_size: int, device: torch.device) -> ModelBatch:
    """Return the batch of `rows`, in order; paths stay in host memory for the attention backend.

    The model waits for it, and the last pass has evicted the CPU caches. So all numbers are collected in
    lists, and become two arrays at the end.
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
        text = part.start + n - len(branched)  # after the rows that are positioned like text
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
    values = array("q", [*tokens, *positions, *(() if every else wanted)])
    numbers = torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)
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
    """Return the cache slots of cache positions."""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def _branched(rows: Rows) -> list[list[int]]:
    """Return the positions of the paths below the root of the last rows, those that are not text.

    A node that is preceded only by its ancestors is positioned like text, and counts as text.
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
