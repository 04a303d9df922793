"""A smoke test for each script: its help, and pages of those that need no other program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from specinfer import LLM
from tests.unit.benchmarks.conftest import BENCHMARKS, Run

pytestmark = pytest.mark.slow
Script = Callable[[str], ModuleType]

PARTS = {"serving_report", "replicas_page", "report", "page", "cells"}  # of other scripts
SCRIPTS = {
    path.stem: path
    for path in BENCHMARKS.glob("*/*.py")
    if "benchmarks.study import" in path.read_text(encoding="utf-8") and path.stem not in PARTS
}
# Options; MODEL, DRAFT and ROWS are filled in.
RUNS = {
    "identity": "--model MODEL --draft DRAFT --dataset ROWS --max-tokens 12",
    "overhead": "--model MODEL --dataset ROWS --limit 3 --max-tokens 8",
    "structured": "--model MODEL --questions ROWS --limit 2 --max-tokens 40",
    "table2": "--model MODEL --draft DRAFT --dataset piqa=ROWS --max-tokens 8 --widths 2,1 --modes greedy",
    "tree_nodes": "--model MODEL --draft DRAFT --dataset ROWS --max-tokens 12",
    "prediction": "--model MODEL --limit 2 --plain 1 --max-tokens 6",
    "policy_live": "--model MODEL --draft DRAFT --texts 1 --max-tokens 8"
    " --chat ROWS --code ROWS --maths ROWS",
}


def rows_of(page: list[str]) -> list[list[str]]:
    """Return the cells of each row below the heads of tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page if line.startswith("| ")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_the_command(
    script: Script, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python -m benchmarks.{SCRIPTS[name].parent.name}.{name}" in said
    assert "--out OUT" in said


@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_a_page_and_goes_on_where_it_was(
    script: Script,
    run: Run,
    pair: tuple[str, str],
    dataset: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = script(name)
    if name == "prediction":
        monkeypatch.setattr(module, "LONGEST_PROMPT", 3000)  # a token is a byte
    if name == "policy_live":
        everything = module.questions_of

        def short(*given: Any) -> dict[str, list[Any]]:
            found = everything(*given)
            return {"edits": [replace(one, prompt=str(one.prompt)[:200]) for one in found["edits"]]}

        monkeypatch.setattr(module, "questions_of", short)
    words = {"MODEL": pair[0], "DRAFT": pair[1], "ROWS": dataset, "piqa=ROWS": f"piqa={dataset}"}
    options = [words.get(word, word) for word in RUNS[name].split()]
    status = 0 if name in ("identity", "structured", "prediction") else None
    page = run(module, *options, status=status)
    assert len(rows_of(page)) > 1
    if name == "identity":
        assert "- identical texts: 3 of 3" in page

    def refuse(*args: Any, **options: Any) -> LLM:
        raise AssertionError("a model is loaded although everything was measured")

    monkeypatch.setattr(module, "LLM", refuse)
    assert run(module, *options, status=status) == page
