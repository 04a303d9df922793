"""The engine with a target that answers from a trace, on a virtual clock.

Step, scheduler, ensemble, speculators, policy and transcripts are the engine's own. The models are replaced:
the executor's flight chooses the recorded tokens, drafts answer from their recordings (drafts.py), and the
clock advances by the seconds of passes and step stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import tokenizers
import torch
from torch import Tensor

from benchmarks.replay.drafts import AnyReplayed, CostTable, ReplayClock
from benchmarks.replay.trace import RecordedEngine, RecordedText, Trace
from specinfer.engine.admission import Admission
from specinfer.engine.engine import Engine
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.steps import Stage
from specinfer.engine.trace import TreeEvent
from specinfer.errors import ConfigError, IntegrityError, TraceTooSmallError
from specinfer.plan import StepPlan
from specinfer.processors.changes import RowChanges
from specinfer.request import Request
from specinfer.runtime.batch import logit_rows
from specinfer.runtime.executor import Executor
from specinfer.runtime.flight import Launch
from specinfer.runtime.runner import Move
from specinfer.scheduler_config import SchedulerConfig
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.limits import SpeculationLimits
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.speculate.speculator import AnySpeculator
from specinfer.speculation_config import SpeculationConfig
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TokenTree
from specinfer.verify.scan import NUMPY, SampleRequest, Scan


@dataclass(frozen=True, slots=True)
class PlayedEntry:
    """One request's share of a played step."""

    request_id: str
    tree: TokenTree
    path: tuple[int, ...]  # accepted nodes
    committed: tuple[int, ...]  # committed tokens: the path's and the bonus token, if any


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A played step."""

    seconds: Mapping[str, float]  # by stage, from the trace's curves
    rows: int  # of the target's pass
    passes: Mapping[str, int]  # by draft
    requests: tuple[str, ...]  # all requests of the step, prefilling ones included
    entries: tuple[PlayedEntry, ...]  # requests with a tree


@dataclass(slots=True)
class _Playing:
    """A request inside the engine."""

    text: tuple[int, ...]  # prompt and output
    num_committed: int  # number of tokens that the engine has committed


class TracedFlight:
    """A Flight of a target whose texts are known: it has choices along the text, and no logits."""

    scan: Scan = NUMPY
    at_once: int = 0  # no row beyond the text is known

    def __init__(
        self, vocab: int, choices: Mapping[int, int], tapped_TND: Tensor, taps: Sequence[int]
    ) -> None:
        """`choices` has the tokens at rows whose paths follow the text; `tapped_TND` the inputs of layers
        `taps`.
        """
        self.vocab = vocab
        self._choices = choices
        self._tapped_TND = tapped_TND
        self._taps = tuple(taps)

    def choices(
        self,
        rows: Sequence[int],
        requests: Sequence[SampleRequest],
        changes: Sequence[RowChanges] | None = None,
    ) -> list[int]:
        """See Flight; only for rows whose paths follow the text."""
        return [self._choices[row] for row in rows]

    def tapped(self, layers: Sequence[int]) -> Tensor:
        """See Flight."""
        return self._tapped_TND.index_select(1, torch.tensor([self._taps.index(one) for one in layers]))

    def _lacks(self, *_: object) -> NoReturn:
        """Raise IntegrityError."""
        raise IntegrityError("a trace keeps no logits, only the target's choices along its texts")

    likeliest = scores = row = copy = _lacks


class TracedExecutor:
    """An Executor whose target has already written all its texts.

    With `states`, a second executor runs the passes for the hidden states that heads read; otherwise these
    have width 0.
    """

    def __init__(
        self,
        vocab: int,
        costs: CostTable,
        stages: Mapping[str, float],
        clock: ReplayClock,
        states: Executor | None = None,
    ) -> None:
        """`costs` has the seconds of passes, `stages` those of a step's other stages."""
        self._vocab = vocab
        self._costs = costs
        self._clock = clock
        self._scheduling = stages.get(Stage.SCHEDULE, 0.0)
        self._behind = stages.get(Stage.VERIFY, 0.0) + stages.get(Stage.COMMIT, 0.0)
        self._states = states
        self.texts: dict[str, tuple[int, ...]] = {}  # running requests only
        self.rows = 0  # of all passes so far

    def launch(self, plan: StepPlan, trees: Sequence[TokenTree], taps: Sequence[int] = ()) -> Launch:
        """See Executor."""
        rows = sum(entry.end - entry.start for entry in plan.entries) + sum(t.num_nodes - 1 for t in trees)
        self.rows += rows
        self._clock.run(self._scheduling + self._costs.seconds(rows))
        if self._states is None or not taps:
            tapped_TND = torch.zeros(rows, len(taps), 0)
        else:
            tapped_TND = self._states.launch(plan, trees, taps).flight().tapped(taps)
        choices: dict[int, int] = {}
        roots = logit_rows(plan, trees).roots
        for entry, tree, root in zip(plan.tree_entries, trees, roots, strict=True):
            text = self.texts[entry.request.request_id]
            path = (0, *path_along(tree, text, entry.end))
            choices |= {root + node: token for node, token in zip(path, text[entry.end :], strict=False)}
        return Launch(TracedFlight(self._vocab, choices, tapped_TND, taps))

    def close(self) -> None:
        """Do nothing: no pass is pending."""

    def drop(self, launch: Launch) -> None:
        """See Executor; a pass ends at its launch."""

    @property
    def stream(self) -> None:
        """See Executor; there are no weights."""
        return None

    @property
    def rank_seconds(self) -> Mapping[str, float]:
        """See Executor; there are no ranks."""
        return {}

    def move(self, moves: Sequence[Move]) -> None:
        """See Executor; charges the stages after the pass."""
        if self._states is not None:
            self._states.move(moves)
        self._clock.run(self._behind)


