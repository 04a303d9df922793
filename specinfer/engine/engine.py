"""The step: schedule, propose, forward, verify, commit.

Every step is a batch of token trees. Ordinary decoding is a one-node tree; the last chunk of a prefill is
the uncached prompt followed by a one-node tree; an earlier chunk has no tree. So nothing here asks whether
a request is in its prefill or whether it speculates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specinfer.engine.admission import Admission
from specinfer.engine.metrics import Stage, StageClock
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.sequence import SequenceState
from specinfer.engine.trace import TreeEvent
from specinfer.engine.transcript import Transcript
from specinfer.engine.verification import TargetLaws, verify_tree
from specinfer.errors import RequestError, UserError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Logprobs, Request, RequestOutput
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.logprobs import raw_logprobs, report
from specinfer.runtime.runner import LogitRows, ModelRunner, Move
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.speculator import Outcome
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TokenTree
from specinfer.verify.acceptance import Acceptance
from specinfer.verify.pairs import Verifier


@dataclass(slots=True)
class _Running:
    """A request inside the engine."""

    sequence: SequenceState
    transcript: Transcript


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What the target made of one request's tree."""

    acceptance: Acceptance
    laws: TargetLaws


class Engine:
    """Serves requests step by step; `step` is the only method that computes."""

    def __init__(
        self,
        *,
        target: ModelRunner,
        speculator: Ensemble,
        tokenizer: Tokenizer,
        admission: Admission,
        scheduler: Scheduler,
        verifier: Verifier,
    ) -> None:
        self._target = target
        self._speculator = speculator
        self._tokenizer = tokenizer
        self._admission = admission
        self._scheduler = scheduler
        self._verifier = verifier
        self._requests: dict[str, _Running] = {}
        self._outputs: list[RequestOutput] = []  # made and not yet returned: an interrupt loses none
        self.clock = StageClock()
        self.on_tree: Callable[[TreeEvent], None] | None = None

    @property
    def max_context(self) -> int:
        """The most tokens a request can have, prompt and output together."""
        return self._admission.max_context

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._outputs) or self._scheduler.has_work

    @property
    def prefix_hits(self) -> tuple[int, int]:
        """Tokens of admitted texts that were found in the cache, and tokens that were looked up."""
        return self._scheduler.prefix_hits, self._scheduler.prefix_queries

    @property
    def preemptions(self) -> int:
        """How often a request gave up its blocks to an older one, so far."""
        return self._scheduler.preemptions

    def check(self, request: Request) -> None:
        """Raise RequestError when the request can never be served here."""
        self._admission.check(request)

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError as `check` does, or when its id is in use."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request its own")
        sequence, ending = self._admission.admit(request)
        transcript = Transcript(
            request,
            self._tokenizer,
            ending=ending,
            max_context=self._admission.max_context,
            now=time.perf_counter(),
        )
        self._requests[request.request_id] = _Running(sequence, transcript)
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free what it holds; None when it is not here (it may just have ended)."""
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        running = self._requests.pop(request_id, None)
        if running is None:
            return None
        self._scheduler.remove(running.sequence)
        self._speculator.observe([Outcome(request_id, (), finished=True)])
        running.transcript.abort(time.perf_counter())
        return running.transcript.output()

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that got tokens, in plan order.

        When anything raises, an interrupt included, the requests go on from what they have said so far.
        """
        try:
            self._step()
        except BaseException:
            self._recover()
            raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step(self) -> None:
        clock = self.clock
        clock.start()
        plan = self._scheduler.schedule()
        if not plan.entries:
            return
        clock.lap(Stage.SCHEDULE)
        trees = self._speculator.propose(plan)
        clock.lap(Stage.PROPOSE)
        logits = self._forward(plan, trees)
        clock.lap(Stage.FORWARD)
        verdicts = self._verify(plan, trees, logits)
        clock.lap(Stage.VERIFY)
        self._commit(plan, trees, verdicts)
        clock.lap(Stage.COMMIT)

    def _recover(self) -> None:
        """After a step that was cut short: texts are what was said, and nothing in a cache is trusted."""
        self._scheduler.restart()  # first: what `computed` says may not be so
        for running in list(self._requests.values()):
            sequence, transcript = running.sequence, running.transcript
            request = sequence.request
            sequence.token_ids[:] = [*request.prompt_token_ids, *transcript.token_ids]
            if transcript.finish_reason is not None:
                if not any(o.finished and o.request_id == request.request_id for o in self._outputs):
                    self._outputs.append(transcript.output())
                self._leave(running)
                self._speculator.observe([Outcome(request.request_id, (), finished=True)])
            else:
                sequence.processors = self._admission.processors(request)
                sequence.processors.commit(transcript.token_ids)

    def _leave(self, running: _Running) -> None:
        # In this order an interrupt between the two leaves nothing that `abort` does not mend.
        self._scheduler.remove(running.sequence)
        del self._requests[running.sequence.request.request_id]

    def _forward(self, plan: StepPlan, trees: Sequence[TokenTree]) -> list[LogitRows]:
        """The target's logits after every node of each tree, [nodes, vocab]; prompts are scored besides."""
        upcoming = iter(trees)
        rows: list[Rows] = []
        nodes: list[int] = []  # 0 where an entry has no tree
        for entry in plan.entries:
            tree = next(upcoming) if entry.has_tree else None
            part = _rows(entry, tree)
            rows.append(replace(part, logits_from=0) if _scores_prompt(entry) else part)
            nodes.append(tree.num_nodes if tree is not None else 0)
        logits = LogitRows(self._target.forward(rows))
        of_trees: list[LogitRows] = []
        first = 0
        for entry, part, in_tree in zip(plan.entries, rows, nodes, strict=True):
            end = first + len(part.token_ids) - part.logits_from
            if _scores_prompt(entry):
                self._score_prompt(entry, logits[first : end - in_tree])
            if in_tree:
                of_trees.append(logits[end - in_tree : end])
            first = end
        return of_trees

    def _score_prompt(self, entry: PlanEntry, logits_TV: LogitRows) -> None:
        """Report how likely the prompt's tokens behind `entry.start` were, one per row."""
        top = entry.request.params.prompt_logprobs
        assert top is not None
        transcript = self._requests[entry.request.request_id].transcript
        first = entry.start + 1
        for row, position in zip(logits_TV, range(first, len(entry.request.prompt_token_ids)), strict=False):
            token = entry.token_ids[position]
            transcript.score_prompt(position, report(raw_logprobs(row), token, top, self._tokenizer))

    def _verify(
        self, plan: StepPlan, trees: Sequence[TokenTree], logits: Sequence[LogitRows]
    ) -> list[_Verdict | UserError]:
        """What became of each tree; an error is its own request's and stops no other."""
        verdicts: list[_Verdict | UserError] = []
        for entry, tree, logits_NV in zip(plan.tree_entries, trees, logits, strict=True):
            laws = TargetLaws(entry, tree, logits_NV, self._target.model.kernels.scan)
            try:
                verdicts.append(_Verdict(verify_tree(tree, laws, self._verifier), laws))
            except UserError as error:
                verdicts.append(error)
        return verdicts

    def _commit(
        self, plan: StepPlan, trees: Sequence[TokenTree], verdicts: Sequence[_Verdict | UserError]
    ) -> None:
        """Accepted paths become text and their KV part of the sequence; requests that end leave."""
        now = time.perf_counter()
        moves: list[Move] = []
        outcomes: list[Outcome] = []
        for entry in plan.entries:
            self._requests[entry.request.request_id].sequence.computed = entry.end
        for entry, tree, verdict in zip(plan.tree_entries, trees, verdicts, strict=True):
            request_id = entry.request.request_id
            running = self._requests[request_id]
            committed = self._extend_text(running, tree, verdict, now)
            finished = running.transcript.finish_reason is not None
            outcomes.append(Outcome(request_id, committed, finished))
            self._outputs.append(running.transcript.output())
            if finished:
                self._leave(running)
            elif isinstance(verdict, _Verdict):
                path = verdict.acceptance.path
                running.sequence.computed += len(path)
                moves.extend(_path_move(entry, path))
        self._target.move(moves)
        self._speculator.observe(outcomes)

    def _extend_text(
        self, running: _Running, tree: TokenTree, verdict: _Verdict | UserError, now: float
    ) -> tuple[int, ...]:
        """Add what the target said to the request's text; returns the tokens that became part of it."""
        sequence, transcript = running.sequence, running.transcript
        transcript.cached_tokens = sequence.cached_tokens
        if isinstance(verdict, UserError):
            transcript.fail(str(verdict), now)
            return ()
        acceptance, laws = verdict.acceptance, verdict.laws
        if self.on_tree is not None:
            self.on_tree(TreeEvent(self.clock.steps, sequence.request.request_id, tree, acceptance))
        logprobs: list[Logprobs] = []
        if (top := sequence.request.params.logprobs) is not None:
            chosen = [tree.token_ids[node] for node in acceptance.path] + [acceptance.next_token]
            for node, token in zip((0, *acceptance.path), chosen, strict=True):
                if laws.is_over(node):
                    break
                logprobs.append(report(laws.logprobs(node), token, top, self._tokenizer))
        committed = transcript.commit(tree, acceptance, now, logprobs)
        sequence.token_ids.extend(committed)
        if sequence.processors is not None and transcript.finish_reason is None:
            sequence.processors.commit(committed)
        return committed

    def check_integrity(self) -> None:
        """Raise when scheduler, blocks and requests disagree."""
        self._scheduler.check_integrity()
        known = {id(r.sequence) for r in self._requests.values()}
        assert known == {id(s) for s in (*self._scheduler.running, *self._scheduler.waiting)}


def _rows(entry: PlanEntry, tree: TokenTree | None) -> Rows:
    """The uncached text up to the root, then the tree's other nodes; logits from the root on."""
    chain, root = entry.end - entry.start, entry.end - 1
    if tree is None or tree.num_nodes == 1:
        text = entry.token_ids[entry.start : entry.end]
        return chain_rows(text, entry.start, entry.block_table, logits=tree is not None)
    return Rows(
        token_ids=[*entry.token_ids[entry.start : root], *tree.token_ids],
        start=entry.start,
        block_table=entry.block_table,
        logits_from=chain - 1,
        parents=tree.parents,
    )


def _scores_prompt(entry: PlanEntry) -> bool:
    """Whether the caller wants to know how likely tokens of the prompt were that follow this entry's rows."""
    request = entry.request
    return request.params.prompt_logprobs is not None and entry.start < len(request.prompt_token_ids) - 1


def _path_move(entry: PlanEntry, path: Sequence[int]) -> list[Move]:
    """The accepted nodes' K and V belong right behind the text; a path that lies there stays."""
    end = entry.end
    if all(node == depth for depth, node in enumerate(path, start=1)):
        return []
    return [Move(entry.block_table, [end - 1 + node for node in path], range(end, end + len(path)))]
