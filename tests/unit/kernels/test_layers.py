"""The layers in one call give the bits that they give op by op, and run where all their parts are native."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.attention.backend import Attend, Paths
from specinfer.attention.native import NativeAttend, NativeAttention
from specinfer.config import Quantization
from specinfer.kernels.bfloat16 import tiled_product
from specinfer.kernels.choice import Kernels
from specinfer.kernels.layers import NativeLayers
from specinfer.kernels.ops import TorchOps
from specinfer.kernels.quantized import NativeProducts
from specinfer.models.decoder import LanguageModel
from specinfer.models.weights import load_model
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner
from tests.kernels import kernels
from tests.parity.families import save_random

FAMILIES = ["llama", "llama-biases", "qwen2-window", "qwen3", "gemma3"]  # every part a layer may have or lack
FORMATS = [
    ("none", torch.bfloat16),
    ("int8", torch.bfloat16),
    ("int4", torch.bfloat16),
    ("int8", torch.float32),
]
#  0 -+- 1 - 3 -+- 5
#     `- 2 - 4  `- 6
TREE = Rows([54, 7, 20, 8, 8, 30, 31], 12, [6, 2, 9, 1, 5], 0, [-1, 0, 0, 1, 2, 3, 3])


class OpByOp(NativeAttention):
    """Native attention that no other op can look into."""

    def bind(self, paths: Paths, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Attend:
        attend = super().bind(paths, keys, values)
        return lambda heads, qkv_TC, rotation: attend(heads, qkv_TC, rotation)


def native(quantization: Quantization = "none") -> Kernels:
    """All native, whatever is the fastest on this CPU."""
    bfloat16 = tiled_product if quantization == "none" else None
    return replace(kernels("native"), products=NativeProducts(onednn=False), bfloat16=bfloat16)


def load(
    folder: Path, chosen: Kernels, quantization: Quantization = "none", dtype: torch.dtype = torch.bfloat16
) -> LanguageModel:
    return load_model(
        folder,
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=chosen,
        quantization=quantization,
        cache=folder / "quantized",
    )


def run(model: LanguageModel) -> list[Tensor]:
    """Logits of two prompts, of a tree beside a row, and what that left in the cache."""
    runner = ModelRunner(model, num_blocks=10, block_size=4)
    prompts = [
        chain_rows(range(20, 32), 0, TREE.block_table, logits=True),
        chain_rows([4], 0, [3], logits=True),
    ]
    logits = [runner.forward(prompts), runner.forward([chain_rows([9], 1, [3], logits=True), TREE])]
    return [*logits, *runner.cache.keys, *runner.cache.values]


@pytest.mark.parametrize(("quantization", "dtype"), FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_bits_are_those_of_op_by_op(
    name: str,
    quantization: Quantization,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_random(name, tmp_path, tied=True)
    chosen = native(quantization)
    by_op = run(load(tmp_path, replace(chosen, attention=OpByOp()), quantization, dtype))
    monkeypatch.setattr(NativeAttend, "__call__", None)
    at_once = run(load(tmp_path, chosen, quantization, dtype))
    assert all(torch.equal(one, other) for one, other in zip(at_once, by_op, strict=True))
    assert at_once[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", lambda chosen: replace(chosen, bfloat16=None)),
        ("llama", lambda chosen: replace(chosen, attention=OpByOp())),
        ("llama", lambda chosen: replace(chosen, ops=TorchOps())),
        ("llama-relu", lambda chosen: chosen),
    ],
    ids=["products", "attention", "ops", "gate"],
)
def test_with_a_part_that_is_not_native_a_model_runs_op_by_op(
    name: str, changed: Callable[[Kernels], Kernels], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(name, tmp_path, tied=True)
    model = load(tmp_path, changed(native()))
    monkeypatch.setattr(NativeLayers, "__call__", None)
    run(model)


def test_a_profiler_sees_every_operation(tmp_path: Path) -> None:
    save_random("llama", tmp_path, tied=True)
    model = load(tmp_path, native())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(model)
    calls = {event.key: event.count for event in profile.key_averages()}
    passes, layers = 2, model.config.num_layers
    assert calls["specinfer::tree_attention"] == calls["specinfer::silu_mul"] == passes * layers
    assert calls["specinfer::bfloat16_linear"] == passes * (4 * layers + 1)
    assert calls["specinfer::add_rms_norm"] == passes * (2 * layers + 1)
