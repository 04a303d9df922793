"""Engine: schedules, drafts, runs, verifies and commits one step at a time.

Every step is a batch of token trees; a one-node tree is ordinary decoding. The last chunk of a prefill ends
in one, and earlier chunks have none. So the engine does not distinguish prefill, decoding and speculation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specinfer.engine.admission import Admission, AdmittedRequest
from specinfer.engine.kv_blocks import SequenceState
from specinfer.engine.listeners import Listeners
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.steps import Stage, StageClock, Statistics, Suspects
from specinfer.engine.target_laws import TargetLaws, TreeResult, tree_results
from specinfer.engine.trace import TreeEvent
from specinfer.engine.transcript import Transcript
from specinfer.errors import AdapterError, ModelFileError, PeerLostError, RequestError, UserError, ensure
from specinfer.models.stream import StoppedError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Delta
from specinfer.runtime.batch import LogitRows, logit_rows
from specinfer.runtime.executor import Executor
from specinfer.runtime.features import text_rows
from specinfer.runtime.flight import Flight, Launch, inference, torch_threads
from specinfer.runtime.runner import Move
from specinfer.speculate.decision import Decision
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.guard import Guard
from specinfer.speculate.policy.memory import PolicyMemory
from specinfer.speculate.policy.policy import StepReport
from specinfer.speculate.speculator import Outcome
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TokenTree
from specinfer.tree.draw import Verifier
from specinfer.verify.coupled import Acceptance

_LOG = logging.getLogger(__name__)
Postponed = Callable[[Callable[[], bool]], bool]  # see Engine.rest; returns whether it is done


@dataclass(slots=True)
class _Running:
    """A request inside the engine."""

    sequence: SequenceState
    transcript: Transcript


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose pass is in flight."""

    plan: StepPlan
    trees: list[TokenTree]  # one per plan.tree_entries
    decisions: Sequence[Decision | None]  # one per tree, if requested
    launch: Launch
    rows: LogitRows  # rows of the flight by request


