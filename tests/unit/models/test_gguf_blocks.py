"""GGUF files whose blocks run unchanged: outputs, and refusals."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specinfer.engine.drafts import FoundModel
from specinfer.engine.hardware import Hardware
from specinfer.engine.memory import MemoryNeeds, draft_bytes
from specinfer.errors import ModelError, ModelFileError
from specinfer.hub import ModelFiles
from specinfer.kernels.choice import TORCH, Kernels
from specinfer.kernels.layout import GROUP
from specinfer.models.gguf_blocks import FILE_BLOCKS
from specinfer.models.open_model import open_model
from specinfer.models.weights import prepare
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.gguf_blocks import MATRICES, random_blocks, write_blocks
from tests.kernels import NAMES, kernels
from tests.loading import load
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
PROMPT = [5, 17, 39, 3, 31, 12, 12, 29]
# A float matrix in a stack with one of blocks, and a float output layer.
FLOATS = {"blk.0.ffn_up.weight": "F32", "output.weight": "F32", "token_embd.weight": "F32"}
# Mixed like llama.cpp's files, so that stacked matrices have several kinds.
MIXED = {"blk.0.attn_v.weight": "Q6_K", "blk.0.ffn_down.weight": "Q6_K", "output.weight": "Q6_K"}


def logits(path: Path, quantization: Quantization, chosen: Kernels = TORCH) -> Tensor:
    model = load(path, chosen, quantization=quantization)
    runner = ModelRunner(model, num_blocks=4, block_size=4)
    return runner.forward([Rows(PROMPT, 0, [0, 1, 2, 3], 0)])


def test_a_model_is_near_that_of_the_floats(tmp_path: Path) -> None:
    """Only activations are rounded, to 8 bits, and weights of Q2_K and IQ3_S."""
    for kind in (*FILE_BLOCKS, "Q2_K", "IQ3_S", "mixed", "with floats"):
        kinds = MIXED if kind == "mixed" else FLOATS if kind == "with floats" else {}
        path = write_blocks(tmp_path / kind / "m.gguf", kinds, "Q4_K" if kinds else kind)
        want, found = logits(path, "none"), logits(path, "gguf")
        assert want.isfinite().all(), kind
        assert (found - want).norm() <= 0.05 * want.norm(), kind
        assert torch.equal(logits(path, "gguf"), found), kind  # as it was kept
        native = logits(path, "gguf", kernels("native"))
        assert (native - found).norm() <= 0.03 * want.norm(), kind


def test_rows_of_blocks_are_the_numbers_of_the_file(tmp_path: Path) -> None:
    """Types with a form of their own are exact; others are rounded, to 4 bits where these are enough."""
    name = "model.layers.0.mlp.down_proj.weight"
    for kind in (*FILE_BLOCKS, "Q2_K", "IQ3_S"):
        file = open_model(write_blocks(tmp_path / kind / "m.gguf", {}, kind))
        want, rows = file.read_rows(name, 3, 40), file.block_reader(name)(3, 40)
        halves = rows[..., GROUP : GROUP + 2].contiguous().view(torch.float16).float()
        mins = rows[..., GROUP + 4 : GROUP + 6].contiguous().view(torch.float16).float()
        steps = rows[..., GROUP + 2 : GROUP + 4].view(torch.int8).repeat_interleave(GROUP // 2, 2)
        levels = rows[..., :GROUP].view(torch.int8).float()
        found = (halves * steps * levels - mins * rows[..., GROUP + 6 :]).flatten(1)
        assert file.has_own_blocks(name) == (kind in FILE_BLOCKS)
        if kind in FILE_BLOCKS:
            assert torch.equal(found, want), kind
        else:
            assert (found - want).norm() < (0.001 if kind == "IQ3_S" else 0.01) * want.norm(), kind


def test_embeddings_stay_in_the_file_and_nothing_is_kept(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", MIXED, "Q4_K")
    want, _ = load(path, "torch", dtype=torch.bfloat16).embedding
    for chosen in NAMES:
        model = load(path, chosen, dtype=torch.bfloat16, quantization="gguf", cache=tmp_path)
        assert model.table.whole is None
        assert torch.equal(model.embedding[0], want)
        ids = torch.tensor([7, 0, 7, 39])
        rows, places = model.table.rows(ids)
        assert torch.equal(rows[places], want[ids])
        with pytest.raises(IndexError, match=r"token ids must be 0 \.\. 39"):
            model.table.rows(torch.tensor([40]))
        os.utime(path, (1, 1))
        with pytest.raises(ModelFileError, match="was changed while it was in use; load the model again"):
            model.table.rows(ids)
        os.utime(path)
    assert [*tmp_path.iterdir()] == [path]


def test_memory_is_planned_for_what_is_in_memory(tmp_path: Path) -> None:
    """The embeddings stay in the file, unless a head reads them; a prepared file has them, too."""
    table = MATRICES["token_embd.weight"][0] * MATRICES["token_embd.weight"][1] * 4
    for kind in ("Q4_K", "Q4_0", "Q8_0", "Q6_K"):
        model = open_model(write_blocks(tmp_path / f"{kind}.gguf", {}, kind))
        how: dict[str, Any] = {"dtype": torch.float32, "kernels": TORCH, "quantization": "gguf"}
        kept = load_file(prepare(model, cache=tmp_path, **how).path)
        sizes = {name: tensor.nbytes for name, tensor in kept.items() if "padding" not in name}
        vectors = sum(math.prod(shape) * 4 for shape in model.shapes.values() if len(shape) == 1)
        assert sizes["model.embed_tokens.weight.rows"] == table
        found, hardware = (
            FoundModel(ModelFiles("m", model.path, ()), model),
            Hardware(CPU, torch.float32, TORCH),
        )
        needs = MemoryNeeds(found, "gguf", hardware, draft_weights={}, draft_sets=(), reads_table=False)
        assert needs.weights == sum(sizes.values()) - table + vectors, kind
        assert draft_bytes(model, torch.float32, TORCH, "gguf") == needs.weights, kind
        assert replace(needs, reads_table=True).weights == needs.weights + table, kind


def test_a_folder_has_no_blocks(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    with pytest.raises(ModelError, match="requires a GGUF file, and m is not one; use"):
        logits(folder, "gguf")


def test_a_number_that_products_cannot_use_is_refused(tmp_path: Path) -> None:
    """A level of -128, and scales or mins that are not finite; the library and PyTorch say the same."""
    level, infinite, nan = (2, b"\x80", "a level of -128; allowed for Q8_0"), b"\x00\xfc", b"\x01\x7c"
    half = "a scale that is not finite in float16; get the file again"
    cases = [("Q8_0", *level), ("Q8_0", 0, nan, half), ("Q4_K", 2, infinite, half), ("Q6_K", 208, nan, half)]
    for kind, at, number, text in cases:
        path = write_blocks(tmp_path / "m.gguf", {}, kind)
        octets = bytearray(path.read_bytes())
        down = random_blocks(kind, *MATRICES["blk.0.ffn_down.weight"], seed=len(MATRICES) - 1)
        begin = octets.index(down.tobytes()) + (down.nbytes // 2 if kind == "Q8_0" else 0) + at
        octets[begin : begin + len(number)] = number
        path.write_bytes(octets)
        for chosen in (TORCH, kernels("native")):
            with pytest.raises(ModelFileError, match=rf"ffn_down\.weight' has {text}"):
                logits(path, "gguf", chosen)
