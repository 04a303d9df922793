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


# The end-to-end tests of `make test`, whatever marks they have.
SMOKES = {
    "a real answer with trees": "real/test_answer.py::test_trees_save_steps_and_leave_the_text",
    "a server with a client": "unit/serve/test_openai_client.py::test_chat_equals_offline[1.0]",
    "a kill": "unit/serve/backend/test_replicas.py"
    "::test_texts_are_those_of_their_seeds_whichever_replica_is_killed",
    "two ranks": "unit/parallel/test_processes.py::test_two_processes_say_what_one_says_and_leave_nothing",
    "a streamed model": "unit/engine/test_offload.py::test_texts_with_every_draft[similar]",
    "a quantized folder": "unit/models/quantized/test_checkpoint.py"
    "::test_quantized_models_equal_floats[gptq]",
    "an adapter": "unit/engine/test_adapters.py::test_a_text_is_the_merged_models[native]",
    "the page": "unit/serve/page/test_smoke.py::test_an_answer_is_read_copied_kept_and_continued",
}


def spread(count: int, chosen: int) -> set[int]:
    """Return `chosen` of `count` places: one in each of as many pieces, at changing places of these.

    So cases of a product of parameters have all values of each.
    """
    step = max(1, count // chosen)
    return {min(count - 1, n * count // chosen + n * 618 * step // 1000 % step) for n in range(chosen)}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the marks `smoke` and `few`, and run long tests first, so that no worker ends with one alone."""
    names = {f"tests/{test}": name for name, test in SMOKES.items()}
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid in names:
            item.add_marker(pytest.mark.smoke(names[item.nodeid]))
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        few = same[0].get_closest_marker("few")
        for place, item in enumerate(same):
            if place not in spread(len(same), *few.args):
                item.add_marker("thorough")
    items.sort(key=lambda item: not any(item.get_closest_marker(mark) for mark in ("slow", "smoke")))


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
