"""Every switch of a decoder: native and in PyTorch, in one call and op by op, beside any rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

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
from specinfer.kernels.recurrence_config import LayerKind
from specinfer.models.config import ModelConfig
from specinfer.models.language_model import LanguageModel
from specinfer.plan import StateUse
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.speculation_config import Quantization
from tests.kernels import NAMES, kernels
from tests.states import StateRunner
from tests.switched import RECURRENT, SWITCHED, build
from tests.unit.runtime.test_row_independence import differing_chunks, differing_lengths

EVERY = pytest.mark.parametrize("name", SWITCHED)
Format = tuple[Quantization, torch.dtype]
FORMATS: list[Format] = [
    *(("none", torch.bfloat16), ("int8", torch.bfloat16), ("int4", torch.bfloat16), ("int8", torch.float32)),
    ("none", torch.float32),
]
EVERY_FORMAT = pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: "-".join(map(str, weights)))
#  0 -+- 1 - 3 -+- 5
#     `- 2 - 4  `- 6
TREE = Rows([54, 7, 20, 8, 8, 30, 31], 12, [6, 2, 9, 1, 5], 0, [-1, 0, 0, 1, 2, 3, 3])
# Layers of a hybrid: A attention, R its recurrence, B both, N neither. A small letter has no MLP.
ORDERS = ("NrB", "bNa", "BRa", "rAB")


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
    return replace(chosen, attention=OpByOp(chosen.library))


@torch.inference_mode()
def run(model: LanguageModel) -> list[Tensor]:
    """Logits of two prompts, of a tree beside a row, their taps, and what that left in the caches."""
    runner = StateRunner(model, num_blocks=10, block_size=4)
    prompts = [
        chain_rows(range(20, 32), 0, TREE.block_table, logits=True),
        chain_rows([4], 0, [3], logits=True),
    ]
    made, tapped = [], []
    for rows in (prompts, [chain_rows([9], 1, [3], logits=True), TREE]):
        output = runner._run(rows, [0, 1, 3, 1], max_logits=8)
        own = output.logits_RV
        made.append(model.logits(output.hidden_RD) if own is None else own)
        tapped.append(output.tapped_TND)
    memory = None if runner.states is None else runner.states.memory
    states = [] if memory is None else [*memory.states_LSF, *memory.rings_LRNF]
    written = [tensor.nan_to_num() for tensor in states]  # the rest is NaN
    return [*made, *tapped, *runner.cache.keys, *runner.cache.values, *written]


def check_one_call(config: ModelConfig, weights: Format, case: object = None) -> None:
    """One call has the bits of the model op by op."""
    quantization, dtype = weights
    chosen = kernels("native")
    by_op = run(build(config, op_by_op(chosen), dtype, quantization))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeAttend, "__call__", None)
        at_once = run(build(config, chosen, dtype, quantization))
    assert all(map(torch.equal, at_once, by_op)), case
    assert at_once[0].isfinite().all(), case


@pytest.mark.few(15)
@EVERY
@EVERY_FORMAT
def test_one_call_has_the_bits_of_op_by_op(name: str, weights: Format) -> None:
    check_one_call(SWITCHED[name], weights)


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "nemotron-h"])
def test_so_it_has_with_layers_in_any_order(name: str) -> None:
    config = SWITCHED[name]
    kinds = {"A": LayerKind.ATTENTION, "R": config.recurrence.kind, "B": LayerKind.BOTH, "N": LayerKind.NONE}
    for order, dtype in product(ORDERS, (torch.float32, torch.bfloat16)):
        own = tuple(kinds[letter.upper()] for letter in order)
        without = frozenset(number for number, letter in enumerate(order) if letter.islower())
        check_one_call(replace(config, layer_kinds=own, layers_without_mlp=without), ("none", dtype), order)


def test_with_a_part_that_is_not_native_a_model_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    native = kernels("native")
    monkeypatch.setattr(NativeDecoder, "__call__", None)
    for changed in (replace(native, products=Products()), op_by_op(native), replace(native, ops=Ops())):
        assert run(build(SWITCHED["granite"], changed))[0].isfinite().all(), changed


def test_states_that_do_not_fit_are_refused() -> None:
    runner, other = (
        StateRunner(build(SWITCHED[name], kernels("native")), num_blocks=4, block_size=4)
        for name in ("qwen3.5", "nemotron-h")
    )
    rows, plan = [chain_rows([1, 2], 0, [0], logits=True)], runner.states.plan
    for states, fault in (
        (None, "got no states; a model with recurrent layers needs those of its requests"),
        (other.states.plan, "states must be contiguous"),
        (lambda given: plan([*given, replace(given[0], states=StateUse(1))]), "rows that are not each"),
    ):
        runner.states.plan = states or (lambda given: (None, nullcontext()))
        with pytest.raises(ValueError, match=fault):
            runner.forward(rows)


@pytest.mark.few(6)
@EVERY
@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_is_the_same_in_any_company(name: str, which: str, dtype: torch.dtype) -> None:
    without_rope = frozenset({0}) & SWITCHED[name].layers_without_rope
    alone: dict[str, Any] = {"num_layers": 1, "layer_windows": (100,), "shared_layers": 0, "layer_inner": ()}
    alone["layer_kinds"] = SWITCHED[name].layer_kinds[:1]
    one_layer = replace(SWITCHED[name], **alone, layers_without_rope=without_rope)
    model = build(one_layer, kernels(which), dtype)
    runner = StateRunner(model, num_blocks=4, block_size=1024)
    assert differing_lengths(runner, (12, 63, 250)) == []


@pytest.mark.few(6)
@pytest.mark.parametrize("name", RECURRENT)
@EVERY_FORMAT
def test_a_text_in_chunks_has_the_bits_of_the_whole(name: str, weights: Format) -> None:
    quantization, dtype = weights
    native = kernels("native")
    runner = StateRunner(build(SWITCHED[name], native, dtype, quantization), num_blocks=4, block_size=1024)
    for threads in (2, 1):
        native.library.set_threads(threads)
        assert differing_chunks(runner) == [], threads


def test_learned_positions_end() -> None:
    model = build(SWITCHED["starcoder"], kernels("native"))
    runner = StateRunner(model, num_blocks=2, block_size=1024)
    runner.forward([chain_rows([1], 1021, [0], logits=True)])
    with pytest.raises(IndexError, match=r"positions must be 0 \.\. 1021, got 1022"):
        runner.forward([chain_rows([1], 1022, [0, 1], logits=True)])
