"""Rows of logits are made when they are looked at."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specinfer.runtime.flight import LogitRows
from specinfer.runtime.runner import as_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_that_of_the_whole(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = LogitRows(logits)
    assert len(rows) == 5
    assert rows[3].dtype == np.float32
    assert [row.tolist() for row in rows] == as_rows(logits).tolist()
    assert [row.tolist() for row in rows[2:4]] == as_rows(logits)[2:4].tolist()
    assert len(rows[5:]) == 0
    with pytest.raises(IndexError):
        rows[5]
