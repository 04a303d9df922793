"""One request's tree while a draft grows it, level by level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from specinfer.plan import PlanEntry
from specinfer.request import Request
from specinfer.speculate.drafts.draws import Site
from specinfer.speculation_config import MAX_DEPTH, MAX_DEPTH_STREAMED, SpeculationConfig
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.draw import draw_rule
from specinfer.tree.expansion import Expansion
from specinfer.verify.noise import draft_stream, uniform

_NODES: Final = 32  # of a tree whose shape is learned, below its root
_WIDTH: Final = 4  # children of each of its nodes that is run
_LEAST: Final = 0.02  # probability of those that are kept behind the first
_LEAST_PATH: Final = 0.01  # of a path that may go on, all as the draft itself says
_LEAST_PATH_STREAMED: Final = 1e-4  # the same where a pass waits for its weights
LIKELY_NODES: Final = round(MAX_DEPTH * _WIDTH / _LEAST_PATH)  # below a root: more cannot be wanted


class Shape(NamedTuple):
    """How a draft's trees grow where a request does not say, and how it draws where the verifier allows.

    A tree whose shape is learned has a few likely children below each node that is run, and whoever decides
    says which are: so it grows wide where the draft is unsure, and deep where it is sure. How many samples
    are drawn below a node must not depend on them, so trees of samples have the `expansion`.
    """

    expansion: Expansion
    rule: DrawRule
    learned: bool = False
    # Of learned trees the nodes below a root for which room is kept; how likely children are that are kept
    # behind the first, and paths that may go on.
    nodes: int = _NODES
    least: float = _LEAST
    least_path: float = _LEAST_PATH
    deepest: int = MAX_DEPTH  # levels

    @classmethod
    def of(cls, speculation: SpeculationConfig) -> Shape:
        """What an engine's config says."""
        return cls(speculation.fixed_expansion, speculation.draw_rule, speculation.learns_shape)

    @classmethod
    def streamed(cls, speculation: SpeculationConfig) -> Shape:
        """The same for a target whose passes wait for its weights, beside which rows and levels are cheap.

        A draft is less sure of long paths than it should be, and the policy knows by how much. Children are
        left out as usual: a tree that is full of them is not deep.
        """
        return cls.of(speculation)._replace(
            nodes=max(1, speculation.most_nodes - 1),
            least_path=_LEAST_PATH_STREAMED,
            deepest=MAX_DEPTH_STREAMED,
        )

    def is_learned(self, request: Request) -> bool:
        """Whether the request's trees have no shape: who asks for a size gets all of it, as it is shaped."""
        params = request.params
        return (
            self.learned
            and params.speculation.expansion is None
            and params.speculation.max_nodes is None
            and (params.greedy or not draw_rule(params.speculation.verifier, self.rule).is_sampled)
        )

    def depth(self, request: Request) -> int:
        """The levels of the request's trees, at most."""
        return self.deepest if self.is_learned(request) else self._of(request).depth

    def width(self, request: Request, depth: int) -> int:
        """The children of a node at this depth that is run."""
        return _WIDTH if self.is_learned(request) else self._of(request).widths[depth]

    def most_nodes(self, request: Request) -> int:
        """The nodes of a request's trees below their roots, at most."""
        return self.nodes if self.is_learned(request) else self._of(request).num_nodes - 1

    def _of(self, request: Request) -> Expansion:
        return request.params.speculation.expansion or self.expansion


