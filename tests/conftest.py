"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from more threads, and lose much when the other cores are busy."""
    torch.set_num_threads(1)
