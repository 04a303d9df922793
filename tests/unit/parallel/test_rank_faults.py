"""Followers that fail while rank 0 loads its model, and a rank 0 that does not answer its followers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM
from specinfer.engine import ranks
from specinfer.errors import ModelError, PeerLostError
from specinfer.models.language_model import PassOutput
from specinfer.progress import Progress
from tests.ranks import GREEDY, INT8, PROMPTS, await_no_followers, followers, soon

pytestmark = pytest.mark.thorough

# A follower's process on a host that has 1,000 bytes of free memory.
POOR = "from specinfer.parallel import follower; follower.free_bytes = lambda _: 1000; follower.main()"


def kill_last() -> int:
    """Kill the last follower, wait for its end, and return its process's id."""
    last = max(followers(), key=lambda one: (one.create_time(), one.pid))
    last.kill()
    assert soon(lambda: last.pid not in [one.pid for one in followers()])
    return last.pid


class Killer(Progress):
    """Kills the last follower when rank 0 begins to load its model."""

    def __init__(self) -> None:
        self.done = 0
        self.killed = 0

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        if label.startswith("loading"):
            self.killed = kill_last()

    def advance(self, n: int) -> None:
        self.done += n


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [{"tensor_parallel": 3}, {"pipeline_parallel": 2}])
def test_a_follower_ends_at_the_start(folder: Path, plain: list[list[int]], layout: dict[str, int]) -> None:
    killer, last = Killer(), max(layout.values()) - 1
    with pytest.raises(PeerLostError) as caught:
        LLM(folder / "target", **INT8, **layout, progress=killer)
    assert str(caught.value) == (
        f"rank {last} (process {killer.killed}) has ended with status -9 before it was ready; start it again"
    )
    assert caught.value.rank == last
    assert killer.done == 0
    await_no_followers()


def test_the_start_ends_when_a_follower_lacks_memory_for_its_weights(
    folder: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def begin_poor(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        begun.append(begin([sys.executable, "-c", POOR, command[-1]], **how))
        return begun[-1]

    monkeypatch.setattr("specinfer.parallel.processes.subprocess.Popen", begin_poor)
    line = r"^rank 1 cannot load the model: the weights need .*, but 0\.00 MiB of memory are free$"
    with pytest.raises(ModelError, match=line):
        LLM(folder / "target", tensor_parallel=2, **INT8)
    assert len(begun) == 1
    assert soon(lambda: begun[0].returncode is not None)


def test_a_rank_0_that_is_late(folder: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers end at their time limit while rank 0 is late, as after SIGSTOP and SIGCONT."""
    monkeypatch.setattr(ranks, "LIMIT", 5.0)  # seconds of an exchange
    with LLM(folder / "target", tensor_parallel=2, **INT8) as llm:
        target = llm.models.target
        read = target.read

        def read_late(*given: Any, **how: Any) -> PassOutput:
            assert soon(lambda: not followers())
            return read(*given, **how)

        monkeypatch.setattr(target, "read", read_late)
        with pytest.raises(PeerLostError) as caught:
            llm.generate(PROMPTS, GREEDY)
    assert str(caught.value) == (
        f"rank 0 (process {os.getpid()}) did not answer the other ranks in time; the group is shut down: "
        "start the model again"
    )
    assert caught.value.rank == 0
    await_no_followers()
