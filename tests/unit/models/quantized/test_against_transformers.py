"""Quantized tensors are read like in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.quantized.checkpoint import STORED, dequantized
from specinfer.models.quantized.pieces import StoredTensor
from specinfer.models.safetensors import FLOATS, read_entries

MXFP4 = {"quant_method": "mxfp4"}


def written(folder: Path, tensors: dict[str, Tensor], said: dict[str, object]) -> dict[str, StoredTensor]:
    save_file(tensors, folder / "model.safetensors")
    return dequantized(folder, said, read_entries([folder / "model.safetensors"], FLOATS | STORED))


@pytest.mark.thorough
@pytest.mark.parametrize("block", [(32, 16), (96, 64), (1, 64)])
def test_fp8(block: tuple[int, int], tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(96, 64).to(torch.float8_e4m3fn)
    scales = torch.rand(96 // block[0], 64 // block[1])
    [want] = (
        Fp8Dequantize(None)
        .convert({"weight": weight, "weight_scale_inv": scales}, full_layer_name="weight")
        .values()
    )
    said = {"quant_method": "fp8", "weight_block_size": [*block]}
    [found] = written(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, said).values()
    assert torch.equal(found.read_rows(0, 96), want)
    assert torch.equal(found.read_rows(33, 70), want[33:70])


def test_mxfp4(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 131, (3, 10, 2), dtype=torch.uint8, generator=generator)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).reshape(30, 64)
    found = written(tmp_path, {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}, MXFP4)
    matrix = found["e.gate_up_proj.weight"]
    assert (list(found), matrix.shape) == (["e.gate_up_proj.weight"], (30, 64))
    for start, stop in ((0, 30), (0, 1), (7, 23), (10, 20), (29, 30), (4, 4)):
        assert torch.equal(matrix.read_rows(start, stop), want[start:stop])
    assert torch.equal(matrix.read_rows(0, 30).bfloat16().float(), want)


@pytest.mark.parametrize("missing", ["blocks", "scales"])
def test_mxfp4_without_a_part(missing: str, tmp_path: Path) -> None:
    shape = {"blocks": (2, 4, 2, 16), "scales": (2, 4, 2)}
    del shape[missing]
    tensors = {f"e.down_proj_{end}": torch.zeros(size, dtype=torch.uint8) for end, size in shape.items()}
    with pytest.raises(ModelFileError, match=r"'e\.down_proj_(scales|blocks)'"):
        written(tmp_path, tensors, MXFP4)
