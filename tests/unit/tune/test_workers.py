"""Parts of a step at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from specinfer.tune.trainer import Workers


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Torch's own, set back behind the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "most", "workers", "shares"),
    [
        (1, 4, 1, [1, 1, 1]),
        (2, 4, 2, [1, 1, 1]),
        (4, 4, 4, [2, 1, 1]),
        (8, 4, 4, [3, 3, 2]),
        (4, 1, 1, [4, 4, 4]),
    ],
)
def test_cores_are_shared_out(cores: int, most: int, workers: int, shares: list[int]) -> None:
    torch.set_num_threads(cores)
    shared = Workers(most)
    assert shared.count == workers
    found = shared.map(lambda part: (part, torch.get_num_threads()), ["a", "b", "c"])
    assert found == [*zip("abc", shares, strict=True)]
    assert shared.map(lambda part: torch.get_num_threads(), ["a"]) == [cores]
    assert torch.get_num_threads() == cores
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [cores], "a thread that computes for the first time"


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


def test_what_fails_waits_for_the_others() -> None:
    torch.set_num_threads(2)
    ended = list[str]()

    def work(part: str) -> None:
        if part == "fails":
            raise ValueError(part)
        time.sleep(0.2)
        ended.append(part)

    with pytest.raises(ValueError, match="fails"):
        Workers(2).map(work, ["fails", "slow"])
    assert ended == ["slow"]
