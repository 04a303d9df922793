"""Mixtures of experts: a wrong switch is noticed, and experts are read however a file has them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelFileError
from specinfer.models.weights import load_model, open_model
from specinfer.runtime.batch import Rows
from specinfer.runtime.executor import ModelRunner
from tests.kernels import NAMES, kernels

from .families import save_random
from .test_against_transformers import PROMPT, TOLERANCE, logits_of

CPU = torch.device("cpu")
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe"]


def ours(model, run="torch", part=None):
    """The logits of the prompt."""
    loaded = load_model(model, dtype=torch.float32, device=CPU, kernels=kernels(run), part=part)
    return ModelRunner(loaded, num_blocks=3, block_size=4).forward([Rows(PROMPT, 0, [0, 1, 2], 0)])


@pytest.mark.parametrize("run", NAMES)
@pytest.mark.parametrize("switch", ["normalized", "per_token", "shared_size"])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_wrong_switch_is_noticed(name, switch, run, tmp_path):
    theirs = save_random(name, tmp_path, tied=False)
    want, opened = logits_of(theirs, PROMPT), open_model(tmp_path)
    experts = opened.config.experts
    torch.testing.assert_close(ours(opened, run), want, atol=TOLERANCE, rtol=0)
    if switch == "shared_size" and not experts.shared_size:
        pytest.skip("no shared expert")
    wrong = {
        "normalized": not experts.normalized,
        "per_token": experts.per_token - 1,
        "shared_size": 0,
    }[switch]
    config = replace(opened.config, experts=replace(experts, **{switch: wrong}))
    assert (ours(opened, run, config) - want).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", MIXTURES[:-1])  # Granite's are stacks as they are saved
def test_stacks_of_experts_are_read_as_their_matrices_are(name, tmp_path):
    """As newer folders have them: one tensor [experts, rows, columns] for a layer's gates and ups."""
    save_random(name, tmp_path, tied=False)
    want, path = ours(open_model(tmp_path)), tmp_path / "model.safetensors"
    tensors, stacks = load_file(path), {}
    for tensor in [*tensors]:
        if found := re.fullmatch(r"(.*layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", tensor):
            kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(found[3], found[3])
            stacks.setdefault(found[1], {})[int(found[2]), kind] = tensors.pop(tensor)
    assert stacks
    for layer, matrices in stacks.items():
        numbers = sorted({number for number, _ in matrices})
        gate_up = [torch.cat([matrices[n, "gate_proj"], matrices[n, "up_proj"]]) for n in numbers]
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.mlp.experts.down_proj"] = torch.stack([matrices[n, "down_proj"] for n in numbers])
    save_file(tensors, path)
    assert torch.equal(ours(open_model(tmp_path)), want)
    one = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[one] = tensors[one][:-1].contiguous()
    save_file(tensors, path)
    with pytest.raises(ModelFileError, match=f"tensor '{re.escape(one)}' has shape .* the config asks for"):
        open_model(tmp_path)
