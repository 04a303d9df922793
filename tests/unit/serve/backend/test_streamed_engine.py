"""An engine process with a streamed model: it answers, and stops in an answer and in a pass."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from specinfer import SamplingParams
from specinfer.kernels.disk import StreamSource
from specinfer.models import streamed as streaming
from specinfer.request import FinishReason
from specinfer.serve.backend.work import Work
from tests.kernels import kernels
from tests.unit.engine.offloading import Planned, resident, streamed
from tests.unit.serve.backend.test_engine_process import deltas_of, ends, hear, serving

LONG = SamplingParams(seed=1, max_tokens=100, ignore_eos=True)


def test_an_engine_process_answers_stops_and_ends_in_mid_pass(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels("native")
    with resident(folder) as llm:
        [want] = llm.generate([[65, 66]], LONG)
    readable = threading.Event()
    readable.set()

    class Source(StreamSource):
        def read_into(self, view: memoryview, offset: int) -> None:
            readable.wait()
            super().read_into(view, offset)

    monkeypatch.setattr(streaming, "StreamSource", Source)
    with streamed(folder, monkeypatch, Planned(self_draft=True)) as llm:
        with serving(llm) as server:
            assert server.recv()[0] == "ready"
            server.send(("add", [Work("a", (65, 66), LONG)]))
            heard = hear(server, ends("a"))
            assert tuple(token for one in deltas_of(heard) for token in one.token_ids) == want.token_ids
            states = [message[2] for message in heard if message[0] == "deltas" and message[2] is not None]
            assert states[-1].streamed_bytes > 0
            server.send(("add", [Work("b", (67, 68), LONG)]))
            hear(server, lambda message: message[0] == "deltas" and any(one.token_ids for one in message[1]))
            server.send(("abort", ["b"]))
            server.send(("add", [Work("c", (65, 66), LONG)]))
            last = deltas_of(hear(server, ends("c")))
            assert [one.finish_reason for one in last if one.finish_reason] == [FinishReason.LENGTH]
            assert tuple(token for one in last if one.id == "c" for token in one.token_ids) == want.token_ids
            server.send(("add", [Work("d", (69, 70), LONG)]))
            hear(server, lambda message: message[0] == "deltas" and any(one.token_ids for one in message[1]))
            readable.clear()  # the pass that runs waits for its weights from here on
        began = time.monotonic()
        llm.close()
        assert time.monotonic() - began < 5
        readable.set()
