"""The step without a model: schedule, propose, read the text off the trace, commit.

Scheduler, ensemble, speculators and policy are the engine's own, and a step here is Engine.step line by line.
What is replaced are the models: a draft's passes are answered from the trace, the target's choice is the text
that it wrote, and a clock counts what the passes would have taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specinfer.config import SchedulerConfig, SpeculationConfig
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.metrics import Stage
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.sequence import SequenceState
from specinfer.errors import ConfigError, IntegrityError, TraceTooSmallError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.processors.pipeline import Processors
from specinfer.replay.drafts import CostTable, NoModel, Replayed, ReplayedPasses
from specinfer.replay.heads import ReplayedHead, without_states
from specinfer.replay.trace import EngineFacts, RecordedText, Trace
from specinfer.request import Request
from specinfer.runtime.batch import Rows, step_rows
from specinfer.runtime.features import text_rows
from specinfer.runtime.flight import Flight
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.drafts.head_drafts import BlockDraft
from specinfer.speculate.drafts.one_pass import OnePassTrees
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy.speculation_policy import SpeculationPolicy, StepReport
from specinfer.speculate.speculator import AnySpeculator, LevelSpeculator, Outcome
from specinfer.speculate.table import build_speculators
from specinfer.tree import TokenTree

AnyReplayed = ReplayedPasses | ReplayedHead
# The target's pass over these rows, as far as hidden states at these layers go.
States = Callable[[Sequence[Rows], Sequence[int]], Flight]


@dataclass(frozen=True, slots=True)
class PlayedEntry:
    """One request's share of a step that was played."""

    request_id: str
    tree: TokenTree
    path: tuple[int, ...]  # nodes that became text
    committed: tuple[int, ...]  # tokens that did: the path's, and the bonus token where the text has one


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A step that was played."""

    seconds: Mapping[str, float]  # of its stages, by the trace's curves
    rows: int  # of the target's pass
    passes: Mapping[str, int]  # of each draft
    requests: tuple[str, ...]  # all in it, those whose prompts are being read included
    entries: tuple[PlayedEntry, ...]  # those with a tree


@dataclass(slots=True)
class _Playing:
    """A request inside the simulated engine."""

    sequence: SequenceState
    said: list[int]  # prompt and output so far
    text: tuple[int, ...]  # prompt and output


class SimulatedEngine:
    """Plays recorded texts under a policy. Its speculators and its policy learn from play to play."""

    def __init__(
        self,
        engine: EngineFacts,
        speculators: Sequence[AnySpeculator],
        policy: SpeculationPolicy,
        speculation: SpeculationConfig,
        costs: CostTable,
        stages: Mapping[str, float],
        *,
        batch: int,
        replayed: Mapping[str, Replayed] | None = None,
        states: States = without_states,
    ) -> None:
        """`costs` and `stages` are the clock's: the target's passes, and the other stages of a step.

        `replayed` are the drafts among the speculators, by name, where these are a trace's. `states` makes
        what those read that are a model's.
        """
        self._engine = engine
        self._limits = SpeculationLimits(speculation, speculators)
        self._ensemble = Ensemble(speculators, vocab=engine.vocab, policy=policy)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=batch,
                max_step_tokens=max(engine.max_step_tokens, batch),
                max_context=max(engine.max_context, 2),
            ),
            BlockPool(num_blocks(engine, speculation, batch), engine.block_size),
            tree_nodes=speculation.max_nodes,
            max_context=engine.max_context,
            prefix_reuse=engine.prefix_reuse,
        )
        self._batch = batch
        self._costs = costs
        self._stages: dict[str, float] = {stage: stages.get(stage, 0.0) for stage in Stage}
        self._replayed = dict(replayed or {})
        self._states = states
        self._playing: dict[str, _Playing] = {}
        self._requests = 0

    def play(
        self, texts: Sequence[tuple[Trace, int]], at_once: int | None = None, slowdown: float = 1.0
    ) -> Iterator[PlayedStep]:
        """Play texts of traces, by number, at most `at_once` at a time; yields every step.

        `slowdown` times as long as the trace says takes everything, on a machine that others use, too.
        Request ids count from "0" on, over all plays, in the order of `texts`. Raises
        TraceTooSmallError when the policy asks for a guess that was not recorded.
        """
        most = self._batch if at_once is None else at_once
        if not 1 <= most <= self._batch:
            raise ConfigError(f"{most} requests at once; allowed: 1 to {self._batch}, the batch size")
        starts = {id(trace): trace.starts for trace, _ in texts}
        waiting = deque(texts)
        while waiting or self._playing:
            # As an engine has them: those behind one that waits for a running prompt may begin before it.
            while waiting and (most == self._batch or len(self._playing) < most):
                trace, number = waiting.popleft()
                self._add(trace, number, starts[id(trace)][number])
            yield self._step(slowdown)

    def _add(self, trace: Trace, number: int, place: int) -> None:
        text, request_id = trace.texts[number], str(self._requests)
        self._requests += 1
        request = Request(request_id, text.prompt, text.params, text.seed, text.prediction)
        self._limits.check(request)
        said = list(request.prompt_token_ids)
        sequence = SequenceState(
            request,
            said,
            tree_nodes=self._limits.nodes(request),
            speculators=self._limits.speculators(request),
            processors=processors_of(text, self._engine),
        )
        for name, passes in self._replayed.items():
            passes.follow(request_id, trace.drafts[name], place - len(text.prompt))
        self._playing[request_id] = _Playing(sequence, said, (*text.prompt, *text.output))
        self._scheduler.add(sequence)

    def _step(self, slowdown: float) -> PlayedStep:
        spent = sum(passes.seconds for passes in self._replayed.values())
        before = {name: passes.passes for name, passes in self._replayed.items()}
        plan = self._scheduler.schedule()
        if not plan.entries:
            raise IntegrityError("requests wait in a simulated engine, and none can run")
        trees = self._propose(plan)
        rows = sum(entry.end - entry.start for entry in plan.entries)
        rows += sum(tree.num_nodes - 1 for tree in trees)
        seconds = dict(self._stages)
        seconds[Stage.PROPOSE] = sum(passes.seconds for passes in self._replayed.values()) - spent
        seconds[Stage.FORWARD] = self._costs.seconds(rows)
        if slowdown != 1.0:
            seconds = {stage: slowdown * spent for stage, spent in seconds.items()}
        taps = self._ensemble.taps
        ran_rows = step_rows(plan, trees) if taps else None
        flight = None if ran_rows is None else self._states(ran_rows, taps)
        for entry in plan.entries:
            self._playing[entry.request.request_id].sequence.computed = entry.end
        entries = tuple(
            self._advance(entry, tree) for entry, tree in zip(plan.tree_entries, trees, strict=True)
        )
        outcomes = [
            Outcome(one.request_id, one.committed, one.request_id not in self._playing) for one in entries
        ]
        if ran_rows is not None and flight is not None:
            paths = [one.path if one.request_id in self._playing else None for one in entries]
            self._ensemble.hear(text_rows(plan, trees, paths), flight)
        told = {
            stage: spent for stage, spent in seconds.items() if stage != Stage.COMMIT
        }  # it has just begun
        self._ensemble.observe(StepReport(outcomes, told))
        ran = {name: passes.passes - before[name] for name, passes in self._replayed.items()}
        return PlayedStep(seconds, rows, ran, tuple(e.request.request_id for e in plan.entries), entries)

    def _propose(self, plan: StepPlan) -> list[TokenTree]:
        for passes in self._replayed.values():
            passes.begin_step()
        trees = self._ensemble.propose(plan)
        for passes in self._replayed.values():
            if passes.lacks:
                raise TraceTooSmallError(passes.lacks)
        return trees

    def _advance(self, entry: PlanEntry, tree: TokenTree) -> PlayedEntry:
        """Commit what the target would have: the path along its text, and one token more."""
        request_id = entry.request.request_id
        playing = self._playing[request_id]
        sequence, text = playing.sequence, playing.text
        path = path_along(tree, text, entry.end)
        committed = text[entry.end : entry.end + len(path) + 1]
        if entry.end + len(committed) == len(text):
            self._scheduler.remove(sequence)
            del self._playing[request_id]
            for passes in self._replayed.values():
                passes.forget(request_id)
        else:
            playing.said.extend(committed)
            sequence.computed += len(path)
            if sequence.processors is not None:
                sequence.processors.commit(committed)
        return PlayedEntry(request_id, tree, path, committed)


def num_blocks(engine: EngineFacts, speculation: SpeculationConfig, batch: int) -> int:
    """Cache blocks for so many of the longest texts at once, with their trees."""
    return -(-batch * (engine.max_context + speculation.max_nodes) // engine.block_size)


def path_along(tree: TokenTree, text: Sequence[int], end: int) -> tuple[int, ...]:
    """The nodes of a tree below `end` tokens of a text along which the text goes on."""
    children = tree.children() if tree.num_nodes > 1 else [{}]
    path: list[int] = []
    node = 0
    for token in text[end:]:
        child = children[node].get(token)
        if child is None:
            break
        node = child
        path.append(node)
    return tuple(path)


def processors_of(text: RecordedText, engine: EngineFacts) -> Processors:
    """What a request's parameters make of guesses: as admission has it, of the parameters a trace keeps."""
    ending = {*text.params.stop_token_ids, *(() if text.params.ignore_eos else engine.ending)}
    return Processors(text.params, text.prompt, vocab=engine.vocab, ending=ending)


