"""The token tree.

Nodes merge (merging.py), draws do not: two speculators that propose the same token below the same node share
that node (and one row of the target's forward pass), but both draws are kept, in order, because multi-step
speculative sampling needs each draw with the law it came from (docs/losslessness.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specinfer.errors import ensure
from specinfer.tree.draw import Draw, DrawRule, as_runs, draw_of

if TYPE_CHECKING:  # options name draw rules, and commands read options before they load anything large
    import numpy as np
    from numpy.typing import NDArray

    from specinfer.tree.distribution import Distribution


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Candidate continuations of one request, flattened parent-before-child.

    Node 0 is the last committed token, so every tree has at least one node. No two children of a
    node hold the same token. Node u stands for the text of its ancestors followed by its own token
    (SpecInfer, definition 3.1).
    """

    token_ids: tuple[int, ...]  # [num_nodes]
    parents: tuple[int, ...]  # [num_nodes], parents[0] == -1, parents[i] < i
    draws: Sequence[Draw] = ()  # in proposal order; duplicates kept, MSS needs them

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return len(self.token_ids)

    def depths(self) -> list[int]:
        """The depth of every node, [num_nodes]; the root's is 0."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def children(self) -> list[dict[int, int]]:
        """For every node, its children as token id -> node, in proposal order."""
        children: list[dict[int, int]] = [{} for _ in self.parents]
        for node in range(1, len(self.parents)):
            children[self.parents[node]][self.token_ids[node]] = node
        return children

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from below the root down to `node`, in order; empty for the root."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The token ids along `path_to(node)`."""
        return tuple(self.token_ids[n] for n in self.path_to(node))

    def likelihoods(self) -> list[float]:
        """How likely its speculators think each node to become text, [num_nodes]; the root's is 1.

        The confidences along its path multiplied; of several draws of a node the surest. No node is likelier
        than its parent, whatever a speculator says.
        """
        own = [1.0, *[0.0] * (self.num_nodes - 1)]
        for run in as_runs(self.draws).runs:
            for node, sure in zip(run.nodes, run.confidences, strict=True):
                if sure > own[node]:
                    own[node] = sure if sure < 1.0 else 1.0
        parents = self.parents
        for node in range(1, len(own)):
            own[node] *= own[parents[node]]
        return own

    def check_integrity(self) -> None:
        """Raise IntegrityError when the tree breaks one of the invariants its docstring names."""
        ensure(len(self.token_ids) == len(self.parents) >= 1, "a tree has a root and one parent per node")
        ensure(self.parents[0] == -1, "node 0 is the root")
        seen: set[tuple[int, int]] = set()
        for node in range(1, self.num_nodes):
            parent = self.parents[node]
            ensure(0 <= parent < node, f"node {node} comes before its parent {parent}")
            ensure((parent, self.token_ids[node]) not in seen, f"node {node} repeats a sibling")
            seen.add((parent, self.token_ids[node]))
        for draw in self.draws:
            ensure(0 < draw.node < self.num_nodes, f"the draw of {draw.node} names no node")
            ensure(self.parents[draw.node] == draw.parent, f"the draw of {draw.node} has another parent")


@dataclass(slots=True)
class TreeBuilder:
    """Grows one tree; a token that is already there is shared, its draw is kept."""

    root: int  # token id of node 0
    max_nodes: int = 1 << 30  # `add` of a new node past this returns None
    token_ids: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    draws: list[Draw] = field(init=False, default_factory=list)
    _children: dict[tuple[int, int], int] = field(init=False, default_factory=dict)  # by parent and token

    def __post_init__(self) -> None:
        self.token_ids = [self.root]
        self.parents = [-1]

    def add(
        self,
        parent: int,
        token: int,
        speculator: str,
        rule: DrawRule = DrawRule.POINT_MASS,
        law: Distribution | NDArray[np.float64] | None = None,
        confidence: float = 0.5,
        evidence: tuple[float, ...] = (),
    ) -> int | None:
        """Record a draw of `token` below `parent`; the node that holds it, or None when the tree is full.

        A full tree drops draws of deterministic and coupled rules only: whether a *sampled* token
        fits must not depend on its value, so callers of the sampled rules check `full` before drawing.
        Raises IndexError where `parent` is no node.
        """
        node = self._children.get((parent, token))
        if node is None:
            node = len(self.token_ids)
            if node >= self.max_nodes:
                ensure(rule in (DrawRule.POINT_MASS, DrawRule.COUPLED), "a sampled draw may not be dropped")
                return None
            if not 0 <= parent < node:
                raise IndexError(f"parent {parent} of a tree of {node} nodes")
            self._children[parent, token] = node
            self.token_ids.append(token)
            self.parents.append(parent)
        self.draws.append(draw_of(Draw, (parent, node, speculator, rule, law, confidence, evidence)))
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The child of `parent` that holds `token`, if there is one."""
        return self._children.get((parent, token))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The token ids from below the root down to `node`; empty for the root."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    @property
    def full(self) -> bool:
        """Whether no further node fits."""
        return len(self.token_ids) >= self.max_nodes

    def build(self) -> TokenTree:
        """The tree as it stands."""
        return TokenTree(tuple(self.token_ids), tuple(self.parents), as_runs(self.draws))


def single_node(token: int) -> TokenTree:
    """The tree of ordinary decoding: the last committed token and nothing guessed."""
    return TokenTree((token,), (-1,))


def draws_by_parent(draws: Iterable[Draw]) -> dict[int, list[Draw]]:
    """The draws below each node, in proposal order."""
    below: dict[int, list[Draw]] = {}
    for draw in draws:
        below.setdefault(draw.parent, []).append(draw)
    return below


def child_of(token_ids: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    """The node below `parent` that holds `token`, if there is one: quicker than `children` for a few."""
    node = -1
    for _ in range(token_ids.count(token)):
        node = token_ids.index(token, node + 1)
        if parents[node] == parent:
            return node
    return None


def next_nodes(tree: TokenTree, text: Iterable[int]) -> dict[int, int | None]:
    """For every node down the path of `text`, the node of its next token; None where none holds it."""
    found: dict[int, int | None] = {}
    node = 0
    for token in text:
        child = found[node] = child_of(tree.token_ids, tree.parents, node, token)
        if child is None:
            break
        node = child
    return found


def proposed_by(tree: TokenTree) -> list[list[str]]:
    """For every node the speculators that proposed it, in order of their draws; the root has none."""
    names: list[list[str]] = [[] for _ in tree.token_ids]
    for draw in tree.draws:
        if draw.speculator not in names[draw.node]:
            names[draw.node].append(draw.speculator)
    return names
