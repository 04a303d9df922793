"""The step: schedule, propose, forward, verify, commit.

Every step is a batch of token trees. Ordinary decoding is a one-node tree; the last chunk of a prefill is
the uncached prompt followed by a one-node tree; an earlier chunk has no tree. So nothing here asks whether
a request is in its prefill or whether it speculates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specinfer.engine.admission import Admission, Admitted
from specinfer.engine.kv_blocks import SequenceState
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.steps import Stage, StageClock, Statistics, Suspects
from specinfer.engine.target_laws import TargetLaws, verify_trees
from specinfer.engine.trace import TreeEvent
from specinfer.engine.transcript import Transcript
from specinfer.errors import AdapterError, ModelFileError, PeerLostError, RequestError, UserError, ensure
from specinfer.models.stream import StoppedError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Delta, Logprobs, Request
from specinfer.runtime.batch import LogitRows, logit_rows
from specinfer.runtime.executor import Executor, Move
from specinfer.runtime.features import text_rows
from specinfer.runtime.flight import Flight, Launch, inference, torch_threads
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


@dataclass(slots=True)
class _Running:
    """A request inside the engine."""

    sequence: SequenceState
    transcript: Transcript


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose pass is in flight: what was planned and guessed, and who is asked about it."""

    plan: StepPlan
    trees: list[TokenTree]  # of plan.tree_entries
    decisions: Sequence[Decision | None]  # about these, where somebody wants to know
    launch: Launch
    rows: LogitRows  # whose rows of the flight are where


@dataclass(slots=True)
class _TreeResult:
    """What the target made of one request's tree."""

    request: Request
    tree: TokenTree
    verdict: Acceptance | UserError
    tokens: tuple[int, ...] = ()  # up to the text's end, as far as ids tell
    over: bool = False  # the text ends with the last of them
    logprobs: Sequence[Logprobs] = ()  # of the tokens, where the request asks for them


