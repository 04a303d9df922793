"""The process that owns the engine: `python -m specinfer.serve.engine_process FD LEVEL FORMAT`.

HTTP never waits for a step, nor a step for HTTP. Over the socket FD come an EngineConfig and then commands:

    ("add", works)        checked and tokenized in threads, then submitted to the loop
    ("abort", ids)        before the next step
    ("ask", number)       for the state
    ("check", number)     whether the engine's bookkeeping holds

and go ("ready", facts) or ("failed", message), then ("deltas", [...]) and ("answer", number, value). All
deltas that are there go in one message, so a busy engine sends one a step. When the socket closes, the
process ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final

from specinfer.config import EngineConfig
from specinfer.engine.admission import Admitted
from specinfer.engine.trace import TreeEvent
from specinfer.errors import RequestError, SpecInferError
from specinfer.llm import LLM
from specinfer.request import FinishReason, RequestOutput, SpeculationFigures
from specinfer.serve.logs import configure
from specinfer.serve.work import Delta, EngineFacts, EngineState, Work

_LOG = logging.getLogger(__name__)
_INTAKE_THREADS: Final = 2  # a grammar takes a second to compile, and others must not wait for it
Message = tuple[Any, ...]


class _Answer:
    """One work in progress, and what of its answer was sent."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.admitted: Admitted | None = None  # None until it is checked
        self.aborted = False
        self.trees: list[dict[str, Any]] = []
        self._sent = len(work.said)
        self._counted = (0, 0, 0)  # steps, drafted and accepted tokens

    def delta(self, output: RequestOutput) -> Delta:
        """What is new in `output`."""
        since, self._sent = self._sent, len(output.token_ids)
        trees, self.trees = tuple(self.trees), []
        return Delta(
            self.work.id,
            output.new_text,
            output.token_ids[since:],
            () if output.logprobs is None else output.logprobs[since:],
            trees,
            self._step(output.figures),
            output.finish_reason,
            output.error,
            figures=output.figures if output.finished else None,
            prompt_logprobs=output.prompt_logprobs if output.finished else None,
            cached_tokens=output.cached_tokens,
        )

    def _step(self, figures: SpeculationFigures) -> tuple[tuple[int, int], ...]:
        """What the last step drafted and accepted, where it was one that counts."""
        steps, drafted, accepted = self._counted
        self._counted = figures.steps, figures.drafted_tokens, figures.accepted_tokens
        if figures.steps == steps:
            return ()
        return ((figures.drafted_tokens - drafted, figures.accepted_tokens - accepted),)


class EngineProcess:
    """Carries out a server's commands on one LLM, whose loop runs in its own thread."""

    def __init__(self, llm: LLM, connection: Connection) -> None:
        self._llm = llm
        self._connection = connection
        self._answers: dict[str, _Answer] = {}  # by the work's id
        self._traced: dict[str, _Answer] = {}  # by the request's id
        self._outbox: SimpleQueue[Delta | Message] = SimpleQueue()
        self._intake = ThreadPoolExecutor(_INTAKE_THREADS, thread_name_prefix="intake")

    def serve(self) -> None:
        """Carry out commands until the socket closes."""
        llm = self._llm
        llm.loop.start()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()
        facts = EngineFacts(
            llm.max_context,
            llm.intake.longest,
            os.getpid(),
            llm.intake.speculators,
            llm.config.speculation,
        )
        self._outbox.put(("ready", facts))
        commands: dict[str, Callable[[Any], None]] = {
            "add": self._add,
            "abort": self._abort,
            "ask": self._ask,
            "check": self._check,
        }
        while True:
            try:
                command, argument = self._connection.recv()
            except (EOFError, OSError):
                return
            commands[command](argument)

    def _add(self, works: Iterable[Work]) -> None:
        for work in works:
            self._answers[work.id] = _Answer(work)
            self._intake.submit(self._admit, self._answers[work.id])

    def _admit(self, answer: _Answer) -> None:
        """Check a work and hand it to the loop; in a thread of the intake."""
        work = answer.work
        if answer.aborted:  # before its turn: nobody waits for its grammar
            self._answers.pop(work.id, None)
            return
        try:
            admitted = self._llm.intake.completion(
                work.prompt_token_ids, work.params, index=work.index, said=work.said
            )
            answer.admitted = admitted
            if work.traced:
                self._traced[admitted.request.request_id] = answer
                self._llm.on_tree = self._on_tree  # for good: another thread may trace the next one by now
            self._llm.loop.submit([admitted], lambda output: self._receive(answer, output))
            if answer.aborted:  # meanwhile
                self._llm.loop.cancel([admitted])
        except Exception as error:
            if not isinstance(error, SpecInferError):
                _LOG.exception("work %s could not be begun", work.id)
            self._answers.pop(work.id, None)
            parameter = error.parameter if isinstance(error, RequestError) else None
            reason = str(error) or repr(error)
            refused = Delta(work.id, finish_reason=FinishReason.ERROR, error=reason, parameter=parameter)
            self._outbox.put(refused)

    def _receive(self, answer: _Answer, output: RequestOutput) -> None:
        """Called by the loop between two steps."""
        delta = answer.delta(output)
        if output.finished:
            self._answers.pop(answer.work.id, None)
            self._traced.pop(output.request_id, None)
        if not answer.aborted:
            self._outbox.put(delta)

    def _on_tree(self, event: TreeEvent) -> None:
        """Called within a step, before the step's outputs are received."""
        answer = self._traced.get(event.request_id)
        if answer is not None:
            answer.trees.append(event.to_json(self._llm.tokenizer))

    def _abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            answer = self._answers.get(name)
            if answer is not None:
                answer.aborted = True
                if answer.admitted is not None:
                    self._llm.loop.cancel([answer.admitted])

    def _ask(self, number: int) -> None:
        now = self._llm.statistics()
        state = EngineState(
            running=now.running,
            waiting=now.waiting,
            kv_cache_usage=now.kv_cache_usage,
            steps=now.steps,
            preemptions=now.preemptions,
            prefix_queries=now.prefix_queries,
            prefix_hits=now.prefix_hits,
            stage_seconds={stage.value: seconds for stage, seconds in now.stage_seconds.items()},
        )
        self._outbox.put(("answer", number, state))

    def _check(self, number: int) -> None:
        """Whether the books are right; "" where they are."""
        try:
            self._llm.check_integrity()
            found = ""
        except Exception as error:
            found = repr(error)
        self._outbox.put(("answer", number, found))

    def _send(self) -> None:
        """The thread of the outbox: whoever makes deltas never waits for the socket."""
        while True:
            batch = [self._outbox.get()]
            while not self._outbox.empty():
                batch.append(self._outbox.get())
            deltas = [one for one in batch if isinstance(one, Delta)]
            try:
                if deltas:
                    self._connection.send(("deltas", deltas))
                for message in batch:
                    if not isinstance(message, Delta):
                        self._connection.send(message)
            except OSError:  # the server is gone, and the reading thread ends the process
                return


def main() -> None:
    """Load what the config names, say so, and serve until the server hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which drains and hangs up
    configure(sys.argv[3], sys.argv[2], "engine")
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    config: EngineConfig = connection.recv()
    try:
        llm = LLM(config)
    except SpecInferError as error:
        connection.send(("failed", str(error)))
        sys.exit(2)
    with llm:
        EngineProcess(llm, connection).serve()
    os._exit(0)  # threads of the intake may still compile a grammar for nobody


if __name__ == "__main__":
    main()
