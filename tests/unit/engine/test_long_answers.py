"""The cost of a step outside of the model does not depend on the length of the answer."""

from __future__ import annotations

import asyncio
import pickle
import random
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specinfer import SamplingParams
from specinfer.plan import StepPlan
from specinfer.request import Delta
from specinfer.runtime.batch import logit_rows
from specinfer.runtime.runner import Move
from specinfer.serve.backend.ledger import Ledger, OpenWork, Waiter
from specinfer.serve.backend.work import Work
from specinfer.tree import TokenTree
from specinfer.verify.scan import NUMPY, Scan
from tests.engines import engine_of, write_tiny

pytestmark = pytest.mark.thorough

TOKENS = 32_000
STEPS = 1000  # steps whose time is compared
WEIGHED = 100  # steps whose memory is compared
PROMPT = [ord(letter) for letter in "say it again"]
SLOWER = 2.0  # maximum ratio on a shared machine
MORE = 16 << 10  # bytes by which a step may exceed the first ones for a while: half of the text


class Choices:
    """A Flight that knows the token at each row, and has no logits."""

    vocab = 256
    scan: Scan = NUMPY

    def __init__(self, chosen: Sequence[int]) -> None:
        self.chosen = chosen

    def choices(self, rows: Sequence[int], *given: Any) -> list[int]:
        return [self.chosen[row] for row in rows]


class Recited:
    """An Executor whose target says one text, whatever it has read."""

    target = SimpleNamespace(model=SimpleNamespace(stream=None, group=None))

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def launch(self, plan: StepPlan, trees: Sequence[TokenTree], taps: Sequence[int] = ()) -> Choices:
        rows = logit_rows(plan, trees)
        chosen = [0] * rows.count
        for entry, tree, root in zip(plan.tree_entries, trees, rows.roots, strict=True):
            for node, depth in enumerate(tree.depths()):
                chosen[root + node] = self.text[min(entry.end + depth, len(self.text) - 1)]
        return Choices(chosen)

    def close(self) -> None:
        pass

    def move(self, moves: Sequence[Move]) -> None:
        pass


def phrases(count: int) -> list[int]:
    """Return `count` letters in repeated phrases, so that lookup has guesses."""
    chance = random.Random(5)
    known = [[chance.choice(b"abcdefgh \n") for _ in range(30)] for _ in range(300)]
    text: list[int] = []
    while len(text) < count:
        text += chance.choice(known)
    return text[:count]


def test_the_last_steps_of_a_long_answer_cost_what_its_first_do(tmp_path: Path) -> None:
    text = phrases(TOKENS)
    tiny = write_tiny(tmp_path, vocab_size=256, max_context=len(PROMPT) + TOKENS + 64)
    options: dict[str, Any] = {"lookup": True, "kv_cache_memory": 1 << 27, "block_size": 64}
    params = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        stop=("abcdefgh abcdefgh", "\n\n\n\n\n\n\n\n"),
        presence_penalty=0.5,
        bad_words=("\x01\x02",),
        ignore_eos=True,
    )
    with tiny.llm(**options) as llm:
        engine = engine_of(llm)
        engine._executor = cast(Any, Recited([*PROMPT, *text]))
        ledger = Ledger("coupled")

        async def answer() -> tuple[list[float], list[int], str, list[int]]:
            waiter = Waiter()
            live = OpenWork(Work("a", tuple(PROMPT), params), waiter)
            ledger.add(live)
            ledger.assign(live, 0)
            seconds: list[float] = []
            taken: list[int] = []
            heard: list[str] = []
            admitted = llm.intake.completion(PROMPT, params, request_id="a")
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            before: int | None = None  # traced memory when the last step ended
            began = 0.0

            def receive(delta: Delta) -> None:
                """Process a delta on its way to a stream, here or in a server, and measure the step."""
                nonlocal before, began
                admitted.transcript.output(delta.text)
                ledger.receive(0, "", [pickle.loads(pickle.dumps(delta))])
                pending, waiter.pending = waiter.pending, {}
                heard.append(Delta.joined(pending["a"]).text)
                if before is not None:
                    taken.append(tracemalloc.get_traced_memory()[1] - before)
                    tracemalloc.stop()
                elif began:
                    seconds.append(time.thread_time() - began)
                before = None
                if len(live.output_ids) > TOKENS - 10 * WEIGHED or len(heard) < WEIGHED:
                    tracemalloc.start()
                    before, _ = tracemalloc.get_traced_memory()
                began = time.thread_time()
                if delta.finished:
                    ended.get_loop().call_soon_threadsafe(ended.set_result, None)

            llm.loop.submit([admitted], receive)
            await ended
            tracemalloc.stop()
            return seconds, taken, "".join(heard), live.output_ids

        seconds, taken, heard, said = asyncio.run(answer())
    assert heard == bytes(text).decode()
    assert said == text[: len(said)]
    assert len(seconds) > 3 * STEPS
    assert len(taken) > 2 * WEIGHED
    # Medians: now and then a list that grows is copied, or the machine does something else.
    assert median(taken[WEIGHED:]) < median(taken[:WEIGHED]) + MORE
    assert median(seconds[-STEPS:]) < SLOWER * median(seconds[:STEPS])
