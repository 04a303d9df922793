"""Our logits with an adapter against those of transformers' model that it is merged into, float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.models.adapters.adapter_cache import AdapterCache
from specinfer.plan import StateCounts, StateUse
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from tests.adapters import adapter_tensors, write_peft
from tests.kernels import NAMES, kernels
from tests.loading import load

from .families import save_random

# Separate and stacked matrices, gated and plain MLPs, the head orders of several libraries, and each kind of
# recurrent layer.
FAMILIES = (
    *("llama-biases", "qwen2-window", "gemma3", "gemma4", "gemma3n", "opt", "phi3-partial-rope", "glm4"),
    *("lfm2", "qwen3.5", "granite-hybrid", "falcon-h1", "nemotron-h"),
)
WITHOUT = {"qwen3.5": ("in_proj_a", "in_proj_b")}  # modules without adapters: gates of a delta rule
PROMPT = [5, 17, 40, 3, 88, 61, 12, 12, 70, 29, 9, 54]
RANK, ALPHA = 3, 5
PREFIX = "base_model.model."


@pytest.mark.few(4)
@pytest.mark.parametrize("run_with", NAMES)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_an_adapter_of_all_linear_modules(name: str, run_with: str, tmp_path: Path) -> None:
    theirs = save_random(name, tmp_path / "model", tied=True)
    without = WITHOUT.get(name, ())
    linear = {
        f"{name}.weight": module
        for name, module in theirs.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not name.endswith(without)
        if not any(other in name for other in ("per_layer", "altup", "laurel"))  # these have no adapters
    }
    targets = sorted({name.rsplit(".", 2)[-2] for name in linear})
    shapes = {name: module.weight.shape for name, module in linear.items()}
    tensors = adapter_tensors(shapes, targets, RANK, 3, 0.3)
    every = targets if without else "all-linear"
    write_peft(tmp_path / "adapter", tensors, r=RANK, lora_alpha=ALPHA, target_modules=every)
    chosen = kernels(run_with)
    ours = load(tmp_path / "model", chosen)
    shelf = AdapterCache(
        ours.config,
        weights=ours.dtype,
        device=ours.device,
        library=chosen.products.library,
        limit=1,
        free=lambda: 1 << 30,
    )
    shelf.add("adapter", tmp_path / "adapter")
    runner = ModelRunner(ours, num_blocks=8, block_size=4, adapters=shelf, states=StateCounts(2))
    plain = theirs(torch.tensor([PROMPT])).logits[0]
    for name, module in linear.items():
        inside = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        module.weight += ALPHA / RANK * tensors[f"{inside}B.weight"] @ tensors[f"{inside}A.weight"]
    want = theirs(torch.tensor([PROMPT])).logits[0]
    rows = [
        Rows(PROMPT, 0, [1, 2, 3], 0, adapter="adapter", states=StateUse(0)),
        Rows(PROMPT, 0, [4, 5, 6], 0, states=StateUse(1)),
    ]
    adapted, without = runner.forward(rows).split(len(PROMPT))
    torch.testing.assert_close(adapted, want, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(without, plain, atol=1e-4, rtol=0)
    assert float((want - plain).abs().max()) > 0.1, "an adapter that says nothing proves nothing"
