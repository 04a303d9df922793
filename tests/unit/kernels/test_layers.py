"""The pass in one call gives the bits that it gives op by op, and is made where all its parts are native."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specinfer.attention.backend import Attend, CacheAttention, Paths
from specinfer.attention.cached_rows import Scales
from specinfer.kernels.attention import NativeAttend, NativeAttention
from specinfer.kernels.choice import Kernels
from specinfer.kernels.decoder import NativeDecoder
from specinfer.kernels.ops import Ops
from specinfer.kernels.quantized import Products
from specinfer.models.language_model import LanguageModel
from specinfer.models.weights import load_model
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.speculation_config import Quantization
from tests.kernels import kernels
from tests.parity.families import save_random
from tests.states import StateRunner

# Every part a layer may have or lack; test_switches.py has what no family of these has.
FAMILIES = ["llama", "llama-biases", "llama-relu", "qwen2-window", "qwen3", "gemma3", "opt"]
Format = tuple[Quantization, torch.dtype]
FORMATS: list[Format] = [
    ("none", torch.bfloat16),
    ("int8", torch.bfloat16),
    ("int4", torch.bfloat16),
    ("int8", torch.float32),
    ("none", torch.float32),
]
every_format = pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: "-".join(map(str, weights)))
#  0 -+- 1 - 3 -+- 5
#     `- 2 - 4  `- 6
TREE = Rows([54, 7, 20, 8, 8, 30, 31], 12, [6, 2, 9, 1, 5], 0, [-1, 0, 0, 1, 2, 3, 3])


class OpByOp(NativeAttention):
    """Native attention that no other op can look into."""

    def over(self, keys: Sequence[Tensor], values: Sequence[Tensor], scales: Scales = ()) -> CacheAttention:
        return Hidden(super().over(keys, values, scales))


@dataclass(frozen=True)
class Hidden:
    """A cache whose attention is no native one to look at."""

    cache: CacheAttention

    def bind(self, paths: Paths) -> Attend:
        attend = self.cache.bind(paths)
        return lambda heads, qkv_TC, rotation: attend(heads, qkv_TC, rotation)


def op_by_op(chosen: Kernels) -> Kernels:
    assert chosen.library is not None
    return replace(chosen, attention=OpByOp(chosen.library))


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
    """Logits of two prompts, of a tree beside a row, and what that left in the caches."""
    runner = StateRunner(model, num_blocks=10, block_size=4)
    prompts = [
        chain_rows(range(20, 32), 0, TREE.block_table, logits=True),
        chain_rows([4], 0, [3], logits=True),
    ]
    logits = [runner.forward(prompts), runner.forward([chain_rows([9], 1, [3], logits=True), TREE])]
    memory = None if runner.states is None else runner.states.memory
    states = [] if memory is None else [*memory.states_LSF, *memory.rings_LRNF]
    written = [tensor.nan_to_num() for tensor in states]  # the rest is NaN
    return [*logits, *runner.cache.keys, *runner.cache.values, *written]


def same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.thorough
@every_format
@pytest.mark.parametrize("name", FAMILIES)
def test_the_bits_are_those_of_op_by_op(
    name: str, weights: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(name, tmp_path, tied=True)
    chosen = kernels("native")
    by_op = run(load(tmp_path, op_by_op(chosen), *weights))
    monkeypatch.setattr(NativeAttend, "__call__", None)
    at_once = run(load(tmp_path, chosen, *weights))
    assert same(at_once, by_op)
    assert at_once[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", lambda chosen: replace(chosen, products=Products())),
        ("llama", op_by_op),
        ("llama", lambda chosen: replace(chosen, ops=Ops())),
    ],
    ids=["products", "attention", "ops"],
)
def test_with_a_part_that_is_not_native_a_model_runs_op_by_op(
    name: str, changed: Callable[[Kernels], Kernels], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(name, tmp_path, tied=True)
    model = load(tmp_path, changed(kernels("native")))
    monkeypatch.setattr(NativeDecoder, "__call__", None)
    run(model)
