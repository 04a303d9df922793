"""`specinfer follow` and a server with --master, as far as they need no engine."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from specinfer.cli import follow as command
from specinfer.cli.follow import follow
from specinfer.cli.serve import serve
from specinfer.errors import ConfigError, ModelNotFoundError
from specinfer.option import name_of_address, parse_address
from specinfer.transport.link import Link


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file with a key."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("a key of tests alone")
    return path


class Knocked(Exception):
    """Stands for an engine."""


def knocks(monkeypatch: pytest.MonkeyPatch, *words: str, **variables: str) -> object:
    """The arguments with which a follower joins a group."""
    asked: list[object] = []

    def join_group(*given: object) -> None:
        asked.append(given[:3])
        raise Knocked

    monkeypatch.setattr(command, "join_group", join_group)
    found = CliRunner().invoke(follow, words, env=variables)
    return asked[0] if asked else found.exception if found.exit_code == 1 else found.output


def test_options_override_the_environment(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setattr("specinfer.hub.resolve", lambda *_, **__: type("Files", (), {"path": model}))
    arguments = (str(model), "--key-file", str(key))
    secret = b"a key of tests alone"
    set_by = {"RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert knocks(monkeypatch, *arguments, **set_by) == (("10.0.0.1", 29500), secret, 3)
    own = (*arguments, "--rank", "1", "--master", "[::1]:7")
    assert knocks(monkeypatch, *own, **set_by) == (("::1", 7), secret, 1)
    six = {**set_by, "MASTER_ADDR": "fe80::1"}
    assert knocks(monkeypatch, *arguments, **six) == (("fe80::1", 29500), secret, 3)
    assert "Missing option '--rank'" in str(knocks(monkeypatch, *arguments, "--master", "host:1"))
    assert "the master is missing" in str(knocks(monkeypatch, *arguments, "--rank", "1", MASTER_ADDR="host"))
    assert "0 is not in the range x>=1" in str(knocks(monkeypatch, *arguments, **{**set_by, "RANK": "0"}))
    found = knocks(monkeypatch, *arguments, "--rank", "1", "--master", "host")
    assert isinstance(found, ConfigError)
    key.chmod(0o644)
    assert isinstance(knocks(monkeypatch, *own), ConfigError)


def test_a_missing_model_is_refused_before_waiting_for_an_engine(key: Path) -> None:
    words = ["./none", "--rank", "1", "--master", "host:1", "--key-file", str(key)]
    assert isinstance(CliRunner().invoke(follow, words).exception, ModelNotFoundError)


def test_a_process_that_cannot_start_is_told_and_it_waits(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.hub.resolve", lambda *_, **__: type("Files", (), {"path": key}))
    ends = [socket.socketpair() for _ in range(2)]
    links = [Link(ours) for ours, _ in ends]

    def join_group(*_: object) -> Link:
        if not links:
            raise Knocked
        return links.pop()

    def spawn(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(command, "join_group", join_group)
    monkeypatch.setattr(command, "spawn", spawn)
    words = [str(key), "--rank", "1", "--master", "[::1]:7", "--key-file", str(key)]
    found = CliRunner().invoke(follow, words)
    assert isinstance(found.exception, Knocked)
    assert found.stderr.count("rank 1: follows the engine at [::1]:7\n") == 2
    assert found.stderr.count("rank 1: its process cannot be started: [Errno 11] Resource temporarily") == 2
    for _, its in ends:
        assert its.recv(1) == b""
        its.close()


def test_an_address_is_printed_in_the_form_that_is_read() -> None:
    for address in (("::1", 7), ("10.0.0.1", 29500), ("host", 1)):
        assert parse_address("master", name_of_address(address)) == address


def test_replicas_have_no_ranks_on_other_hosts() -> None:
    words = ["m", "--quantization", "int8", "--tensor-parallel", "2", "--master", "h:1", "--key-file", "k"]
    found = CliRunner().invoke(serve, [*words, "--replicas", "2"]).exception
    assert isinstance(found, ConfigError)
    assert str(found).startswith("replicas is 2 with master; each replica's processes are of this host")