class Engine:
    """Serves requests step by step; `step` is the only method that computes.

    One thread at a time may use it. After a failed step all requests continue from their committed texts.
    After repeated failures requests run alone to find the one that fails; it ends with an error.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        speculators: Ensemble,
        tokenizer: Tokenizer,
        admission: Admission,
        scheduler: Scheduler,
        verifier: Verifier,
        threads: int = 1,
        guard: Guard | None = None,
        memory: PolicyMemory | None = None,
        postponed: Postponed | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._speculators = speculators
        self._tokenizer = tokenizer
        self._admission = admission
        self._scheduler = scheduler
        self._verifier = verifier
        self._threads = threads  # PyTorch's threads in a step
        self._guard = guard  # the policy's guard, if any, for statistics
        self._memory = memory  # the policy's state on disk, if it is kept
        self._postponed = postponed  # work for idle moments, see `rest`
        self._requests: dict[str, _Running] = {}
        self._deltas: dict[str, Delta] = {}  # by request, not returned yet; an interrupt loses none
        self._launched: list[_Launched] = []  # steps whose results are not committed
        self._suspects = Suspects()  # requests that may make steps fail
        self._failed_steps = 0
        self.clock = StageClock(clock)
        self.listeners = Listeners()

    @property
    def admission(self) -> Admission:
        """The admission of this engine."""
        return self._admission

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs."""
        return bool(self._deltas) or self._scheduler.has_work

    def statistics(self) -> Statistics:
        """Return counters and the present state; callable from any thread, also during a step."""
        scheduler, clock = self._scheduler, self.clock
        guard = None if self._guard is None else self._guard.state()
        stream = self._executor.stream
        return Statistics(
            steps=clock.steps,
            step_seconds=clock.age,
            stage_seconds=dict(clock.seconds),
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.cache_usage,
            speculation_off_steps=0 if guard is None else guard.off_steps,
            cost_factors={} if guard is None else guard.factors,
            speculation_on=guard is None or guard.guessing,
            guessed_tokens=self._speculators.guessed_tokens,
            failed_steps=self._failed_steps,
            failures=self._speculators.failures,
            speculators_paused=self._speculators.num_paused,
            streamed_bytes=0 if stream is None else stream.read_bytes,
            stream_wait_seconds=0.0 if stream is None else stream.waited,
            rank_seconds=dict(self._executor.rank_seconds),
        )

    @property
    def has_postponed(self) -> bool:
        """True if `rest` has work."""
        return self._postponed is not None

    def rest(self, wanted: Callable[[], bool]) -> None:
        """Do the work that the start put off until it is done or `wanted()`; no step may run meanwhile."""
        postponed, self._postponed = self._postponed, None
        try:
            if postponed is not None and not postponed(wanted):
                self._postponed = postponed
        except Exception:
            _LOG.exception("passes could not be measured while the engine was idle")

    def close(self) -> None:
        """Interrupt a running step that waits for streamed weights; no further step may run.

        Callable from any thread. The interrupted step commits nothing.
        """
        self._executor.close()

    def save_policy(self) -> None:
        """Write the policy's learned state to disk; no step may run meanwhile."""
        if self._memory is not None:
            self._memory.keep()

    def add(self, admitted: AdmittedRequest) -> None:
        """Queue an admitted request; raises RequestError if its id is in use."""
        request_id = admitted.request.request_id
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; give each request its own")
        self._requests[request_id] = _Running(admitted.sequence, admitted.transcript)
        self._scheduler.add(admitted.sequence)

    def abort(self, request_id: str) -> Delta | None:
        """End a request and free its resources; returns its last delta, or None if it is unknown."""
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._scheduler.remove(running.sequence)
            self._speculators.observe(StepReport([Outcome(request_id, (), finished=True)]))
            running.transcript.abort(self.clock.now())
            self._queue_delta(running)
        return self._deltas.pop(request_id, None)

    def step(self) -> list[Delta]:
        """Run one step; returns the deltas of requests that got tokens or ended, in plan order.

        KeyboardInterrupt propagates, and the requests continue from their committed texts. An exception of
        `on_tree` propagates after the step, whose deltas come with the next step's. Other exceptions are
        logged and the step is tried again; repeated failures end the requests concerned. Unreadable weights
        end the requests of the step at once, as a retry could wait for the disk for an unknown time.

        Raises:
            PeerLostError: a rank is lost and the engine cannot continue. All committed tokens are in deltas.
        """
        try:
            with torch_threads(self._threads):
                self._step()
        finally:
            self.clock.end()
        self.listeners.raise_error()
        deltas, self._deltas = self._deltas, {}
        return [*deltas.values()]

    @inference
    def _step(self) -> None:
        self.clock.start()
        plan: StepPlan | None = None
        try:
            plan = self._schedule()
            if plan.entries:
                self.listeners.announce(plan)
                self._land(self._launch(plan))
            self._suspects.succeeded(plan, self._requests.keys())
        except StoppedError:  # `close` was called
            self._recover()
        except PeerLostError:  # a retry would fail, too
            self._recover()
            raise
        except Exception as error:
            self._recover()
            self._failed(plan, error)
        except BaseException:
            self._recover()
            raise

    def _schedule(self) -> StepPlan:
        suspect = self._suspects.next
        plan = self._scheduler.schedule(self._requests[suspect].sequence if suspect is not None else None)
        if suspect is not None and not plan.entries and self._scheduler.running:
            # Other requests hold the blocks that it needs. If none runs, its adapter is being read.
            self._suspects.acquit()
            plan = self._scheduler.schedule()
        self.clock.lap(Stage.SCHEDULE)
        return plan

    def _launch(self, plan: StepPlan) -> _Launched:
        """Run the speculators, and start the target's pass over all texts and trees."""
        trees = self._speculators.propose(plan)
        wanted = self.listeners.wants_decisions
        decisions = self._speculators.explain() if wanted else [None] * len(trees)
        self.clock.lap(Stage.PROPOSE)
        launch = self._executor.launch(plan, trees, self._speculators.taps)
        launched = _Launched(plan, trees, decisions, launch, logit_rows(plan, trees))
        self._launched.append(launched)
        return launched

    def _land(self, launched: _Launched) -> None:
        """Wait for the pass, verify its trees and commit their tokens."""
        flight = launched.launch.flight()
        self.clock.lap(Stage.FORWARD)
        results = self._verify(launched, flight)
        self.clock.lap(Stage.VERIFY)
        now = self.clock.now()
        self._advance(launched.plan, results)
        outcomes = self._commit(launched, flight, results, now)
        self._pass_states(launched, flight, results)
        self._launched.remove(launched)
        self.clock.lap(Stage.COMMIT)
        self._speculators.observe(StepReport(outcomes, self.clock.last))
        if self._memory is not None:
            self._memory.stepped()
        self.clock.lap(Stage.COMMIT)

    def _verify(self, launched: _Launched, flight: Flight) -> list[TreeResult]:
        """Verify each tree; includes log-probabilities if requested."""
        entries = launched.plan.tree_entries
        laws = [
            TargetLaws(entry, tree, flight, row)
            for entry, tree, row in zip(entries, launched.trees, launched.rows.roots, strict=True)
        ]
        transcripts = [self._requests[entry.request.request_id].transcript for entry in entries]
        return tree_results(laws, transcripts, self._verifier, flight, self._tokenizer)

    def _advance(self, plan: StepPlan, results: Sequence[TreeResult]) -> None:
        """Update the state for the next plan: processors, accepted paths, and computed positions."""
        for entry in plan.entries:
            self._requests[entry.request.request_id].sequence.computed = entry.end
        moves: list[Move] = []
        for entry, result in zip(plan.tree_entries, results, strict=True):
            if result.finished or not isinstance(result.verdict, Acceptance):
                continue
            sequence = self._requests[entry.request.request_id].sequence
            sequence.computed += len(result.verdict.path)
            moves.extend(result.moves(entry))
            if sequence.processors is not None:
                sequence.processors.commit(result.tokens)
        self._executor.move(moves)

    def _commit(
        self, launched: _Launched, flight: Flight, results: Sequence[TreeResult], now: float
    ) -> list[Outcome]:
        """Add the tokens to their texts and make deltas; removes requests that end."""
        for entry, scored in launched.rows.scored:
            self._score_prompt(entry, flight, scored)
        outcomes: list[Outcome] = []
        for result, decision in zip(results, launched.decisions, strict=True):
            running = self._requests[result.request.request_id]
            transcript, verdict = running.transcript, result.verdict
            committed: tuple[int, ...] = ()
            if isinstance(verdict, UserError):
                transcript.fail(str(verdict), now, internal=not isinstance(verdict, RequestError))
            else:
                if self.listeners.on_tree is not None:
                    name, clock = result.request.request_id, self.clock
                    event = TreeEvent(clock.steps, name, result.tree, verdict, clock.last, decision)
                    self.listeners.trace(event)
                committed = transcript.commit(result.tree, verdict, now, result.logprobs)
            outcomes.append(self._outcome(running, committed))
        for entry in launched.plan.entries:
            if entry.ends_with_prompt:
                running = self._requests[entry.request.request_id]
                running.transcript.end_with_prompt(now)
                outcomes.append(self._outcome(running, ()))
        return outcomes

    def _outcome(self, running: _Running, committed: tuple[int, ...]) -> Outcome:
        """Queue a request's new output, remove it if it has ended, and return its outcome."""
        transcript = running.transcript
        self._queue_delta(running)
        if transcript.finished:
            self._remove(running)
        return Outcome(transcript.request.request_id, committed, transcript.finished)

    def _queue_delta(self, running: _Running) -> None:
        """Add a request's new output to the next deltas."""
        transcript, name = running.transcript, running.transcript.request.request_id
        transcript.cached_tokens = running.sequence.cached_tokens
        delta = transcript.delta()
        # An interrupted step may have left a delta that was not returned.
        self._deltas[name] = Delta.joined([self._deltas[name], delta]) if name in self._deltas else delta

    def _pass_states(self, launched: _Launched, flight: Flight, results: Sequence[TreeResult]) -> None:
        """Pass the hidden states of committed rows of continuing texts to the speculators that read them."""
        if not self._speculators.taps:
            return
        paths = [
            result.verdict.path
            if isinstance(result.verdict, Acceptance) and result.request.request_id in self._requests
            else None
            for result in results
        ]
        self._speculators.receive_states(text_rows(launched.plan, launched.trees, paths), flight)

    def _score_prompt(self, entry: PlanEntry, flight: Flight, rows: range) -> None:
        """Store the log-probabilities of the prompt's tokens after `entry.start`, one per row."""
        reports = self._requests[entry.request.request_id].transcript.prompt_logprobs
        assert reports is not None
        first = entry.start + 1
        scores = flight.scores(rows, entry.token_ids[first : first + len(rows)], reports.top)
        reports.add(first, scores, self._tokenizer.text_of)

    def _remove(self, running: _Running) -> None:
        # In this order, `abort` can repair the state after an interrupt between the two calls.
        self._scheduler.remove(running.sequence)
        del self._requests[running.sequence.request.request_id]

    def _failed(self, plan: StepPlan | None, error: Exception) -> None:
        """Count a failure, and end the request that causes it once it is known."""
        self._failed_steps += 1
        if plan is not None and isinstance(error, AdapterError):
            ended = [one.request.request_id for one in plan.entries if one.request.adapter == error.adapter]
            reason = str(error)
        elif plan is not None and isinstance(error, ModelFileError):
            _LOG.error("the requests of a step end, as the model cannot be read: %s", str(error))
            ended = [entry.request.request_id for entry in plan.entries]
            reason = f"the model cannot be read: {error}"
        else:
            failures = self._suspects.failures + 1
            _LOG.error("a step failed (%d); requests continue from their texts", failures, exc_info=error)
            ended = self._suspects.failed(plan, self._requests.keys())
            reason = f"its steps failed repeatedly: {error!r}"
        for name in ended:
            if (running := self._requests.get(name)) is not None:
                running.transcript.fail(reason, self.clock.now(), internal=True)
                self._speculators.observe(StepReport([self._outcome(running, ())]))

    def _recover(self) -> None:
        """Restart all requests from their committed texts, with empty caches, after an interrupted step."""
        launched, self._launched = self._launched, []
        self._scheduler.restart()  # first, as `computed` may be wrong
        for running in list(self._requests.values()):
            transcript = running.transcript
            request = transcript.request
            if transcript.finished:
                self._speculators.observe(StepReport([self._outcome(running, ())]))
            else:
                sequence = running.sequence
                sequence.processors = self._admission.processors(request, sequence.processors)
                sequence.processors.commit(transcript.token_ids)
        for one in launched:  # last, as another interrupt may end this wait
            self._executor.drop(one.launch)

    def check_integrity(self) -> None:
        """Raise IntegrityError if scheduler, blocks and requests disagree."""
        self._scheduler.check_integrity()
        known = {id(r.sequence) for r in self._requests.values()}
        scheduled = {id(s) for s in (*self._scheduler.running, *self._scheduler.waiting)}
        ensure(known == scheduled, "the scheduler has the requests that the engine knows")