class ReplayEngine:
    """Plays recorded texts in an Engine. Its speculators and its policy keep learning from play to play."""

    def __init__(
        self,
        trace: Trace,
        speculators: Sequence[AnySpeculator],
        policy: SpeculationPolicy,
        speculation: SpeculationConfig,
        *,
        batch: int,
        replayed: Mapping[str, AnyReplayed] | None = None,
        clock: ReplayClock | None = None,
        states: Executor | None = None,
    ) -> None:
        """Make an engine of a trace for `batch` concurrent requests; for `states` see TracedExecutor.

        `replayed` are the speculators that answer from a trace, by name; they share `clock`.
        """
        self._facts = facts = trace.engine
        self._batch = batch
        self._replayed = replayed or {}
        self._clock = clock or ReplayClock()
        self._executor = TracedExecutor(
            facts.vocab, CostTable(trace.curve), trace.stages, self._clock, states
        )
        blocks, max_context = num_blocks(facts, speculation, batch), max(facts.max_context, 2)
        self._admission = Admission(
            _wordless_tokenizer(facts.ending),
            SpeculationLimits(speculation, speculators),
            vocab=facts.vocab,
            max_context=max_context,
            capacity=blocks * facts.block_size,
            block_size=facts.block_size if facts.prefix_reuse else None,
        )
        self._engine = Engine(
            executor=self._executor,
            speculators=Ensemble(speculators, vocab=facts.vocab, policy=policy, clock=self._clock),
            tokenizer=self._admission.tokenizer,
            admission=self._admission,
            scheduler=Scheduler(
                SchedulerConfig(
                    max_batch_size=batch,
                    max_step_tokens=max(facts.max_step_tokens, batch),
                    max_context=max_context,
                ),
                BlockPool(blocks, facts.block_size),
                tree_nodes=speculation.node_limit,
                max_context=max_context,
                prefix_reuse=facts.prefix_reuse,
            ),
            verifier="coupled",
            clock=self._clock,
        )
        self._engine.listeners.on_step = self._begin
        self._engine.listeners.on_tree = self._on_tree
        self._playing: dict[str, _Playing] = {}
        self._requests = 0
        self._in_step: tuple[str, ...] = ()
        self._entries: list[PlayedEntry] = []  # of the current step

    def play(
        self, texts: Sequence[tuple[Trace, int]], at_once: int | None = None, slowdown: float = 1.0
    ) -> Iterator[PlayedStep]:
        """Play texts of traces, by number, at most `at_once` at a time; yields every step.

        All seconds of the trace are multiplied by `slowdown`, to simulate a shared machine. Request ids count
        from "0" over all plays, in the order of `texts`. Raises TraceTooSmallError if the policy needs a
        proposal that was not recorded.
        """
        most = self._batch if at_once is None else at_once
        if not 1 <= most <= self._batch:
            raise ConfigError(f"{most} requests at once; allowed: 1 to {self._batch}, the batch size")
        self._clock.slowdown = slowdown
        starts = {id(trace): trace.starts for trace, _ in texts}
        waiting = deque(texts)
        while waiting or self._playing:
            # As in an engine, requests behind one that waits for a running prompt may start before it.
            while waiting and (most == self._batch or len(self._playing) < most):
                trace, number = waiting.popleft()
                self._add(trace, number, starts[id(trace)][number])
            yield self._step()

    def _add(self, trace: Trace, number: int, place: int) -> None:
        text, request_id = trace.texts[number], str(self._requests)
        self._requests += 1
        params = text.params
        if not self._ends_by_itself(text):
            params = replace(params, max_tokens=len(text.output))
        admitted = self._admission.admit(Request(request_id, text.prompt, params, text.seed, text.prediction))
        for name, passes in self._replayed.items():
            passes.follow(request_id, trace.drafts[name], place - len(text.prompt))
        whole = (*text.prompt, *text.output)
        self._playing[request_id] = _Playing(whole, len(text.prompt))
        self._executor.texts[request_id] = whole
        self._engine.add(admitted)

    def _ends_by_itself(self, text: RecordedText) -> bool:
        """True if the text's own parameters end it at its recorded end."""
        params, count = text.params, len(text.output)
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else self._facts.ending)}
        full = len(text.prompt) + count >= self._admission.max_context
        return full or count == params.max_tokens or text.output[-1] in ending

    def _step(self) -> PlayedStep:
        before = {name: passes.passes for name, passes in self._replayed.items()}
        rows = self._executor.rows
        self._entries, self._in_step = [], ()
        for passes in self._replayed.values():
            passes.begin_step()
        deltas = self._engine.step()
        for passes in self._replayed.values():
            if passes.lacks:
                raise TraceTooSmallError(passes.lacks)
        for delta in deltas:
            if delta.error is not None:
                raise IntegrityError(f"request {delta.id} of a replay failed: {delta.error}")
            if delta.finished:
                self._on_end(delta.id)
        if not self._in_step:
            raise IntegrityError("requests of a replay wait and none can run")
        ran = {name: passes.passes - before[name] for name, passes in self._replayed.items()}
        seconds = dict(self._engine.clock.last)
        return PlayedStep(seconds, self._executor.rows - rows, ran, self._in_step, tuple(self._entries))

    def _begin(self, requests: Sequence[str]) -> None:
        self._in_step = tuple(requests)

    def _on_tree(self, event: TreeEvent) -> None:
        playing, path = self._playing[event.request_id], event.acceptance.path
        committed = playing.text[playing.num_committed : playing.num_committed + len(path) + 1]
        playing.num_committed += len(committed)
        self._entries.append(PlayedEntry(event.request_id, event.tree, path, committed))

    def _on_end(self, request_id: str) -> None:
        playing = self._playing.pop(request_id)
        if playing.num_committed != len(playing.text):
            raise IntegrityError(
                f"request {request_id} of a replay ended after {playing.num_committed} tokens"
            )
        del self._executor.texts[request_id]
        for passes in self._replayed.values():
            passes.forget(request_id)


def _wordless_tokenizer(ending: Iterable[int]) -> Tokenizer:
    """Return a tokenizer whose ids decode to no text, since a trace has no vocabulary."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, eos_token_ids=ending)


def num_blocks(facts: RecordedEngine, speculation: SpeculationConfig, batch: int) -> int:
    """Return the KV blocks for `batch` texts of the largest length with their trees."""
    return -(-batch * (facts.max_context + speculation.node_limit) // facts.block_size)


def path_along(tree: TokenTree, text: Sequence[int], end: int) -> tuple[int, ...]:
    """Return the path of a tree after `end` tokens that follows the text."""
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
