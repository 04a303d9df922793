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
from tests.tiny_models import write_pair

_OPTIONS = {name: value for name, value in ENGINE.items() if name != "lookup"}
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def guessed(folder: Path, **options: Any) -> int:
    """The tokens that lookups have guessed for an answer that repeats its prompt."""
    with LLM(str(folder / "target"), **{**_OPTIONS, **options}) as llm:
        [output] = llm.generate(["(1,2)(1,2)"], GREEDY)
    return output.figures.proposed_by.get("lookup", 0)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_guesses_are_looked_up_whichever_kernels_the_models_run_on(folder: Path, kernels: str) -> None:
    library_or_skip()
    assert guessed(folder, kernels=kernels, lookup=True) > 0


def test_guesses_are_looked_up_unless_that_is_switched_off(folder: Path) -> None:
    library_or_skip()
    assert guessed(folder) > 0
    assert guessed(folder, lookup=False) == 0


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(progress: object = None) -> None:
        raise KernelBuildError("no compiler here; install one")

    monkeypatch.setattr(table, "load_library", refuse)


@pytest.mark.usefixtures("no_library")
def test_lookups_by_default_are_left_off_without_a_library(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="specinfer"):
        assert guessed(folder, kernels="torch", lookup="auto") == 0
    warnings = [record.message for record in caplog.records if "lookup is off" in record.message]
    assert warnings == ["lookup is off, as it needs native kernels: no compiler here; install one"]
