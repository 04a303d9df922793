"""Blocks of a file: the library's layout and elements are PyTorch's, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from specinfer.errors import ModelFileError
from specinfer.kernels.file_blocks import (
    BlockForm,
    StoredRows,
    block_elements,
    empty_blocks,
    lay_out_blocks,
    read_stored,
)
from specinfer.kernels.layout import (
    Int4Weight,
    Int8Weight,
    empty_int4,
    empty_int8,
    quantize_int4,
    quantize_int8,
)
from specinfer.kernels.structures import FILE_KINDS
from specinfer.models.gguf_blocks import FILE_BLOCKS
from tests.gguf_blocks import random_blocks
from tests.kernels import library_or_skip

WIDE = BlockForm(8, 1, steps=True, mins=True)  # which has room for all kinds
ORDER = (7, 3, 18, 0, 1, 2, 19, 4)
BEFORE = b"header"


def stored_in(file: Path, kind: str, octets: np.ndarray, rows: range | tuple[int, ...]) -> StoredRows:
    file.write_bytes(BEFORE + octets.tobytes())
    return StoredRows(file, "m", kind, len(BEFORE), octets.shape[1], rows)


def test_the_library_reads_each_kind_as_pytorch_does(tmp_path: Path) -> None:
    """Stacked matrices, whose blocks of 16 rows have rows of both, in the order of either."""
    library = library_or_skip()
    for kind, wide, inner in product(FILE_KINDS, (False, True), (256, 768)):
        blocks = FILE_BLOCKS[kind]
        case = f"{kind}, wide {wide}, {inner}"
        form, size = WIDE if wide else blocks.form, gguf.GGML_QUANT_SIZES[Kind[kind]][1]
        octets = [random_blocks(kind, 20, inner, seed=seed) for seed in (1, 2)]
        parts = [(octets[0], range(2, 20)), (octets[1], ORDER), (octets[1], range(20))]
        stored = [stored_in(tmp_path / f"{n}", kind, of_one, rows) for n, (of_one, rows) in enumerate(parts)]
        chosen = torch.from_numpy(np.concatenate([of_one[list(rows)] for of_one, rows in parts]))
        want = lay_out_blocks(blocks.rows(chosen.view(len(chosen), -1, size)), form)
        found = empty_blocks(len(chosen), inner, form)
        for one in found:
            one.view(torch.uint8).fill_(77)
        read_stored(library, stored, inner, found)
        for name, one, other in zip(found._fields, found, want, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), f"{case}: {name}"
        floats = torch.from_numpy(gguf.quants.dequantize(octets[0], Kind[kind]))
        for dtype in (torch.float32, torch.bfloat16):
            elements = block_elements(library, kind, octets[0], inner, dtype)
            assert torch.equal(elements, floats.to(dtype)), f"{case}: {dtype}"


def same_bits(found: Int4Weight | Int8Weight, want: Int4Weight | Int8Weight) -> bool:
    both = zip(found, want, strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in both)


def test_the_library_quantizes_floats_and_blocks_as_pytorch_does(tmp_path: Path) -> None:
    """Weights of models and 4-bit grids, ties, zeros, subnormal and huge numbers; stacked, in any order."""
    random, library = torch.Generator().manual_seed(3), library_or_skip()
    few = (300, 64), (20, 100), (37, 1536), (21, 96)
    for (rows, inner), kind in product(
        few, {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.items()
    ):
        normal, integers = (
            torch.randn(rows, inner, generator=random),
            torch.randint(0, 16, (rows, inner), generator=random),
        )
        by_row = torch.logspace(-44, 17, rows) if kind[0] != "F16" else torch.logspace(-7, 4, rows)
        for name, matrix in {
            "weights": normal * 0.02,
            "outliers": normal**5 * 0.02,
            "all sizes": normal * by_row[:, None],
            "one sign": -normal.abs(),
            "grid": (integers - 6.25) * 2**-7,
            "13 levels": (integers % 13 - 4) * 0.01,
            "ties": (integers - 7) / 2,
            "sparse": normal * (integers == 0),
        }.items():
            matrix = matrix.to(kind[1])
            octets = matrix.view(torch.uint8).numpy()
            parts = [range(3, rows), tuple(range(rows - 1, -1, -2)), range(rows)]
            stored = [stored_in(tmp_path / "m", kind[0], octets, part) for part in parts]
            floats = torch.cat([matrix[list(part)].float() for part in parts])
            for empty, quantize in ((empty_int8, quantize_int8), (empty_int4, quantize_int4)):
                found = empty(len(floats), inner)
                assert read_stored(library, stored, inner, found), f"{name}, {kind}, {inner}"
                assert same_bits(found, quantize(floats)), f"{name}, {kind}, {inner}, {quantize}"
    octets = random_blocks("Q4_K", 20, 256)
    floats, found = torch.from_numpy(gguf.quants.dequantize(octets, Kind.Q4_K)), empty_int4(20, 256)
    assert read_stored(library, [stored_in(tmp_path / "m", "Q4_K", octets, range(20))], 256, found)
    assert same_bits(found, quantize_int4(floats))
    for value in (float("nan"), float("inf"), -float("inf")):  # left to PyTorch
        floats[7, 130] = value
        stored = [stored_in(tmp_path / "m", "F32", floats.view(torch.uint8).numpy(), range(20))]
        assert not any(
            read_stored(library, stored, 256, empty(20, 256)) for empty in (empty_int4, empty_int8)
        )


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    library = library_or_skip()
    octets = random_blocks("Q8_0", 20, 256)
    into = empty_blocks(20, 256, FILE_BLOCKS["Q8_0"].form)
    whole = stored_in(tmp_path / "m", "Q8_0", octets, range(20))
    whole.path.write_bytes(whole.path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"cannot be read, or became shorter"):
        read_stored(library, [whole], 256, into)
