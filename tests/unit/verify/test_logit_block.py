"""Blocks of logits: rows as float32, whatever they are kept in, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from specinfer.verify.scan import LogitBlock, LogitType

VALUES = np.array(
    [[1.5, -2.0, 0.0], [-np.inf, 3.25, 4.0], [0.5, 1.0, 2.0]], dtype=np.float32
)  # bfloat16 has them


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rows_are_float32_and_those_of_an_address_are_shown_when_somebody_looks(kind: LogitType) -> None:
    made = VALUES if kind == "float32" else bfloat16(VALUES)
    shown: list[str] = []

    def show() -> NDArray[np.float32] | NDArray[np.uint16]:
        shown.append("once")
        return made

    block = LogitBlock.from_address(made.ctypes.data, kind, (3, 3), show)
    same = LogitBlock(made)
    for one in (block, same):
        assert (one.dtype, one.vocab, one.stride, len(one), one.address) == (kind, 3, 3, 3, made.ctypes.data)
    assert not shown
    for one in (block, same):
        assert [row.tolist() for row in one] == VALUES.tolist()
        assert all(row.dtype == np.float32 for row in one)
        with pytest.raises(IndexError):
            one[3]
    assert shown == ["once"]
