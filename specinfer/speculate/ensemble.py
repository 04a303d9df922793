"""Ensemble: runs all speculators and merges their guesses into one tree per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import lt
from typing import Any, Final, TypeVar

from specinfer.errors import ConfigError, RequestError, SpeculatorError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.features import TextRows
from specinfer.runtime.flight import Flight
from specinfer.speculate.decision import Decision, Proposed
from specinfer.speculate.policy.policy import LevelPass, SpeculationPolicy, StepReport
from specinfer.speculate.speculator import AnySpeculator, LevelSpeculator, Speculator
from specinfer.tree import TokenTree, merge
from specinfer.tree.draw import any_sampled, as_runs
from specinfer.tree.merging import MergedTree, likeliest, prune
from specinfer.tree.token_tree import single_node

_LOG = logging.getLogger(__name__)
_Made = TypeVar("_Made")
POLICY: Final = "policy"  # the policy's name among those that failed
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 1 << 14  # steps
# Consecutive steps without guesses in which heads still receive hidden states.
_MAX_STEPS_WITHOUT_GUESSES: Final = 8


class Ensemble:
    """Runs speculators in turn and merges their trees (SpecInfer's merge-based construction).

    They run in the given order. Cheap speculators come first and draft models last, because the worth of a
    draft's pass depends on the guesses that exist without it. Guesses that cannot become text are dropped
    before the next speculator runs.

    `policy` decides how deep level speculators draw, and which nodes of the merged trees are verified.
    Guesses that may be dropped do not count against the node budget before that (SharedTree). If the
    policy keeps more nodes than the budget, the likeliest by confidence remain. Sampled draws are never
    dropped, and their speculators get their budget before they draw, so the tree is lossless under every
    verifier (docs/losslessness.md).

    A speculator that raises or returns an invalid tree is logged once and pauses for 32 steps, and for twice
    as many after each further failure: it costs time, and the text does not change.
    """

    def __init__(
        self,
        speculators: Sequence[AnySpeculator],
        *,
        vocab: int,
        policy: SpeculationPolicy,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if foreign := [s for s in speculators if not isinstance(s, Speculator | LevelSpeculator)]:
            raise ConfigError(
                f"{type(foreign[0]).__name__} is no speculator; derive it from "
                "specinfer.speculators.Speculator, which has defaults for all methods but propose"
            )
        names = [s.name for s in speculators]
        if len(set(names)) != len(names):
            raise ConfigError(f"speculators are named {names}; each needs a distinct name")
        self._all = tuple(speculators)
        self._steps = 0
        self._failures: dict[str, int] = {}  # exceptions of each speculator, and of the policy
        self._paused_until: dict[str, int] = {}  # the step in which it runs again
        self._select()
        self._steps_without_guesses = 0  # consecutive, up to this step
        self._names = tuple(names)  # of all speculators, including failed ones
        self._vocab = vocab  # of the target
        self._policy = self._deciding = policy
        self._fallback = SpeculationPolicy()  # decides in the pauses of a policy that raises
        self._clock = clock
        self._guessed_tokens = dict.fromkeys(names, 0)
        self._passes: list[LevelPass] = []  # of the step
        self._proposed = Proposed(StepPlan(()), StepPlan(()))  # of the step, for `explain`

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Return one merged tree per tree entry, of at most `entry.max_nodes` nodes."""
        self._passes = []
        self._steps += 1
        if self._failures:
            self._select()
        self._deciding = self._fallback if self._is_paused(POLICY) else self._policy
        requested, plan = plan, self._decided("begin_step", plan)
        self._proposed = Proposed(requested, plan)
        without_guesses = all(entry.speculators == () for entry in plan.entries)
        self._steps_without_guesses = self._steps_without_guesses + 1 if without_guesses else 0
        if without_guesses:
            roots = [single_node(entry.token_ids[entry.end - 1]) for entry in plan.tree_entries]
            self._proposed.guessed = self._proposed.chosen = roots
            return roots
        shared = [SharedTree(entry) for entry in plan.tree_entries]
        guessing: list[AnySpeculator] = []
        for speculator in self._speculators:
            asked, offer = _offer(speculator.name, plan, shared)
            if not offer.entries:
                continue
            guessing.append(speculator)
            trees = self._isolated(speculator, partial(self._trees_of, speculator, offer, shared)) or []
            self._guessed_tokens[speculator.name] += sum([len(tree.token_ids) - 1 for tree in trees])
            for one, tree in zip(asked, trees, strict=False):  # no trees if it failed
                one.add(tree)
        guessed = [one.tree for one in shared]
        chosen = self._decided("choose_nodes", guessed)
        fitting = [_within(one.entry, tree) for one, tree in zip(shared, chosen, strict=True)]
        self._proposed.guessed, self._proposed.chosen = guessed, fitting
        for speculator in guessing:
            self._isolated(speculator, partial(speculator.see_choices, guessed, fitting))
        return fitting

    def explain(self) -> list[Decision]:
        """Return which speculators guessed for each tree entry of the last `propose`, and why others did not.

        Must be called before `observe`.
        """
        failed = frozenset(filter(self._is_paused, self._names))
        return self._proposed.decisions(self._names, failed, self._decided("appraise", self._proposed.chosen))

    @property
    def guessed_tokens(self) -> dict[str, int]:
        """Number of tokens that each speculator has guessed, verified or not; readable from any thread."""
        return dict(self._guessed_tokens)

    @property
    def failures(self) -> dict[str, int]:
        """Exceptions of each speculator, and of the policy as "policy"; readable from any thread."""
        return dict(self._failures)

    @property
    def num_paused(self) -> int:
        """Number of speculators that pause after an exception, and the policy; readable from any thread."""
        return sum(map(self._is_paused, [*self._paused_until]))

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs a speculator reads in this step; see `receive_states`.

        Empty after several steps without guesses; a head then resumes at the next block of its cache.
        """
        return () if self._steps_without_guesses > _MAX_STEPS_WITHOUT_GUESSES else self._taps

    def receive_states(self, texts: TextRows, flight: Flight) -> None:
        """Pass the hidden states of one pass, for texts that continue, to the speculators that read them."""
        for speculator in self._speculators:
            if speculator.taps:
                self._isolated(speculator, partial(self._send_states, speculator, texts, flight))

    @staticmethod
    def _send_states(reader: AnySpeculator, texts: TextRows, flight: Flight) -> None:
        own = texts.where(lambda entry: entry.lets_guess(reader.name))
        reader.receive_states(own.features(flight, reader.taps))

    def observe(self, report: StepReport) -> None:
        """Pass the outcomes to every speculator, and the report with the time of this to the policy."""
        began = self._clock()
        for speculator in self._all:  # a paused one, too, forgets requests that ended
            self._isolated(speculator, partial(speculator.observe, report.outcomes))
        if report.seconds:
            seconds = {**report.seconds, "observe": self._clock() - began}
            report = replace(report, seconds=seconds, passes=self._passes)
            self._passes = []
        self._decided("observe", report)

    def _trees_of(
        self, speculator: AnySpeculator, plan: StepPlan, shared: Sequence[SharedTree]
    ) -> list[TokenTree]:
        """Return a speculator's checked trees without impossible tokens."""
        if isinstance(speculator, LevelSpeculator):
            proposed = self._grown(speculator, plan, [one.tree for one in shared])
        else:
            proposed = speculator.propose(plan)
        entries = plan.tree_entries
        if len(proposed) != len(entries):
            raise SpeculatorError(
                f"speculator {speculator.name!r} gave {len(proposed)} trees for {len(entries)} entries; "
                "propose must return one for each"
            )
        checked = self._checked(speculator.name, entries, proposed)
        return [_possible(tree, entry) for entry, tree in zip(entries, checked, strict=True)]

    def _checked(
        self, name: str, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]
    ) -> list[TokenTree]:
        return [_checked(name, tree, entry, self._vocab) for entry, tree in zip(entries, trees, strict=True)]

    def _grown(
        self, speculator: LevelSpeculator, plan: StepPlan, guessed: Sequence[TokenTree]
    ) -> list[TokenTree]:
        """Return a level speculator's trees, grown level by level below the nodes that the policy selects.

        `guessed` are the merged trees so far.
        """
        entries = plan.entries
        began = self._clock()
        unread = speculator.begin(plan)
        worth = [False] * len(entries)
        if not speculator.retired and self._deciding is not self._fallback:
            worth = self._decided("worth_starting", speculator.name, entries, unread, guessed)
        below: dict[int, Sequence[int]] = {i: (0,) for i, starts in enumerate(worth) if starts}
        if len(below) < len(entries):
            refused = [entry for entry, starts in zip(entries, worth, strict=True) if not starts]
            self._proposed.refused[speculator.name] = refused
        level = 0
        rows = sum(max(0, entries[i].end - len(entries[i].token_ids) + unread[i]) for i in below)
        while below:
            ends, ran = speculator.deepen(below), rows
            below, rows = {}, 0
            if ends:
                asked = [entries[i] for i in ends]
                # The policy relies on valid trees.
                trees = self._checked(speculator.name, asked, [speculator.tree(i) for i in ends])
                chosen = self._decided("worth_deepening", speculator.name, asked, trees, [*ends.values()])
                below = {i: nodes for i, nodes in zip(ends, chosen, strict=True) if nodes}
                rows = sum(map(len, below.values()))
            now = self._clock()
            self._passes.append(LevelPass(speculator.name, level, ran, now - began))
            began, level = now, level + 1
        return [speculator.tree(i) for i, entry in enumerate(entries) if entry.has_tree]

    def _decided(self, method: str, *arguments: Any) -> Any:
        """Return the result of a policy method; after an exception the fallback decides for some steps.

        A policy affects speed and never the text, so its failure may not end a request.
        """
        try:
            return getattr(self._deciding, method)(*arguments)
        except Exception:
            if self._deciding is self._fallback:
                raise
            if self._pause(POLICY):
                _LOG.exception(
                    "the speculation policy %s failed and pauses; later failures are not logged, and drafts "
                    "guess nothing meanwhile",
                    type(self._policy).__name__,
                )
            self._deciding = self._fallback
            return getattr(self._deciding, method)(*arguments)

    def _isolated(self, speculator: AnySpeculator, action: Callable[[], _Made]) -> _Made | None:
        """Return the result of a speculator's method, or None if it raises; then it pauses."""
        try:
            return action()
        except Exception:
            if self._is_paused(speculator.name):
                return None
            if self._pause(speculator.name):
                _LOG.exception(
                    "speculator %r failed and pauses; later failures are not logged, and texts go on "
                    "without it",
                    speculator.name,
                )
            self._select()
            return None

    def _pause(self, name: str) -> bool:
        """Begin a pause, twice as long as the one before; returns True for the first failure."""
        count = self._failures[name] = self._failures.get(name, 0) + 1
        length = min(_SHORTEST_PAUSE << min(count - 1, 10), _LONGEST_PAUSE)
        self._paused_until[name] = self._steps + 1 + length  # the running step does not count
        return count == 1

    def _is_paused(self, name: str) -> bool:
        return self._steps < self._paused_until.get(name, 0)

    def _select(self) -> None:
        """Run the speculators that do not pause."""
        self._speculators = tuple(s for s in self._all if not self._is_paused(s.name))
        self._taps = tuple(sorted({tap for speculator in self._speculators for tap in speculator.taps}))


