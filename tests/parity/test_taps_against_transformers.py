"""Taps against transformers' hidden states, float32: every layer's input, and the last one's output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.models.language_model import LanguageModel
from specinfer.runtime.batch import chain_rows
from tests.kernels import NAMES
from tests.loading import load
from tests.passes import Passes

from .families import save_random
from .test_against_transformers import PROMPT, SCATTERED, TOLERANCE

FAMILIES = ["llama", "llama-relu", "qwen2-window", "qwen3", "gemma3", "opt", "opt-no-bias"]
Both = tuple[torch.nn.Module, LanguageModel]


@pytest.fixture(params=[(name, run) for name in FAMILIES for run in NAMES], ids=str, scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """A transformers model, and ours loaded from the folder it was saved to."""
    name, run = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    theirs = save_random(name, folder, tied=True)
    return theirs, load(folder, run)


@torch.no_grad()
def hidden_states(theirs: torch.nn.Module, token_ids: Sequence[int]) -> Tensor:
    """[tokens, layers + 1, D]: the inputs of its layers, and what the last one puts out, before any norm."""
    body = theirs.model.decoder if hasattr(theirs.model, "decoder") else theirs.model
    last: list[Tensor] = []
    hook = body.layers[-1].register_forward_hook(
        lambda module, given, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        states = theirs(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return torch.stack([*(state[0] for state in states[:-1]), last[0].view(len(token_ids), -1)], dim=1)


def every(model: LanguageModel) -> range:
    return range(model.config.num_layers + 1)


@pytest.mark.few(5)
def test_taps_of_a_prompt_in_chunks_are_the_hidden_states_and_not_their_neighbours(both: Both) -> None:
    theirs, ours = both
    want = hidden_states(theirs, PROMPT)
    for step in (len(PROMPT), 5):
        passes, parts = Passes(ours), []
        for start in range(0, len(PROMPT), step):
            rows = chain_rows(PROMPT[start : start + step], start, SCATTERED, logits=False)
            parts.append(passes.run(rows, taps=every(ours))[1])
        got = torch.cat(parts)
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
        assert ((got[:, 1:] - want[:, :-1]).abs().amax(dim=(0, 2)) > 100 * TOLERANCE).all()
