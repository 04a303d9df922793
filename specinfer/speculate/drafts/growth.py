"""Shape of drafts' trees, and Growth: one request's tree while a draft grows it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Self

from specinfer.plan import PlanEntry
from specinfer.request import Request
from specinfer.speculate.drafts.draws import Site
from specinfer.speculation_config import MAX_DEPTH, MAX_DEPTH_STREAMED, SpeculationConfig
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.draw import draw_rule
from specinfer.tree.token_tree import Expansion
from specinfer.verify.noise import draft_stream, uniform

_NODES: Final = 32  # maximum nodes of a tree with a learned shape, without its root
_WIDTH: Final = 4  # children of each of its nodes that is run
_MIN_PROB: Final = 0.02  # minimum draft probability of children after the first
_MIN_PATH_PROB: Final = 0.01  # minimum draft probability of a path that may be extended
_MIN_PATH_PROB_STREAMED: Final = 1e-4  # the same with streamed layers


class Shape(NamedTuple):
    """Default form of a draft's trees, and its draw rule.

    In a tree with a learned shape each node that is run gets a few likely children, and the policy selects
    the nodes to run. The tree is wide at uncertain tokens, and deep at likely ones. The number of
    samples below a node may not depend on their values, so sampled trees have the shape `expansion`.
    """

    expansion: Expansion
    rule: DrawRule
    learned: bool = False
    # For learned shapes:
    nodes: int = _NODES  # maximum nodes without the root
    min_probability: float = _MIN_PROB  # minimum probability of children after the first
    min_path: float = _MIN_PATH_PROB  # minimum probability of a path that may be extended
    deepest: int = MAX_DEPTH  # maximum levels

    @classmethod
    def of(cls, speculation: SpeculationConfig) -> Self:
        """Return the shape of an engine's options."""
        return cls(speculation.fixed_expansion, speculation.draw_rule, speculation.learns_shape)

    @classmethod
    def streamed(cls, speculation: SpeculationConfig) -> Self:
        """Return the shape for a target with streamed layers, whose reads cost more than rows and levels.

        Drafts underestimate long paths, and the policy corrects this, so paths may have lower probabilities.
        The minimum for children is unchanged, as a tree full of them is not deep.
        """
        return cls.of(speculation)._replace(
            nodes=max(1, speculation.node_limit - 1),
            min_path=_MIN_PATH_PROB_STREAMED,
            deepest=MAX_DEPTH_STREAMED,
        )

    def is_learned(self, request: Request) -> bool:
        """True if the draft may choose the tree's shape: the request sets none, and no draw is sampled."""
        params = request.params
        return (
            self.learned
            and params.speculation.expansion is None
            and params.speculation.max_nodes is None
            and (params.greedy or not draw_rule(params.speculation.verifier, self.rule).is_sampled)
        )

    def depth(self, request: Request) -> int:
        """Return the maximum levels of the request's trees."""
        return self.deepest if self.is_learned(request) else self._of(request).depth

    def width(self, request: Request, depth: int) -> int:
        """Return the number of children of a node at this depth that is run."""
        return _WIDTH if self.is_learned(request) else self._of(request).widths[depth]

    def max_nodes(self, request: Request) -> int:
        """Return the maximum nodes of a request's trees without their roots."""
        return self.nodes if self.is_learned(request) else self._of(request).num_nodes - 1

    def _of(self, request: Request) -> Expansion:
        return request.params.speculation.expansion or self.expansion


