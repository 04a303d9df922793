"""Quantized folders give the floats their numbers stand for, whatever is made of them then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.layout import empty_int4, int4_rows, lay_out_int4
from specinfer.models.open_model import open_model
from specinfer.models.weight_reader import WeightReader
from specinfer.progress import NoProgress
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from tests.loading import load
from tests.quantized_folders import FORMATS, write_quantized
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
