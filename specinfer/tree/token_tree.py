"""TokenTree, its builder, and Expansion, the shape of a tree that is grown level by level.

Two speculators that propose the same token below the same node share a node, and so one row of the target's
pass. Both draws are kept in order, because multi-step speculative sampling needs each draw with the
distribution it was drawn from (docs/losslessness.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specinfer.errors import ConfigError, ensure
from specinfer.tree.draw import Draw, DrawRule, as_runs, draw_of

if TYPE_CHECKING:  # options name draw rules, and commands read options before they load anything large
    import numpy as np
    from numpy.typing import NDArray

    from specinfer.tree.distribution import Distribution


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Candidate continuations of one request; immutable, parents before children.

    Node 0 is the last committed token, so every tree has at least one node. No two children of a node hold
    the same token. A node represents the text of its ancestors followed by its own token (SpecInfer,
    definition 3.1).
    """

    token_ids: tuple[int, ...]  # [num_nodes]
    parents: tuple[int, ...]  # [num_nodes], parents[0] == -1, parents[i] < i
    draws: Sequence[Draw] = ()  # in proposal order, with duplicates, which MSS needs

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return len(self.token_ids)

    def depths(self) -> list[int]:
        """Return the depth of every node, [num_nodes]; the root's is 0."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def children(self) -> list[dict[int, int]]:
        """Return the children of every node as token id -> node, in proposal order."""
        children: list[dict[int, int]] = [{} for _ in self.parents]
        for node in range(1, len(self.parents)):
            children[self.parents[node]][self.token_ids[node]] = node
        return children

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the nodes from below the root down to `node`; empty for the root."""
        return _path(self.parents, node)

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Return the token ids along `path_to(node)`."""
        return tuple(self.token_ids[n] for n in self.path_to(node))

    def likelihoods(self) -> list[float]:
        """Return the speculators' acceptance probability of each node, [num_nodes]; the root's is 1.

        It is the product of the confidences along the node's path, with the highest confidence of several
        draws of a node, at most 1. So no node is likelier than its parent.
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
        """Raise IntegrityError if an invariant of the class docstring does not hold."""
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
    """Builds one tree; a repeated token shares its node, and every draw is kept."""

    root: int  # token id of node 0
    max_nodes: int = 1 << 30  # `add` returns None for a new node beyond this number
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
        """Add a draw of `token` below `parent`; returns its node, or None if the tree is full.

        Mutates the builder. A full tree accepts no new node: it drops draws of the rules POINT_MASS and
        COUPLED. Whether a *sampled* token fits may not depend on its value, so callers check `full` before
        they sample.

        Args:
            parent: the node below which the token was drawn.
            token: the token id.
            speculator: the name of the speculator.
            rule: how the token was drawn.
            law: the distribution that a sampled token was drawn from; None for the other rules.
            confidence: the speculator's acceptance probability, from 0 to 1.
            evidence: numbers for a policy to learn from.

        Raises:
            IndexError: `parent` is not a node of the tree.
            IntegrityError: a sampled token does not fit.
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
        """Return the child of `parent` that holds `token`, or None."""
        return self._children.get((parent, token))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Return the token ids from below the root down to `node`; empty for the root."""
        return tuple(self.token_ids[n] for n in _path(self.parents, node))

    @property
    def full(self) -> bool:
        """True if no further node fits."""
        return len(self.token_ids) >= self.max_nodes

    def build(self) -> TokenTree:
        """Return the tree."""
        return TokenTree(tuple(self.token_ids), tuple(self.parents), as_runs(self.draws))


def _path(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Return the nodes from below the root down to `node`; empty for the root."""
    path: list[int] = []
    while node > 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def single_node(token: int) -> TokenTree:
    """Return the tree of ordinary decoding: the last committed token without guesses."""
    return TokenTree((token,), (-1,))


def draws_by_parent(draws: Iterable[Draw]) -> dict[int, list[Draw]]:
    """Return the draws below each node, in proposal order."""
    below: dict[int, list[Draw]] = {}
    for draw in draws:
        below.setdefault(draw.parent, []).append(draw)
    return below


def child_of(token_ids: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    """Return the child of `parent` that holds `token`, or None; faster than `children` for few look-ups."""
    node = -1
    for _ in range(token_ids.count(token)):
        node = token_ids.index(token, node + 1)
        if parents[node] == parent:
            return node
    return None


def next_nodes(tree: TokenTree, text: Iterable[int]) -> dict[int, int | None]:
    """Return, for every node on the path of `text`, the child with the next token, or None at its end."""
    found: dict[int, int | None] = {}
    node = 0
    for token in text:
        child = found[node] = child_of(tree.token_ids, tree.parents, node, token)
        if child is None:
            break
        node = child
    return found


def proposed_by(tree: TokenTree) -> list[list[str]]:
    """Return the speculators that proposed each node, in the order of their draws; none for the root."""
    names: list[list[str]] = [[] for _ in tree.token_ids]
    for draw in tree.draws:
        if draw.speculator not in names[draw.node]:
            names[draw.node].append(draw.speculator)
    return names


@dataclass(frozen=True, slots=True)
class Expansion:
    """The shape of a tree grown breadth first; raises ConfigError unless every width is an integer >= 1."""

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        ok = self.widths and all(type(k) is int and 1 <= k <= 64 for k in self.widths)
        if not ok or len(self.widths) > 64:
            raise ConfigError(
                f"expansion is {','.join(map(str, self.widths))!r}; allowed: 1 to 64 integers from 1 to 64, "
                "for example 1,1,3,1,1"
            )

    @classmethod
    def of(cls, value: object) -> Expansion:
        """Return a plan given as a plan, as text or as widths; raises ConfigError for other values."""
        if isinstance(value, Expansion):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Iterable):
            return cls(tuple(value))
        raise ConfigError(f"expansion is {value!r}; allowed: integers >= 1, for example 1,1,3,1,1")

    @classmethod
    def parse(cls, text: str) -> Expansion:
        """Return the plan written as '1,1,3'; raises ConfigError for other text."""
        try:
            widths = tuple(int(part) for part in text.strip("<> ").split(","))
        except ValueError:
            raise ConfigError(
                f"expansion is {text!r}; allowed: integers >= 1 with commas between, for example 1,1,3,1,1"
            ) from None
        return cls(widths)

    @property
    def depth(self) -> int:
        """The number of levels below the root."""
        return len(self.widths)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of a full tree, the root included."""
        total, level = 1, 1
        for width in self.widths:
            level *= width
            total += level
        return total

    def __str__(self) -> str:
        return ",".join(map(str, self.widths))