class SharedTree:
    """The merged guesses for one request, built in the course of a step.

    Guesses that may be dropped do not count against the node budget: the tree may exceed it until all
    speculators have guessed, and then the best nodes are kept. Sampled draws are never dropped, so they
    count, and come before the other draws below every node.
    """

    def __init__(self, entry: PlanEntry) -> None:
        self.entry = entry
        self.taken = 0  # nodes that cannot be dropped, which reduce the budget of later speculators
        self._tree: TokenTree | None = single_node(entry.token_ids[entry.end - 1])  # None: build from _merged
        self._merged: MergedTree | None = None
        self._sampled: list[TokenTree] = []
        self._others: list[TokenTree] = []

    @property
    def tree(self) -> TokenTree:
        """The merged tree."""
        if self._tree is None:
            assert self._merged is not None, "without a tree there is a merged one"
            self._tree = self._merged.build()
        return self._tree

    def add(self, tree: TokenTree) -> None:
        """Merge one speculator's tree, which fits into the remaining node budget."""
        if tree.num_nodes == 1:
            return
        if not any_sampled(tree.draws):
            self._others.append(tree)
            self._graft([tree])
            return
        self._sampled.append(tree)
        self._tree = merge(self._sampled)
        self.taken = self._tree.num_nodes - 1
        self._merged = None
        self._graft(self._others)

    def _graft(self, trees: Sequence[TokenTree]) -> None:
        """Merge trees of guesses that may be dropped."""
        if self._merged is None and trees:
            if self.tree.num_nodes == 1 and len(trees) == 1:
                self._tree = trees[0]
                return
            self._merged = MergedTree(self.tree)
        for tree in trees:
            assert self._merged is not None, "there are trees"
            self._merged.graft(tree)
            self._tree = None


