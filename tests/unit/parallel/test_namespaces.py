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

from benchmarks.machines.two_nodes import MASTER, Nodes, call, two_nodes
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
        except SystemExit as error:
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
    assert process.stdout is not None
    others = []
    for line in process.stdout:
        if line.startswith(beginning):
            return line
        others.append(line)
    raise AssertionError("".join(others))


@pytest.mark.parametrize("stages", [1, 2])
def test_texts_are_those_of_one_host_until_the_cable_is_cut(
    folder: Path, cache: None, nodes: Nodes, tmp_path: Path, stages: int
) -> None:
    ranks = {"pipeline_parallel": 2} if stages == 2 else {"tensor_parallel": 2}
    options = {**INT8, **ranks, "master": MASTER, "key_file": nodes.key_file}
    shutil.copytree(folder / "target", tmp_path / "there")
    prompts, here, there = json.dumps(PROMPTS), nodes.here, nodes.there
    with begin(here, "-c", ENGINE, str(folder / "target"), json.dumps(INT8), prompts) as one:
        want = line_of(one, "[[")
    follow = ("-m", "specinfer", "follow", str(tmp_path / "there"), "--rank", "1", "--master", MASTER)
    follower = begin(there, *follow, "--key-file", nodes.key_file)
    try:
        line_of(follower, f"specinfer follow: rank 1: waits for an engine at {MASTER}")
        with begin(here, "-c", ENGINE, str(folder / "target"), json.dumps(options), prompts, "on") as engine:
            assert line_of(engine, "[[") == want
            line_of(engine, "says")
            time.sleep(0.5)
            call("ip", "-n", there, "link", "set", "end1", "down")
            cut = time.monotonic()
            seconds, words = json.loads(line_of(engine, "["))
            assert seconds < 11.0
            assert "rank 1 (on 10.213.9.2)" in words
        line_of(follower, "specinfer follow: rank 1: ")  # follows
        told = line_of(follower, "specinfer follow: rank 1: ")
        assert "rank was lost" in told or "engine has ended" in told
        assert time.monotonic() - cut < 15.0
        call("ip", "-n", there, "link", "set", "end1", "up")
        with begin(here, "-c", ENGINE, str(folder / "target"), json.dumps(options), prompts) as engine:
            assert line_of(engine, "[[") == want
        follower.terminate()
        assert follower.wait(5) == 143
    finally:
        follower.kill()
    listed = ["ip", "netns", "pids", there]
    assert soon(lambda: not subprocess.run(listed, capture_output=True, check=True).stdout)