class Engine:
    """Serves requests step by step; `step` is the only method that computes.

    One thread at a time may use it. What fails in a step costs no request its text: whoever is at fault is
    found out by running alone, ends with an error, and the others go on.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._speculators = speculators
        self._tokenizer = tokenizer
        self._admission = admission
        self._scheduler = scheduler
        self._verifier = verifier
        self._threads = threads  # of PyTorch, in a step
        self._guard = guard  # of the speculators' policy, if it has one: for statistics
        self._memory = memory  # of what that policy learns, if it is to outlive the engine
        self._requests: dict[str, _Running] = {}
        self._deltas: dict[str, Delta] = {}  # by request, made and not yet returned: an interrupt loses none
        self._launched: list[_Launched] = []  # whose answers are not in the texts yet
        self._suspects = Suspects()  # of making steps fail
        self._listener_error: Exception | None = None  # of `on_tree`, in the step that runs
        self.clock = StageClock(clock)
        self.on_step: Callable[[Sequence[str]], None] | None = None
        self._on_step_failed = False  # and it was said
        self.on_tree: Callable[[TreeEvent], None] | None = None
        self.explains = False  # what `on_tree` is told says why so much was guessed

    @property
    def admission(self) -> Admission:
        """Who lets requests into this engine."""
        return self._admission

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._deltas) or self._scheduler.has_work

    def statistics(self) -> Statistics:
        """What was done so far, and who waits and runs now. May be called by any thread, in a step too."""
        scheduler, clock = self._scheduler, self.clock
        guard = None if self._guard is None else self._guard.state()
        stream = self._executor.stream
        return Statistics(
            steps=clock.steps,
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
            streamed_bytes=0 if stream is None else stream.read_bytes,
            stream_wait_seconds=0.0 if stream is None else stream.waited,
            rank_seconds=dict(self._executor.rank_seconds),
        )

    def close(self) -> None:
        """Let the step that runs end soon, with nothing said, where it waits for weights; it is the last one.

        Any thread may call it.
        """
        self._executor.close()

    def keep_learnt(self) -> None:
        """Keep on disk what the policy has learnt; no step may run meanwhile."""
        if self._memory is not None:
            self._memory.keep()

    def add(self, admitted: Admitted) -> None:
        """Queue a request that `admission` let in; raises RequestError when its id is in use."""
        request_id = admitted.request.request_id
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; give each request its own")
        self._requests[request_id] = _Running(admitted.sequence, admitted.transcript)
        self._scheduler.add(admitted.sequence)

    def abort(self, request_id: str) -> Delta | None:
        """End a request and free what it holds; its last delta, or None when it is not here."""
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._scheduler.remove(running.sequence)
            self._speculators.observe(StepReport([Outcome(request_id, (), finished=True)]))
            running.transcript.abort(self.clock.now())
            self._tell(running)
        return self._deltas.pop(request_id, None)

    def step(self) -> list[Delta]:
        """Run one step; the deltas of the requests that got tokens or ended, in plan order.

        An interrupt comes out, and the requests go on from what they have said so far. So does what `on_tree`
        raises, when the step is done: its deltas come with the next one's. Anything else that raises is
        logged and tried again; what fails again and again ends the requests concerned. Weights that cannot
        be read end those of the step at once, as nobody knows how long the next try would wait for the disk.
        PeerLostError comes out: this engine cannot go on, and what its requests have said is in their deltas.
        """
        with torch_threads(self._threads):
            self._step()
        heard, self._listener_error = self._listener_error, None
        if heard is not None:
            raise heard
        deltas, self._deltas = self._deltas, {}
        return [*deltas.values()]

    @inference
    def _step(self) -> None:
        self.clock.start()
        plan: StepPlan | None = None
        try:
            plan = self._schedule()
            if plan.entries:
                self._announce(plan)
                self._land(self._launch(plan))
            self._suspects.succeeded(plan, self._requests.keys())
        except StoppedError:  # by `close`
            self._recover()
        except PeerLostError:  # whatever is tried again fails again
            self._recover()
            raise
        except Exception as error:
            self._recover()
            self._failed(plan, error)
        except BaseException:
            self._recover()
            raise

    def _schedule(self) -> StepPlan:
        alone = self._suspects.next
        plan = self._scheduler.schedule(self._requests[alone].sequence if alone is not None else None)
        if alone is not None and not plan.entries:  # others hold what it needs: let them go on
            self._suspects.acquit()
            plan = self._scheduler.schedule()
        self.clock.lap(Stage.SCHEDULE)
        return plan

    def _announce(self, plan: StepPlan) -> None:
        """Tell `on_step` who is in the step. What it raises is a listener's fault, and no request's."""
        if self.on_step is None:
            return
        try:
            self.on_step([entry.request.request_id for entry in plan.entries])
        except Exception:
            if not self._on_step_failed:
                _LOG.exception("on_step failed; steps go on, and this is not said again")
            self._on_step_failed = True

    def _launch(self, plan: StepPlan) -> _Launched:
        """Guess, and start the target's pass over all texts and trees."""
        trees = self._speculators.propose(plan)
        explained = self.explains and self.on_tree is not None
        decisions = self._speculators.explain() if explained else [None] * len(trees)
        self.clock.lap(Stage.PROPOSE)
        launch = self._executor.launch(plan, trees, self._speculators.taps)
        launched = _Launched(plan, trees, decisions, launch, logit_rows(plan, trees))
        self._launched.append(launched)
        return launched

    def _land(self, launched: _Launched) -> None:
        """Ask the pass when it has ended, and make what it says text."""
        flight = launched.launch.flight()
        self.clock.lap(Stage.FORWARD)
        answers = self._ask(launched, flight)
        self.clock.lap(Stage.VERIFY)
        now = self.clock.now()
        self._advance(launched.plan, answers)
        outcomes = self._commit(launched, flight, answers, now)
        self._hear(launched, flight, answers)
        self._launched.remove(launched)
        self.clock.lap(Stage.COMMIT)
        self._speculators.observe(StepReport(outcomes, self.clock.last))
        if self._memory is not None:
            self._memory.stepped()
        self.clock.lap(Stage.COMMIT)

    def _ask(self, launched: _Launched, flight: Flight) -> list[_TreeResult]:
        """What the target says of each tree, and how likely it was, if somebody wants to know."""
        laws = [
            TargetLaws(entry, tree, flight, row)
            for entry, tree, row in zip(
                launched.plan.tree_entries, launched.trees, launched.rows.roots, strict=True
            )
        ]
        answers: list[_TreeResult] = []
        for of_tree, verdict in zip(laws, verify_trees(laws, self._verifier, flight), strict=True):
            answer = _TreeResult(of_tree.request, of_tree.tree, verdict)
            answers.append(answer)
            if isinstance(verdict, Acceptance):
                transcript = self._requests[of_tree.request.request_id].transcript
                answer.tokens, answer.over = transcript.until_end(of_tree.tree, verdict)
                # Now: its processors still stand where the tree begins.
                answer.logprobs = self._logprobs(of_tree, verdict, answer.tokens)
        return answers

    def _logprobs(self, laws: TargetLaws, acceptance: Acceptance, tokens: Sequence[int]) -> list[Logprobs]:
        top = laws.request.params.logprobs
        if top is None:
            return []
        return laws.reports((0, *acceptance.path)[: len(tokens)], tokens, top, self._tokenizer)

    def _advance(self, plan: StepPlan, answers: Sequence[_TreeResult]) -> None:
        """What the next plan needs besides texts: processors, accepted paths, how far caches are computed."""
        for entry in plan.entries:
            self._requests[entry.request.request_id].sequence.computed = entry.end
        moves: list[Move] = []
        for entry, answer in zip(plan.tree_entries, answers, strict=True):
            if answer.over or not isinstance(answer.verdict, Acceptance):
                continue
            sequence = self._requests[entry.request.request_id].sequence
            sequence.computed += len(answer.verdict.path)
            moves.extend(_path_move(entry, answer.verdict.path))
            if sequence.processors is not None:
                sequence.processors.commit(answer.tokens)
        self._executor.move(moves)

    def _commit(
        self, launched: _Launched, flight: Flight, answers: Sequence[_TreeResult], now: float
    ) -> list[Outcome]:
        """Add the tokens to their texts, and make deltas; requests that end leave."""
        for entry, scored in launched.rows.scored:
            self._score_prompt(entry, flight, scored)
        outcomes: list[Outcome] = []
        for answer, decision in zip(answers, launched.decisions, strict=True):
            running = self._requests[answer.request.request_id]
            transcript, verdict = running.transcript, answer.verdict
            committed: tuple[int, ...] = ()
            if isinstance(verdict, UserError):
                transcript.fail(str(verdict), now, internal=not isinstance(verdict, RequestError))
            else:
                self._trace(answer.request, answer.tree, verdict, decision)
                committed = transcript.commit(answer.tree, verdict, now, answer.logprobs)
            outcomes.append(self._told(running, committed))
        for entry in launched.plan.entries:
            if entry.ends_with_prompt:
                running = self._requests[entry.request.request_id]
                running.transcript.end_with_prompt(now)
                outcomes.append(self._told(running, ()))
        return outcomes

    def _told(self, running: _Running, committed: tuple[int, ...]) -> Outcome:
        """Hand out what is new; one that has ended leaves."""
        transcript = running.transcript
        self._tell(running)
        if transcript.finished:
            self._leave(running)
        return Outcome(transcript.request.request_id, committed, transcript.finished)

    def _tell(self, running: _Running) -> None:
        """Let the next deltas have what is new of a request."""
        transcript, name = running.transcript, running.transcript.request.request_id
        transcript.cached_tokens = running.sequence.cached_tokens
        delta = transcript.delta()
        # Of a step that was cut short there may be one that nobody got.
        self._deltas[name] = Delta.joined([self._deltas[name], delta]) if name in self._deltas else delta

    def _hear(self, launched: _Launched, flight: Flight, answers: Sequence[_TreeResult]) -> None:
        """Tell the speculators that read hidden states which rows became text that goes on."""
        if not self._speculators.taps:
            return
        paths = [
            answer.verdict.path
            if isinstance(answer.verdict, Acceptance) and answer.request.request_id in self._requests
            else None
            for answer in answers
        ]
        self._speculators.hear(text_rows(launched.plan, launched.trees, paths), flight)

    def _score_prompt(self, entry: PlanEntry, flight: Flight, rows: range) -> None:
        """Report how likely the prompt's tokens behind `entry.start` were, one per row."""
        reports = self._requests[entry.request.request_id].transcript.prompt_logprobs
        assert reports is not None
        first = entry.start + 1
        scores = flight.scores(rows, entry.token_ids[first : first + len(rows)], reports.top)
        reports.add(first, scores, self._tokenizer.text_of)

    def _trace(
        self, request: Request, tree: TokenTree, acceptance: Acceptance, decision: Decision | None
    ) -> None:
        if self.on_tree is None:
            return
        event = TreeEvent(self.clock.steps, request.request_id, tree, acceptance, self.clock.last, decision)
        try:
            self.on_tree(event)
        except Exception as error:  # the listener's own, for whoever runs the step; texts do not wait for it
            self._listener_error = self._listener_error or error

    def _leave(self, running: _Running) -> None:
        # In this order an interrupt between the two leaves nothing that `abort` does not mend.
        self._scheduler.remove(running.sequence)
        del self._requests[running.sequence.request.request_id]

    def _failed(self, plan: StepPlan | None, error: Exception) -> None:
        """Count a failure, and end the request whose fault it is, once that is known."""
        if plan is not None and isinstance(error, AdapterError):
            ended = [one.request.request_id for one in plan.entries if one.request.adapter == error.adapter]
            reason = str(error)
        elif plan is not None and isinstance(error, ModelFileError):
            _LOG.error("the requests of a step end, as the model cannot be read: %s", str(error))
            ended = [entry.request.request_id for entry in plan.entries]
            reason = f"the model cannot be read: {error}"
        else:
            failures = self._suspects.failures + 1
            _LOG.error("a step failed (%d); requests go on from what they said", failures, exc_info=error)
            ended = self._suspects.failed(plan, self._requests.keys())
            reason = f"its steps failed again and again: {error!r}"
        for name in ended:
            if (running := self._requests.get(name)) is not None:
                running.transcript.fail(reason, self.clock.now(), internal=True)
                self._speculators.observe(StepReport([self._told(running, ())]))

    def _recover(self) -> None:
        """After a step that was cut short: texts are what was said, and nothing in a cache is trusted."""
        launched, self._launched = self._launched, []
        self._scheduler.restart()  # before all else: what `computed` says may not be so
        for running in list(self._requests.values()):
            transcript = running.transcript
            request = transcript.request
            if transcript.finished:
                self._speculators.observe(StepReport([self._told(running, ())]))
            else:
                running.sequence.processors = self._admission.processors(request)
                running.sequence.processors.commit(transcript.token_ids)
        for one in launched:  # last: another interrupt may end the wait for passes nobody will ask any more
            self._executor.drop(one.launch)

    def check_integrity(self) -> None:
        """Raise IntegrityError when scheduler, blocks and requests disagree."""
        self._scheduler.check_integrity()
        known = {id(r.sequence) for r in self._requests.values()}
        scheduled = {id(s) for s in (*self._scheduler.running, *self._scheduler.waiting)}
        ensure(known == scheduled, "the scheduler has the requests that the engine knows")


def _path_move(entry: PlanEntry, path: Sequence[int]) -> list[Move]:
    """The accepted nodes' K and V belong right behind the text; a path that lies there stays."""
    end = entry.end
    if all(node == depth for depth, node in enumerate(path, start=1)):
        return []
    return [Move(entry.block_table, [end - 1 + node for node in path], range(end, end + len(path)))]
