"""Passes of a model that may have recurrent layers, without an engine that keeps the states."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specinfer.models.language_model import LanguageModel, PassOutput
from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner, Move

SLOTS, NODES = 10, 32


class StateRunner(ModelRunner):
    """A runner that tests may let go on behind a text's first pass again and again, with states or without.

    A text's slot is the first block of its table. Its first pass makes a checkpoint at its end.
    """

    def __init__(self, model: LanguageModel, *, num_blocks: int, block_size: int) -> None:
        counts = StateCounts(SLOTS, SLOTS, NODES)
        super().__init__(model, num_blocks=num_blocks, block_size=block_size, states=counts)
        if self.states is not None:
            for tensor in (self.states.memory.states_LSF, self.states.memory.rings_LRNF):
                tensor.fill_(torch.nan)  # shows a state that is read before it is written
        self._ends: dict[int, StateCheckpoint] = {}

    @torch.inference_mode()
    def read(self, rows: Sequence[Rows], stage_input_TD: Tensor | None = None) -> Tensor:
        """Return the output layer's inputs for these logits, [R, D], or the next stage's input, [T, D]."""
        self._begin()
        part = self._part([replace(one, states=self._use(one)) for one in rows], (), 0)
        with nullcontext() if self.model.stream is None else self.model.stream.passing():
            output = part.read(stage_input_TD)
        return output.hidden_RD if output.stage_output_TD is None else output.stage_output_TD

    def _run(self, rows: Sequence[Rows], *given: Any, **named: Any) -> PassOutput:
        return super()._run([replace(part, states=self._use(part)) for part in rows], *given, **named)

    def _use(self, part: Rows) -> StateUse:
        slot = part.block_table[0]
        if part.start == 0 and part.parents is None:
            end = len(part.token_ids)
            self._ends[slot] = StateCheckpoint(SLOTS + slot, end, end.to_bytes(8, "little"))
            return StateUse(slot, None, (self._ends[slot],))
        return StateUse(slot, self._ends.get(slot))

    def move(self, moves: Sequence[Move]) -> None:
        """See ModelRunner."""
        super().move([replace(move, states=StateUse(move.block_table[0])) for move in moves])