def replayed_drafts(trace: Trace, *, whole_trees: bool = False) -> dict[str, AnyReplayed]:
    """The drafts of a trace, to be answered from it; heads grow `whole_trees`, or what they would."""
    return {
        name: ReplayedPasses(name, CostTable(draft.curve))
        if draft.head is None
        else ReplayedHead(
            name=name,
            costs=CostTable(draft.curve),
            block_size=trace.engine.block_size,
            head=draft.head,
            whole=whole_trees,
        )
        for name, draft in trace.drafts.items()
    }


def speculators_of(
    speculation: SpeculationConfig, trace: Trace, replayed: Mapping[str, AnyReplayed]
) -> list[AnySpeculator]:
    """The speculators of an engine in the order they are asked, its drafts answered from a trace."""
    drafts = [_speculator(one, speculation, trace) for one in replayed.values()]
    return [*build_speculators(speculation), *drafts]


def _speculator(replayed: AnyReplayed, speculation: SpeculationConfig, trace: Trace) -> LevelSpeculator:
    name, engine, shape = replayed.name, trace.engine, Shape.of(speculation)
    if isinstance(replayed, ReplayedHead):
        trees = OnePassTrees(name, shape, replayed.grow, replayed.draw)
        # Which layer it is told of is all the same: their states have no width.
        return BlockDraft(
            *(name, replayed.guess, replayed.head, trees),
            max_rows=engine.max_step_tokens,
            block_size=engine.block_size,
            taps=(0,),
        )
    runner = NoModel(engine.block_size, trace.drafts[name].max_context)
    return DraftModel(name, runner, shape, max_rows=engine.max_step_tokens, draw=replayed)
