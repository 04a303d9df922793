"""Shared by all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from specinfer.files import cache_dir


def pytest_configure(config: pytest.Config) -> None:
    """The same examples in every run, on every machine: a test that passed passes again.

    Ctrl-C is heard even where a shell has started the run in the background, and has it ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process only deals out tests, and the others wait for it to start
    import hypothesis

    hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first: of several processes none is left with one while the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from more threads, and lose much when the other cores are busy.

    An engine sets its own number for the process: each test begins with one again.
    """
    import torch  # here, as the process that deals out tests does without

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a policy learns in one test is not known in the next one, nor in the user's cache."""
    monkeypatch.setattr("specinfer.speculate.policy.memory.LEAST", 1 << 60)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, but for compiled kernels, which take most of a minute to make."""
    own, kernels = tmp_path / "cache", cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    own.mkdir(mode=0o700)
    (own / "kernels").symlink_to(kernels)
    monkeypatch.setenv("SPECINFER_CACHE", str(own))
    return own
