"""Faults of a library: each wrong result is named."""

import copy
import ctypes

import pytest

from specinfer.check.kernel_faults import faults, other_faults
from specinfer.kernels.library import Library
from specinfer.kernels.structures import KINDS
from tests.kernels import library_or_skip


@pytest.fixture(scope="module")
def real() -> Library:
    return library_or_skip()


def disturbed(library: Library, rows: int | None = None) -> Library:
    """The library with a flipped bit in the first result of products with `rows` rows, or of all products."""
    other = copy.copy(library)

    def multiply(args: object, kind: int, x: int, count: int, out: int) -> None:
        library.multiply(args, kind, x, count, out)
        if rows in (None, count):
            ctypes.c_uint8.from_address(out).value ^= 1

    other.multiply = multiply
    return other


def test_the_real_library_has_no_fault(real: Library) -> None:
    assert list(faults(real)) == []
    assert list(other_faults(real)) == []


def test_what_is_not_a_product_is_tried_as_well(real: Library) -> None:
    other = copy.copy(real)
    other.tree_attention = lambda *args: ctypes.memset(args[-1], 0xFF, 4)
    other.most_likely = lambda *args: 0
    other.mass = lambda *args: 0.0
    found = list(other_faults(other))
    assert found[:6] == [
        f"attention{what} of {dtype} is off by nan"
        for dtype in ("float32", "bfloat16")
        for what in ("", " with a cap, biases and sinks", " over int8")
    ]
    assert found[6].endswith(", not []")
    assert any(fault.startswith("the mass of a row is not 0") for fault in found)


def shape(kind: str, channels: int, inner: int) -> str:
    """The shape of a matrix, in whole spans of groups if it has these."""
    return f"{channels} x {-(-inner // 256) * 256 if kind in ('blocks4', 'blocks6') else inner}"


def test_a_row_that_depends_on_the_others_is_named(real: Library) -> None:
    assert list(faults(disturbed(real, rows=17))) == [
        f"{kind} {shape(kind, *sizes)}: 17 rows differ from the same rows among 80"
        for sizes in ((33, 96), (80, 800))
        for kind in KINDS
    ]


def test_a_single_wrong_bit_of_exact_products_is_named(real: Library) -> None:
    """Products of floats may round as they like, as may int4 where it is one of them, but always alike."""
    exact = ["results of bfloat16 rows differ", "1 of {} results differ"]
    of_int4 = exact if real.int4_is_exact() else [exact[0], "8 loose rows differ"]
    assert list(faults(disturbed(real))) == [
        f"{kind} {shape(kind, *sizes)}: {fault.format(80 * sizes[0])}"
        for sizes in ((33, 96), (80, 800))
        for kind in ("int8", "int4", "blocks4", "blocks6", "blocks8")
        for fault in (of_int4 if kind == "int4" else exact)
    ]
