"""Draws of speculators, and the verifiers that are lossless for them.

A step makes hundreds of draws. So consecutive draws of one speculator by one rule are stored as columns, a
*run*; a Draw object is made only when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, compress, groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, overload

from specinfer.errors import DrawRuleError

if TYPE_CHECKING:  # options name draw rules, and commands read options before they load anything large
    import numpy as np
    from numpy.typing import NDArray

    from specinfer.tree.distribution import Distribution


class DrawRule(StrEnum):
    """How a speculator chose a token; it determines which verifier is lossless for the draw."""

    POINT_MASS = "point_mass"  # a function of the text so far: top-k, lookup, prediction
    COUPLED = "coupled"  # top-k of log q + the noise the target will use at that position
    IID = "iid"  # sampled from q, independently of the other draws
    WITHOUT_REPLACEMENT = "without_replacement"  # from q without this speculator's earlier draws at the node

    @property
    def is_sampled(self) -> bool:
        """True if a verifier relies on how the token was drawn; its value may not decide its removal."""
        # Comparison is faster than a set, which would call the hash function in Python.
        return self is not DrawRule.POINT_MASS and self is not DrawRule.COUPLED


# Verifiers. coupled: the target's seeded choice, then a look-up in the tree; mss: multi-step speculative
# sampling (SpecInfer, algorithm 2).
Verifier = Literal["coupled", "mss"]
DraftDraw = Literal["coupled", "top_k", "iid", "without_replacement"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The draw rules of one verifier."""

    accepted: frozenset[DrawRule]  # rules for which it is lossless (docs/losslessness.md)
    draws: Mapping[str, DrawRule]  # rules for draft models, by option name; the default first


# The coupled verifier never reads a draw. Multi-step sampling needs the distribution that a token was drawn
# from, and a coupled draw has none that is independent of the target's noise. The top-k tokens of a draft
# model are point masses for both.
PAIRS: Final[Mapping[Verifier, Pairs]] = MappingProxyType(
    {
        "coupled": Pairs(frozenset(DrawRule), {"coupled": DrawRule.COUPLED, "top_k": DrawRule.POINT_MASS}),
        "mss": Pairs(
            frozenset({DrawRule.POINT_MASS, DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT}),
            {
                "without_replacement": DrawRule.WITHOUT_REPLACEMENT,
                "iid": DrawRule.IID,
                "top_k": DrawRule.POINT_MASS,
            },
        ),
    }
)


def draw_rule(verifier: Verifier | None, usual: DrawRule | None = None) -> DrawRule:
    """Return a draft's rule for `verifier`: `usual` if that is lossless, else the verifier's default."""
    if verifier is None and usual is not None:
        return usual
    rules = tuple(PAIRS[verifier or "coupled"].draws.values())
    return usual if usual in rules else rules[0]


def check_pair(verifier: Verifier, rules: Iterable[DrawRule], speculator: str) -> None:
    """Raise DrawRuleError unless `verifier` is lossless for all draw rules of `speculator`."""
    allowed = PAIRS[verifier].accepted
    for rule in rules:
        if rule not in allowed:
            raise DrawRuleError(
                f"speculator {speculator!r} proposes {rule} draws, which verifier '{verifier}' cannot treat "
                f"losslessly; it takes {', '.join(sorted(allowed))}; use one of these or verifier 'coupled'"
            )


class Draw(NamedTuple):
    """One token that one speculator proposed below one node.

    A tuple, which is the fastest to make and to unpack. A draw is equal only to itself.
    """

    parent: int  # the node below which the token was proposed
    node: int  # the node that holds the token; several draws may share it
    speculator: str
    rule: DrawRule
    law: Distribution | NDArray[np.float64] | None = None  # q of a sampled rule, [vocab] if an array
    confidence: float = 0.5  # the speculator's acceptance probability; no verifier reads it
    evidence: tuple[float, ...] = ()  # numbers for a policy, documented by the speculator's module

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


