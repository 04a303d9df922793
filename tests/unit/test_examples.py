"""The programs of examples/ run, and a page names each."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DRAFTED = ["smollm2-135m", "smollm2-135m-head"]
PRINTED = {
    "chat": r"> Where does it end\?\n\w.*",
    "draft_model": r"depth 1: accepted in [1-9]\d* of \d+ steps\n.*accepted by: .*'draft': [1-9]",
    "generate": r"(\[[1-9]\.\d\d tokens per step, .*){3}",
    "own_speculator": r"{'echo': [1-9]\d*} [2-9]\.\d\d tokens per step",
    "stream": r"\n  \[\d\.\d\d tokens per step\]\n.*\n  \[1\.00 tokens per step\]",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_names_the_example_and_it_compiles(path: Path) -> None:
    compile(path.read_text(encoding="utf-8"), path.name, "exec")
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md")]
    assert any(f"](../examples/{path.name})" in page for page in pages)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_the_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *(DRAFTED if name == "draft_model" else [])])
    runpy.run_path(str(path))
    assert re.search(PRINTED[name], capsys.readouterr().out, re.S)


@pytest.mark.slow
def test_the_example_of_a_model_that_does_not_fit_runs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "offload.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert re.search(r"^smollm2-135m: \d+ of 30 layers streamed, .*tokens/s", done.stderr, re.M)
    assert re.search(r"^[1-9]\d* MB streamed, \d+\.\d s waited for them$", done.stdout, re.M)
