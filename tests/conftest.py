"""Shared by all tests."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# The same examples in every run, on every machine: a test that passed passes again.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from more threads, and lose much when the other cores are busy."""
    torch.set_num_threads(1)
