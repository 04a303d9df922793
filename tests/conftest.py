"""Fixtures and hooks of all tests."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specinfer.files import cache_dir
from tests.fork_server import AVAILABLE, forking_popen


def pytest_configure(config: pytest.Config) -> None:
    """Make hypothesis deterministic: the same examples in every run, on every machine.

    Restore Ctrl-C, which shells ignore for background jobs.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only distributes tests, and the workers wait for it to start
    import hypothesis

    hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first, so that no worker ends with one while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Set one thread: tiny tensors gain nothing from more, and lose much when other cores are busy.

    An engine sets the number of threads of the process, so each test resets it.
    """
    import torch  # imported here, as the distributing process does not need it

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep learned policy state out of other tests and of the user's cache."""
    monkeypatch.setattr("specinfer.speculate.policy.memory.MIN_OUTCOMES", 1 << 60)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary cache, except for compiled kernels, which take most of a minute to build."""
    own, kernels = tmp_path / "cache", cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    own.mkdir(mode=0o700)
    (own / "kernels").symlink_to(kernels)
    monkeypatch.setenv("SPECINFER_CACHE", str(own))
    return own


@pytest.fixture(scope="session")
def fork_server() -> Iterator[type[subprocess.Popen[Any]]]:
    """One fork server for the process's tests, as a replacement of Popen."""
    if not AVAILABLE:
        yield subprocess.Popen
        return
    with forking_popen() as replacement:
        yield replacement


@pytest.fixture(scope="module")
def forked(fork_server: type[subprocess.Popen[Any]]) -> Iterator[None]:
    """Fork the processes of a module's tests instead of importing PyTorch in each (tests/fork_server.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", fork_server)
        yield
