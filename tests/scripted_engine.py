"""An engine without a model that only counts, for tests of the loop that drives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.kv_blocks import SequenceState
from specinfer.engine.transcript import Transcript
from specinfer.request import Delta, Request, RequestOutput
from specinfer.sampling_params import SamplingParams
from specinfer.tokenizer import Tokenizer
from specinfer.tree.token_tree import single_node
from specinfer.verify.coupled import Acceptance


class ScriptedEngine:
    """In each step every request outputs the next number, 1, 2, ..., until its max_tokens.

    A script runs in each step, with the step's number, after the first request has its token and before the
    others have theirs. It may block, call functions that drive the engine, or raise. Concurrent callers are
    an error.
    """

    def __init__(self) -> None:
        self.requests: dict[str, AdmittedRequest] = {}
        self.happened: list[str] = []
        self.steppers: list[int] = []  # the thread of each step
        self.script: Callable[[int], object] = lambda step: None
        self.refuses: set[str] = set()  # ids that cannot be added
        self._called = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        assert self._called.acquire(blocking=False), "two callers at once"
        try:
            yield
        finally:
            self._called.release()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    has_postponed = False

    @property
    def stepped(self) -> list[str]:
        return [*self.requests]

    def close(self) -> None:
        """Do nothing: no step blocks."""

    def add(self, admitted: AdmittedRequest) -> None:
        with self._alone():
            if admitted.request.request_id in self.refuses:
                raise ValueError("no room")
            assert admitted.request.request_id not in self.requests
            self.happened.append(f"add {admitted.request.request_id}")
            self.requests[admitted.request.request_id] = admitted

    def abort(self, request_id: str) -> Delta | None:
        with self._alone():
            self.happened.append(f"abort {request_id}")
            admitted = self.requests.pop(request_id, None)
            if admitted is None:
                return None
            admitted.transcript.abort(now=2.0)
            return admitted.transcript.delta()

    def step(self) -> list[Delta]:
        with self._alone():
            self.happened.append("step")
            self.steppers.append(threading.get_ident())
            deltas: list[Delta] = []
            for number, (request_id, admitted) in enumerate(list(self.requests.items())):
                transcript = admitted.transcript
                transcript.commit(single_node(0), Acceptance((), transcript.num_output + 1), now=1.0)
                if transcript.finish_reason is not None:
                    del self.requests[request_id]
                deltas.append(transcript.delta())
                if number == 0:
                    self.script(len(self.steppers))
            return deltas

    def fail(self, error: BaseException) -> list[Delta]:
        with self._alone():
            failed = [admitted.fail(repr(error)) for admitted in self.requests.values()]
            self.requests.clear()
            return failed

    def check_integrity(self) -> None:
        with self._alone():
            self.happened.append("check")


def admitted(tokenizer: Tokenizer, request_id: str, max_tokens: int = 3) -> AdmittedRequest:
    """Return a request that counts to `max_tokens`."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = Request(request_id, (65,), params, seed=0)
    transcript = Transcript(request, tokenizer, ending=frozenset(), max_context=1 << 20, now=0.0)
    return AdmittedRequest(request, SequenceState(request, transcript.ids), transcript)


class Pause:
    """A script that blocks an engine in each step until it is released."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, step: int) -> None:
        self.reached.set()
        self.go_on.wait()


def said(outputs: Iterable[RequestOutput]) -> list[tuple[str, list[int]]]:
    return [(output.request_id, list(output.token_ids)) for output in outputs]


def counted(request_id: str, to: int = 3) -> list[tuple[str, list[int]]]:
    """Return a request's output, step by step."""
    return [(request_id, list(range(1, n + 1))) for n in range(1, to + 1)]
