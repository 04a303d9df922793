"""Quantized folders that are not read: one line names the key or the tensor, and nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.models.open_model import open_model
from specinfer.models.quantized.checkpoint import STORED, dequantized
from specinfer.models.safetensors import FLOATS, read_entries
from tests.quantized_folders import FORMATS, Format, awq, gptq, pack_quantized, write_quantized

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
