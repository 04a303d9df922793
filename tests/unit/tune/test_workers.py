"""Parts of a step at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from specinfer.tune.workers import Workers


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Torch's own, set back behind the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "most", "workers", "each"),
    [(1, 4, 1, 1), (2, 4, 2, 1), (4, 4, 4, 1), (9, 4, 4, 2), (4, 1, 1, 4)],
)
def test_cores_are_shared_out(cores: int, most: int, workers: int, each: int) -> None:
    torch.set_num_threads(cores)
    shared = Workers(most)
    assert shared.count == workers
    found = shared.map(lambda part: (part, torch.get_num_threads()), [3, 1, 2])
    assert found == [(3, each), (1, each), (2, each)]
    assert torch.get_num_threads() == cores
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [cores], "a thread that computes for the first time"


def test_parts_are_computed_at_the_same_time() -> None:
    torch.set_num_threads(2)
    both = threading.Barrier(2, timeout=30)
    assert sorted(Workers(2).map(lambda part: both.wait(), [0, 1])) == [0, 1]


@pytest.mark.parametrize("cores", [1, 2])
def test_a_part_that_fails_ends_the_step(cores: int) -> None:
    torch.set_num_threads(cores)
    workers = Workers(2)

    def divided(part: int) -> float:
        return 1 / part

    with pytest.raises(ZeroDivisionError):
        workers.map(divided, [1, 0])
    assert torch.get_num_threads() == cores
    assert workers.map(divided, [1, 2]) == [1.0, 0.5]
