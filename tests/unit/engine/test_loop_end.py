"""The end of a loop: closed, or with its interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specinfer.engine.loop import EngineLoop
from specinfer.errors import ClosedError
from specinfer.request import Delta, FinishReason
from tests.scripted_engine import Pause, ScriptedEngine, said, waits
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.conftest import Make


def test_a_closed_loop_says_so_once_to_everybody_who_waits(
    engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    loop = EngineLoop(engine)
    begun = waits(loop)
    engine.script = pause = Pause()
    driver = threads(lambda: said(loop.stream([make("a", 100)])))
    pause.reached.wait()
    waiting = [threads(lambda name=name: said(loop.stream([make(name, 100)]))) for name in ("b", "c")]
    closers = [threads(loop.close) for _ in range(2)]
    for _ in (*waiting, *closers):
        begun.acquire()
    pause.go_on.set()
    for future in (driver, *waiting):
        with pytest.raises(ClosedError, match="the LLM was closed; make a new one"):
            future.result()
    for closer in closers:
        closer.result()
    assert engine.happened.count("step") == 1
    assert not engine.has_work


def test_after_closing_outputs_that_are_there_can_be_read_and_nothing_else_works(
    engine: ScriptedEngine, make: Make
) -> None:
    loop = EngineLoop(engine)
    heard: list[Delta] = []
    ended, cut = loop.stream([make("a", 2)]), loop.stream([make("b", 9)])
    next(ended)
    loop.submit([make("c", 9)], heard.append)
    next(cut)  # and in this step `a` ended
    loop.close()
    loop.close()
    assert said(ended) == [("a", [1, 2])]
    with pytest.raises(ClosedError):
        next(cut)
    assert list(cut) == []
    assert [output.finish_reason for output in heard] == [None, FinishReason.ABORT]
    calls: list[Callable[[], object]] = [
        lambda: next(loop.stream([make("d")])),
        lambda: loop.submit([make("d")], heard.append),
        lambda: loop.wait_until(lambda: False),
        loop.check_integrity,
        loop.start,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="the LLM was closed"):
            call()
    loop.cancel([make("d")])


EXIT = """
import atexit, sys, threading
sys.path.insert(0, {root!r})
from pathlib import Path
from specinfer.engine.loop import EngineLoop
from specinfer.tokenizer import Tokenizer
from tests.scripted_engine import Pause, ScriptedEngine, admitted

engine, stepping = ScriptedEngine(), threading.Event()
engine.script = lambda step: stepping.set()
loop = EngineLoop(engine)
last = []
atexit.register(lambda: print(last[-1].finish_reason, engine.has_work))  # after what `start` registers
loop.start()
loop.submit([admitted(Tokenizer.load(Path({folder!r})), "a", 1 << 19)], last.append)
stepping.wait()
{ending}
"""


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("sys.exit(3)", 3)])
def test_the_interpreter_ends_with_the_thread_in_the_middle_of_its_work(
    tmp_path_factory: pytest.TempPathFactory, ending: str, status: int
) -> None:
    folder = write_tiny_llama(tmp_path_factory.mktemp("exit"), vocab_size=256, tokenizer=True)
    code = EXIT.format(root=str(Path(__file__).parents[3]), folder=str(folder), ending=ending)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "abort False\n", "")