@dataclass(slots=True)
class Growth:
    """One request's share of a step: its tree, of at most `limit` levels; 0: its text is only read.

    Only those nodes are run below which somebody wants guesses. They lie in the draft's cache in the order in
    which they were chosen, which need not be that of the tree.
    """

    entry: PlanEntry
    builder: TreeBuilder
    speculator: str  # whose it is
    limit: int
    stream: int | None = None  # of the random numbers of sampled draws, once there is one
    drawn: int = 0  # random numbers used
    seen: int = 0  # draws of the tree that are taken in
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes that get children next
    waiting: list[int] = field(default_factory=list)  # others that have none, and may
    depths: list[int] = field(default_factory=lambda: [0])  # of all nodes
    likely: list[float] = field(default_factory=lambda: [1.0])  # their paths, as the draft says
    least: float = 0.0  # of paths that may go on
    # Of nodes that were chosen to get children the number in that order, and of each its parent's number.
    order: dict[int, int] = field(default_factory=lambda: {0: 0})
    above: list[int] = field(default_factory=lambda: [-1])
    started: bool = False  # whether the root was run
    grown: TokenTree | None = None  # all of it, where it was not built node by node

    @classmethod
    def of(cls, entry: PlanEntry, name: str, limit: int) -> Growth:
        """A tree that is about to grow for the speculator `name`, `limit` levels at most."""
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        levels = limit if entry.max_nodes > 1 else 0
        return cls(entry, builder, name, levels)

    def tree(self) -> TokenTree:
        """The tree as it has grown so far."""
        return self.builder.build() if self.grown is None else self.grown

    @classmethod
    def shaped(cls, entry: PlanEntry, name: str, shape: Shape, limit: int | None = None) -> Growth:
        """The same of a tree that is to have this shape, and not more levels than `limit`."""
        request = entry.request
        levels = min(entry.max_depth, shape.depth(request))
        growth = cls.of(entry, name, levels if limit is None else min(levels, limit))
        growth.least = shape.least_path if shape.is_learned(request) else 0.0
        return growth

    def uniform(self) -> float:
        """The next number in [0, 1) of this tree's own stream."""
        root = self.entry.end - 1
        if self.stream is None:
            self.stream = draft_stream(self.speculator, root)
        self.drawn += 1
        return uniform(self.entry.request.seed, root, self.drawn, stream=self.stream)

    @property
    def depth(self) -> int:
        """Of the frontier's deepest node."""
        return self.depths[self.frontier[-1]]

    @property
    def ends(self) -> Sequence[int]:
        """The nodes below which the tree can grow; none where it is full."""
        return () if self.builder.full else self.waiting

    def choose(self, nodes: Iterable[int]) -> int:
        """Let these of `ends` get children next; the number of the first of them in the order of all."""
        first = len(self.above)
        self.frontier = sorted(nodes)
        chosen = frozenset(self.frontier)
        self.waiting = [node for node in self.waiting if node not in chosen]
        for node in self.frontier:
            self.order[node] = len(self.above)
            self.above.append(self.order[self.builder.parents[node]])
        return first

    def descend(self) -> None:
        """Take in the nodes that were added below the frontier: they may get children, too."""
        depths, likely, builder = self.depths, self.likely, self.builder
        before = len(depths)
        for draw in builder.draws[self.seen :]:
            if draw.node == len(depths):  # others are of a node that had one
                depths.append(depths[draw.parent] + 1)
                likely.append(likely[draw.parent] * draw.confidence)
        self.seen = len(builder.draws)
        new = range(before, len(depths))
        self.waiting += [n for n in new if depths[n] < self.limit and likely[n] >= self.least]

    def path(self, tokens: Iterable[int]) -> list[int]:
        """The nodes along these tokens below the root, as far as they lie in the cache."""
        path: list[int] = []
        node = 0
        for token in tokens:
            child = self.builder.child(node, token)
            if child is None or child not in self.order:
                break
            node = child
            path.append(node)
        return path

    def sites(self, shape: Shape) -> list[Site]:
        """The frontier's nodes, each as a place where children are drawn."""
        entry, builder = self.entry, self.builder
        request, params = entry.request, entry.request.params
        processors = entry.active_processors
        least = shape.least if shape.is_learned(request) else 0.0
        return [
            Site(
                builder,
                node,
                width=shape.width(request, self.depths[node]),
                params=params,
                seed=request.seed,
                position=entry.end + self.depths[node],
                uniforms=self.uniform,
                rule=draw_rule(params.speculation.verifier, shape.rule),
                processed=partial(processors.apply, path=builder.path_tokens(node)) if processors else None,
                request_id=request.request_id,
                least=least,
            )
            for node in self.frontier
        ]


@dataclass(slots=True)
class GuessedTree:
    """A tree that one pass guesses all levels of: rows first..first+levels-1 of those that guess."""

    growth: Growth
    first: int
    levels: int
    site: Site  # the root, where the first level is drawn


def trees_first(growths: Sequence[Growth], which: Iterable[int]) -> list[int]:
    """These entries, those with trees first: prompts are read with the rows that trees leave."""
    return sorted(which, key=lambda i: not growths[i].entry.has_tree)
