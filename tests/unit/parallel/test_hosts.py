"""Ranks of other hosts, which are processes of this one here that are reached over TCP alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer import LLM
from specinfer.engine import memory
from specinfer.errors import CapacityError, ConfigError, ModelError, PeerLostError
from specinfer.kernels.choice import TORCH
from specinfer.models.open_model import open_model
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.parallel import launch, listener
from tests.ranks import GREEDY, INT8, PROMPTS, await_no_followers, followers, soon, token_ids_of

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.thorough]


class Hosts:
    """Followers, each as on a separate host, and the options of their engine."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        # The bound socket reserves the port, and no program listens on it.
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port = self._kept.getsockname()[1]
        self.master = f"127.0.0.1:{self.port}"
        self.key = tmp_path / "key"
        self.key.touch(0o600)
        self.key.write_text("a key that is long enough\n")
        self.options: dict[str, Any] = {
            **INT8,
            "tensor_parallel": 2,
            "master": self.master,
            "key_file": str(self.key),
        }
        # The same files elsewhere, and newer.
        self.model = shutil.copytree(folder / "target", tmp_path / "there", copy_function=shutil.copyfile)
        self._log = tmp_path / "log"
        self.begun: list[subprocess.Popen[bytes]] = []

    def follow(self, rank: int = 1, count: int = 1, **more: Any) -> subprocess.Popen[bytes]:
        """Start a follower, or several that share memory."""
        given = {"model": self.model, "key": self.key, **more}
        command = [sys.executable, "-m", "specinfer", "follow", str(given["model"]), "--rank", str(rank)]
        command += ["--master", self.master, "--key-file", str(given["key"]), "--local-ranks", str(count)]
        with self._log.open("ab") as log:
            self.begun.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.begun[-1]

    def says(self) -> str:
        """Return the log of all followers so far."""
        return self._log.read_text() if self._log.exists() else ""

    def workers(self) -> list[psutil.Process]:
        """The processes that compute, in the order in which their followers started."""
        found: list[psutil.Process] = []
        for one in self.begun:
            with suppress(psutil.NoSuchProcess):
                found += followers(one.pid)
        return found

    def close(self) -> None:
        """End them, and see that nothing is left."""
        for one in self.begun:
            one.terminate()
        for one in self.begun:
            one.wait(5)
        with socket.create_server(("127.0.0.1", self.port)):
            self._kept.close()


