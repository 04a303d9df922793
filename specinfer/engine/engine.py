"""Engine: schedules, drafts, runs, verifies and commits one step at a time.

Every step is a batch of token trees; a one-node tree is ordinary decoding. The last chunk of a prefill ends
in one, and earlier chunks have none. So the engine does not distinguish prefill, decoding and speculation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from specinfer.engine.admission import Admission, AdmittedRequest
from specinfer.engine.changing_text import ChangingText
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.steps import Listeners, Stage, StageClock, Statistics, TreeEvent
from specinfer.engine.target_laws import TargetLaws, accepted_moves, verify_trees
from specinfer.errors import AdapterError, ModelFileError, PeerLostError, RequestError, UserError, ensure
from specinfer.models.stream import StoppedError
from specinfer.plan import PlanEntry, StateCounts, StepPlan
from specinfer.request import Delta
from specinfer.runtime.batch import LogitRows, logit_rows
from specinfer.runtime.executor import Executor
from specinfer.runtime.features import text_rows
from specinfer.runtime.flight import Flight, inference, torch_threads
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
_SHOWN: Final = 12  # tokens of a changing text
Postponed = Callable[[Callable[[], bool]], bool]  # see Engine.rest; returns whether it is done


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose pass has run."""

    plan: StepPlan
    trees: list[TokenTree]  # one per plan.tree_entries
    decisions: Sequence[Decision | None]  # one per tree, if requested
    flight: Flight
    rows: LogitRows  # rows of the flight by request


