"""Lookup implementations of engines with and without native kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.errors import KernelBuildError
from specinfer.speculate import table
from tests.engines import ENGINE
from tests.kernels import library_or_skip

_OPTIONS = {name: value for name, value in ENGINE.items() if name != "lookup"}
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def guessed(folder: Path, **options: Any) -> int:
    """The tokens that lookups have guessed for an answer that repeats its prompt."""
    with LLM(str(folder / "target"), **{**_OPTIONS, **options}) as llm:
        [output] = llm.generate(["(1,2)(1,2)"], GREEDY)
    return output.figures.proposed_by.get("lookup", 0)


def test_guesses_are_looked_up_with_any_kernels_unless_that_is_switched_off(folder: Path) -> None:
    library_or_skip()
    for options in ({"kernels": "native"}, {"kernels": "torch"}, {}):
        assert guessed(folder, **options) > 0, options
    assert guessed(folder, lookup=False) == 0


def test_lookups_by_default_are_left_off_without_a_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(progress: object = None) -> None:
        raise KernelBuildError("no compiler here; install one")

    monkeypatch.setattr(table, "load_library", refuse)
    with caplog.at_level(logging.WARNING, logger="specinfer"):
        assert guessed(folder, kernels="torch", lookup="auto") == 0
    warnings = [record.message for record in caplog.records if "lookup is off" in record.message]
    assert warnings == ["lookup is off, as it needs native kernels: no compiler here; install one"]
