"""GGUF files whose blocks run unchanged: outputs, and refusals."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from specinfer.engine.drafts import FoundModel
from specinfer.engine.hardware import Hardware
from specinfer.engine.memory import MemoryNeeds, draft_bytes
from specinfer.errors import ModelError, ModelFileError
from specinfer.hub import ModelFiles
from specinfer.hub.gguf_header import read_header
from specinfer.kernels.choice import TORCH, Kernels
from specinfer.kernels.layout import GROUP
from specinfer.models.gguf import GGUFFile
from specinfer.models.gguf_blocks import FILE_BLOCKS
from specinfer.models.open_model import open_model
from specinfer.models.weight_sizes import estimate_bytes
from specinfer.models.weights import prepare
from specinfer.runtime.batch import Rows
from specinfer.runtime.runner import ModelRunner
from specinfer.speculation_config import Quantization
from tests.gguf_blocks import HEAD, HIDDEN, INNER, MATRICES, VOCAB, random_blocks, write_blocks
from tests.kernels import NAMES, kernels
from tests.loading import load
from tests.tiny_gguf import begin, finish, matrices
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


# Rows do not depend on how they are cut, and damage is reported in one line.


OF_ONE = matrices(VOCAB, HIDDEN, INNER, HIDDEN // 2)
VECTORS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")


def _dequantizes(kind):
    """Whether the installed gguf package makes floats of such blocks."""
    try:
        gguf.quants.dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


# All kinds of the package, including those of later versions.
ALL_KINDS = [kind.name for kind in Kind if kind in GGML_QUANT_SIZES and _dequantizes(kind)]


def write_file(path, kind=Kind.F32, *, arch="llama", leave_out=(), scales=None, **extra):
    """A one-layer model of random bytes; returns the bytes of each matrix."""
    heads = HIDDEN // HEAD
    writer = begin(path, arch, hidden=HIDDEN, inner=INNER, heads=heads, kv_heads=heads // 2)
    for key, value in extra.items():
        writer.add_uint32(key.replace("__", "."), value)
    written = {}
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    for name, (rows, columns) in OF_ONE.items():
        if name in leave_out:
            continue
        # Bytes below 60 keep every 16-bit scale finite.
        written[name] = random.integers(0, 60, (rows, columns // block * block_bytes), dtype=np.uint8)
        writer.add_tensor(name, written[name], raw_dtype=kind)
    for name in VECTORS:
        writer.add_tensor(name, random.standard_normal(HIDDEN).astype(np.float32))
    for name, values in (scales or {}).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    finish(writer)
    return written


@pytest.mark.parametrize("kind", [Kind[name] for name in ALL_KINDS], ids=ALL_KINDS)
def test_every_kind_is_read_as_gguf_dequantizes_it(kind, tmp_path):
    written = write_file(tmp_path / "m.gguf", kind)
    file = GGUFFile(read_header(tmp_path / "m.gguf"))
    want = torch.from_numpy(gguf.quants.dequantize(written["blk.0.ffn_down.weight"], kind))
    name = "model.layers.0.mlp.down_proj.weight"
    assert want.isfinite().all()
    assert want.abs().max() > 0
    assert torch.equal(file.read_rows(name, 0, HIDDEN), want)
    assert torch.equal(file.read_rows(name, 7, 30), want[7:30])


def test_interleaved_heads_are_put_in_order_in_any_range_of_rows(tmp_path):
    written = write_file(tmp_path / "m.gguf", Kind.Q8_0)
    file = GGUFFile(read_header(tmp_path / "m.gguf"))
    raw = gguf.quants.dequantize(written["blk.0.attn_k.weight"], Kind.Q8_0)
    name = "model.layers.0.self_attn.k_proj.weight"
    whole = file.read_rows(name, 0, HIDDEN // 2).numpy()
    # Row j of a head's first half is row 2 j of the file, row j of its second half row 2 j + 1.
    assert np.array_equal(whole[HEAD + 3], raw[HEAD + 6])
    assert np.array_equal(whole[HEAD + HEAD // 2 + 3], raw[HEAD + 7])
    for start, stop in ((0, 1), (5, 40), (33, 34), (100, 128)):
        assert np.array_equal(file.read_rows(name, start, stop).numpy(), whole[start:stop])


def test_estimate_is_of_the_loaded_dtype_not_of_the_file(tmp_path):
    write_file(tmp_path / "m.gguf", Kind.Q4_K)
    elements = sum(rows * columns for rows, columns in OF_ONE.values()) + len(VECTORS) * HIDDEN
    assert estimate_bytes(tmp_path / "m.gguf", torch.float32) == elements * 4


def refused(path, error, message):
    with pytest.raises(error, match=message) as caught:
        load(path, "torch")
    assert "\n" not in str(caught.value)


def test_truncated_anywhere(tmp_path):
    write_file(tmp_path / "whole.gguf", Kind.Q8_0)
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 20, 100, 700, len(whole) // 2, len(whole) - 2000):
        cut.write_bytes(whole[:length])
        refused(cut, ModelFileError, r"cut\.gguf")


def test_a_number_beside_a_matrix_multiplies_it(tmp_path):
    """As NVFP4 has it; what activations would be divided by changes nothing, as they are floats."""
    name, there = "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q"
    write_file(tmp_path / "plain.gguf", Kind.Q8_0)
    write_file(
        tmp_path / "m.gguf",
        Kind.Q8_0,
        scales={f"{there}.scale": [0.5], f"{there}.input_scale": [3.0], "output.scale": [2.0]},
    )
    with pytest.raises(ModelFileError, match=r"unexpected tensor 'output\.scale'"):
        open_model(tmp_path / "m.gguf")
    write_file(
        tmp_path / "m.gguf", Kind.Q8_0, scales={f"{there}.scale": [0.5], f"{there}.input_scale": [3.0]}
    )
    plain, scaled = (open_model(tmp_path / f"{file}.gguf") for file in ("plain", "m"))
    assert torch.equal(scaled.read_rows(name, 5, 40), 0.5 * plain.read_rows(name, 5, 40))
    assert scaled.shapes == plain.shapes
    write_file(tmp_path / "m.gguf", Kind.Q8_0, scales={f"{there}.scale": [0.5, 0.5]})
    with pytest.raises(ModelFileError, match=r"unexpected tensor 'blk\.0\.attn_q\.scale'"):
        open_model(tmp_path / "m.gguf")


def test_files_that_are_no_model_are_refused(tmp_path):
    path, sizes = tmp_path / "m.gguf", {f"llama__attention__{one}_length": 16 for one in ("key", "value")}
    path.write_bytes(b"PK\x03\x04" + b"\0" * 200)
    refused(path, ModelFileError, "GGUF")
    for options, error, message in (
        (
            {"kind": Kind.Q8_K},
            ModelFileError,
            r"is of type Q8_K; supported: F32 F16 BF16 Q4_0 .*another quant",
        ),
        ({"leave_out": ["blk.0.ffn_up.weight"]}, ModelFileError, r"lacks tensor '.*0\.mlp\.up_proj\.weight'"),
        ({"leave_out": ["token_embd.weight"]}, ModelError, r"no token_embd\.weight"),
        ({"arch": "mamba"}, ModelError, "'mamba' is a recurrent hybrid, .*models.md lists"),
        (sizes, ModelFileError, r"shape \[256, 256\], the config asks for \[128, 256\]"),
    ):
        write_file(path, **options)
        refused(path, error, message)