def _offer(name: str, plan: StepPlan, shared: Sequence[SharedTree]) -> tuple[list[SharedTree], StepPlan]:
    """Return the plan for one speculator: the entries it may guess for, with their remaining node budgets.

    Prefill entries are included. The list has the trees of the tree entries.
    """
    asked: list[SharedTree] = []
    entries: list[PlanEntry] = []
    trees = iter(shared)
    whole = True
    for entry in plan.entries:
        one = next(trees) if entry.max_nodes > 0 else None
        if not entry.lets_guess(name):
            whole = False
            continue
        if one is not None:
            asked.append(one)
            if one.taken:
                entry = replace(entry, max_nodes=entry.max_nodes - one.taken)
                whole = False
        entries.append(entry)
    return asked, plan if whole else StepPlan(tuple(entries))


def _checked(name: str, tree: TokenTree, entry: PlanEntry, vocab: int) -> TokenTree:
    """Return the tree with its draws as runs; raises SpeculatorError if it is invalid for its entry.

    Draws that cannot be grouped into runs raise other exceptions, which count as failures, too.
    """
    tokens, parents, nodes = tree.token_ids, tree.parents, tree.num_nodes
    runs, root = as_runs(tree.draws), entry.token_ids[entry.end - 1]
    if tokens[0] != root:
        fault = f"rooted at token {tokens[0]}; the last token is {root}"
    elif nodes > entry.max_nodes:
        fault = f"of {nodes} nodes; entry.max_nodes is {entry.max_nodes}"
    elif nodes == 1 == len(parents):
        return single_node(root)
    elif not (
        len(parents) == nodes
        and parents[0] == -1
        and all(map(lt, parents, range(nodes)))
        and min(parents[1:], default=0) >= 0
    ):
        fault = f"whose nodes do not come after their parents, {parents}"
    elif nodes - 1 > entry.max_depth and (depth := max(tree.depths())) > entry.max_depth:
        fault = f"of depth {depth}; entry.max_depth is {entry.max_depth}"
    elif min(tokens) < 0 or max(tokens) >= vocab:
        fault = f"with tokens outside the vocabulary of {vocab}"
    elif faults := [found for run in runs.runs if (found := run.fault(nodes))]:
        fault = faults[0]
    else:
        return tree if runs is tree.draws else replace(tree, draws=runs)
    raise SpeculatorError(f"speculator {name!r} proposed a tree {fault}; see docs/add_a_speculator.md")


def _possible(tree: TokenTree, entry: PlanEntry) -> TokenTree:
    """Return the tree without nodes that the request's parameters exclude or that follow its end."""
    processors = entry.processors
    if processors is None or tree.num_nodes == 1:
        return tree
    permits = processors.permits if processors.bans else None
    if permits is None and processors.ending.isdisjoint(tree.token_ids):
        return tree
    try:
        return prune(tree, permits=permits, ending=processors.ending)
    except RequestError:  # the grammar is too complex; verification raises this error for the request
        return single_node(tree.token_ids[0])


def _within(entry: PlanEntry, tree: TokenTree) -> TokenTree:
    """Return a policy's tree, cut to the request's node budget."""
    return tree if tree.num_nodes <= entry.max_nodes else likeliest(tree, tree.likelihoods(), entry.max_nodes)