_UNSAMPLED: Final = (DrawRule.POINT_MASS, DrawRule.COUPLED)
draw_of: Final = tuple.__new__  # draw_of(Draw, fields) is faster than Draw(*fields)


class Run(NamedTuple):
    """Consecutive draws of one speculator by one rule with equal evidence lengths, as columns."""

    speculator: str
    rule: DrawRule
    parents: Sequence[int]
    nodes: Sequence[int]
    confidences: Sequence[float]
    evidence: Sequence[float]  # `pieces` numbers for each draw
    pieces: int
    laws: Sequence[Distribution | NDArray[np.float64] | None] | None = None  # None: no draw has one

    def moved(self, nodes: Sequence[int]) -> Run:
        """Return this run with node n renumbered to nodes[n]."""
        speculator, rule, parents, own, confidences, evidence, pieces, laws = self
        above, at = [nodes[parent] for parent in parents], [nodes[node] for node in own]
        return Run(speculator, rule, above, at, confidences, evidence, pieces, laws)

    def fault(self, num_nodes: int) -> str | None:
        """Return why the run is invalid in a tree of `num_nodes` nodes, or None if it is valid."""
        parents, nodes, confidences, count = self.parents, self.nodes, self.confidences, len(self.nodes)
        lengths = len(parents), len(confidences), count if self.laws is None else len(self.laws)
        if lengths != (count, count, count) or len(self.evidence) != self.pieces * count:
            return f"with draws in columns of {(count, *lengths)}, and evidence of {len(self.evidence)}"
        if not count:
            return "with a run of no draws"
        if not isinstance(self.rule, DrawRule):
            return f"with a draw by {self.rule!r}, which is no DrawRule"
        if not (_all_are(int, parents) and _all_are(int, nodes)):
            return "with a draw whose nodes are no int"
        if min(parents) < 0 or max(parents) >= num_nodes or min(nodes) < 1 or max(nodes) >= num_nodes:
            return f"with a draw at none of its {num_nodes} nodes"
        if not (_all_are(float, confidences) or all(isinstance(sure, (int, float)) for sure in confidences)):
            return "with a draw whose confidence is no number"
        return None

    def draws(self) -> Iterator[Draw]:
        """Yield each draw."""
        pieces = self.pieces
        seen = zip(*[iter(self.evidence)] * pieces, strict=True) if pieces else iter([()] * len(self.nodes))
        for i, (parent, node, sure, evidence) in enumerate(
            zip(self.parents, self.nodes, self.confidences, seen, strict=True)
        ):
            law = None if self.laws is None else self.laws[i]
            yield draw_of(Draw, (parent, node, self.speculator, self.rule, law, sure, evidence))

    def kept(self, numbers: Sequence[int]) -> Run:
        """Return the draws at nodes n with numbers[n] >= 0, renumbered to that."""
        stay = [numbers[node] >= 0 for node in self.nodes]
        pieces, laws, number = self.pieces, self.laws, numbers.__getitem__
        of_each = stay if pieces == 1 else [one for one in stay for _ in range(pieces)]
        return Run(
            self.speculator,
            self.rule,
            [*map(number, compress(self.parents, stay))],
            [*map(number, compress(self.nodes, stay))],
            [*compress(self.confidences, stay)],
            [*compress(self.evidence, of_each)],
            pieces,
            None if laws is None else [*compress(laws, stay)],
        )


