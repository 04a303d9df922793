"""PyTorch's recurrent blocks: the rows, states, copies and rings of the native ones, within rounding."""

from __future__ import annotations

import torch

from specinfer.kernels.ops import Ops
from tests.kernels import kernels
from tests.unit.kernels.recurrent import Part, States, inputs
from tests.unit.kernels.test_recurrence import BLOCKS, TEXT, TREE, path


def test_a_text_its_tree_a_replay_and_another_request() -> None:
    for name, parts in BLOCKS.items():
        text = inputs(parts, TEXT, torch.float32)
        found = []
        for ops in (Ops(), kernels("native").ops):
            states = States(ops, parts)  # type: ignore[arg-type]
            made = states.run(Part(text, [*range(9), *range(20, 29)], 0, parents=TREE, saves=[(4, 3)]))
            states.accept(0, 9, path(8)[1:])
            start = 9 + len(path(8))
            made += states.run(
                Part(text, [30, 31], start, parents=[-1]), Part(text, range(4, 9), 4, slot=1, source=3)
            )
            found.append([*made, states.memory.states_LSF[1, [0, 1, 3]], states.memory.rings_LRNF[1, 0, :8]])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(
                got, want, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