class Engine:
    """Serves requests step by step; `step` is the only method that computes.

    One thread at a time may use it. After a step that raised, `fail` ends its requests.
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
    ) -> None:
        self._executor = executor
        self._speculators = speculators
        self._tokenizer = tokenizer
        self.admission = admission
        self._scheduler = scheduler
        self._verifier = verifier
        self._threads = threads  # PyTorch's threads in a step
        self._guard = guard  # the policy's guard, if any, for statistics
        self._memory = memory  # the policy's state on disk, if it is kept
        self._postponed = postponed  # work for idle moments, see `rest`
        self._requests: dict[str, AdmittedRequest] = {}
        self._stepped: list[AdmittedRequest] = []  # the requests of the running or last step
        self._changing = ChangingText()
        self.clock = StageClock()
        self.listeners = Listeners()

    @property
    def states(self) -> StateCounts:
        """Slots of recurrent states in each model that has them."""
        return self._executor.states

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs."""
        return bool(self._requests)

    def statistics(self) -> Statistics:
        """Return counters and the present state; callable from any thread, also during a step."""
        scheduler, clock, guard = self._scheduler, self.clock, self._guard
        stream, group = self._executor.target.model.stream, self._executor.target.model.group
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
            speculation_on=guard is None or guard.allowance.guessing,
            guessed_tokens=self._speculators.guessed_tokens,
            failures=self._speculators.failures,
            speculators_paused=self._speculators.num_paused,
            unenforced=self.admission.unenforced,
            streamed_bytes=0 if stream is None else stream.read_bytes,
            stream_wait_seconds=0.0 if stream is None else stream.waited,
            rank_seconds={} if group is None else dict(group.times.by_rank),
            prompt_store={} if scheduler.store is None else scheduler.store.counts,
        )

    @property
    def stepped(self) -> list[str]:
        """The ids of the requests of a step that raised, before `fail`; all, if none was scheduled."""
        return [one.request.request_id for one in self._stepped] or [*self._requests]

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

    def close_store(self) -> None:
        """Write what the prompt store has not written yet; no step may run afterwards."""
        if self._scheduler.store is not None:
            self._scheduler.store.close()

    def add(self, admitted: AdmittedRequest) -> None:
        """Queue an admitted request; raises RequestError if its id is in use."""
        request_id = admitted.request.request_id
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; give each request its own")
        self._requests[request_id] = admitted
        self._scheduler.add(admitted.sequence)

    def abort(self, request_id: str) -> Delta | None:
        """End a request and free its resources; returns its last delta, or None if it is unknown."""
        running = self._requests.get(request_id)
        if running is None:
            return None
        running.transcript.abort(self.clock.now())
        return self._end(running)

    @inference
    def step(self) -> list[Delta]:
        """Run one step; returns the deltas of requests that got tokens or ended, in plan order.

        An exception leaves the requests of the step unusable: call `fail` next. Weights or an adapter that
        cannot be read end the requests that need them.
        """
        self.clock.start()
        self._stepped = [*self._requests.values()]  # if scheduling fails
        deltas: list[Delta] = []
        try:
            plan = self._scheduler.schedule()
            self._stepped = [self._requests[entry.request.request_id] for entry in plan.entries]
            self.clock.lap(Stage.SCHEDULE)
            if plan.entries:
                if plan.copies:
                    self._copy_rows(plan)
                self.listeners.announce(plan)
                with torch_threads(self._threads):
                    deltas = self._land(self._launch(plan))
        except StoppedError:  # `close` was called
            pass
        except AdapterError as error:  # its pass has not begun
            users = [one for one in self._stepped if one.request.adapter == error.adapter]
            deltas = self._end_all(users, str(error))
        except ModelFileError as error:
            _LOG.error("the requests of a step end, as the model cannot be read: %s", str(error))
            deltas = self._end_all(self._stepped, f"the model cannot be read: {error}")
        finally:
            self.clock.end()
        self._stepped = []  # holds no request that has ended
        return deltas

    def fail(self, error: BaseException) -> list[Delta]:
        """End the requests of a step that raised `error`, all if a rank is lost; returns their deltas."""
        failed, self._stepped = self._stepped, []
        if not failed or isinstance(error, PeerLostError):
            failed = [*self._requests.values()]
        return self._end_all(failed, f"a step of the engine failed: {error!r}")

    def _copy_rows(self, plan: StepPlan) -> None:
        """Copy the rows of blocks that new texts begin like, before a failing pass could leave them out."""
        size = self._executor.block_size
        self._executor.move(
            [
                Move((one.source, one.target), range(one.rows), range(size, size + one.rows))
                for one in plan.copies
            ]
        )

    def _launch(self, plan: StepPlan) -> _Launched:
        """Run the speculators, and the target's pass over all texts and trees."""
        trees = self._speculators.propose(plan)
        explains = self.listeners.explains and self.listeners.on_tree is not None
        decisions = self._speculators.explain() if explains else [None] * len(trees)
        self.clock.lap(Stage.PROPOSE)
        flight = self._executor.launch(plan, trees, self._speculators.taps)
        self.clock.lap(Stage.FORWARD)
        return _Launched(plan, trees, decisions, flight, logit_rows(plan, trees))

    def _land(self, launched: _Launched) -> list[Delta]:
        """Verify the trees of a pass and commit their tokens; returns the deltas."""
        entries, flight = launched.plan.tree_entries, launched.flight
        laws = [
            TargetLaws(entry, tree, flight, row)
            for entry, tree, row in zip(entries, launched.trees, launched.rows.roots, strict=True)
        ]
        verdicts = verify_trees(laws, self._verifier, flight)
        self.clock.lap(Stage.VERIFY)
        now = self.clock.now()
        committed = self._commit(launched, laws, verdicts, now)
        for running, _ in committed:
            if running.transcript.finished:
                self._remove(running)
        if self._speculators.taps:
            self._pass_states(launched, verdicts)
        self.clock.lap(Stage.COMMIT)
        outcomes = [
            Outcome(one.request.request_id, tokens, one.transcript.finished) for one, tokens in committed
        ]
        self._speculators.observe(StepReport(outcomes, self.clock.last))
        if self._memory is not None:
            self._memory.stepped()
        self.clock.lap(Stage.COMMIT)
        return [running.delta() for running, _ in committed]

    def _commit(
        self,
        launched: _Launched,
        laws: Sequence[TargetLaws],
        verdicts: Sequence[Acceptance | UserError],
        now: float,
    ) -> list[tuple[AdmittedRequest, tuple[int, ...]]]:
        """Add the accepted tokens to their texts, and their K and V to the cache.

        Returns the requests whose output changes, or that end, with their new tokens.
        """
        for entry, scored in launched.rows.scored:
            self._score_prompt(entry, launched.flight, scored)
        for entry in launched.plan.entries:
            self._requests[entry.request.request_id].sequence.computed = entry.end
        committed: list[tuple[AdmittedRequest, tuple[int, ...]]] = []
        moves: list[Move] = []
        for entry, law, verdict, decision in zip(
            launched.plan.tree_entries, laws, verdicts, launched.decisions, strict=True
        ):
            running = self._requests[entry.request.request_id]
            if isinstance(verdict, UserError):
                internal = not isinstance(verdict, RequestError)
                if internal:  # neither its blocks nor its checkpoints of this step are found again
                    running.sequence.computed = entry.start
                running.transcript.fail(str(verdict), now, internal=internal)
                committed.append((running, ()))
                continue
            committed.append((running, running.accept(law, verdict, now, self._tokenizer)))
            if self.listeners.on_tree is not None:
                self._trace(running, law.tree, verdict, decision, now)
            if not running.transcript.finished:
                moves += accepted_moves(entry, verdict.path)
        if moves:
            self._executor.move(moves)
        for entry in launched.plan.entries:
            if entry.ends_with_prompt:
                running = self._requests[entry.request.request_id]
                running.transcript.end_with_prompt(now)
                committed.append((running, ()))
        return committed

    def _trace(
        self,
        running: AdmittedRequest,
        tree: TokenTree,
        acceptance: Acceptance,
        decision: Decision | None,
        now: float,
    ) -> None:
        """Call `on_tree`; its exception ends the request."""
        clock, name = self.clock, running.request.request_id
        wrong = self.listeners.trace(TreeEvent(clock.steps, name, tree, acceptance, clock.last, decision))
        if wrong is not None and not running.transcript.finished:
            running.transcript.fail(wrong, now, internal=True)

    def _pass_states(self, launched: _Launched, verdicts: Sequence[Acceptance | UserError]) -> None:
        """Pass the hidden states of committed rows of continuing texts to the speculators that read them."""
        paths = [
            verdict.path
            if isinstance(verdict, Acceptance) and entry.request.request_id in self._requests
            else None
            for entry, verdict in zip(launched.plan.tree_entries, verdicts, strict=True)
        ]
        rows = text_rows(launched.plan, launched.trees, paths)
        self._speculators.receive_states(rows, launched.flight)

    def _score_prompt(self, entry: PlanEntry, flight: Flight, rows: range) -> None:
        """Store the log-probabilities of the prompt's tokens after `entry.start`, one per row."""
        reports = self._requests[entry.request.request_id].transcript.prompt_logprobs
        assert reports is not None
        first = entry.start + 1
        scores = flight.scores(rows, entry.token_ids[first : first + len(rows)], reports.top)
        reports.add(first, scores, self._tokenizer.text_of)

    def _remove(self, running: AdmittedRequest, *, computed: bool = True) -> None:
        self._report_change(running)
        self._scheduler.remove(running.sequence, computed=computed)
        del self._requests[running.request.request_id]

    def _report_change(self, running: AdmittedRequest) -> None:
        """Log once which text changes in every prompt, so that what follows it is never reused."""
        miss, prompt = running.sequence.miss, running.request.prompt_token_ids
        if miss is None or miss.reason != "differs":
            return
        size = self._executor.block_size
        block = miss.position // size
        if self._changing.see(running.sequence.hash_before(block), prompt[block * size :]):
            decode = self._tokenizer.decode
            _LOG.warning(
                "prompts change at token %d: after %r now comes %r; the %d tokens from there on are computed "
                "each time; move what changes to the end of the system prompt or into the user's message",
                miss.position,
                decode(prompt[max(0, miss.position - _SHOWN) : miss.position]),
                decode(prompt[miss.position : miss.position + _SHOWN]),
                len(prompt) - miss.position,
            )

    def _end(self, running: AdmittedRequest, *, computed: bool = True) -> Delta:
        """Remove a request whose transcript has ended, unless it is removed; returns its last delta."""
        request_id = running.request.request_id
        if request_id in self._requests:
            self._remove(running, computed=computed)
            self._speculators.observe(StepReport([Outcome(request_id, (), finished=True)]))
        return running.delta()

    def _end_all(self, failed: Sequence[AdmittedRequest], reason: str) -> list[Delta]:
        """End requests with an error; blocks that the step was to compute are not kept."""
        for running in failed:
            if not running.transcript.finished:
                running.transcript.fail(reason, self.clock.now(), internal=True)
        return [self._end(running, computed=False) for running in failed]

    def check_integrity(self) -> None:
        """Raise IntegrityError if scheduler, blocks and requests disagree."""
        self._scheduler.check_integrity()
        known = {id(r.sequence) for r in self._requests.values()}
        scheduled = {id(s) for s in (*self._scheduler.running, *self._scheduler.waiting)}
        ensure(known == scheduled, "the scheduler has the requests that the engine knows")
