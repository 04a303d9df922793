"""The step: schedule, propose, forward, verify, commit.

Every step is a batch of token trees. Ordinary decoding is a one-node tree; the last chunk of a prefill is
the uncached prompt followed by a one-node tree; an earlier chunk has no tree. So nothing here asks whether
a request is in its prefill or whether it speculates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.metrics import Stage, StageClock
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.sequence import SequenceState
from specinfer.engine.trace import TreeEvent
from specinfer.engine.transcript import Transcript
from specinfer.engine.verification import TargetLaws, verify_tree
from specinfer.errors import RequestError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request, RequestOutput
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner, Move, as_rows
from specinfer.speculate.speculator import Outcome, Speculator
from specinfer.tokenizer import Tokenizer
from specinfer.tree import TokenTree
from specinfer.tree.mask import chain_then_tree
from specinfer.verify.acceptance import Acceptance
from specinfer.verify.pairs import Verifier


@dataclass(slots=True)
class _Running:
    """A request inside the engine."""

    sequence: SequenceState
    transcript: Transcript
    ending: NDArray[np.int64]  # token ids that may end the text


class Engine:
    """Serves requests step by step; `step` is the only method that computes."""

    def __init__(
        self,
        *,
        target: ModelRunner,
        speculator: Speculator,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        pool: BlockPool,
        verifier: Verifier,
        max_context: int,
    ) -> None:
        self._target = target
        self._speculator = speculator
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._pool = pool
        self._verifier = verifier
        self.max_context = max_context
        self._requests: dict[str, _Running] = {}
        self.clock = StageClock()
        self.on_tree: Callable[[TreeEvent], None] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work

    @property
    def preemptions(self) -> int:
        """How often a request gave up its blocks to an older one, so far."""
        return self._scheduler.preemptions

    def check(self, request: Request) -> None:
        """Raise RequestError when the request can never be served here."""
        prompt, params = len(request.prompt_token_ids), request.params
        vocab = self._target.model.config.vocab_size
        if prompt == 0:
            raise RequestError("the prompt is empty; give at least one token of text")
        if prompt >= self.max_context:
            raise RequestError(
                f"the prompt has {prompt} tokens; allowed: at most {self.max_context - 1}, since the context "
                f"is {self.max_context} and an answer needs at least one; shorten the prompt"
            )
        outside = [t for t in (*request.prompt_token_ids, *params.stop_token_ids) if not 0 <= t < vocab]
        if outside:
            raise RequestError(f"token id {outside[0]} is outside the model's vocabulary of {vocab} tokens")
        longest = min(prompt + params.max_tokens, self.max_context)
        capacity = self._pool.num_blocks * self._pool.block_size
        if longest > capacity:
            raise RequestError(
                f"{prompt} prompt tokens and max_tokens {params.max_tokens} need {longest} KV cache "
                f"positions; the cache has {capacity}; lower max_tokens or raise kv_cache_memory"
            )

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError as `check` does, or when its id is in use."""
        self.check(request)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request its own")
        params = request.params
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self._tokenizer.eos_token_ids
        transcript = Transcript(
            request,
            self._tokenizer,
            ending=frozenset(ending),
            max_context=self.max_context,
            now=time.perf_counter(),
        )
        sequence = SequenceState(request)
        barred = np.array(sorted(ending), dtype=np.int64)
        self._requests[request.request_id] = _Running(sequence, transcript, barred)
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free what it holds; None when it is not here (it may just have ended)."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return None
        self._scheduler.remove(running.sequence)
        self._speculator.observe([Outcome(request_id, (), finished=True)])
        running.transcript.abort(time.perf_counter())
        return running.transcript.output()

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of the requests that got tokens, in plan order."""
        clock = self.clock
        clock.start()
        plan = self._scheduler.schedule()
        if not plan.entries:
            return []
        clock.lap(Stage.SCHEDULE)
        trees = self._speculator.propose(plan.tree_entries)
        clock.lap(Stage.PROPOSE)
        logits = self._forward(plan, trees)
        clock.lap(Stage.FORWARD)
        acceptances = self._verify(plan, trees, logits)
        clock.lap(Stage.VERIFY)
        outputs = self._commit(plan, trees, acceptances)
        clock.lap(Stage.COMMIT)
        return outputs

    def _forward(self, plan: StepPlan, trees: Sequence[TokenTree]) -> NDArray[np.float32]:
        """The target's logits after every node of every tree, tree after tree, [sum of nodes, vocab]."""
        upcoming = iter(trees)
        rows = [
            _tree_rows(entry, next(upcoming))
            if entry.has_tree
            else chain_rows(
                entry.token_ids[entry.start : entry.end], entry.start, entry.block_table, logits=False
            )
            for entry in plan.entries
        ]
        return as_rows(self._target.forward(rows))

    def _verify(
        self, plan: StepPlan, trees: Sequence[TokenTree], logits: NDArray[np.float32]
    ) -> list[Acceptance]:
        acceptances: list[Acceptance] = []
        first = 0
        for entry, tree in zip(plan.tree_entries, trees, strict=True):
            ending = self._requests[entry.request.request_id].ending
            laws = TargetLaws(entry, tree, logits[first : first + tree.num_nodes], ending)
            acceptances.append(verify_tree(tree, laws, self._verifier))
            first += tree.num_nodes
        return acceptances

    def _commit(
        self, plan: StepPlan, trees: Sequence[TokenTree], acceptances: Sequence[Acceptance]
    ) -> list[RequestOutput]:
        """Accepted paths become text and their KV part of the sequence; requests that end leave."""
        now = time.perf_counter()
        moves: list[Move] = []
        outcomes: list[Outcome] = []
        outputs: list[RequestOutput] = []
        for entry in plan.entries:
            self._requests[entry.request.request_id].sequence.computed = entry.end
        for entry, tree, acceptance in zip(plan.tree_entries, trees, acceptances, strict=True):
            request_id = entry.request.request_id
            running = self._requests[request_id]
            if self.on_tree is not None:
                self.on_tree(TreeEvent(self.clock.steps, request_id, tree, acceptance))
            committed = running.transcript.commit(tree, acceptance, now)
            running.sequence.token_ids.extend(committed)
            finished = running.transcript.finish_reason is not None
            outcomes.append(Outcome(request_id, committed, finished))
            if finished:
                # In this order an interrupt between the two leaves nothing that `abort` does not mend.
                self._scheduler.remove(running.sequence)
                del self._requests[request_id]
            else:
                running.sequence.computed += len(acceptance.path)
                moves.extend(_path_move(entry, acceptance.path))
            outputs.append(running.transcript.output())
        self._target.move(moves)
        self._speculator.observe(outcomes)
        return outputs

    def check_integrity(self) -> None:
        """Raise when scheduler, blocks and requests disagree."""
        self._scheduler.check_integrity()
        known = {id(r.sequence) for r in self._requests.values()}
        assert known == {id(s) for s in (*self._scheduler.running, *self._scheduler.waiting)}


def _tree_rows(entry: PlanEntry, tree: TokenTree) -> Rows:
    """The uncached text up to the root, then the other nodes; logits from the root on."""
    chain, root = entry.end - entry.start, entry.end - 1
    if tree.num_nodes == 1:
        return chain_rows(
            entry.token_ids[entry.start : entry.end], entry.start, entry.block_table, logits=True
        )
    positions = [*range(entry.start, root), *(root + depth for depth in tree.depths())]
    return Rows(
        token_ids=[*entry.token_ids[entry.start : root], *tree.token_ids],
        positions=positions,
        start=entry.start,
        block_table=entry.block_table,
        sees=chain_then_tree(chain, tree.parents),
        tail_positions=positions,
        logits_from=chain - 1,
    )


def _path_move(entry: PlanEntry, path: Sequence[int]) -> list[Move]:
    """The accepted nodes' K and V belong right behind the text; a path that lies there stays."""
    end = entry.end
    if all(node == depth for depth, node in enumerate(path, start=1)):
        return []
    return [Move(entry.block_table, [end - 1 + node for node in path], range(end, end + len(path)))]
