"""A step's guesses weighed by the library (cpu/step_guesses.cpp), a call a question: as PlainWeighing does.

Trees are told as bytes, numbers first and then integers. What was told stays there until the next step, so
what became of guesses is learnt from the tokens that were committed alone.
"""

from __future__ import annotations

import math
import struct
import weakref
from array import array
from collections.abc import Mapping, Sequence
from ctypes import byref
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, cast

from specinfer.kernels.library import KnowledgeArgs, Library, StepCostsArgs
from specinfer.plan import PlanEntry
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.native_knowledge import NativeKnowledge
from specinfer.speculate.policy.speculation_policy import has_own_size
from specinfer.speculate.policy.weighing import BESIDE, Expected, Grown, StepCosts
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree
from specinfer.tree.draw import Run, any_sampled, as_runs
from specinfer.tree.merging import firm_nodes, keep

_MOST_NODES: Final = 1 << 30  # of a tree; more make no difference


class NativeWeighing:
    """A `Weighing` by what is known; `drafts` are those whose passes have a price.

    No other one learns the same `knowledge`.
    """

    def __init__(
        self, library: Library, knowledge: NativeKnowledge, drafts: Mapping[str, DraftCosts]
    ) -> None:
        self._library = library
        self._knowledge = knowledge
        self._drafts = drafts
        self._step = library.step_new()
        # Not at exit: a thread that nobody waits for may be in the library yet.
        weakref.finalize(self, library.step_free, self._step).atexit = False
        self._known = KnowledgeArgs(logistics=knowledge.logistics, beside=BESIDE if drafts else 1.0)
        self._version = 0  # of what is known
        self._names: Sequence[str] = ()  # of speculators, by number
        self._levels = array("i")  # of these, that are counted of a draft that has a price; 0: it is none
        self._costs = StepCostsArgs()
        self._passes, self._draft_passes = _Table(), _Table()
        self._args = byref(self._known), byref(self._costs)
        self._entries: Sequence[PlanEntry] = ()
        self._about: Sequence[tuple[float, int, bool]] = ()  # them: temperature, most nodes, whether all stay
        self._seen: dict[int, tuple[int, int]] = {}  # of a draft's trees, by number: nodes and draws

    def begin(self, entries: Sequence[PlanEntry]) -> None:
        """As Weighing says."""
        self._entries, self._seen = entries, {}
        self._about = [
            (entry.request.params.temperature, min(entry.max_nodes, _MOST_NODES), has_own_size(entry))
            for entry in entries
        ]
        self._library.step_begin(self._step)

    def expect(self, trees: Sequence[TokenTree], costs: StepCosts, doubt: float) -> Expected:
        """As Weighing says."""
        self._seen = {}
        found = array("d", bytes(8 * (3 + 2 * len(trees))))
        told = *self._told(trees), self._known_now(), self._taken(costs)
        _there(self._library.step_expect(self._step, *told, doubt, found.buffer_info()[0]))
        tokens, nodes, price, *of_each = found
        return Expected(tokens, int(nodes), price, of_each[::2], of_each[1::2])

    def deepen(
        self, grown: Sequence[Grown], costs: StepCosts, passes: Sequence[float], rows: float
    ) -> list[bool]:
        """As Weighing says."""
        numbers, integers, count = list[float](), list[int](), 0
        for number, tree, ends, rates in grown:
            if len(ends) != len(rates):
                raise ValueError(f"{len(rates)} rates of levels below {len(ends)} nodes")
            nodes, draws = self._seen.get(number, (1, 0))
            self._seen[number] = len(tree.token_ids), len(tree.draws)
            new = as_runs(tree.draws[draws:]).runs
            firm = [node for run in new if run.rule.is_sampled for node in run.nodes]
            self._add(
                *(numbers, integers, 0.0, tree.token_ids[nodes:], tree.parents[nodes:], new, firm, number, 0)
            )
            numbers += [rate.first for rate in rates]
            numbers += [rate.other for rate in rates]
            integers.append(len(ends))
            integers += ends
            count += len(ends)
        chosen = array("i", bytes(4 * (count + 1)))
        there = self._library.step_deepen(
            *(self._step, *_packed(numbers, integers), len(grown), self._known_now(), self._taken(costs)),
            *(self._draft_passes.address(passes, count), rows, chosen.buffer_info()[0]),
        )
        _there(there)
        return [*map(bool, chosen[:count])]

    def choose(self, trees: Sequence[TokenTree], costs: StepCosts) -> list[TokenTree]:
        """As Weighing says."""
        told = self._told(trees)
        kept = array("i", bytes(4 * sum([len(tree.token_ids) + 1 for tree in trees])))
        args = self._known_now(), self._taken(costs), kept.buffer_info()[0]
        _there(self._library.step_choose(self._step, *told, *args))
        nodes, chosen, at = kept.tolist(), list[TokenTree](), 0
        for tree in trees:
            behind = at + 1 + nodes[at]
            chosen.append(keep(tree, nodes[at + 1 : behind]))
            at = behind
        return chosen

    def hopes(self, trees: Sequence[TokenTree]) -> list[list[float]]:
        """As Weighing says."""
        told = self._told(trees)
        ends = [*accumulate([tree.num_nodes for tree in trees], initial=0)]
        hopes = array("d", bytes(8 * ends[-1]))
        _there(self._library.hopes(*told, self._known_now(), hopes.buffer_info()[0]))
        return [hopes[first:end].tolist() for first, end in pairwise(ends)]

    def learn(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """As Weighing says."""
        told, tables, known = list[int](), list[int](), self._known_now()
        levels = zip(self._names, self._levels, strict=True)
        priced = [self._drafts[name] for name, count in levels if count]
        for number, outcome in outcomes:
            told += (number, len(outcome.committed))
            told += outcome.committed
            request = self._entries[number].request
            for draft in priced:
                tables += draft.lent(request.request_id, request.params.temperature)
        lent, packed = array("Q", tables), _packed((), told)[0]
        learnt = self._library.step_learn(self._step, packed, len(outcomes), known, lent.buffer_info()[0])
        _there(learnt >= 0)
        self._knowledge.outcomes += learnt

    def _told(self, trees: Sequence[TokenTree]) -> tuple[bytes, int, int]:
        """Whole trees, one for each entry, as the library takes them."""
        numbers, integers = list[float](), list[int]()
        for (heat, most, all_stay), tree in zip(self._about, trees, strict=True):
            firm = sorted(firm_nodes(tree)) if any_sampled(tree.draws) else ()
            self._add(
                *(numbers, integers, heat, tree.token_ids, tree.parents, as_runs(tree.draws).runs, firm),
                *(most, all_stay),
            )
        return *_packed(numbers, integers), len(trees)

    def _add(
        self,
        numbers: list[float],
        integers: list[int],
        temperature: float,
        token_ids: Sequence[int],
        parents: Sequence[int],
        runs: Sequence[Run],
        firm: Sequence[int],
        *about: int,
    ) -> None:
        """Tell of one tree, as cpu/guesses.h has it: add it to `numbers` and `integers`."""
        if len(parents) != len(token_ids):
            raise ValueError(f"{len(parents)} parents of {len(token_ids)} nodes")
        above, nodes, told = list[int](), list[int](), list[int]()
        confidences, evidence = list[float](), list[float]()
        numbered = self._knowledge.numbers(runs)
        for number, run in zip(numbered, runs, strict=True):
            told += (number, len(run.nodes), run.pieces)
            above.extend(run.parents)
            nodes.extend(run.nodes)
            confidences.extend(run.confidences)
            evidence.extend(run.evidence)
        if not len(above) == len(nodes) == len(confidences):
            raise ValueError(f"{len(above)} parents and {len(confidences)} confidences of {len(nodes)} draws")
        numbers.append(temperature)
        numbers += confidences
        numbers += evidence
        integers += (len(token_ids), len(nodes), len(evidence), len(firm), len(runs), *about)
        integers += token_ids
        integers += parents
        integers += above
        integers += nodes
        integers += told
        integers += firm

    def _known_now(self) -> Any:
        """What is known, for the library: somebody new may have guessed since it was last asked."""
        if self._version != self._knowledge.version:
            self._version, self._names = self._knowledge.version, self._knowledge.names
            drafts = self._drafts
            self._levels = array("i", [drafts[n].depth if n in drafts else 0 for n in self._names])
            self._known.known, self._known.levels = self._knowledge.address, self._levels.buffer_info()[0]
            self._known.speculators = len(self._names)
        return self._args[0]

    def _taken(self, costs: StepCosts) -> Any:
        """The costs that a question is about, for the library."""
        passes, rows, last, spent, tokens = costs
        args = self._costs
        args.passes, args.rows, args.last = self._passes.address(passes, last), rows, last
        args.spent, args.tokens = spent, tokens
        return self._args[1]


class _Table:
    """Seconds by rows as they lie in memory; the same are mostly asked about for some steps."""

    def __init__(self) -> None:
        self._told: Sequence[float] = ()
        self._lying = array("d")

    def address(self, seconds: Sequence[float], most: int) -> int:
        """Where those of 0, 1, ... `most` rows lie, until others are asked about."""
        if len(seconds) <= most:
            raise IndexError(f"seconds of {len(seconds) - 1} rows at most, not of {most}")
        if seconds is not self._told:
            self._told, self._lying = seconds, array("d", seconds)
        return self._lying.buffer_info()[0]


def _packed(numbers: Sequence[float], integers: Sequence[int]) -> tuple[bytes, int]:
    """Numbers and the integers behind them, and how many numbers there are."""
    form = _form(len(numbers), len(integers))
    try:
        return form(*numbers, *integers), len(numbers)
    except (
        struct.error,
        OverflowError,
    ):  # some confidence or evidence of a speculator of one's own is no number
        return form(*map(_number, numbers), *integers), len(numbers)


@lru_cache(maxsize=4096)
def _form(numbers: int, integers: int) -> Any:
    """What packs so many: trees have about as many sizes as steps have."""
    return struct.Struct(f"={numbers}d{integers}i").pack


def _number(value: object) -> float:
    """A value as a number; NaN where it is none, infinite where it is too large for one."""
    try:
        return float(cast(float, value))
    except OverflowError:
        return math.copysign(math.inf, cast(int, value) > 0 or -1)
    except (TypeError, ValueError):
        return math.nan


def _there(found: int) -> None:
    if not found:
        raise IndexError("guesses name nodes that are not there")
