"""Matrices in blocks of 16 rows: where each element lies, and how near quantized ones come."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels import file_blocks, layout
from specinfer.kernels.file_blocks import StoredRows, empty_blocks, lay_out_blocks, read_stored
from specinfer.kernels.layout import GROUP, Int4Weight, Int8Weight, empty_int4, empty_int8, quantize_int4
from specinfer.kernels.structures import FILE_KINDS
from specinfer.models.gguf_blocks import FILE_BLOCKS
from tests.gguf_blocks import random_blocks
from tests.kernels import library_or_skip


def element(blocks: Tensor, row: int, column: int) -> float:
    """Return the position of a matrix element in cpu/product.h's layout."""
    per_word = blocks.shape[3]
    return float(blocks[row // 16, column // per_word, row % 16, column % per_word])


def as_matrix(blocks: Tensor) -> Tensor:
    """All elements, [blocks * 16, padded inner], found one by one."""
    rows, columns = len(blocks) * 16, blocks.shape[1] * blocks.shape[3]
    return torch.tensor([[element(blocks, r, c) for c in range(columns)] for r in range(rows)])


def floats(channels: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, layout.FloatWeight]:
    matrix = torch.randn(channels, inner, generator=torch.Generator().manual_seed(channels)).to(dtype)
    laid_out = layout.empty_floats(channels, inner, dtype)
    layout.lay_out_floats(matrix, laid_out)
    return matrix, laid_out


def int8(channels: int, inner: int) -> tuple[Tensor, Tensor, Int8Weight]:
    generator = torch.Generator().manual_seed(channels)
    values = torch.randint(-127, 128, (channels, inner), generator=generator).to(torch.int8)
    scales = torch.rand(channels, generator=generator)
    return values, scales, layout.lay_out_int8(values, scales)


@pytest.mark.parametrize("ids", [[], [5], [*range(20)], [32, 0, 19, 19, *range(14)]], ids=len)
def test_chosen_rows_are_those_rows_laid_out(ids: list[int]) -> None:
    values, scales, whole = int8(33, 70)
    some = empty_int8(len(ids), 70)
    layout.choose_rows(whole, ids, some)
    for found, want in zip(some, layout.lay_out_int8(values[ids], scales[ids]), strict=True):
        assert torch.equal(found, want)
    matrix, laid_out = floats(33, 70, torch.bfloat16)
    chosen, wanted = (layout.empty_floats(len(ids), 70, torch.bfloat16) for _ in range(2))
    layout.choose_rows(laid_out, ids, chosen)
    layout.lay_out_floats(matrix[ids], wanted)
    assert torch.equal(chosen.values, wanted.values)


def test_ranges_of_a_matrix_are_a_matrix_of_their_own() -> None:
    for rows, columns in (
        ([range(0, 16), range(32, 64)], range(64, 128)),  # whole blocks
        ([range(16, 32), range(64, 70)], range(32, 128)),  # to the matrix's end
        ([range(16, 24)], range(0, 96)),
        ([range(3, 20), range(40, 41)], range(96, 128)),
    ):
        values, scales, whole = int8(70, 128)
        chosen = torch.tensor([row for one in rows for row in one])
        part = empty_int8(len(chosen), len(columns))
        part.values.fill_(7)
        layout.cut(whole, rows, columns, part)
        wanted = values[chosen][:, columns.start : columns.stop]
        found, found_scales = layout.int8_matrix(part, len(chosen), len(columns))
        assert torch.equal(found, wanted), rows
        assert torch.equal(found_scales, scales[chosen]), rows
        behind = as_matrix(part.values)[:, len(columns) :]
        assert behind.eq(128).all(), rows


def test_ranges_of_int4_keep_levels_scales_and_zeros() -> None:
    matrix = torch.randn(70, 102, generator=torch.Generator().manual_seed(0))
    whole = quantize_int4(matrix)
    for rows in ([range(16, 32), range(64, 70)], [range(3, 20), range(40, 41)]):
        for columns in (range(32, 64), range(96, 102)):
            wanted = torch.cat([matrix[one.start : one.stop] for one in rows])
            own = quantize_int4(wanted[:, columns.start : columns.stop])
            part = empty_int4(len(wanted), len(columns))
            layout.cut(whole, rows, columns, part)
            for row in range(len(wanted)):
                for here, there in zip(part, own, strict=True):
                    axis = {3: 2, 5: 3}[here.dim()]
                    found, found_own = (one[row // 16].select(axis - 1, row % 16) for one in (here, there))
                    assert torch.equal(found, found_own)


def int4_values(weight: Int4Weight) -> Tensor:
    """The weights it stands for, [blocks * 16, padded inner]."""
    columns = [
        (layout.unpack_levels(weight.levels[:, g]) - weight.zeros[:, g].reshape(-1, 1) / 16)
        * weight.scales[:, g].reshape(-1, 1).float()
        for g in range(weight.scales.shape[1])
    ]
    return torch.cat(columns, 1)


def test_int8_is_within_half_a_step_of_the_turned_weights() -> None:
    w = torch.randn(20, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 20)[:, None]
    values, scales = layout.int8_matrix(layout.quantize_int8(w), 20, 128)
    rotated = layout.rotate(torch.nn.functional.pad(w, (0, 28)).view(20, 4, GROUP)).flatten(1) / GROUP
    assert values.abs().amax(1).tolist() == [127] * 20
    error = (values * scales[:, None] - rotated).abs().amax(1)
    assert (error <= 0.501 * scales).all()


@pytest.mark.parametrize("span", [15, 12, 10])
def test_int4_finds_the_grid_that_weights_lie_on(span: int) -> None:
    """Groups that use `span` + 1 of 16 levels with a zero among them, as those of 4-bit files do."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, span + 1, (16, 4, GROUP), generator=generator).float()
    levels[..., 0], levels[..., 1] = 0, span
    steps = 2.0 ** -torch.randint(4, 9, (16, 4, 1), generator=generator)
    w = ((levels - 6.25) * steps).view(16, 4 * GROUP)
    torch.testing.assert_close(int4_values(quantize_int4(w)), w, rtol=2**-9, atol=0)


# Blocks of a file.


WIDE = file_blocks.BlockForm(8, 1, steps=True, mins=True)  # which has room for all kinds
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
            elements = file_blocks.block_elements(library, kind, octets[0], inner, dtype)
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
            **{"weights": normal * 0.02, "outliers": normal**5 * 0.02},
            **{"all sizes": normal * by_row[:, None], "one sign": -normal.abs()},
            **{"grid": (integers - 6.25) * 2**-7, "13 levels": (integers % 13 - 4) * 0.01},
            **{"ties": (integers - 7) / 2, "sparse": normal * (integers == 0)},
        }.items():
            matrix = matrix.to(kind[1])
            octets = matrix.view(torch.uint8).numpy()
            parts = [range(3, rows), tuple(range(rows - 1, -1, -2)), range(rows)]
            stored = [stored_in(tmp_path / "m", kind[0], octets, part) for part in parts]
            floats = torch.cat([matrix[list(part)].float() for part in parts])
            for empty, quantize in ((empty_int8, layout.quantize_int8), (empty_int4, quantize_int4)):
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
        assert not any(read_stored(library, stored, 256, made(20, 256)) for made in (empty_int4, empty_int8))


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    library = library_or_skip()
    octets = random_blocks("Q8_0", 20, 256)
    into = empty_blocks(20, 256, FILE_BLOCKS["Q8_0"].form)
    whole = stored_in(tmp_path / "m", "Q8_0", octets, range(20))
    whole.path.write_bytes(whole.path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"cannot be read, or became shorter"):
        read_stored(library, [whole], 256, into)
