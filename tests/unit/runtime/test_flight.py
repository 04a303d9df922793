"""Answers of a pass; its logits are computed in blocks, few of them in memory."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from specinfer.processors.changes import NOTHING, bans
from specinfer.runtime import flight as flight_module
from specinfer.runtime.flight import Flight, inference
from specinfer.sampling_params import SamplingParams
from specinfer.verify.scan import NUMPY, choice, sample_request

VOCAB = 300
REQUESTS = [
    sample_request(SamplingParams(temperature=0), 1, 5),
    sample_request(SamplingParams(temperature=0.8), 2, 9),
    sample_request(SamplingParams(temperature=1.2, top_p=0.9, top_k=40), 3, 9),
]


class Head:
    """An output layer that notes how many rows it is given, time after time."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.weight_DV = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1), dtype=dtype)
        self.passes: list[int] = []

    def __call__(self, hidden_RD: Tensor) -> Tensor:
        self.passes.append(len(hidden_RD))
        return self.rows(hidden_RD)

    def rows(self, hidden_RD: Tensor) -> Tensor:
        # A row at a time: so its bits do not depend on the block.
        rows = [hidden_RD[i : i + 1] @ self.weight_DV for i in range(len(hidden_RD))]
        return torch.cat(rows) if rows else hidden_RD.new_zeros(0, VOCAB)


def hidden(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_that_of_the_whole(dtype: torch.dtype) -> None:
    head, hidden_RD = Head(dtype), hidden(5, dtype)
    flight = Flight(hidden_RD, head, VOCAB, NUMPY)
    want = head.rows(hidden_RD).float().tolist()
    assert [flight.row(i).tolist() for i in range(5)] == want
    assert flight.row(3).dtype == np.float32
    for wrong in (5, -1):
        with pytest.raises(IndexError, match=f"got rows {wrong} .. {wrong} of a pass with logits of 5"):
            flight.row(wrong)
    assert head.passes == [5]


def test_what_is_made_with_the_pass() -> None:
    for rows, likelihoods, passes in (
        (64, lambda: pytest.fail("asked without need"), [64]),
        (200, None, [200]),  # all will be requested
        (200, lambda: [1.0] * 200, [64]),
    ):
        head = Head()
        Flight(hidden(rows), head, VOCAB, NUMPY, likelihoods=likelihoods)
        assert head.passes == passes, (rows, passes)


def test_the_likeliest_rows_come_first_and_the_others_when_asked_for() -> None:
    head, hidden_RD = Head(), hidden(200)
    likely = [float(i % 2) for i in range(200)]  # 100 of them
    flight = Flight(hidden_RD, head, VOCAB, NUMPY, likelihoods=lambda: likely)
    want = head.rows(hidden_RD).numpy()
    for row in range(1, 128, 2):
        assert flight.row(row).tolist() == want[row].tolist()
    assert head.passes == [64]
    assert flight.row(0).tolist() == want[0].tolist()  # and with it the next 63: 129, 131, ..., 0's likes
    assert flight.row(199).tolist() == want[199].tolist()
    assert head.passes == [64, 64]


def test_answers_are_those_of_the_rows_wherever_they_are() -> None:
    head, hidden_RD = Head(), hidden(150)
    want = head.rows(hidden_RD).numpy()
    rng = np.random.default_rng(0)
    flight = Flight(hidden_RD, head, VOCAB, NUMPY, likelihoods=lambda: rng.random(150).tolist())
    for size in (1, 7, 150, 300):
        rows = rng.integers(0, 150, size).tolist()  # some of them twice
        requests = [REQUESTS[i % len(REQUESTS)] for i in range(size)]
        as_array = np.array(requests, dtype=flight_module.SAMPLE_REQUEST)
        assert flight.choices(rows, requests) == [
            choice(want[r], a, NUMPY) for r, a in zip(rows, as_array, strict=True)
        ]
        changes = [NOTHING if r % 3 else bans([int(want[r].argmax()), r]) for r in rows]
        changed = [want[r].copy() for r in rows]
        for row, own in zip(changed, changes, strict=True):
            own.apply(row)
        assert flight.choices(rows, requests, changes) == [
            choice(row, a, NUMPY) for row, a in zip(changed, as_array, strict=True)
        ]
        assert flight.choices(rows, requests, [NOTHING] * size) == flight.choices(rows, requests)
        found = flight.likeliest(rows, 3, [0.5 + r % 3 for r in rows])
        assert found.ids.tolist() == [NUMPY.most_likely(want[r], 3).tolist() for r in rows]
        assert found.values.tolist() == [
            want[r][ids].tolist() for r, ids in zip(rows, found.ids, strict=True)
        ]
        masses = [NUMPY.mass(want[r], float(want[r].max()), 0.5 + r % 3) for r in rows]
        assert found.masses.tolist() == masses
        assert found.found.tolist() == [3] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_nodes_of_a_large_vocabulary_take_32_mebibytes(dtype: torch.dtype) -> None:
    vocab = 151_936
    hidden_RD = torch.zeros(1024, 1, dtype=dtype)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []  # bytes, whenever a block is made

    def head(rows: Tensor) -> Tensor:
        logits = torch.zeros(len(rows), vocab, dtype=dtype)
        made.append(weakref.ref(logits))
        alive.append(sum(tensor.nbytes for ref in made if (tensor := ref()) is not None))
        return logits

    flight = Flight(hidden_RD, head, vocab, NUMPY, likelihoods=lambda: [1.0] * 1024)
    assert len(made) == 1
    for first in range(0, 1024, 128):  # a walk that asks for everything
        flight.row(first)
        flight.choices(list(range(first, first + 128)), REQUESTS[:1] * 128)
    assert len(made) >= 1024 * vocab * dtype.itemsize / flight_module.MAX_BYTES
    assert max(alive) <= flight_module.MAX_BYTES == 32 * 2**20


def test_nothing_computed_inside_has_a_gradient_and_the_mode_ends_with_the_call() -> None:
    weight = torch.ones(2, requires_grad=True)

    @inference
    def doubled(x: Tensor, *, times: int) -> Tensor:
        """Return its output."""
        return times * x

    made = doubled(weight, times=2)
    assert made.tolist() == [2.0, 2.0]
    assert not made.requires_grad
    assert not torch.is_inference_mode_enabled()
    assert (2 * weight).requires_grad
    assert doubled.__doc__ == "Return its output."