@pytest.fixture
def hosts(folder: Path, cache: None, tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(folder, tmp_path)
    yield hosts
    print(hosts.says())
    hosts.close()


# About 5 s: a follower process serves two engines.
def test_texts_are_the_same_and_the_follower_serves_the_next_engine(
    folder: Path, plain: list[list[int]], hosts: Hosts, tmp_path: Path
) -> None:
    first, second, three = hosts.follow(), hosts.follow(2), {**hosts.options, "tensor_parallel": 3}
    for _ in range(2):  # the same followers, the same layout
        with LLM(folder / "target", **three) as llm:
            assert token_ids_of(llm) == plain
            assert len(hosts.workers()) == 2
        assert soon(lambda: not hosts.workers())
    assert first.poll() is None
    first.terminate()
    assert first.wait(5) == 128 + signal.SIGTERM
    with LLM(folder / "target", **three, local_ranks=2) as llm:
        assert token_ids_of(llm) == plain
        assert len(hosts.workers()) == 1
        second.send_signal(signal.SIGINT)
        assert second.wait(5) == 130
        with pytest.raises(PeerLostError, match=r"rank 2 \(on 127\.0\.0\.1\) has closed its link"):
            token_ids_of(llm)
    assert hosts.says().count("follows the engine at 127.0.0.1") == 5
    await_no_followers()


def test_whoever_lacks_the_key_or_the_rank_is_refused_and_the_right_one_is_waited_for(
    folder: Path, plain: list[list[int]], hosts: Hosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text("another key, as long as this")
    refused = [hosts.follow(key=other), hosts.follow(key=other), hosts.follow(2)]
    found: list[object] = []

    def run() -> None:
        with LLM(folder / "target", **hosts.options) as llm:
            found.extend(token_ids_of(llm))

    engine = threading.Thread(target=run)
    engine.start()
    assert [one.wait(60) for one in refused] == [2, 2, 2]
    hosts.follow()
    engine.join(60)
    assert found == plain
    assert hosts.says().count(f"specinfer: error: {hosts.master} has another key") == 2
    assert "rank 2 is not a follower on another host: 1" in hosts.says()
    strangers = [line for line in caplog.messages if line.endswith("it has not proved the key")]
    assert len(strangers) == 1


def test_a_follower_that_does_not_come_is_named_and_the_others_are_let_go(
    folder: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_JOINING", 1.5)
    hosts.follow(2)
    assert soon(lambda: "waits for an engine" in hosts.says())
    with pytest.raises(PeerLostError, match=rf"rank 3 did not connect to {hosts.master} within") as kept:
        LLM(folder / "target", **{**hosts.options, "tensor_parallel": 4, "local_ranks": 2})
    # Sooner than a follower notices that heartbeats are missing, and while the error's frames are kept.
    assert soon(lambda: "the engine has ended" in hosts.says() and not hosts.workers(), listener.SILENCE - 2)
    assert kept.tb is not None


def test_followers_of_others_are_refused(folder: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(hosts.model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] += 0.5
    save_file(tensors, hosts.model / "model.safetensors")
    hosts.follow()
    with pytest.raises(ModelError, match="rank 1 differs from rank 0 in model file; all ranks must run the"):
        LLM(folder / "target", **hosts.options)
    monkeypatch.setattr(launch, "VERSION", "0.0.1")
    with pytest.raises(
        ModelError, match=r"rank 1 cannot load the model: this rank has version .*, rank 0 has 0\.0\.1"
    ):
        LLM(folder / "target", **hosts.options)
    assert "cannot load the model: this rank has version" in hosts.says()


def test_a_host_has_memory_for_its_own_ranks_alone(
    folder: Path, plain: list[list[int]], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # From there to here both ends have other addresses, as on two hosts.
    hosts.master = hosts.options["master"] = f"127.0.0.2:{hosts.port}"
    hosts.follow()
    whole = open_model(folder / "target")
    size = estimate_bytes(whole, torch.bfloat16, TORCH, "int8")
    monkeypatch.setattr(memory, "process_bytes", lambda: 0)
    monkeypatch.setattr(memory, "allowed_bytes", lambda *_: size - 1)
    with pytest.raises(CapacityError, match="the weights need"):
        LLM(folder / "target", **INT8)
    with LLM(folder / "target", **hosts.options) as llm:
        assert token_ids_of(llm) == plain
        here, there = llm.models.hosts
        assert (here.parts, there.address, len(there.parts)) == ([], "127.0.0.1", 1)
        assert there.free > 1 << 20


def test_a_killed_follower_is_known_at_once(folder: Path, plain: list[list[int]], hosts: Hosts) -> None:
    hosts.follow()
    hosts.follow(2)
    options = {**hosts.options, "tensor_parallel": 3}
    with LLM(folder / "target", **options) as llm:
        second = hosts.workers()[1]
        llm.on_step = lambda _: os.kill(second.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 2 \(on 127.0.0.1\) has closed its link"):
            llm.generate(PROMPTS, GREEDY)
        assert time.monotonic() - began < 8.0  # and not 10 s
    with LLM(folder / "target", **options) as llm:  # it is there again
        assert token_ids_of(llm) == plain
        group, heard = llm.models.target.group, list[PeerLostError]()
        group.watch(heard.append)
        hosts.workers()[0].kill()
        assert soon(lambda: heard)
        assert heard[0].rank == 1


def test_a_message_that_does_not_fit_ends_the_follower_and_nothing_is_run(folder: Path, hosts: Hosts) -> None:
    hosts.follow()
    with LLM(folder / "target", **hosts.options) as llm:
        llm.generate(PROMPTS[:1], GREEDY)
        group = llm.models.target.group
        os.write(group._links[0].number, b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(PeerLostError, match=r"rank 1 .* has closed its link"):
            llm.generate(PROMPTS[:1], GREEDY)
        assert soon(lambda: "its process has ended with status 70" in hosts.says())
    assert "ValueError" in hosts.says()
    assert "in _run" not in hosts.says()


def test_what_does_not_go_with_hosts_is_refused(folder: Path, hosts: Hosts) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"key_file": None}, "master is '127.0.0.1:.*' without key_file; set key_file to the key's path"),
        ({"master": None}, "key_file is '.*' without master; set master, or leave key_file out"),
        ({"master": None, "key_file": None, "local_ranks": 1}, "local_ranks is 1 without master"),
        ({"master": "127.0.0.1"}, "master is '127.0.0.1'; allowed: HOST:PORT"),
        ({"master": "::1:80"}, "master is '::1:80'; allowed: HOST:PORT"),
        ({"master": "host:0"}, "master is 'host:0'; allowed: HOST:PORT"),
        ({"local_ranks": 2}, "master is '127.0.0.1:.*', but all 2 ranks run on this host; raise"),
        ({"tensor_parallel": 1}, "master is .*, but all 1 ranks run on this host"),
        ({"key_file": "/no/such/file"}, "cannot read the key in /no/such/file: No such file or directory"),
    ]
    for options, line in cases:
        with pytest.raises(ConfigError, match=line):
            pytest.fail(f"{options}: {LLM(folder / 'target', **{**hosts.options, **options})}")