class Runs(Sequence[Draw]):
    """Lazy sequence of draws, stored as runs, as draws, or as both."""

    __slots__ = ("_draws", "_numbers", "_runs", "_source")

    def __init__(
        self,
        runs: Sequence[Run] = (),
        numbers: Sequence[int] | None = None,
        draws: tuple[Draw, ...] | None = None,
    ) -> None:
        """Hold `runs`, or `draws` if these are given.

        With `numbers`, only draws at nodes n with numbers[n] >= 0 are held, renumbered to that.
        """
        self._source = runs
        self._numbers = numbers
        self._draws = draws
        # Set once, when complete, as several threads may read a tree.
        self._runs: Sequence[Run] | None = runs if numbers is None and draws is None else None

    @property
    def runs(self) -> Sequence[Run]:
        """Return the non-empty runs."""
        made = self._runs
        if made is None:
            if self._numbers is not None:
                kept = [run.kept(self._numbers) for run in self._source]
                made = [run for run in kept if run.nodes]
            else:
                made = _runs_of(self._draws or ())
            self._runs = made
        return made

    @property
    def rules(self) -> list[DrawRule]:
        """The rules of all draws, unordered, with repetitions."""
        if self._runs is None and self._draws is not None:
            return [draw.rule for draw in self._draws]
        return [run.rule for run in self.runs]

    def drawn_by(self, speculator: str) -> int:
        """Return the number of draws of one speculator."""
        numbers = self._numbers
        if self._runs is None and numbers is not None:
            nodes = [run.nodes for run in self._source if run.speculator == speculator]
            return sum([numbers[node] >= 0 for of_run in nodes for node in of_run])
        return sum([len(run.nodes) for run in self.runs if run.speculator == speculator])

    def __len__(self) -> int:
        return sum([len(run.nodes) for run in self.runs]) if self._draws is None else len(self._draws)

    @overload
    def __getitem__(self, index: int) -> Draw: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Draw, ...]: ...
    def __getitem__(self, index: int | slice) -> Draw | tuple[Draw, ...]:
        return self._each()[index]

    def __iter__(self) -> Iterator[Draw]:
        return iter(self._each())

    def __eq__(self, other: object) -> bool:
        """Compare the draws and their order."""
        if isinstance(other, Runs):
            other = other._each()
        return self._each() == other

    def __hash__(self) -> int:
        return hash(self._each())

    def __repr__(self) -> str:
        return repr(self._each())

    def _each(self) -> tuple[Draw, ...]:
        if self._draws is None:
            self._draws = tuple(chain.from_iterable(run.draws() for run in self.runs))
        return self._draws


def as_runs(draws: Sequence[Draw]) -> Runs:
    """Return the draws as Runs."""
    return draws if isinstance(draws, Runs) else Runs(draws=tuple(draws))


def _all_are(kind: type, values: Sequence[object]) -> bool:
    """Return whether all values are of that type; the fast path has no loop in Python."""
    return {kind}.issuperset(map(type, values)) or all(isinstance(value, kind) for value in values)


def _runs_of(draws: Sequence[Draw]) -> Sequence[Run]:
    """Group consecutive draws into runs."""
    if not draws:
        return ()
    columns = tuple(zip(*draws, strict=True))
    speculators, rules, evidence = columns[2], columns[3], columns[6]
    alike = speculators.count(speculators[0]) == rules.count(rules[0]) == len(draws)
    if alike and len({*map(len, evidence)}) == 1 and rules[0] in _UNSAMPLED:  # the usual case
        return (_run(columns),)
    return [_run(tuple(zip(*each, strict=True))) for _, each in groupby(draws, _kind)]


def any_sampled(draws: Sequence[Draw]) -> bool:
    """Return whether any draw is sampled (DrawRule.is_sampled)."""
    rules = as_runs(draws).rules  # counting is faster than calling `is_sampled` for every tree of a step
    return sum(map(rules.count, _UNSAMPLED)) < len(rules)


def _kind(draw: Draw) -> tuple[str, DrawRule, int, bool]:
    """Return the key that all draws of a run share."""
    return draw.speculator, draw.rule, len(draw.evidence), draw.law is None


def _run(columns: tuple[Any, ...]) -> Run:
    """Return the run of one or more draws with one key, given as columns."""
    parents, nodes, speculators, rules, laws, confidences, evidence = columns
    flat, pieces = [*chain.from_iterable(evidence)], len(evidence[0])
    run_laws = None if laws[0] is None else laws
    return Run(speculators[0], rules[0], parents, nodes, confidences, flat, pieces, run_laws)
