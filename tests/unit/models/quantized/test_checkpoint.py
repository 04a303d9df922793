"""Quantized folders give the floats their numbers stand for, whatever is made of them then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.kernels.layout import empty_int4, int4_rows, lay_out_int4
from specinfer.models.open_model import open_model
from specinfer.models.quantized.checkpoint import STORED, dequantized
from specinfer.models.quantized.scaled import scaled
from specinfer.models.safetensors import FLOATS, read_entries
from specinfer.models.weight_reader import WeightReader
from specinfer.progress import NoProgress
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from tests.loading import load
from tests.quantized_folders import FORMATS, Format, awq, gptq, pack_quantized, write_quantized
from tests.tiny_models import write_tiny_llama
from tests.unit.kernels.test_layout import int4_values

PROMPT = [5, 17, 40, 3, 61, 12, 12, 29]
GATE = "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.few(20)
@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_numbers_they_stand_for(name: str, experts: int, tmp_path: Path) -> None:
    floats = write_quantized(tmp_path, FORMATS[name], experts=experts)
    model = open_model(tmp_path)
    assert model.shapes == {name: tuple(tensor.shape) for name, tensor in floats.items()}
    for matrix, want in floats.items():
        count = len(want)
        torch.testing.assert_close(model.read_rows(matrix, 0, count), want, rtol=1e-6, atol=0)
        for start, stop in ((0, 1), (3, min(count, 29)), (max(count - 5, 0), count)):
            rows = model.read_rows(matrix, start, stop)
            torch.testing.assert_close(rows, want[start:stop], rtol=1e-6, atol=0)
    gate = GATE.replace("mlp.", "mlp.experts.2.") if experts else GATE
    assert (model.dtype(gate), model.dtype("model.norm.weight")) == (None, torch.float32)


@pytest.mark.parametrize("name", ["gptq", "w4a16", "fp8-block", "nf4"])
def test_experts_that_are_left_in_one_stack_of_floats(name: str, tmp_path: Path) -> None:
    """As tools write them that quantize linear layers alone."""
    floats = write_quantized(tmp_path, FORMATS[name], experts=3)
    stored = {
        one: tensor
        for one, tensor in load_file(tmp_path / "model.safetensors").items()
        if ".experts." not in one
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [[floats[f"{prefix}.{n}.{part}_proj.weight"] for part in ("gate", "up")] for n in range(3)]
        stored[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(both) for both in each])
        downs = [floats[f"{prefix}.{n}.down_proj.weight"] for n in range(3)]
        stored[f"{prefix}.down_proj"] = torch.stack(downs)
    save_file(stored, tmp_path / "model.safetensors")
    model = open_model(tmp_path)
    for one, want in floats.items():
        torch.testing.assert_close(model.read_rows(one, 0, len(want)), want, rtol=1e-6, atol=0)


def test_stacks_of_quantized_experts_are_refused_by_their_names(tmp_path: Path) -> None:
    for name, message in (
        ("fp8-block", r"gate_up_proj' has shape \[3, 192, 64\]; expected \[any, any\]"),
        ("float-channel", r"gate_up_proj' belongs to no matrix quantized by compressed-tensors"),
    ):
        write_quantized(folder := tmp_path / name, FORMATS[name], experts=3)
        stored = load_file(folder / "model.safetensors")
        values = torch.zeros(3, 192, 64).to(torch.float8_e4m3fn)
        save_file(stored | {"model.layers.0.mlp.experts.gate_up_proj": values}, folder / "model.safetensors")
        with pytest.raises(ModelFileError, match=message):
            open_model(folder)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", FORMATS)
def test_int4_has_the_same_numbers_where_it_can(name: str, tmp_path: Path) -> None:
    floats = write_quantized(tmp_path, FORMATS[name])
    names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"]
    for stack in (names, [DOWN]):
        want = torch.cat([floats[one] for one in stack])
        into = empty_int4(*want.shape)
        with WeightReader(open_model(tmp_path), torch.float32, NoProgress(), "int4") as reader:
            reader.read(stack, into)
        same = torch.equal(int4_values(into)[: len(want), : want.shape[1]], want)
        assert same == FORMATS[name].int4_is_exact


@pytest.mark.parametrize("name", ["gptq", "awq", "w8a8", "fp8-block", "nf4"])
def test_quantized_models_equal_floats(name: str, tmp_path: Path) -> None:
    floats = write_quantized(tmp_path / "quantized", FORMATS[name])
    plain = write_tiny_llama(
        tmp_path / "plain", hidden_size=64, intermediate_size=96, spread=0.1, tie_embeddings=False
    )
    save_file(floats, plain / "model.safetensors")
    for quantization in ("none", "int8"):
        logits = []
        for folder in ("quantized", "plain"):
            model = load(tmp_path / folder, "torch", quantization=quantization)
            runner = ModelRunner(model, num_blocks=4, block_size=4)
            logits.append(runner.forward([Rows(PROMPT, 0, [0, 1, 2, 3], 0)]))
        assert logits[0].isfinite().all()
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_a_group_with_a_negative_scale_is_turned_round() -> None:
    levels = torch.arange(32, dtype=torch.uint8).view(1, 32) % 16
    for scale, zero in ((-0.25, 3), (0.25, 3), (-2.0, 15), (0.0, 7)):
        rows = int4_rows(levels, torch.tensor([[scale]]), torch.tensor([[zero]], dtype=torch.uint8))
        want = scale * (levels.float() - zero)
        assert torch.equal(int4_values(lay_out_int4(rows))[:1], want)


def test_scales_that_float16_lacks_are_no_int4(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["w4a16"])
    model = open_model(tmp_path)
    assert model.int4_reader(GATE) is not None
    matrix = model._entries[GATE]

    class Scales:
        path, shape, dtype = matrix.path, (96, 2), torch.bfloat16

        def read_rows(self, start: int, stop: int) -> Tensor:
            return torch.full((stop - start, 2), 1e-7, dtype=torch.bfloat16)

    matrix._scales = Scales()
    assert model.int4_reader(GATE) is None


# Scales.


BLOCK = (2, 3)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((3, 2), BLOCK), ((5, 1), None), ((5, 2), None), ((1, 1), None)],
    ids=["blocks", "channels", "groups", "all"],
)
def test_zero_points_are_subtracted_whatever_shares_them(
    shape: tuple[int, int], block: tuple[int, int] | None, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    values, scales = torch.randint(-8, 8, (5, 6), dtype=torch.int8), torch.rand(shape)
    zeros = torch.randint(-3, 4, shape, dtype=torch.int8)
    high, wide = -(-5 // shape[0]), 6 // shape[1]

    def each(of: Tensor) -> Tensor:
        return of.float().repeat_interleave(high, 0)[:5].repeat_interleave(wide, 1)

    save_file({"values": values, "scales": scales, "zeros": zeros}, tmp_path / "m")
    there = read_entries([tmp_path / "m"], {"I8": torch.int8, "F32": torch.float32})
    matrix = scaled("up.weight_scale", there["values"], there["scales"], block, there["zeros"])
    want = (values.float() - each(zeros)) * each(scales)
    torch.testing.assert_close(torch.cat([matrix.read_rows(0, 3), matrix.read_rows(3, 5)]), want)


# Refusals.


UP = "model.layers.0.mlp.up_proj"
Change = Callable[[dict[str, Tensor]], object]


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        open_model(folder)
    assert "\n" not in str(caught.value)


def saying(form: Format, **more: Any) -> Format:
    return replace(form, said=form.said | more)


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": 4, "symmetric": True} | weights}}}


CONFIGS = [
    (saying(gptq(), quant_method="tomorrow's"), r"\(quant_method\): .*supported: awq, bits"),
    (saying(gptq(), bits=3), "bits of the quantized model is 3; supported: 2, 4, 8"),
    (saying(gptq(), bits=None), "bits is None; expected an integer"),
    (saying(gptq(), group_size=40), "group_size is 40, which does not divide the .* elements of"),
    (saying(gptq(), group_size=0), "group_size is 0, which does not divide"),
    (saying(gptq(), checkpoint_format="marlin"), "checkpoint_format is 'marlin'; supported for GPTQ"),
    (saying(gptq(), dynamic={"+:.*down.*": {"bits": 8}}), "dynamic has other settings for some matrices"),
    (saying(gptq(), adapter={"name": "lora"}), "an adapter"),
    (saying(gptq(index=False), desc_act=True), "sets desc_act, and .* has no tensor '.*g_idx'"),
    (saying(awq(), version="gemv"), "version is 'gemv'; supported for AWQ: 'gemm'"),
    (saying(awq(), bits=8), "bits of the quantized model is 8; supported: 4"),
    (saying(pack_quantized(), format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-qu.*; supported"),
    (saying(pack_quantized(), sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
    (saying(pack_quantized(), transform_config={"config_groups": {"u": {}}}), "transform_config transforms"),
    (saying(pack_quantized(), config_groups=None), "config_groups is None; expected a JSON object"),
    (saying(pack_quantized(), **group(symmetric=False)), "lacks tensor '.*weight_zero_point'"),
    (saying(FORMATS["fp8-block"], weight_block_size=128), "weight_block_size is 128; expected two"),
    (
        saying(FORMATS["fp8-block"], weight_block_size=[32, 32]),
        r"weight_scale_inv' has shape \[3, 5\] for a matrix 64 x 96, with blocks of 32 x 32",
    ),
]


def test_what_a_config_asks_for(tmp_path: Path) -> None:
    for number, (form, message) in enumerate(CONFIGS):
        write_quantized(tmp_path / str(number), form)
        refused(tmp_path / str(number), message)


def changed(end: str, how: Callable[[Tensor], Tensor]) -> Change:
    """Replace a tensor of the matrix."""
    return lambda tensors: tensors.update({f"{UP}.{end}": how(tensors[f"{UP}.{end}"])})


def dropped(end: str) -> Change:
    return lambda tensors: tensors.pop(f"{UP}.{end}")


def cut(end: str, count: int = 1) -> Change:
    return changed(end, lambda tensor: tensor[:count].clone())


def cast(end: str, dtype: torch.dtype) -> Change:
    return changed(end, lambda tensor: tensor.to(dtype))


def filled(end: str, value: float) -> Change:
    return changed(end, lambda tensor: tensor.fill_(value))


TENSORS = [
    ("gptq", dropped("scales"), "lacks tensor '.*up_proj.scales', without which"),
    ("gptq", dropped("qzeros"), "lacks tensor '.*up_proj.qzeros'"),
    ("gptq", dropped("qweight"), "tensor '.*(qzeros|scales|g_idx)' belongs to no matrix quantized by gptq"),
    ("gptq", cut("scales"), r"up_proj.scales' has shape \[1, 96\]; expected \[2, 96\]"),
    ("gptq", cut("qzeros"), r"up_proj.qzeros' has shape \[1, 12\]; expected \[2, 12\]"),
    ("gptq", cast("scales", torch.int32), "up_proj.scales' is of type int32; expected float64 or"),
    ("gptq", cast("qweight", torch.int64), "up_proj.qweight' is of type int64; expected int32"),
    ("gptq", filled("g_idx", 9), "g_idx' has groups from 9 to 9; there are 2"),
    ("gptq-desc-act", dropped("g_idx"), "sets desc_act, and .* has no tensor '.*up_proj.g_idx'"),
    ("awq", dropped("scales"), "lacks tensor '.*up_proj.scales'"),
    ("w4a16", dropped("weight_scale"), "lacks tensor '.*up_proj.weight_scale'"),
    ("w4a16", dropped("weight_shape"), "lacks tensor '.*up_proj.weight_shape'"),
    ("w4a16", filled("weight_shape", 64), r"has shape \[96, 8\] for a matrix 64 x 64; supported num_b"),
    ("w4a16-actorder", filled("weight_g_idx", 2), "weight_g_idx' has groups from 2 to 2; there are 2"),
    ("w8a8", dropped("weight_scale"), "lacks tensor '.*up_proj.weight_scale'"),
    ("w8a8", cut("weight_scale", 5), r"weight_scale' has shape \[5, 1\] for a matrix 96 x 64; config"),
    ("fp8-block", dropped("weight_scale_inv"), "lacks tensor '.*up_proj.weight_scale_inv'"),
    ("nf4", dropped("weight.absmax"), "lacks tensor '.*up_proj.weight.absmax'"),
    ("nf4", cut("weight", 7), r"up_proj.weight' has shape \[7, 1\], its quant_state has 96 x 64"),
    ("nf4", filled("weight.quant_state.bitsandbytes__nf4", 65), "a quant_state is not JSON"),
    ("nf4-nested", dropped("weight.nested_absmax"), "lacks tensor '.*weight.nested_absmax'"),
    ("llm-int8", filled("weight_format", 2), r"weight_format' is \[2\]; supported: \[0\]"),
    ("llm-int8", dropped("SCB"), "tensor '.*(weight|weight_format)' belongs to no matrix quantized by bits"),
]


def test_tensors_that_are_not_what_is_said(tmp_path: Path) -> None:
    for number, (name, change, message) in enumerate(TENSORS):
        write_quantized(folder := tmp_path / str(number), FORMATS[name])
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        refused(folder, message)


def test_mxfp4_without_a_part(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for end, shape in (("blocks", (2, 4, 2, 16)), ("scales", (2, 4, 2))):
        save_file({f"e.down_proj_{end}": torch.zeros(shape, dtype=torch.uint8)}, file)
        with pytest.raises(ModelError, match=r"'e\.down_proj_(scales|blocks)'"):
            dequantized(tmp_path, {"quant_method": "mxfp4"}, read_entries([file], FLOATS | STORED))


def test_scales_of_activations_and_caches_are_left_aside(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["w8a8"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"{UP}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    open_model(tmp_path)
