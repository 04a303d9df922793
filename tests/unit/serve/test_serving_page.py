"""Documentation pages on the server: examples that its model refuses, and the table of paths."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.served import Served

DOCS = Path(__file__).parents[3] / "docs"
HERE = "http://127.0.0.1:8000"


def curls(*shells: str) -> list[str]:
    """The curl commands of some blocks."""
    return re.findall(r"^curl .*?(?:'\{.*?\}'|$)(?=\ncurl|\n\Z|\Z)", "".join(shells), re.M | re.S)


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)


def block(page: str, section: str, language: str) -> str:
    """The only block of that language in a section of a page, without its subsections."""
    whole = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    [text] = re.findall(rf"^#+ {section}\n(.*?)(?=^##+ |\Z)", whole, re.M | re.S)
    [found] = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return str(found)


@pytest.mark.thorough
def test_the_examples_of_filling_in_are_refused_by_a_model_that_cannot(served: Served) -> None:
    commands = curls(block("serving", "Filling in the middle", "sh"))
    assert len(commands) == 2
    for command in commands:
        assert "looked for <|fim_prefix|>" in run(command.replace(HERE, served.url)).stdout


@pytest.mark.thorough
def test_the_table_names_the_paths_there_are(served: Served) -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(/[\w/-]*)`", "".join(re.findall(r"^\| (`/.*?) \|", page, re.M))))
    described = set(served.get("/openapi.json").json()["paths"])
    described = {path for path in described if "{" not in path} - {"/v1/embeddings"}
    assert named - {"/"} == described