@dataclass(slots=True)
class Growth:
    """One request's tree of at most `limit` levels while it grows; 0 levels: the text is only read.

    Only the selected nodes are run. Their order in the draft's cache is that of selection, which may differ
    from the order in the tree.
    """

    entry: PlanEntry
    builder: TreeBuilder
    speculator: str  # name of the draft
    limit: int
    stream: int | None = None  # random stream of sampled draws, once it is needed
    drawn: int = 0  # number of random numbers used
    seen: int = 0  # number of processed draws
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes that get children next
    waiting: list[int] = field(default_factory=list)  # other nodes that may get children
    depths: list[int] = field(default_factory=lambda: [0])  # of all nodes
    likely: list[float] = field(default_factory=lambda: [1.0])  # the draft's probability of each node's path
    min_path: float = 0.0  # minimum probability of paths that may be extended
    # Selected nodes: their number in the order of selection, and for each number that of the parent.
    order: dict[int, int] = field(default_factory=lambda: {0: 0})
    above: list[int] = field(default_factory=lambda: [-1])
    started: bool = False  # True once the root was run
    grown: TokenTree | None = None  # the whole tree, if it was not built node by node

    @classmethod
    def of(cls, entry: PlanEntry, name: str, limit: int) -> Self:
        """Return the initial tree of the speculator `name`, of at most `limit` levels."""
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        levels = limit if entry.max_nodes > 1 else 0
        return cls(entry, builder, name, levels)

    def tree(self) -> TokenTree:
        """Return the present tree."""
        return self.builder.build() if self.grown is None else self.grown

    @classmethod
    def shaped(cls, entry: PlanEntry, name: str, shape: Shape) -> Self:
        """Return the initial tree of this shape."""
        request = entry.request
        growth = cls.of(entry, name, min(entry.max_depth, shape.depth(request)))
        growth.min_path = shape.min_path if shape.is_learned(request) else 0.0
        return growth

    def uniform(self) -> float:
        """Return the next number in [0, 1) of this tree's random stream."""
        root = self.entry.end - 1
        if self.stream is None:
            self.stream = draft_stream(self.speculator, root)
        self.drawn += 1
        return uniform(self.entry.request.seed, root, self.drawn, stream=self.stream)

    @property
    def depth(self) -> int:
        """Depth of the frontier's deepest node."""
        return self.depths[self.frontier[-1]]

    @property
    def ends(self) -> Sequence[int]:
        """The nodes below which the tree can grow; none if it is full."""
        return () if self.builder.full else self.waiting

    def choose(self, nodes: Iterable[int]) -> int:
        """Select nodes of `ends` to extend next; returns the first one's number in the order of selection."""
        first = len(self.above)
        self.frontier = sorted(nodes)
        chosen = frozenset(self.frontier)
        self.waiting = [node for node in self.waiting if node not in chosen]
        for node in self.frontier:
            self.order[node] = len(self.above)
            self.above.append(self.order[self.builder.parents[node]])
        return first

    def descend(self) -> None:
        """Process the nodes that were added below the frontier, which may now get children."""
        depths, likely, builder = self.depths, self.likely, self.builder
        before = len(depths)
        for draw in builder.draws[self.seen :]:
            if draw.node == len(depths):  # else a repeated draw of a node
                depths.append(depths[draw.parent] + 1)
                likely.append(likely[draw.parent] * draw.confidence)
        self.seen = len(builder.draws)
        new = range(before, len(depths))
        self.waiting += [n for n in new if depths[n] < self.limit and likely[n] >= self.min_path]

    def path(self, tokens: Iterable[int]) -> list[int]:
        """Return the nodes along these tokens below the root, as far as they are in the cache."""
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
        """Return a Site for each node of the frontier."""
        entry, builder = self.entry, self.builder
        request, params = entry.request, entry.request.params
        processors = entry.active_processors
        min_probability = shape.min_probability if shape.is_learned(request) else 0.0
        return [
            Site(
                builder,
                self.speculator,
                node,
                width=shape.width(request, self.depths[node]),
                params=params,
                seed=request.seed,
                position=entry.end + self.depths[node],
                uniforms=self.uniform,
                rule=draw_rule(params.speculation.verifier, shape.rule),
                processed=partial(processors.apply, path=builder.path_tokens(node)) if processors else None,
                min_probability=min_probability,
            )
            for node in self.frontier
        ]


@dataclass(slots=True)
class GuessedTree:
    """A tree whose levels one pass guesses, in the rows first..first+levels-1 with logits."""

    growth: Growth
    first: int
    levels: int
    site: Site  # the root's


def trees_first(growths: Sequence[Growth], which: Iterable[int]) -> list[int]:
    """Return the entries with trees first; prompts are read with the rows that remain."""
    return sorted(which, key=lambda i: not growths[i].entry.has_tree)
