"""Two hosts with a network between them, which are two network namespaces of this one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.machines.two_nodes import MASTER, Nodes, NoNodesError, call, two_nodes
from tests.ranks import INT8, PROMPTS, soon

pytestmark = pytest.mark.slow
# Says what the engine says, then goes on with a long text until a line is read, and how that ends.
ENGINE = """
import json, sys, time
from specinfer import LLM, SamplingParams
from specinfer.errors import PeerLostError
options = json.loads(sys.argv[2])
llm = LLM(sys.argv[1], **options)
greedy = SamplingParams(temperature=0, max_tokens=12)
print(json.dumps([list(out.token_ids) for out in llm.generate(json.loads(sys.argv[3]), greedy)]), flush=True)
if sys.argv[4:]:
    print("says", flush=True)
    heard = time.monotonic()
    try:
        while True:
            llm.generate([[1, 2, 3]], greedy)
            heard = time.monotonic()
    except PeerLostError as error:
        print(json.dumps([time.monotonic() - heard, str(error)]), flush=True)
llm.close()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two namespaces whose interfaces end0 and end1 are ends of one cable."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces are Linux's, and made by ip")
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_nodes())
        except NoNodesError as error:
            pytest.skip(f"no network namespaces can be had: {error}")
        yield found


def begin(namespace: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def line_of(process: subprocess.Popen[str], beginning: str) -> str:
    """The next line that begins so; all of them are in the failure where none does."""
    others = []
    for line in process.stdout:
        if line.startswith(beginning):
            return line
        others.append(line)
    raise AssertionError("".join(others))


def test_a_cable_is_cut(folder: Path, plain: list[list[int]], nodes: Nodes, tmp_path: Path) -> None:
    """Ranks of a layer and stages, in two engines at once."""
    here, there, greedy = nodes.here, nodes.there, plain[: len(PROMPTS)]
    shutil.copytree(folder / "target", tmp_path / "there")
    masters = {"tensor_parallel": MASTER, "pipeline_parallel": MASTER[:-1] + "1"}
    with ExitStack() as stack:

        def begun(namespace: str, *command: str) -> subprocess.Popen[str]:
            one = stack.enter_context(begin(namespace, *command))
            stack.callback(one.kill)
            return one

        def engines(*more: str) -> list[subprocess.Popen[str]]:
            found = []
            for layout, master in masters.items():
                options = {**INT8, layout: 2, "master": master, "key_file": nodes.key_file}
                given = (str(folder / "target"), json.dumps(options), json.dumps(PROMPTS), *more)
                found.append(begun(here, "-c", ENGINE, *given))
            return found

        follow = ("-m", "specinfer", "follow", str(tmp_path / "there"), "--rank", "1")
        key = ("--key-file", nodes.key_file)
        following = [begun(there, *follow, *key, "--master", master) for master in masters.values()]
        for one, master in zip(following, masters.values(), strict=True):
            line_of(one, f"specinfer follow: rank 1: waits for an engine at {master}")
        running = engines("on")
        for engine in running:
            assert json.loads(line_of(engine, "[[")) == greedy
            line_of(engine, "says")
        time.sleep(0.5)
        call("ip", "-n", there, "link", "set", "end1", "down")
        cut = time.monotonic()
        for engine in running:
            seconds, words = json.loads(line_of(engine, "["))
            assert seconds < 12.0
            assert "rank 1 (on 10.213.9.2)" in words
            engine.wait(10)
        for one in following:
            line_of(one, "specinfer follow: rank 1: ")  # follows
            line = line_of(one, "specinfer follow: rank 1: ")
            assert "rank was lost" in line or "engine has ended" in line
        assert time.monotonic() - cut < 15.0
        call("ip", "-n", there, "link", "set", "end1", "up")
        for engine in engines():
            assert json.loads(line_of(engine, "[[")) == greedy
            engine.wait(30)
        for one in following:
            one.terminate()
            assert one.wait(5) == 143
    listed = ["ip", "netns", "pids", there]
    assert soon(lambda: not subprocess.run(listed, capture_output=True, check=True).stdout)
