"""Models whose logits depend on a recurrent state alone, so that a token applied wrongly or twice is seen.

The state is a number that each token changes. It is kept, walked and replayed as `kernels.states` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specinfer.kernels.choice import TORCH
from specinfer.kernels.recurrence_config import LayerKind, Recurrence
from specinfer.kernels.states import ZERO, StatePass
from specinfer.models.language_model import LanguageModel, PassContext, PassOutput
from specinfer.tokenizer import Tokenizer
from tests import switched
from tests.engines import Tiny

VOCAB, _MODULUS = switched.PLAIN.vocab_size, 65521
_SIZES: Any = {"hidden_size": 1, "intermediate_size": 1, "num_layers": 2, "num_heads": 1, "num_kv_heads": 1}
PLAIN = replace(
    switched.PLAIN, **_SIZES, head_dim=8, layer_windows=(None, None), attention_scale=1.0, max_context=4096
)
CONFIG = replace(
    PLAIN,
    layer_kinds=(LayerKind.ATTENTION, LayerKind.SHORT_CONV),
    recurrence=Recurrence(kind=LayerKind.SHORT_CONV, taps=2, channels=1),
)


def after(state: int, token: int) -> int:
    """Return the state after a token."""
    return (state * 31 + token + 1) % _MODULUS


class CountingModel(LanguageModel):
    """A model with one float of state; every `strange`th state has other logits, for drafts."""

    def __init__(self, strange: int = 0) -> None:
        weights: Any = SimpleNamespace(
            dtype=torch.float32, device=torch.device("cpu"), kernels=TORCH, group=None, stream=None
        )
        super().__init__(CONFIG, weights)
        self._strange = strange
        self.rows = 0  # that were computed
        self.fails = 0  # passes to come that raise behind their last row

    def read(
        self,
        token_ids_T: Tensor,
        context: PassContext,
        rows: Tensor | None = None,
        *,
        max_logits: int = 0,
        stage_input_TD: Tensor | None = None,
    ) -> PassOutput:
        """See LanguageModel."""
        self.rows += len(token_ids_T)
        states_T = _visited(token_ids_T.tolist(), context.states)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("a pass failed")
        hidden_TD = torch.tensor(states_T, dtype=torch.float32)[:, None]
        return PassOutput(hidden_TD if rows is None else hidden_TD[rows])

    def logits(self, h_RD: Tensor) -> Tensor:
        """See LanguageModel."""
        mixed = h_RD.to(torch.int64) * 7919
        if self._strange:
            mixed += (h_RD.to(torch.int64) % self._strange == 0) * 5000
        return ((mixed + torch.arange(VOCAB) * 10472) % 997).float() / 50


def _visited(tokens: Sequence[int], states: StatePass) -> list[int]:
    """Return the state after each row; every row must be visited once."""
    slots_SF, ring_RNF = states.memory.states_LSF[0], states.memory.rings_LRNF[0]
    found: dict[int, int] = {}
    saves = states.rows.saves_S3.tolist()
    for number, (first, count, chain, source, slot) in enumerate(states.rows.requests_R5.tolist()):
        before = 0 if source == ZERO else int(slots_SF[source, 0])
        made: list[int] = []
        for row, place, parent, _, _ in states.rows.visits_V5[first : first + count].tolist():
            token = int(ring_RNF[slot, place, 0]) if row < 0 else tokens[row]
            made.append(after(before if parent < 0 else made[parent], token))
            if row >= 0:
                assert row not in found
                found[row] = made[-1]
                if place >= 0:
                    ring_RNF[slot, place, 0] = token
        for request, visits, to in saves:
            if request == number:
                slots_SF[to, 0] = made[visits - 1]
        slots_SF[slot, 0] = made[chain - 1] if chain else before
    return [found[row] for row in range(len(tokens))]


def answer(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the greedy text of a CountingModel."""
    state, text = 0, list[int]()
    for token in prompt:
        state = after(state, token)
    while len(text) < tokens:
        text.append(int(CountingModel().logits(torch.tensor([[float(state)]])).argmax()))
        state = after(state, text[-1])
    return text


def counting(tokenizer: Tokenizer) -> Tiny:
    """Return a target, a draft that often agrees with it, and one that does not."""
    return Tiny(CountingModel(), CountingModel(3), CountingModel(1), tokenizer)
