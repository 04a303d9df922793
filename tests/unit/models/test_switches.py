"""Every switch of a decoder: native and in PyTorch, in one call and op by op, beside any rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specinfer.kernels.attention import NativeAttend
from specinfer.models.config import Activation
from specinfer.models.positions import Alibi
from specinfer.runtime.batch import chain_rows
from tests.kernels import NAMES, kernels
from tests.states import StateRunner
from tests.switched import RECURRENT, SWITCHED, RandomFile, build
from tests.unit.kernels.test_decoder import TREE
from tests.unit.kernels.test_layers import FORMATS, Format, op_by_op, run, same
from tests.unit.runtime.test_row_independence import differing_chunks, differing_lengths

EVERY = pytest.mark.parametrize("name", SWITCHED)


@pytest.mark.few(15)
@EVERY
@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: "-".join(map(str, weights)))
def test_one_call_has_the_bits_of_op_by_op(
    name: str, weights: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization, dtype = weights
    chosen = kernels("native")
    by_op = run(build(SWITCHED[name], op_by_op(chosen), dtype, quantization))
    monkeypatch.setattr(NativeAttend, "__call__", None)
    at_once = run(build(SWITCHED[name], chosen, dtype, quantization))
    assert same(at_once, by_op)
    assert at_once[0].isfinite().all()


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
@pytest.mark.parametrize("weights", FORMATS, ids=lambda weights: "-".join(map(str, weights)))
def test_a_text_in_chunks_has_the_bits_of_the_whole(name: str, weights: Format) -> None:
    quantization, dtype = weights
    native = kernels("native")
    runner = StateRunner(build(SWITCHED[name], native, dtype, quantization), num_blocks=4, block_size=1024)
    for threads in (2, 1):
        native.library.set_threads(threads)
        assert differing_chunks(runner) == [], threads


@EVERY
def test_taps_are_those_of_the_steps(name: str) -> None:
    native = kernels("native")
    at_once, by_steps = (
        StateRunner(build(SWITCHED[name], chosen), num_blocks=10, block_size=4)
        for chosen in (native, op_by_op(native))
    )
    for rows in ([chain_rows(range(20, 23), 0, [4, 0], logits=False)], [TREE]):
        with torch.inference_mode():
            found, wanted = (runner._run(rows, [0, 1, 3]) for runner in (at_once, by_steps))
        assert found.tapped_TND is not None
        assert wanted.tapped_TND is not None
        assert torch.equal(found.tapped_TND, wanted.tapped_TND)
        assert torch.equal(found.hidden_RD, wanted.hidden_RD)


# Another value of each switch, where the model has the same tensors.
OTHERWISE: dict[str, tuple[str, dict[str, object]]] = {
    "softcap": ("gemma2", {"attention_softcap": 20.0}),
    "no softcap": ("gemma2", {"attention_softcap": None}),
    "clip": ("mpt", {"qkv_clip": 0.6}),
    "slopes": ("mpt", {"alibi": Alibi.of(4, steepest=4.0)}),
    "rounded slopes": ("mpt", {"alibi": Alibi.of(4, rounded=True)}),
    "no positions": ("mpt", {"alibi": None}),
    "residual scale": ("granite", {"residual_scale": 0.23}),
    "logit scale": ("granite", {"logit_scale": 0.126}),
    "rope everywhere": ("smollm3", {"layers_without_rope": frozenset()}),
    "no rope": ("smollm3", {"layers_without_rope": frozenset({0})}),
    "clamped": ("gpt-oss", {"activation": Activation.SILU}),
    "gelu": ("falcon", {"activation": Activation.GELU_TANH}),
    "offset": ("starcoder", {"position_offset": 1, "max_context": 1023}),
    "parallel": ("gpt-neox", {"parallel_block": False}),
}


@pytest.mark.few(15)
@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize(("name", "changes"), OTHERWISE.values(), ids=OTHERWISE)
def test_every_switch_counts(name: str, changes: dict[str, object], which: str) -> None:
    config = SWITCHED[name]
    other = replace(config, **changes)  # type: ignore[arg-type]
    assert RandomFile(config).shapes == RandomFile(other).shapes
    ones, others = (run(build(one, kernels(which)))[0] for one in (config, other))
    assert (ones - others).abs().max() > 1e-4


def test_learned_positions_end() -> None:
    model = build(SWITCHED["starcoder"], kernels("native"))
    runner = StateRunner(model, num_blocks=2, block_size=1024)
    runner.forward([chain_rows([1], 1023, [0], logits=True)])
    with pytest.raises(IndexError, match=r"positions must be 0 \.\. 1023, got 1024"):
        runner.forward([chain_rows([1], 1024, [0, 1], logits=True)])
