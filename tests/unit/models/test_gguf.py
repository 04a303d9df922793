"""GGUF files: rows do not depend on how they are cut, and damage is reported in one line."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from specinfer.errors import ModelError, ModelFileError
from specinfer.hub.gguf_header import read_header
from specinfer.models.gguf import GGUFFile
from specinfer.models.open_model import open_model
from specinfer.models.weight_sizes import estimate_bytes
from tests.loading import load
from tests.tiny_gguf import begin, finish, matrices

VOCAB, HIDDEN, INNER, HEAD = 24, 256, 512, 32
MATRICES = matrices(VOCAB, HIDDEN, INNER, HIDDEN // 2)
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


def write(path, kind=Kind.F32, *, arch="llama", leave_out=(), scales=None, **extra):
    """A one-layer model of random bytes; returns the bytes of each matrix."""
    heads = HIDDEN // HEAD
    writer = begin(path, arch, hidden=HIDDEN, inner=INNER, heads=heads, kv_heads=heads // 2)
    for key, value in extra.items():
        writer.add_uint32(key.replace("__", "."), value)
    written = {}
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    for name, (rows, columns) in MATRICES.items():
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
    written = write(tmp_path / "m.gguf", kind)
    file = GGUFFile(read_header(tmp_path / "m.gguf"))
    want = torch.from_numpy(gguf.quants.dequantize(written["blk.0.ffn_down.weight"], kind))
    name = "model.layers.0.mlp.down_proj.weight"
    assert want.isfinite().all()
    assert want.abs().max() > 0
    assert torch.equal(file.read_rows(name, 0, HIDDEN), want)
    assert torch.equal(file.read_rows(name, 7, 30), want[7:30])


def test_interleaved_heads_are_put_in_order_in_any_range_of_rows(tmp_path):
    written = write(tmp_path / "m.gguf", Kind.Q8_0)
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
    write(tmp_path / "m.gguf", Kind.Q4_K)
    elements = sum(rows * columns for rows, columns in MATRICES.values()) + len(VECTORS) * HIDDEN
    assert estimate_bytes(tmp_path / "m.gguf", torch.float32) == elements * 4


def refused(path, error, message):
    with pytest.raises(error, match=message) as caught:
        load(path, "torch")
    assert "\n" not in str(caught.value)


def test_truncated_anywhere(tmp_path):
    write(tmp_path / "whole.gguf", Kind.Q8_0)
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 3, 20, 100, 700, len(whole) // 2, len(whole) - 2000):
        cut.write_bytes(whole[:length])
        refused(cut, ModelFileError, r"cut\.gguf")


def test_a_number_beside_a_matrix_multiplies_it(tmp_path):
    """As NVFP4 has it; what activations would be divided by changes nothing, as they are floats."""
    name, there = "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q"
    write(tmp_path / "plain.gguf", Kind.Q8_0)
    write(
        tmp_path / "m.gguf",
        Kind.Q8_0,
        scales={f"{there}.scale": [0.5], f"{there}.input_scale": [3.0], "output.scale": [2.0]},
    )
    with pytest.raises(ModelFileError, match=r"unexpected tensor 'output\.scale'"):
        open_model(tmp_path / "m.gguf")
    write(tmp_path / "m.gguf", Kind.Q8_0, scales={f"{there}.scale": [0.5], f"{there}.input_scale": [3.0]})
    plain, scaled = (open_model(tmp_path / f"{file}.gguf") for file in ("plain", "m"))
    assert torch.equal(scaled.read_rows(name, 5, 40), 0.5 * plain.read_rows(name, 5, 40))
    assert scaled.shapes == plain.shapes
    write(tmp_path / "m.gguf", Kind.Q8_0, scales={f"{there}.scale": [0.5, 0.5]})
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
        write(path, **options)
        refused(path, error, message)
