"""One request's tree while a draft grows it, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from specinfer.config import draw_rule
from specinfer.plan import PlanEntry
from specinfer.speculate.draws import Site
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.expansion import Expansion
from specinfer.verify.noise import draft_stream, uniform


class Shape(NamedTuple):
    """How a draft's trees grow where a request does not say, and how it draws where the verifier allows."""

    expansion: Expansion
    rule: DrawRule

    def expansion_for(self, entry: PlanEntry) -> Expansion:
        """The request's own expansion, or the usual one."""
        return entry.request.params.speculation.expansion or self.expansion


@dataclass(slots=True)
class Growth:
    """One request's share of a step: its tree, of at most `limit` levels; 0: its text is only read."""

    entry: PlanEntry
    builder: TreeBuilder
    speculator: str  # whose it is
    limit: int
    stream: int | None = None  # of the random numbers of sampled draws, once there is one
    drawn: int = 0  # random numbers used
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes of the last depth
    depth: int = 0  # of the frontier
    in_cache: int = 0  # nodes 0..in_cache-1 have been run
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

    def uniform(self) -> float:
        """The next number in [0, 1) of this tree's own stream."""
        root = self.entry.end - 1
        if self.stream is None:
            self.stream = draft_stream(self.speculator, root)
        self.drawn += 1
        return uniform(self.entry.request.seed, root, self.drawn, stream=self.stream)

    @property
    def wants_more(self) -> bool:
        """Whether there is room for another level below the frontier."""
        return self.depth < self.limit and bool(self.frontier) and not self.builder.full

    def descend(self) -> None:
        """Make the nodes added below the frontier the new frontier."""
        self.frontier = list(range(self.frontier[-1] + 1, len(self.builder.parents)))
        self.depth += 1

    def sites(self, shape: Shape) -> list[Site]:
        """The frontier's nodes, each as a place where children are drawn."""
        entry, builder = self.entry, self.builder
        request, params = entry.request, entry.request.params
        processors = entry.active_processors
        return [
            Site(
                builder,
                node,
                width=shape.expansion_for(entry).widths[self.depth],
                params=params,
                seed=request.seed,
                position=entry.end + self.depth,
                uniforms=self.uniform,
                rule=draw_rule(params.speculation.verifier, shape.rule),
                processed=partial(processors.apply, path=builder.path_tokens(node)) if processors else None,
                request_id=request.request_id,
            )
            for node in self.frontier
        ]


@dataclass(slots=True)
class Guessed:
    """One request's levels where one pass guesses all: rows first..first+levels-1 of those that guess."""

    growth: Growth
    first: int
    levels: int
    site: Site  # the root, where the first level is drawn


def trees_first(growths: Sequence[Growth], which: Sequence[int]) -> list[int]:
    """These entries, those with trees first: prompts are read with the rows that trees leave."""
    return sorted(which, key=lambda i: not growths[i].entry.has_tree)
